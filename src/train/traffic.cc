#include "train/traffic.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "model/context_shard.h"
#include "train/buckets.h"

namespace tessera::train {
namespace {

constexpr double kReal = 4;                          // bytes of float32: gradients, masters, states, routing weights
constexpr double kCount = 8, kIndex = 4, kHalf = 2;  // i64 and f64; i32; bf16

// What a layer does again in backward, its exchanges among it.
double forwards_of(const model::Model& model, int64_t layer) {
  const auto& recompute = model.options().recompute;
  const bool again = layer < std::ssize(recompute) && recompute[size_t(layer)] == model::Recompute::full;
  return again ? 2 : 1;
}

// How often a token is routed in a step: once a MoE layer, and again where the layer is made again.
double routed_rows(const model::Model& model) {
  double times = 0;
  for (int64_t l = 0; l < model.config().layers; ++l) times += model.config().is_moe(l) ? forwards_of(model, l) : 0;
  return times;
}

// Probability that k distinct experts, chosen evenly of all, have none among `here`.
double misses(int64_t experts, int64_t here, int64_t top_k) {
  double p = 1;
  for (int64_t i = 0; i < top_k; ++i) p *= std::max(0.0, double(experts - here - i)) / double(experts - i);
  return p;
}

class Flows {
 public:
  Flows(const model::Model& model, const RunConfig& run)
      : model_(model),
        run_(run),
        mesh_(*model.mesh()),
        c_(model.config()),
        activation_(run.device == Device::cuda ? kHalf : kReal) {}

  std::vector<Flow> all(const std::vector<model::RouterOptions>& routers,
                        std::span<const std::vector<int64_t>> micro_batches) {
    parameters();
    cut_parameters();
    counts(routers);
    for (const std::vector<int64_t>& offsets : micro_batches) {
      const model::ContextShard shard(mesh_.context, offsets);
      const double tokens = double(shard.tokens(shard.rank()));
      experts(tokens);
      heads(tokens);
      streams(tokens);
      if (mesh_.context.alone()) continue;
      if (shard.any_crosses()) states();
      latents(shard);
    }
    std::erase_if(flows_, [](const Flow& f) { return f.bytes() == 0; });
    return flows_;
  }

 private:
  Flow& flow(const dist::Communicator& axis, const char* what) {
    const auto same = [&](const Flow& f) { return f.axis == axis.axis() && f.what == what; };
    const auto found = std::ranges::find_if(flows_, same);
    return found != flows_.end() ? *found : flows_.emplace_back(Flow{.axis = axis.axis(), .what = what});
  }

  // bytes_to(member), in `messages` to each that gets any.
  template <class F>
  void send(const dist::Communicator& axis, const char* what, double messages, F&& bytes_to) {
    Flow& f = flow(axis, what);
    for (int r = 0; r < axis.size(); ++r) {
      const double bytes = r == axis.rank() ? 0 : bytes_to(r);
      if (bytes == 0) continue;
      const bool here = axis.node_of(r) == axis.node_of(axis.rank());
      (here ? f.inside : f.across) += bytes;
      (here ? f.messages_inside : f.messages_across) += messages;
    }
  }
  void send_each(const dist::Communicator& axis, const char* what, double messages, double bytes) {
    send(axis, what, messages, [&](int) { return bytes; });
  }
  // Everywhere the sum of what each has: a part to each owner, and its sum to all.
  void all_reduce(const dist::Communicator& axis, const char* what, double bytes) {
    send_each(axis, what, 2, 2 * bytes / double(axis.size()));
  }

  void parameters() {
    double dense = 0, dense_copies = 0, stacked = 0, stacked_copies = 0;
    for (const model::Parameter& p : model_.table().all()) {
      if (p.group == model::Group::buffer) continue;
      const double n = double(p.elements()), copies = run_.device == Device::cuda && !p.exact ? n : 0;
      (p.stack > 0 ? stacked : dense) += n;
      (p.stack > 0 ? stacked_copies : dense_copies) += copies;
    }
    owned(mesh_.replica, dense, dense_copies);
    owned(mesh_.expert_replica, stacked, stacked_copies);
  }
  void owned(const dist::Communicator& axis, double elements, double copies) {
    const double share = 1 / double(axis.size()), buckets = std::ceil(elements * kReal / double(kBucketBytes));
    send_each(axis, "gradients", buckets, share * elements * kReal);
    send_each(axis, "parameters", copies > 0 ? 2 * buckets : buckets, share * (elements * kReal + copies * kHalf));
  }

  // Between the parts of heads and hidden widths: sums of what all of them use, and whole matrices for their updates.
  // Each replica does its share of both.
  void cut_parameters() {
    const dist::Communicator& axis = mesh_.tensor;
    if (axis.alone()) return;
    double partial = 0, through = 0, through_copies = 0;
    for (const model::Parameter& p : model_.table().all()) {
      const double n = double(p.elements()) / double(mesh_.replica.size());
      if (p.cut == model::Cut::partial) partial += n;
      if (p.cut_through) through += n;
      if (p.cut_through && run_.device == Device::cuda && !p.exact) through_copies += n;
    }
    all_reduce(axis, "gradients", partial * kReal);
    send_each(axis, "parts of matrices", 3, (3 * through * kReal + through_copies * kHalf) / double(axis.size()));
  }

  // Of the routers, the guard, the loss and the gradient norm.
  void counts(const std::vector<model::RouterOptions>& routers) {
    const double experts = double(c_.moe.experts), layers = double(routers.size());
    double bins = 0;
    for (const model::RouterOptions& r : routers) {
      if (ops::router::counts_quantiles(r.balance.method)) bins += double(r.balance.bins);
    }
    const double of_layer = (2 * experts + 2) * kCount + experts * kCount * (run_.guard.on ? 2 : 1);
    all_reduce(mesh_.replica, "counts", layers * of_layer + bins * experts * kIndex);
    if (run_.guard.on) all_reduce(mesh_.replica, "counts", layers * 3 * experts * kCount);
    all_reduce(mesh_.replica, "counts", 3 * kCount);  // tokens and bytes of text
    const double largest_logits =
        run_.optim.qk_clip > 0 ? double(model_.mla_layers() * c_.mla.heads / mesh_.tensor.size()) * kReal : 0;
    send_each(mesh_.replica, "counts", 2, largest_logits + kCount);
    send_each(mesh_.world, "gradient norm", 1, kCount);
  }

  // Forward: the row, its choices and their weights; its result back. Backward: the gradients of the three.
  void experts(double tokens) {
    const dist::Communicator& axis = mesh_.expert;
    const dist::ExpertRanges ranges{c_.moe.experts, axis.size()};
    const double row = double(c_.expert_width()) * activation_, choices = double(c_.moe.top_k);
    for (int64_t l = 0; l < c_.layers && !axis.alone(); ++l) {
      if (!model_.has_moe(l)) continue;
      const double times = forwards_of(model_, l);
      const double of_row = times * (2 * row + choices * (kIndex + kReal)) + 2 * row + choices * kReal;
      const auto rows_to = [&](int r) { return tokens * (1 - misses(c_.moe.experts, ranges.count(r), c_.moe.top_k)); };
      send(axis, "rows of tokens", 4 * times + 3, [&](int r) { return rows_to(r) * of_row; });
      for (int r = 0; r < axis.size(); ++r) {
        if (r != axis.rank()) flow(axis, "rows of tokens").rows += times * rows_to(r);
      }
      send_each(axis, "counts of rows", times, times * kCount);
    }
  }

  // One sum of the rows forward and one backward in each sublayer that is cut.
  void heads(double tokens) {
    for (int64_t l = 0; l < c_.layers && !mesh_.tensor.alone(); ++l) {
      if (!model_.holds(l)) continue;
      const double sublayers = c_.is_moe(l) && c_.moe.shared == 0 ? 1 : 2;
      for (int pass = 0; pass < 2; ++pass) {
        all_reduce(mesh_.tensor, "rows of heads", sublayers * tokens * double(c_.width) * activation_);
      }
    }
  }

  // To the next run of layers what it lacks, and the gradients of what came to the one before.
  void streams(double tokens) {
    const model::Stages& stages = model_.stages();
    const int here = mesh_.pipeline.rank(), processes = mesh_.pipeline.size();
    for (int64_t chunk = here; chunk < stages.count() && processes > 1; chunk += processes) {
      const auto pass = [&](int64_t entered, int to) {
        const double bytes = double(std::ssize(model_.entering(entered))) * tokens * double(c_.width) * activation_;
        send(mesh_.pipeline, "streams", 1, [&](int r) { return r == to ? bytes : 0; });
      };
      if (chunk + 1 < stages.count()) pass(chunk + 1, (here + 1) % processes);
      if (chunk > 0) pass(chunk, (here + processes - 1) % processes);
    }
  }

  void states() {
    const auto& k = c_.kda;
    const int64_t heads = k.heads / mesh_.tensor.size();
    const double map = double(heads * k.head_dim * 2 * k.head_dim) * kReal;
    const double windows = 3 * double((k.conv_width - 1) * heads * k.head_dim) * activation_;
    for (int64_t l = 0; l < c_.layers; ++l) {
      if (c_.is_mla(l) || !model_.holds(l)) continue;
      const double times = forwards_of(model_, l) + 1;  // backward moves as much the other way
      send_each(mesh_.context, "KDA states", times, times * map);
      send_each(mesh_.context, "convolution windows", 3 * times, times * windows);
    }
  }

  // To every later process of a document the keys that it reads, and to every earlier one their gradients.
  void latents(const model::ContextShard& shard) {
    const int self = shard.rank();
    const double width = double(c_.mla.kv_rank + c_.mla.rope_dim) * activation_;
    for (int64_t l = 0; l < c_.layers; ++l) {
      if (!model_.has_mla(l)) continue;
      const double times = forwards_of(model_, l);
      send(mesh_.context, "MLA latents", 1, [&](int r) {
        return r > self ? times * width * double(read_by(shard, r, self)) : width * double(read_by(shard, self, r));
      });
    }
  }
  static int64_t read_by(const model::ContextShard& shard, int reader, int owner) {
    if (shard.tokens(reader) == 0) return 0;
    return std::max<int64_t>(0, shard.end(owner) - std::max(shard.first_begin(reader), shard.begin(owner)));
  }

  const model::Model& model_;
  const RunConfig& run_;
  dist::Mesh& mesh_;
  const model::ModelConfig& c_;
  const double activation_;
  std::vector<Flow> flows_;
};

}  // namespace

std::vector<Flow> step_flows(const model::Model& model, const RunConfig& run,
                             const std::vector<model::RouterOptions>& routers,
                             std::span<const std::vector<int64_t>> micro_batches) {
  return Flows(model, run).all(routers, micro_batches);
}

// ---- as counted ----

void TrafficMeter::begin() {
  before_.clear();
  for (const dist::Communicator* axis : model_.mesh()->axes()) before_.push_back(axis->traffic());
}

void TrafficMeter::end(const std::vector<Flow>& formula, int64_t tokens) {
  const std::vector<const dist::Communicator*> axes = model_.mesh()->axes();
  counted_.resize(axes.size());
  formula_.resize(axes.size());
  for (size_t a = 0; a < axes.size(); ++a) {
    const dist::Traffic& now = axes[a]->traffic();
    counted_[a] += {now.inside - before_[a].inside, now.across - before_[a].across, 0, now.rows - before_[a].rows};
    for (const Flow& f : formula) {
      if (f.axis != axes[a]->axis()) continue;
      formula_[a].inside += f.inside;
      formula_[a].across += f.across;
      formula_[a].rows += f.rows;
    }
  }
  ++steps_;
  tokens_ += tokens;
}

std::vector<AxisTraffic> TrafficMeter::report() const {
  dist::Mesh& mesh = *model_.mesh();
  std::vector<AxisTraffic> report;
  if (steps_ == 0) return report;
  const std::vector<const dist::Communicator*> axes = mesh.axes();
  for (size_t a = 0; a < axes.size(); ++a) {
    const Flow& f = formula_[a];
    std::vector<double> sums{
        double(counted_[a].inside), double(counted_[a].across), double(counted_[a].rows), f.inside, f.across, f.rows};
    mesh.world.all_reduce(View(sums.data(), DType::f64, {std::ssize(sums)}));
    const auto [inside, across, rows, formula_inside, formula_across, balanced_rows] =
        std::array<double, 6>{sums[0], sums[1], sums[2], sums[3], sums[4], sums[5]};
    if (inside + across + formula_inside + formula_across == 0) continue;
    const double steps = double(steps_), times = routed_rows(model_) * double(tokens_);
    report.push_back(
        {.axis = axes[a]->axis(),
         .inside = inside / steps,
         .across = across / steps,
         .formula_inside = formula_inside / steps,
         .formula_across = formula_across / steps,
         .formula_at_rows = (formula_inside + formula_across) / steps * (balanced_rows > 0 ? rows / balanced_rows : 1),
         .rows_per_token = balanced_rows > 0 ? rows / times : 0,
         .balanced_per_token = balanced_rows > 0 ? balanced_rows / times : 0});
  }
  return report;
}

}  // namespace tessera::train
