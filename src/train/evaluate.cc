#include "train/evaluate.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>

#include "train/step_sums.h"

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
    tokens_ += double(tokens);
    documents_ += 1;
    weighted_square_ += double(tokens) * mean * mean;
  }
  std::array<double*, 4> sums() { return {&sum_, &weighted_square_, &tokens_, &documents_}; }
  int64_t tokens() const { return static_cast<int64_t>(tokens_); }
  double mean() const { return sum_ / tokens_; }
  double ci() const {
    if (documents_ < 2) return 0;
    const double variance = std::max(0.0, weighted_square_ / tokens_ - mean() * mean());
    return 1.96 * std::sqrt(variance / (documents_ - 1));
  }

 private:
  double sum_ = 0, weighted_square_ = 0, tokens_ = 0, documents_ = 0;
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

// The tokens of a batch that this process evaluates: all, or its part along the context axis.
struct Part {
  model::Batch batch;
  int64_t begin = 0;
  View loss;
};
Part place(Context& ctx, dist::Mesh* mesh, std::span<const int64_t> offsets) {
  Part part;
  if (mesh != nullptr && !mesh->context.alone()) {
    part.batch.shard = std::make_shared<const model::ContextShard>(mesh->context, offsets);
    part.begin = part.batch.shard->begin(mesh->context.rank());
    offsets = part.batch.shard->offsets();
  }
  const int64_t tokens = offsets.back();
  part.batch.ids = ctx.arena.allocate(DType::i32, {tokens});
  part.batch.targets = ctx.arena.allocate(DType::i32, {tokens});
  part.loss = ctx.arena.allocate(DType::f32, {tokens});
  part.batch.documents = place_documents(ctx, offsets);
  return part;
}

EvalReport::Routing audit(const model::Model& model, const std::vector<ops::router::Counters>& counters) {
  struct Row {
    EvalReport::LayerRouting layer;
    double sampling_floor;
  };
  EvalReport::Routing routing;
  std::vector<Row> rows;  // of this process's layers, then of all
  const model::ModelConfig& c = model.config();
  const bool has_routers = c.moe.experts > 0 && c.ffn.dense_layers < c.layers;
  routing.min_utilisation = has_routers ? 1e300 : 0;
  size_t index = 0;
  for (int64_t l = 0; l < c.layers && !counters.empty(); ++l) {
    if (!model.has_moe(l)) continue;
    std::vector<int64_t> loads(static_cast<size_t>(c.moe.experts));
    copy(counters[index++].load, View(loads.data(), DType::i64, {c.moe.experts}));
    const int64_t* load = loads.data();
    const double q = double(std::accumulate(load, load + c.moe.experts, int64_t{0})) / double(c.moe.experts);
    if (q == 0) continue;
    const auto [least, most] = std::minmax_element(load, load + c.moe.experts);
    const EvalReport::LayerRouting layer{l + 1, double(*most) / q - 1, double(*least) / q,
                                         std::count(load, load + c.moe.experts, int64_t{0})};
    rows.push_back({layer, std::sqrt(2 * std::log(double(c.moe.experts)) / q)});
  }
  if (model.stages().count() > 1) rows = gather_rows(model.mesh()->pipeline, rows);
  std::ranges::sort(rows, {}, [](const Row& row) { return row.layer.layer; });
  for (const Row& row : rows) {
    routing.layers.push_back(row.layer);
    routing.max_vio = std::max(routing.max_vio, row.layer.max_vio);
    routing.min_utilisation = std::min(routing.min_utilisation, row.layer.min_load);
    routing.dead_experts += row.layer.dead;
    routing.sampling_floor = row.sampling_floor;
  }
  return routing;
}

// Every process has evaluated other batches: sums over all of them, in the order of the processes.
void sum_over_replicas(dist::Communicator& replica, std::vector<BucketMean>& buckets, EvalReport& report) {
  std::vector<double> all{report.loss, double(report.tokens), double(report.bytes), double(report.documents)};
  for (BucketMean& bucket : buckets) {
    for (const double* sum : bucket.sums()) all.push_back(*sum);
  }
  replica.all_reduce(View(all.data(), DType::f64, {std::ssize(all)}));
  report.loss = all[0];
  report.tokens = static_cast<int64_t>(all[1]);
  report.bytes = static_cast<int64_t>(all[2]);
  report.documents = static_cast<int64_t>(all[3]);
  size_t i = 4;
  for (BucketMean& bucket : buckets) {
    for (double* sum : bucket.sums()) *sum = all[i++];
  }
}

}  // namespace

EvalReport evaluate(Context& ctx, const model::Model& model, const model::Weights& weights,
                    const data::ValidationSet& set, const std::function<void(int64_t, int64_t)>& progress) {
  Arena::Scope scope(ctx.arena);
  model::StepRecord record = model.allocate_record(ctx.arena, DType::f32, kCountLoads);
  EvalReport report;
  std::vector<BucketMean> buckets(64);
  // Among several processes each takes its turn, and they make the same number of calls: the last may be empty.
  dist::Mesh* mesh = model.mesh();
  const int64_t turns = mesh != nullptr ? mesh->layout.data : 1, turn = mesh != nullptr ? mesh->data_index : 0;
  for (int64_t b = 0; b < set.count(); b += turns) {
    const data::Batch batch = b + turn < set.count() ? set.batch(b + turn) : data::Batch{};
    const int64_t tokens = static_cast<int64_t>(batch.ids.size());
    Arena::Scope one(ctx.arena);
    const Part part = place(ctx, mesh, batch.offsets);
    copy(host_view(batch.ids).row_range(part.begin, part.batch.ids.rows()), part.batch.ids);
    copy(host_view(batch.targets).row_range(part.begin, part.batch.ids.rows()), part.batch.targets);
    model.evaluate(ctx, weights, part.batch, part.loss, &record);
    std::vector<float> losses(batch.ids.size());
    const View all(losses.data(), DType::f32, {tokens});
    copy(part.loss, all.row_range(part.begin, part.loss.rows()));
    if (mesh != nullptr) mesh->context.all_gather(all);
    if (mesh != nullptr) mesh->pipeline.broadcast(all, mesh->pipeline.size() - 1);
    if (mesh == nullptr || mesh->context.rank() == 0) add_losses(batch, losses.data(), buckets, report);
    if (progress) progress(std::min(b + turns, set.count()), set.count());
  }
  if (mesh != nullptr) {
    sum_over_replicas(mesh->replica, buckets, report);
    sum_record(mesh->replica, record);
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
  const Part part = place(ctx, model.mesh(), offsets);
  model.evaluate(ctx, weights, part.batch, part.loss, &record);
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
