#include "dist/expert_exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/host_copy.h"
#include "dist/cuda.h"

namespace tessera::dist {
namespace {

// The rows of one peer, in the buffer that holds those of all one after the other.
std::vector<View> by_peer(const View& rows, const std::vector<int64_t>& counts) {
  std::vector<View> parts;
  int64_t begin = 0;
  for (int64_t count : counts) {
    parts.push_back(rows.row_range(begin, count));
    begin += count;
  }
  return parts;
}

std::vector<int64_t> sent_counts(const Routes& routes) {
  std::vector<int64_t> counts;
  for (const auto& tokens : routes.sent) counts.push_back(std::ssize(tokens));
  return counts;
}

View like(Context& ctx, const View& rows, int64_t count) {
  return ctx.arena.allocate(rows.dtype(), {count, rows.row_elements()});
}

// Absent on a CPU, where the index is read as it is.
View on_device(Context& ctx, const std::vector<int64_t>& index) {
  if (ctx.back_end() == Device::cpu) return {};
  const View view = ctx.arena.allocate(DType::i64, {std::ssize(index)});
  copy(View(const_cast<int64_t*>(index.data()), DType::i64, view.shape()), view);
  return view;
}

void gather_rows(Context& ctx, const View& from, const std::vector<int64_t>& index, const View& to) {
  const View placed = on_device(ctx, index);
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::gather_rows(ctx.stream(), from, placed, to);
  const size_t bytes = static_cast<size_t>(from.row_elements() * bytes_of(from.dtype()));
  const auto* source = static_cast<const std::byte*>(from.data());
  auto* target = static_cast<std::byte*>(to.data());
  for (size_t i = 0; i < index.size(); ++i) {
    std::memcpy(target + i * bytes, source + static_cast<size_t>(index[i]) * bytes, bytes);
  }
}

void add_rows(Context& ctx, const View& from, const std::vector<int64_t>& index, const View& to) {
  const View placed = on_device(ctx, index);
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::add_rows(ctx.stream(), from, placed, to);
  const int64_t width = from.row_elements();
  dispatch_real(to.dtype(), [&](auto real) {
    using Real = decltype(real);
    for (size_t i = 0; i < index.size(); ++i) {
      const Real* x = from.as<Real>() + static_cast<int64_t>(i) * width;
      Real* y = to.as<Real>() + index[i] * width;
      for (int64_t c = 0; c < width; ++c) y[c] += x[c];
    }
  });
}

// Nothing is known of the choices: an even share of what a random choice of k experts would send.
Routes dry_routes(const Communicator& expert, const ExpertRanges& ranges, int64_t tokens, int64_t top_k,
                  double imbalance) {
  Routes routes;
  const double members = double(expert.size());
  for (int r = 0; r < expert.size(); ++r) {
    const double misses = 1 - double(ranges.count(r)) / double(ranges.experts);
    const double share = double(tokens) * (1 - std::pow(misses, double(top_k)));
    const auto sent = static_cast<int64_t>(std::ceil(share));
    routes.sent.emplace_back(static_cast<size_t>(std::min(sent, tokens)));
  }
  const double own_share = double(routes.sent[static_cast<size_t>(expert.rank())].size());
  const double most = double(tokens), rows = imbalance > 0 ? std::min(most, std::ceil(imbalance * own_share)) : most;
  routes.received.assign(static_cast<size_t>(members), static_cast<int64_t>(rows));
  routes.rows = static_cast<int64_t>(rows * members);
  return routes;
}

}  // namespace

Routes plan_routes(Context& ctx, Communicator& expert, const ExpertRanges& ranges, const View& indices,
                   double imbalance) {
  const int64_t tokens = indices.dim(0), top_k = indices.dim(1);
  if (ctx.dry()) return dry_routes(expert, ranges, tokens, top_k, imbalance);
  Routes routes;
  routes.sent.resize(static_cast<size_t>(expert.size()));
  const HostCopy on_host(indices);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t s = 0; s < top_k; ++s) {
      const int32_t e = on_host.as<int32_t>()[t * top_k + s];
      if (e < 0) continue;
      auto& list = routes.sent[static_cast<size_t>(ranges.owner(e))];
      if (list.empty() || list.back() != t) list.push_back(t);
    }
  }
  std::vector<int64_t> counts = sent_counts(routes);
  for (size_t r = 0; r < counts.size(); ++r) expert.count_rows(int(r) != expert.rank() ? counts[r] : 0);
  routes.received.resize(counts.size());
  std::vector<View> out, in;
  for (size_t r = 0; r < counts.size(); ++r) {
    out.emplace_back(&counts[r], DType::i64, Shape{1});
    in.emplace_back(&routes.received[r], DType::i64, Shape{1});
  }
  expert.all_to_all(out, in);
  for (int64_t n : routes.received) routes.rows += n;
  const int64_t planned = imbalance > 0 ? dry_routes(expert, ranges, tokens, top_k, imbalance).rows : routes.rows;
  if (routes.rows > planned) {
    fail_user(
        "the experts of one process were sent {} rows, and memory was planned for {}; raise mem.imbalance, now {}",
        routes.rows, planned, imbalance);
  }
  return routes;
}

void dispatch(Context& ctx, Communicator& expert, const Routes& routes, const View& rows, const View& received) {
  Arena::Scope scope(ctx.arena);
  const std::vector<int64_t> counts = sent_counts(routes);
  int64_t all = 0;
  for (int64_t n : counts) all += n;
  const std::vector<View> out = by_peer(like(ctx, rows, all), counts);
  for (size_t r = 0; r < out.size(); ++r) gather_rows(ctx, rows, routes.sent[r], out[r]);
  expert.all_to_all(out, by_peer(received, routes.received));
}

void combine(Context& ctx, Communicator& expert, const Routes& routes, const View& received, const View& rows) {
  Arena::Scope scope(ctx.arena);
  const std::vector<int64_t> counts = sent_counts(routes);
  int64_t all = 0;
  for (int64_t n : counts) all += n;
  const std::vector<View> in = by_peer(like(ctx, rows, all), counts);
  expert.all_to_all(by_peer(received, routes.received), in);
  rows.zero();
  for (size_t r = 0; r < in.size(); ++r) add_rows(ctx, in[r], routes.sent[r], rows);
}

void keep_own(Context& ctx, const ExpertRanges& ranges, int64_t member, const View& indices) {
  if (ctx.dry()) return;
  const auto begin = static_cast<int32_t>(ranges.begin(member)), count = static_cast<int32_t>(ranges.count(member));
  if (ctx.device == Device::cuda) return cuda::keep_own(ctx.stream(), begin, count, indices);
  int32_t* index = indices.as<int32_t>();
  for (int64_t i = 0; i < indices.elements(); ++i) {
    const int32_t own = index[i] - begin;
    index[i] = own >= 0 && own < count ? own : -1;
  }
}

}  // namespace tessera::dist
