// The same step on any layout of processes: losses, gradients, balance and weights of one process.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "core/philox.h"
#include "dist/in_process.h"
#include "support.h"
#include "train/gathered_state.h"
#include "train/memory_plan.h"
#include "train/step.h"

namespace tessera::test {
namespace {

using Values = std::vector<double>;

constexpr int64_t kMicroBatches = 8, kMicroTokens = 96, kSteps = 3;

model::ModelConfig small_config() {
  model::ModelConfig c;
  c.layers = 4;
  c.width = 32;
  c.vocabulary = 64;
  c.init_std = 0.1;
  c.mla_layers = {3};
  c.kda = {.heads = 2, .head_dim = 16, .gate_rank = 8, .chunk = 16};
  c.mla = {.heads = 2, .q_rank = 0, .kv_rank = 8, .nope_dim = 8, .rope_dim = 4, .value_dim = 8};
  c.ffn.dense_layers = 1;
  c.ffn.dense_hidden = 48;
  c.moe.experts = 12;
  c.moe.top_k = 3;
  c.moe.hidden = 16;
  c.moe.latent = 16;
  c.moe.shared = 1;
  c.residual.attn_res_block = 2;
  return c;
}

// What the other one leaves out: more heads, a query latent, a low-rank output gate, no gate of MLA, experts at full
// width.
model::ModelConfig other_config() {
  model::ModelConfig c = small_config();
  c.kda.heads = c.mla.heads = 4;
  c.kda.head_dim = 8;
  c.kda.output_gate = model::OutputGate::low_rank;
  c.mla.q_rank = 12;
  c.mla.output_gate = false;
  c.moe.latent = 0;
  c.moe.shared = 2;
  return c;
}

// With so few tokens an expert gets 192 a step: above that the bias waits, and the histogram is kept.
constexpr double kMovesAtOnce = 8, kWaits = 250;

train::RunConfig run_of(const dist::Layout& layout, double min_tokens) {
  train::RunConfig run;
  run.parallel = layout;
  run.train.micro_tokens = kMicroTokens;
  run.optim.qk_clip = 0.1;  // some heads are above it
  run.guard.window = 1;
  run.balance.min_tokens = min_tokens;
  return run;
}

// Documents shorter than the convolution, of one token at the end, and one that fills a micro-batch.
std::vector<int64_t> offsets_of(int64_t micro_batch) {
  if (micro_batch % 3 == 1) return {0, kMicroTokens};
  if (micro_batch % 3 == 2) return {0, 2, 3, 70, kMicroTokens};
  return {0, 40, 43, 43, kMicroTokens - 1, kMicroTokens};
}

std::vector<int32_t> ids_of(int64_t step, int64_t micro_batch, uint64_t what) {
  const Philox random(7 + static_cast<uint64_t>(step), Purpose::test, static_cast<uint64_t>(micro_batch));
  std::vector<int32_t> ids;
  for (uint64_t t = 0; t < kMicroTokens; ++t) {
    // Zipf-like, so that the routers have something to balance
    ids.push_back(static_cast<int32_t>(random.bits(2 * t + what) % 64 * (random.bits(900 + t) % 64) / 64));
  }
  return ids;
}

constexpr auto kNone = model::Recompute::none, kCheap = model::Recompute::cheap, kFull = model::Recompute::full;

struct Result {
  std::vector<double> losses, norms;        // of each step
  std::vector<int64_t> clipped;             // heads, by QK-clip
  std::map<std::string, Values> gradients;  // of the first step
  std::map<std::string, Values> state;      // after the first step, all of a checkpoint
  std::string guard;
};

Values values_of(const View& view) {
  Values values(static_cast<size_t>(view.elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    switch (view.dtype()) {
      case DType::f32: values[i] = double(view.as<float>()[i]); break;
      case DType::i32: values[i] = double(view.as<int32_t>()[i]); break;
      default: values[i] = double(view.as<int64_t>()[i]);
    }
  }
  return values;
}

void expect_same_bits(const std::string& name, const Values& here, dist::Communicator& axis) {
  Values everyones(here.size() * static_cast<size_t>(axis.size()));
  const View all(everyones.data(), DType::f64, {axis.size(), std::ssize(here)});
  std::ranges::copy(here, all.at(axis.rank()).as<double>());
  axis.all_gather(all);
  for (int r = 0; r < axis.size(); ++r) {
    EXPECT_TRUE(std::ranges::equal(here, std::span(all.at(r).as<double>(), here.size()))) << name << ", process " << r;
  }
}

// What the processes of the tensor axis have between them: parts of a whole, terms of a sum, or all the same.
Values along_tensor(const Values& here, const model::Parameter& p, dist::Communicator& axis) {
  if (p.cut == model::Cut::none) {
    expect_same_bits(p.name, here, axis);
    return here;
  }
  Values whole(static_cast<size_t>(p.whole.elements()));
  const int64_t row = p.elements() / std::max<int64_t>(p.shape[0], 1), whole_row = p.whole.elements() / p.whole[0];
  for (int64_t i = 0; i < p.elements(); ++i) {
    whole[static_cast<size_t>((p.first + i / row) * whole_row + p.first_column + i % row)] = here[size_t(i)];
  }
  axis.all_reduce(View(whole.data(), DType::f64, {std::ssize(whole)}));
  return whole;
}

// Everyone's gradients, summed; expert stacks and cut parameters whole.
std::map<std::string, Values> gradients_of(const train::Stepper& stepper, dist::Mesh* mesh) {
  std::map<std::string, Values> gradients;
  const model::ParameterTable& table = stepper.model().table();
  for (model::ParamId id = 0; id < table.size(); ++id) {
    const View& gradient = stepper.weights().d(id);
    if (!gradient.present()) continue;
    const model::Parameter& p = table[id];
    const int64_t row = gradient.row_elements(), rows = p.stack > 0 ? small_config().moe.experts : gradient.rows();
    Values here = values_of(gradient), whole = here;
    if (p.stack > 0) {
      if (mesh != nullptr) here = along_tensor(here, p, mesh->tensor);
      whole.assign(static_cast<size_t>(rows * row), 0);
      std::ranges::copy(here, whole.begin() + p.first * row);
    } else if (mesh != nullptr) {
      whole = along_tensor(here, p, mesh->tensor);
    }
    if (mesh != nullptr) mesh->replica.all_reduce(View(whole.data(), DType::f64, {std::ssize(whole)}));
    gradients[p.name] = std::move(whole);
  }
  return gradients;
}

Result train(const model::ModelConfig& config, const dist::Layout& layout, double min_tokens, dist::Mesh* mesh) {
  const train::RunConfig run = run_of(layout, min_tokens);
  const model::Model model(config, {.recompute = {kCheap, kFull, kNone, kFull}, .mesh = mesh});
  Arena arena(int64_t{1} << 30);
  Context ctx{Device::cpu, arena};
  train::Stepper stepper(ctx, model, run);
  stepper.initialise(1);
  train::Guard guard(model, run.guard_options());
  Result result;
  const int64_t share = kMicroBatches / layout.data, first = mesh != nullptr ? mesh->data_index * share : 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    double loss = 0;
    for (int64_t m = first; m < first + share; ++m) {
      const std::vector<int64_t> offsets = offsets_of(m);
      const model::Batch batch = stepper.place(ctx, ids_of(step, m, 0).data(), ids_of(step, m, 1).data(), offsets);
      loss += stepper.accumulate(ctx, batch, kMicroBatches * kMicroTokens);
    }
    if (step == 0) result.gradients = gradients_of(stepper, mesh);
    const train::StepReport report = stepper.finish(ctx, 0.01, step, &guard);
    result.losses.push_back(mesh != nullptr ? mesh->replica.sum(loss) : loss);
    result.norms.push_back(report.gradient_norm);
    result.clipped.push_back(report.heads_clipped);
    if (step > 0) continue;
    const train::GatheredState gathered(stepper.state(), mesh != nullptr ? &mesh->world : nullptr);
    for (const auto& [name, view] : gathered.tensors()) result.state[name] = values_of(view);
  }
  for (model::ParamId id = 0; mesh != nullptr && id < model.table().size(); ++id) {
    const model::Parameter& p = model.table()[id];
    if (p.shape == p.whole) expect_same_bits(p.name, values_of(stepper.weights()[id]), mesh->tensor);
  }
  result.guard = guard.state();
  return result;
}

using Config = model::ModelConfig();

const Result& alone(double min_tokens, Config* config = small_config) {
  static std::map<std::pair<Config*, double>, Result> results;
  const auto key = std::pair(config, min_tokens);
  if (!results.contains(key)) results[key] = train(config(), {}, min_tokens, nullptr);
  return results.at(key);
}

Result together(const dist::Layout& layout, double min_tokens, Config* config = small_config) {
  Result first;
  dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
    dist::Mesh mesh(layout, transport);
    Result result = train(config(), layout, min_tokens, &mesh);
    if (transport.rank() == 0) first = std::move(result);
  });
  return first;
}

// Largest difference over the largest value.
double relative_difference(const Values& a, const Values& b) {
  double most = 0, largest = 1e-30;
  EXPECT_EQ(a.size(), b.size());
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    most = std::max(most, std::fabs(a[i] - b[i]));
    largest = std::max(largest, std::fabs(b[i]));
  }
  return most / largest;
}

// Margins of tokens are the same bits where the forward pass is, and then the counts are equal; where sums are taken in
// another order, a margin may fall over the edge of its bin.
enum class Forward { same_bits, to_rounding };

void expect_same_counts(const std::string& name, const Values& counts, const Values& wanted, Forward forward) {
  double moved = 0;
  for (size_t i = 0; i < wanted.size(); ++i) moved += std::fabs(counts.at(i) - wanted[i]);
  EXPECT_LE(moved, forward == Forward::same_bits || !name.ends_with(".histogram") ? 0 : 12) << name;
}

void expect_same(const Result& result, const Result& wanted, Forward forward) {
  for (size_t s = 0; s < kSteps; ++s) {
    EXPECT_NEAR(result.losses[s], wanted.losses[s], 1e-5 * wanted.losses[s]);
    EXPECT_NEAR(result.norms[s], wanted.norms[s], 1e-4 * wanted.norms[s]);
  }
  EXPECT_EQ(result.clipped, wanted.clipped);
  ASSERT_EQ(result.gradients.size(), wanted.gradients.size());
  for (const auto& [name, gradient] : wanted.gradients) {
    EXPECT_LT(relative_difference(result.gradients.at(name), gradient), 1e-5) << name;
  }
  ASSERT_EQ(result.state.size(), wanted.state.size());
  for (const auto& [name, values] : wanted.state) {
    const bool bias = name.find("e_score_correction_bias") != std::string::npos;
    if (name.starts_with("balance.")) {
      expect_same_counts(name, result.state.at(name), values, forward);
    } else if (bias && forward == Forward::same_bits) {
      EXPECT_EQ(result.state.at(name), values) << name;
    } else {  // both rules divide by the size of a gradient: where that is near zero, rounding shows
      EXPECT_LT(relative_difference(result.state.at(name), values), 1e-2) << name;
    }
  }
}

void expect_same_as_alone(const dist::Layout& layout, Forward forward, Config* config = small_config) {
  SCOPED_TRACE(layout.to_string());
  for (const double min_tokens : {kMovesAtOnce, kWaits}) {
    expect_same(together(layout, min_tokens, config), alone(min_tokens, config), forward);
  }
}

TEST(Layout, DataParallel) {
  for (const int64_t data : {1, 2, 4, 8}) expect_same_as_alone({.data = data}, Forward::same_bits);
}

TEST(Layout, ExpertParallel) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .expert = 2},
                                     {.data = 4, .expert = 2},
                                     {.data = 4, .expert = 4},
                                     {.data = 8, .expert = 8}}) {  // 12 experts: unevenly
    expect_same_as_alone(layout, Forward::to_rounding);
  }
}

// Documents cross one and several cuts, begin and end at them, and are shorter than the convolution.
TEST(Layout, ContextParallel) {
  for (const dist::Layout& layout : {dist::Layout{.context = 2}, {.context = 3}, {.context = 4}, {.context = 8}}) {
    expect_same_as_alone(layout, Forward::to_rounding);
  }
}

TEST(Layout, TensorParallel) {
  expect_same_as_alone({.tensor = 2}, Forward::to_rounding);
  expect_same_as_alone({.tensor = 2}, Forward::to_rounding, other_config);
  expect_same_as_alone({.tensor = 4}, Forward::to_rounding, other_config);
}

TEST(Layout, TensorWithOtherAxes) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .tensor = 2},
                                     {.context = 2, .tensor = 2},
                                     {.context = 3, .tensor = 2},
                                     {.data = 2, .expert = 2, .tensor = 2},
                                     {.data = 2, .expert = 4, .context = 2, .tensor = 2}}) {
    expect_same_as_alone(layout, Forward::to_rounding);
  }
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .tensor = 4}, {.expert = 2, .context = 2, .tensor = 4}}) {
    expect_same_as_alone(layout, Forward::to_rounding, other_config);
  }
}

TEST(Layout, AxesTogether) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .context = 2},
                                     {.expert = 2, .context = 2},
                                     {.data = 2, .expert = 4, .context = 2},
                                     {.data = 2, .expert = 2, .context = 4}}) {
    expect_same_as_alone(layout, Forward::to_rounding);
  }
}

void put(const Values& values, const View& view) {
  for (size_t i = 0; i < values.size(); ++i) {
    switch (view.dtype()) {
      case DType::f32: view.as<float>()[i] = float(values[i]); break;
      case DType::i32: view.as<int32_t>()[i] = int32_t(values[i]); break;
      default: view.as<int64_t>()[i] = int64_t(values[i]);
    }
  }
}

// All of a checkpoint: of a step from the beginning, or of `from`, read into this layout.
using State = std::map<std::string, Values>;

State state_of(const dist::Layout& layout, dist::Mesh* mesh, const State* from) {
  const train::RunConfig run = run_of(layout, kWaits);
  const model::Model model(other_config(), {.mesh = mesh});
  Arena arena(int64_t{1} << 30);
  Context ctx{Device::cpu, arena};
  train::Stepper stepper(ctx, model, run);
  if (from == nullptr) {
    stepper.initialise(1);
    const std::vector<int64_t> offsets = offsets_of(0);
    const model::Batch batch = stepper.place(ctx, ids_of(0, 0, 0).data(), ids_of(0, 0, 1).data(), offsets);
    stepper.accumulate(ctx, batch, kMicroTokens);
    stepper.finish(ctx, 0.01, 0);
  } else {
    const train::StagedState staged(stepper.state());
    for (const auto& [name, view] : staged.tensors()) {
      put(from->at(name), view);
    }
    staged.put_back();
  }
  const train::GatheredState gathered(stepper.state(), mesh != nullptr ? &mesh->world : nullptr);
  State state;
  for (const auto& [name, view] : gathered.tensors()) state[name] = values_of(view);
  return state;
}

State state_together(const dist::Layout& layout, const State* from) {
  State first;
  dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
    dist::Mesh mesh(layout, transport);
    State state = state_of(layout, &mesh, from);
    if (transport.rank() == 0) first = std::move(state);
  });
  return first;
}

TEST(Layout, CheckpointsGoFromAnyToAnyBitForBit) {
  const State alone = state_of({}, nullptr, nullptr);
  const State cut = state_together({.tensor = 4}, nullptr);
  ASSERT_EQ(alone.size(), cut.size());
  for (const auto& [name, values] : alone) EXPECT_EQ(cut.at(name).size(), values.size()) << name;
  for (const State* state : {&alone, &cut}) {
    EXPECT_EQ(state_of({}, nullptr, state), *state);
    for (const dist::Layout& layout : {dist::Layout{.tensor = 2},
                                       {.tensor = 4},
                                       {.data = 2, .tensor = 2},
                                       {.data = 2, .expert = 2, .tensor = 2},
                                       {.data = 4, .expert = 2, .context = 2}}) {
      EXPECT_EQ(state_together(layout, state), *state) << layout.to_string();
    }
  }
}

// Their shares differ: whole matrices lie where they are updated.
TEST(Layout, EveryProcessPlansWhatItTakes) {
  const std::vector<int64_t> offsets = offsets_of(0);
  int64_t before = std::numeric_limits<int64_t>::max();
  for (const dist::Layout& layout : {dist::Layout{}, {.tensor = 2}, {.data = 2, .tensor = 4}}) {
    int64_t activations = 0;
    dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
      dist::Mesh mesh(layout, transport);
      const train::RunConfig run = run_of(layout, kWaits);
      const model::Model model(other_config(), {.mesh = &mesh});
      train::LargestBatches batches;
      batches.add(offsets);
      const train::Guard guard(model, run.guard_options());
      const train::MemoryPlan plan = train::plan_memory(model, run, guard.routers(), batches, {});
      Arena arena(plan.capacity);
      Context ctx{Device::cpu, arena};
      train::Stepper stepper(ctx, model, run);
      stepper.initialise(1);
      stepper.accumulate(ctx, stepper.place(ctx, ids_of(0, 0, 0).data(), ids_of(0, 0, 1).data(), offsets),
                         kMicroTokens);
      stepper.finish(ctx, 0.01, 0);
      EXPECT_EQ(arena.peak(), plan.planned_peak) << layout.to_string() << ", process " << transport.rank();
      if (transport.rank() != 0) return;
      for (const train::MemoryUse& use : plan.uses) {
        if (use.what == "KDA" || use.what == "MLA" || use.what == "dense FFN") activations += use.most_bytes;
      }
    });
    EXPECT_LT(activations, before);
    before = activations;
  }
}

// One sum of the tokens' rows forward and one backward, each half to the other process and half back from it.
TEST(Layout, CutLayersSendTheirRowsTwiceWhateverIsRecomputed) {
  const std::vector<int64_t> offsets = offsets_of(0);
  for (const auto& [recompute, block_tokens] : {std::pair{kNone, 0}, {kCheap, 0}, {kFull, 0}, {kNone, 40}}) {
    dist::DryTransport transport(0, {0, 0});
    dist::Mesh mesh({.tensor = 2}, transport);
    const model::ModelConfig c = small_config();
    const model::Model model(c,
                             {.recompute = std::vector(4, recompute), .ffn_block_tokens = block_tokens, .mesh = &mesh});
    const train::RunConfig run = run_of(mesh.layout, kWaits);
    Arena arena = Arena::dry();
    Context ctx{Device::dry, arena};
    train::Stepper stepper(ctx, model, run);
    stepper.accumulate(ctx, stepper.place(ctx, nullptr, nullptr, offsets), kMicroTokens);
    const int64_t rows = kMicroTokens * c.width * int64_t(sizeof(float)), sublayers = 2 * c.layers;
    EXPECT_EQ(mesh.tensor.traffic().bytes(), 2 * sublayers * rows);
  }
}

// ---- checkpoints ----

using Bytes = std::vector<std::byte>;

std::map<std::string, Bytes> gathered_bytes(const train::Stepper& stepper, dist::Mesh* mesh) {
  std::map<std::string, Bytes> bytes;
  const train::GatheredState gathered(stepper.state(), mesh != nullptr ? &mesh->world : nullptr);
  for (const auto& [name, view] : gathered.tensors()) {
    const auto* begin = static_cast<const std::byte*>(view.data());
    bytes[name] = Bytes(begin, begin + view.bytes());
  }
  return bytes;
}

// Calls f(stepper, ctx, mesh) in every process of a layout.
template <class F>
void on_layout(const dist::Layout& layout, F&& f) {
  dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
    dist::Mesh of_several(layout, transport);
    dist::Mesh* mesh = layout.processes() > 1 ? &of_several : nullptr;
    const train::RunConfig run = run_of(layout, kWaits);
    const model::Model model(small_config(), {.mesh = mesh});
    Arena arena(int64_t{1} << 30);
    Context ctx{Device::cpu, arena};
    train::Stepper stepper(ctx, model, run);
    f(stepper, ctx, mesh);
  });
}

TEST(Layout, CheckpointOfOneIsTheSameBitsOnAnother) {
  const TemporaryDirectory dir;
  std::map<std::string, Bytes> saved;
  const dist::Layout writer{.data = 2, .expert = 4, .context = 2};
  on_layout(writer, [&](train::Stepper& stepper, Context& ctx, dist::Mesh* mesh) {
    stepper.initialise(1);
    const std::vector<int64_t> offsets = offsets_of(mesh->data_index);
    const model::Batch batch = stepper.place(ctx, ids_of(0, 0, 0).data(), ids_of(0, 0, 1).data(), offsets);
    stepper.accumulate(ctx, batch, 2 * kMicroTokens);
    stepper.finish(ctx, 0.01, 0);  // momenta and counts that are not zero
    const train::GatheredState gathered(stepper.state(), &mesh->world);
    const auto bytes = gathered_bytes(stepper, mesh);
    if (mesh->world.rank() > 0) return;
    ckpt::CheckpointState state;
    state.tensors = gathered.tensors();
    ckpt::save(dir.path("checkpoints"), state);
    saved = bytes;
  });
  ASSERT_GT(saved.size(), 100u);
  const ckpt::Reader reader(ckpt::newest_valid(dir.path("checkpoints"))->path);
  for (const dist::Layout& layout : {dist::Layout{},
                                     {.data = 2},
                                     {.data = 2, .expert = 2},
                                     {.context = 3},
                                     {.data = 8, .expert = 8},
                                     {.data = 2, .expert = 2, .context = 2},
                                     writer}) {
    SCOPED_TRACE(layout.to_string());
    std::map<std::string, Bytes> restored;
    on_layout(layout, [&](train::Stepper& stepper, Context&, dist::Mesh* mesh) {
      stepper.initialise(2);
      const train::StagedState staged(stepper.state());
      ckpt::load_all(reader, staged.tensors(), mesh != nullptr);
      staged.put_back();
      const auto bytes = gathered_bytes(stepper, mesh);
      if (mesh == nullptr || mesh->world.rank() == 0) restored = bytes;
    });
    EXPECT_TRUE(restored == saved);
  }
}

TEST(Layout, RepeatsBitForBit) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .expert = 4, .context = 2}, {.data = 2, .tensor = 2}}) {
    const Result a = together(layout, kWaits);
    const Result b = together(layout, kWaits);
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.gradients, b.gradients);
    EXPECT_EQ(a.state, b.state);
    EXPECT_EQ(a.guard, b.guard);
  }
}

}  // namespace
}  // namespace tessera::test
