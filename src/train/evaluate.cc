#include "train/evaluate.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace tessera::train {
namespace {

constexpr model::RecordOptions kCountLoads{.router = {.balance = {.method = ops::router::Balance::none}}};

// Mean loss of one position bucket with documents as the samples: tokens of one document are not independent.
class BucketMean {
 public:
  void add_document(double sum, int64_t tokens) {
    if (tokens == 0) return;
    const double mean = sum / double(tokens);
    sum_ += sum;
    tokens_ += tokens;
    ++documents_;
    weighted_square_ += double(tokens) * mean * mean;
  }
  int64_t tokens() const { return tokens_; }
  double mean() const { return sum_ / double(tokens_); }
  double ci() const {
    if (documents_ < 2) return 0;
    const double variance = std::max(0.0, weighted_square_ / double(tokens_) - mean() * mean());
    return 1.96 * std::sqrt(variance / double(documents_ - 1));
  }

 private:
  double sum_ = 0, weighted_square_ = 0;
  int64_t tokens_ = 0, documents_ = 0;
};

// Bucket 0 holds position 0, bucket b positions [2^(b-1), 2^b).
size_t bucket_of(int64_t position) { return static_cast<size_t>(std::bit_width(static_cast<uint64_t>(position))); }

void add_losses(const data::Batch& batch, const float* loss, std::vector<BucketMean>& buckets, EvalReport& report) {
  for (size_t n = 0; n + 1 < batch.offsets.size(); ++n) {
    std::vector<std::pair<double, int64_t>> of_document(64, {0.0, 0});
    for (int64_t t = batch.offsets[n]; t < batch.offsets[n + 1]; ++t) {
      if (batch.targets[static_cast<size_t>(t)] < 0) continue;
      auto& [sum, tokens] = of_document[bucket_of(batch.segments[n].begin + t - batch.offsets[n])];
      sum += double(loss[t]);
      ++tokens;
      report.loss += double(loss[t]);
    }
    for (size_t b = 0; b < of_document.size(); ++b)
      buckets[b].add_document(of_document[b].first, of_document[b].second);
    ++report.documents;
  }
  report.tokens += batch.loss_tokens;
  report.bytes += batch.text_bytes;
}

View host_view(const std::vector<int32_t>& v) {
  return View(const_cast<int32_t*>(v.data()), DType::i32, {static_cast<int64_t>(v.size())});
}

EvalReport::Routing audit(const model::Model& model, const std::vector<ops::router::Counters>& counters) {
  EvalReport::Routing routing;
  const model::ModelConfig& c = model.config();
  routing.min_utilisation = model.moe_layers() > 0 && !counters.empty() ? 1e300 : 0;
  size_t index = 0;
  for (int64_t l = 0; l < c.layers && !counters.empty(); ++l) {
    if (!c.is_moe(l)) continue;
    std::vector<int64_t> loads(static_cast<size_t>(c.moe.experts));
    copy(counters[index++].load, View(loads.data(), DType::i64, {c.moe.experts}));
    const int64_t* load = loads.data();
    const double q = double(std::accumulate(load, load + c.moe.experts, int64_t{0})) / double(c.moe.experts);
    if (q == 0) continue;
    const auto [least, most] = std::minmax_element(load, load + c.moe.experts);
    const EvalReport::LayerRouting layer{l + 1, double(*most) / q - 1, double(*least) / q,
                                         std::count(load, load + c.moe.experts, int64_t{0})};
    routing.layers.push_back(layer);
    routing.max_vio = std::max(routing.max_vio, layer.max_vio);
    routing.min_utilisation = std::min(routing.min_utilisation, layer.min_load);
    routing.dead_experts += layer.dead;
    routing.sampling_floor = std::sqrt(2 * std::log(double(c.moe.experts)) / q);
  }
  return routing;
}

}  // namespace

EvalReport evaluate(Context& ctx, const model::Model& model, const model::Weights& weights,
                    const data::ValidationSet& set, const std::function<void(int64_t, int64_t)>& progress) {
  Arena::Scope scope(ctx.arena);
  model::StepRecord record = model.allocate_record(ctx.arena, DType::f32, kCountLoads);
  EvalReport report;
  std::vector<BucketMean> buckets(64);
  for (int64_t b = 0; b < set.count(); ++b) {
    const data::Batch batch = set.batch(b);
    const int64_t tokens = static_cast<int64_t>(batch.ids.size());
    Arena::Scope one(ctx.arena);
    const View ids = ctx.arena.allocate(DType::i32, {tokens}), targets = ctx.arena.allocate(DType::i32, {tokens});
    const View loss = ctx.arena.allocate(DType::f32, {tokens});
    copy(host_view(batch.ids), ids);
    copy(host_view(batch.targets), targets);
    model.evaluate(ctx, weights, {ids, targets, place_documents(ctx, batch.offsets)}, loss, &record);
    std::vector<float> losses(batch.ids.size());
    copy(loss, View(losses.data(), DType::f32, loss.shape()));
    add_losses(batch, losses.data(), buckets, report);
    if (progress) progress(b + 1, set.count());
  }
  if (report.tokens == 0) fail_user("no held-out text to evaluate; build the store with a larger validation share");
  report.bits_per_byte = report.loss / std::log(2.0) / double(std::max<int64_t>(report.bytes, 1));
  report.loss /= double(report.tokens);
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].tokens() == 0) continue;
    report.loss_by_position.push_back(
        {b == 0 ? 0 : int64_t{1} << (b - 1), int64_t{1} << b, buckets[b].mean(), buckets[b].ci(), buckets[b].tokens()});
  }
  report.routing = audit(model, record.counters);
  return report;
}

void evaluate_dry(Context& ctx, const model::Model& model, const model::Weights& weights,
                  std::span<const int64_t> offsets) {
  Arena::Scope scope(ctx.arena);
  Arena::Label label(ctx.arena, "evaluation");
  model::StepRecord record = model.allocate_record(ctx.arena, DType::f32, kCountLoads);
  const int64_t tokens = offsets.back();
  const View ids = ctx.arena.allocate(DType::i32, {tokens}), targets = ctx.arena.allocate(DType::i32, {tokens});
  const View loss = ctx.arena.allocate(DType::f32, {tokens});
  model.evaluate(ctx, weights, {ids, targets, place_documents(ctx, offsets)}, loss, &record);
}

int64_t evaluation_bytes(const model::Model& model, std::span<const int64_t> offsets, Product product, Device device) {
  Arena dry = Arena::dry();
  Context ctx{Device::dry, dry, nullptr, product, device};
  const model::Weights weights = model::allocate_weights(dry, model.table(), ctx.activations(), false);
  const int64_t base = dry.used();
  evaluate_dry(ctx, model, weights, offsets);
  return dry.peak() - base;
}

std::vector<int64_t> worst_packing(int64_t tokens) {
  std::vector<int64_t> offsets(static_cast<size_t>(tokens) + 1);
  std::iota(offsets.begin(), offsets.end(), int64_t{0});
  return offsets;
}

}  // namespace tessera::train
