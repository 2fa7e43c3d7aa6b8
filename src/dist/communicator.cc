#include "dist/communicator.h"

#include <fmt/format.h>

#include <algorithm>

#include "ops/elementwise/op.h"

namespace tessera::dist {

Traffic& Traffic::operator+=(const Traffic& other) {
  inside += other.inside;
  across += other.across;
  calls += other.calls;
  rows += other.rows;
  return *this;
}

Communicator::Communicator(std::string axis, std::vector<int> members, int channel, Transport& host, Transport* gpu)
    : axis_(std::move(axis)), members_(std::move(members)), channel_(channel), host_(&host), gpu_(gpu) {
  const auto self = std::ranges::find(members_, host.rank());
  TESSERA_CHECK(std::ranges::is_sorted(members_) && self != members_.end(), "axis {}: rank {} is not a member", axis_,
                host.rank());
  rank_ = static_cast<int>(self - members_.begin());
}

// ---- messages ----

void Communicator::exchange(const char* what, std::span<const View> send, std::span<const View> receive) {
  Transport* transport = host_;
  const auto collect = [&](std::span<const View> views) {
    std::vector<Message> messages;
    for (int r = 0; r < static_cast<int>(views.size()); ++r) {
      const View& v = views[static_cast<size_t>(r)];
      if (r == rank_ || v.bytes() == 0) continue;
      TESSERA_CHECK(v.contiguous(), "{} along {}: a view with strides", what, axis_);
      if (v.memory() == Memory::gpu) transport = gpu_;
      messages.push_back({rank_in_job(r), v.data(), v.bytes()});
    }
    return messages;
  };
  const std::vector<Message> out = collect(send), in = collect(receive);
  for (const Message& m : out)
    (host_->node_of(m.peer) == host_->node_of(host_->rank()) ? traffic_.inside : traffic_.across) += m.bytes;
  traffic_.calls += 1;
  if (out.empty() && in.empty()) return;
  TESSERA_CHECK(transport != nullptr, "{} along {}: memory of the GPU, and no transport for it", what, axis_);
  transport->exchange(channel_, out, in, fmt::format("{} along the {} axis", what, axis_));
}

void Communicator::all_to_all(std::span<const View> send, std::span<const View> receive) {
  TESSERA_CHECK(std::ssize(send) == size() && std::ssize(receive) == size(), "all_to_all of {} and {} views among {}",
                send.size(), receive.size(), size());
  const auto self = static_cast<size_t>(rank_);
  if (send[self].bytes() > 0 && send[self].data() != receive[self].data()) copy(send[self], receive[self]);
  exchange("all_to_all", send, receive);
}

void Communicator::all_gather(std::span<const View> parts) {
  const std::vector<View> own(static_cast<size_t>(size()), parts[static_cast<size_t>(rank_)]);
  exchange("all_gather", own, parts);
}

// `count` ranges of rows, in lengths that differ by one row at most.
static std::vector<View> row_parts(const View& rows, int64_t count) {
  std::vector<View> parts;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t begin = rows.rows() * r / count, end = rows.rows() * (r + 1) / count;
    parts.push_back(rows.row_range(begin, end - begin));
  }
  return parts;
}

void Communicator::all_gather(const View& rows) { all_gather(row_parts(rows, size())); }

void Communicator::broadcast(const View& values, int root) {
  std::vector<View> send(static_cast<size_t>(size())), receive(send);
  if (rank_ == root) {
    std::ranges::fill(send, values);
  } else {
    receive[static_cast<size_t>(root)] = values;
  }
  exchange("broadcast", send, receive);
}

void Communicator::send_receive(const View& send, int to, const View& receive, int from) {
  std::vector<View> out(static_cast<size_t>(size())), in(out);
  if (send.present()) out[static_cast<size_t>(to)] = send;
  if (receive.present()) in[static_cast<size_t>(from)] = receive;
  exchange("send_receive", out, in);
}

void Communicator::send_receive(std::span<const View> send, int to, std::span<const View> receive, int from) {
  for (size_t i = 0; i < std::max(send.size(), receive.size()); ++i) {
    send_receive(i < send.size() ? send[i] : View(), to, i < receive.size() ? receive[i] : View(), from);
  }
}

void Communicator::barrier() { all_gather(int64_t{0}); }

// ---- sums ----

template <class T>
static void add_on_host(const View& from, const View& to) {
  const T* x = from.as<T>();
  T* y = to.as<T>();
  for (int64_t i = 0; i < to.elements(); ++i) y[i] += x[i];
}

static void add(Context& ctx, const View& from, const View& to) {
  if (to.memory() == Memory::gpu) return ops::elementwise::add_to(ctx, from, to);
  switch (to.dtype()) {
    case DType::f32: return add_on_host<float>(from, to);
    case DType::f64: return add_on_host<double>(from, to);
    case DType::i32: return add_on_host<int32_t>(from, to);
    case DType::i64: return add_on_host<int64_t>(from, to);
    default: TESSERA_CHECK(false, "no sums of type {}", name_of(to.dtype()));
  }
}

void Communicator::reduce_scatter(Context& ctx, std::span<const View> parts, const View& sum) {
  const View own = parts[static_cast<size_t>(rank_)];
  Arena::Scope scope(ctx.arena);
  std::vector<View> received(static_cast<size_t>(size()));
  for (View& v : received) v = ctx.arena.allocate(own.dtype(), own.shape());
  received[static_cast<size_t>(rank_)] = own;
  exchange("reduce_scatter", parts, received);
  if (own.data() == nullptr || own.elements() == 0) return;
  const View total = received.front().data() == own.data() ? own : received.front();  // the order of the ranks
  for (size_t r = 1; r < received.size(); ++r) add(ctx, received[r], total);
  if (total.data() != sum.data()) copy(total, sum);
}

void Communicator::all_reduce(Context& ctx, const View& values) {
  if (alone()) return;
  const View flat = values.reshaped({values.elements()});
  const std::vector<View> parts = row_parts(flat, size());
  reduce_scatter(ctx, parts, parts[static_cast<size_t>(rank_)]);
  all_gather(parts);
}

// ---- small things ----

void Communicator::all_reduce(const View& values) {
  Arena arena(values.bytes() + (size() + 1) * 2 * Arena::kAlignment);
  Context host{Device::cpu, arena};
  all_reduce(host, values);
}

template <class T>
static View host_view(std::vector<T>& values) {
  return {values.data(), dtype_of<T>, {std::ssize(values)}};
}

std::vector<int64_t> Communicator::all_gather(int64_t value) {
  std::vector<int64_t> values(static_cast<size_t>(size()), value);
  all_gather(host_view(values));
  return values;
}

int64_t Communicator::sum(int64_t value) {
  int64_t total = 0;
  for (int64_t v : all_gather(value)) total += v;
  return total;
}

double Communicator::sum(double value) {
  std::vector<double> values(static_cast<size_t>(size()), value);
  all_gather(host_view(values));
  double total = 0;
  for (double v : values) total += v;
  return total;
}

std::vector<std::string> Communicator::all_gather(const std::string& text) {
  const std::vector<int64_t> lengths = all_gather(std::ssize(text));
  std::vector<std::string> texts;
  for (int64_t length : lengths) texts.emplace_back(static_cast<size_t>(length), '\0');
  texts[static_cast<size_t>(rank_)] = text;
  std::vector<View> parts;
  for (std::string& t : texts) parts.emplace_back(t.data(), DType::u8, Shape{std::ssize(t)});
  all_gather(parts);
  return texts;
}

}  // namespace tessera::dist
