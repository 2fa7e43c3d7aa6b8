// The same step on any layout of processes: losses, gradients, balance and weights of one process.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>

#include "core/philox.h"
#include "dist/in_process.h"
#include "support.h"
#include "train/gathered_state.h"
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

// With so few tokens an expert gets 192 a step: above that the bias waits, and the histogram is kept.
constexpr double kMovesAtOnce = 8, kWaits = 250;

train::RunConfig run_of(const dist::Layout& layout, double min_tokens) {
  train::RunConfig run;
  run.parallel = layout;
  run.train.micro_tokens = kMicroTokens;
  run.optim.qk_clip = 3;
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

// Everyone's gradients, summed; expert stacks whole.
std::map<std::string, Values> gradients_of(const train::Stepper& stepper, dist::Mesh* mesh) {
  std::map<std::string, Values> gradients;
  const model::ParameterTable& table = stepper.model().table();
  for (model::ParamId id = 0; id < table.size(); ++id) {
    const View& gradient = stepper.weights().d(id);
    if (!gradient.present()) continue;
    const model::Parameter& p = table[id];
    const int64_t row = gradient.row_elements(), rows = p.stack > 0 ? small_config().moe.experts : gradient.rows();
    const Values here = values_of(gradient);
    Values whole(static_cast<size_t>(rows * row));
    std::ranges::copy(here, whole.begin() + p.first * row);
    if (mesh != nullptr) mesh->replica.all_reduce(View(whole.data(), DType::f64, {std::ssize(whole)}));
    gradients[p.name] = std::move(whole);
  }
  return gradients;
}

Result train(const dist::Layout& layout, double min_tokens, dist::Mesh* mesh) {
  const train::RunConfig run = run_of(layout, min_tokens);
  const model::Model model(small_config(), {.recompute = {kCheap, kFull, kNone, kFull}, .mesh = mesh});
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
    if (step > 0) continue;
    const train::GatheredState gathered(stepper.state(), mesh != nullptr ? &mesh->world : nullptr);
    for (const auto& [name, view] : gathered.tensors()) result.state[name] = values_of(view);
  }
  result.guard = guard.state();
  return result;
}

const Result& alone(double min_tokens) {
  static std::map<double, Result> results;
  if (!results.contains(min_tokens)) results[min_tokens] = train({}, min_tokens, nullptr);
  return results.at(min_tokens);
}

Result together(const dist::Layout& layout, double min_tokens) {
  Result first;
  dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
    dist::Mesh mesh(layout, transport);
    Result result = train(layout, min_tokens, &mesh);
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

void expect_same_as_alone(const dist::Layout& layout, Forward forward) {
  SCOPED_TRACE(layout.to_string());
  for (const double min_tokens : {kMovesAtOnce, kWaits})
    expect_same(together(layout, min_tokens), alone(min_tokens), forward);
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

TEST(Layout, AxesTogether) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .context = 2},
                                     {.expert = 2, .context = 2},
                                     {.data = 2, .expert = 4, .context = 2},
                                     {.data = 2, .expert = 2, .context = 4}}) {
    expect_same_as_alone(layout, Forward::to_rounding);
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
  const Result a = together({.data = 2, .expert = 4, .context = 2}, kWaits);
  const Result b = together({.data = 2, .expert = 4, .context = 2}, kWaits);
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.gradients, b.gradients);
  EXPECT_EQ(a.state, b.state);
  EXPECT_EQ(a.guard, b.guard);
}

}  // namespace
}  // namespace tessera::test
