// The same step on any layout of processes: losses, gradients, balance and weights of one process.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "ckpt/checkpoint.h"
#include "core/philox.h"
#include "dist/in_process.h"
#include "support.h"
#include "train/gathered_state.h"
#include "train/step.h"

namespace tessera::test {
namespace {

using Values = std::vector<double>;

constexpr int64_t kMicroTokens = 96, kSteps = 3;

enum class Residual { blocks, every_sublayer, plain };

// With so few tokens an expert gets 192 a step: above that the bias waits, and the histogram is kept.
constexpr double kMovesAtOnce = 8, kWaits = 250;

struct Problem {
  double min_tokens = kMovesAtOnce;
  int64_t layers = 4, micro_batches = 8;
  Residual residual = Residual::blocks;
  int64_t attn_res_block = 2;
  auto operator<=>(const Problem&) const = default;
};

model::ModelConfig config_of(const Problem& problem) {
  model::ModelConfig c;
  c.layers = problem.layers;
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
  c.residual.attn_res_block = problem.residual == Residual::blocks ? problem.attn_res_block : 0;
  c.residual.attn_res_full = problem.residual == Residual::every_sublayer;
  return c;
}

train::RunConfig run_of(const dist::Layout& layout, const Problem& problem) {
  train::RunConfig run;
  run.parallel = layout;
  run.train.micro_tokens = kMicroTokens;
  run.optim.qk_clip = 3;
  run.guard.window = 1;
  run.balance.min_tokens = problem.min_tokens;
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

// Each kind of recompute somewhere.
std::vector<model::Recompute> recompute_of(const Problem& problem) {
  constexpr auto kNone = model::Recompute::none, kCheap = model::Recompute::cheap, kFull = model::Recompute::full;
  std::vector<model::Recompute> of_layers;
  for (int64_t l = 0; l < problem.layers; ++l)
    of_layers.push_back(std::array{kCheap, kFull, kNone, kFull}[size_t(l) % 4]);
  return of_layers;
}

// Of a step, from the host.
struct Batches {
  std::vector<std::vector<int64_t>> offsets;
  std::vector<std::vector<int32_t>> ids, targets;
  std::vector<train::MicroBatch> all;

  Batches(int64_t step, int64_t first, int64_t count) {
    for (int64_t m = first; m < first + count; ++m) {
      offsets.push_back(offsets_of(m));
      ids.push_back(ids_of(step, m, 0));
      targets.push_back(ids_of(step, m, 1));
    }
    for (size_t i = 0; i < offsets.size(); ++i) all.push_back({ids[i].data(), targets[i].data(), offsets[i]});
  }
};

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

// Everyone's gradients, summed; expert stacks whole. In a pipeline those of the process's layers.
std::map<std::string, Values> gradients_of(const train::Stepper& stepper, dist::Mesh* mesh) {
  std::map<std::string, Values> gradients;
  const model::ParameterTable& table = stepper.model().table();
  for (model::ParamId id = 0; id < table.size(); ++id) {
    const View& gradient = stepper.weights().d(id);
    if (!gradient.present()) continue;
    const model::Parameter& p = table[id];
    const int64_t row = gradient.row_elements(),
                  rows = p.stack > 0 ? stepper.model().config().moe.experts : gradient.rows();
    const Values here = values_of(gradient);
    Values whole(static_cast<size_t>(rows * row));
    std::ranges::copy(here, whole.begin() + p.first * row);
    if (mesh != nullptr) mesh->replica.all_reduce(View(whole.data(), DType::f64, {std::ssize(whole)}));
    gradients[p.name] = std::move(whole);
  }
  return gradients;
}

Result train(const dist::Layout& layout, const Problem& problem, dist::Mesh* mesh) {
  const train::RunConfig run = run_of(layout, problem);
  const model::Model model(config_of(problem), {.recompute = recompute_of(problem), .mesh = mesh});
  Arena arena(int64_t{1} << 30);
  Context ctx{Device::cpu, arena};
  train::Stepper stepper(ctx, model, run);
  stepper.initialise(1);
  train::Guard guard(model, run.guard_options());
  Result result;
  const int64_t share = problem.micro_batches / layout.data, first = mesh != nullptr ? mesh->data_index * share : 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    const Batches batches(step, first, share);
    const double loss = stepper.accumulate(ctx, batches.all, problem.micro_batches * kMicroTokens);
    if (step == 0) result.gradients = gradients_of(stepper, mesh);
    const train::StepReport report = stepper.finish(ctx, 0.01, step, &guard);
    result.losses.push_back(mesh != nullptr ? mesh->pipeline.sum(mesh->replica.sum(loss)) : loss);
    result.norms.push_back(report.gradient_norm);
    if (step > 0) continue;
    const train::GatheredState gathered(stepper.state(), mesh != nullptr ? &mesh->world : nullptr);
    for (const auto& [name, view] : gathered.tensors()) result.state[name] = values_of(view);
  }
  result.guard = guard.state();
  return result;
}

const Result& alone(const Problem& problem) {
  static std::map<Problem, Result> results;
  if (!results.contains(problem)) results[problem] = train({}, problem, nullptr);
  return results.at(problem);
}

// Of the first process, and of everyone's layers.
Result together(const dist::Layout& layout, const Problem& problem) {
  Result first;
  std::map<std::string, Values> gradients;
  std::mutex mutex;
  dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
    dist::Mesh mesh(layout, transport);
    Result result = train(layout, problem, &mesh);
    const std::lock_guard lock(mutex);
    gradients.merge(result.gradients);
    if (transport.rank() == 0) first = std::move(result);
  });
  first.gradients = std::move(gradients);
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
  for (const double min_tokens : {kMovesAtOnce, kWaits}) {
    const Problem problem{.min_tokens = min_tokens};
    expect_same(together(layout, problem), alone(problem), forward);
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

TEST(Layout, AxesTogether) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .context = 2},
                                     {.expert = 2, .context = 2},
                                     {.data = 2, .expert = 4, .context = 2},
                                     {.data = 2, .expert = 2, .context = 4}}) {
    expect_same_as_alone(layout, Forward::to_rounding);
  }
}

// Of every layer and expert, in the state of the guard.
Values watched_loads(const std::string& guard) {
  Values loads;
  const auto state = nlohmann::json::parse(guard);
  for (const auto& layer : state.at("layers")) {
    for (const auto& expert : layer.at("window")) loads.push_back(expert.at(0));
  }
  return loads;
}

// A process of a pipeline takes sums in the order in which one process takes them: everything is the same bits but the
// norm, a sum over processes.
void expect_pipeline_as_alone(const dist::Layout& layout, const Problem& problem) {
  SCOPED_TRACE(layout.to_string());
  const Result result = together(layout, problem), &wanted = alone(problem);
  expect_same(result, wanted, Forward::same_bits);
  EXPECT_EQ(watched_loads(result.guard), watched_loads(wanted.guard));
  if (layout.pipeline_chunks > 1) return;  // gradients of blocks meet in another order
  EXPECT_EQ(result.guard, wanted.guard);
  EXPECT_EQ(result.losses.front(), wanted.losses.front());
  EXPECT_EQ(result.gradients, wanted.gradients);
}

TEST(Layout, Pipeline) {
  for (const double min_tokens : {kMovesAtOnce, kWaits}) {
    for (const int64_t processes : {2, 3, 4}) {  // 4: a process without experts
      expect_pipeline_as_alone({.pipeline = processes}, {.min_tokens = min_tokens});
    }
  }
}

TEST(Layout, PipelineOfSeveralChunks) {
  expect_pipeline_as_alone({.pipeline = 2, .pipeline_chunks = 2}, {});
  expect_pipeline_as_alone({.pipeline = 2, .pipeline_chunks = 4}, {.layers = 8});
  expect_pipeline_as_alone({.pipeline = 3, .pipeline_chunks = 2}, {.layers = 8, .micro_batches = 6});
  expect_pipeline_as_alone({.pipeline = 4, .pipeline_chunks = 2}, {.layers = 8});
}

// Cuts on and beside the edges of blocks, and no blocks at all.
TEST(Layout, PipelineOfEveryResidual) {
  for (const int64_t block : {1, 2, 3, 7}) {
    const Problem problem{.layers = 7, .attn_res_block = block};
    expect_pipeline_as_alone({.pipeline = 2}, problem);
    expect_pipeline_as_alone({.pipeline = 2, .pipeline_chunks = 3}, problem);
  }
  for (const Residual residual : {Residual::every_sublayer, Residual::plain}) {
    const Problem problem{.layers = 7, .residual = residual};
    expect_pipeline_as_alone({.pipeline = 3}, problem);
    expect_pipeline_as_alone({.pipeline = 2, .pipeline_chunks = 2}, problem);
  }
}

// Fewer micro-batches than processes.
TEST(Layout, PipelineThatIsNeverFull) {
  expect_pipeline_as_alone({.pipeline = 4}, {.micro_batches = 2});
  expect_pipeline_as_alone({.pipeline = 4}, {.micro_batches = 1});
}

TEST(Layout, PipelineWithOtherAxes) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .pipeline = 2},
                                     {.context = 2, .pipeline = 2},
                                     {.context = 3, .pipeline = 2, .pipeline_chunks = 2},
                                     {.data = 2, .expert = 2, .pipeline = 2},
                                     {.data = 2, .expert = 4, .context = 2, .pipeline = 2}}) {
    expect_same_as_alone(
        layout, layout.replicas() == layout.data && layout.expert == 1 ? Forward::same_bits : Forward::to_rounding);
  }
}

// The other processes do not see its counts.
TEST(Layout, ABlindRouterOfOneStageRefusesTheStepEverywhere) {
  const dist::Layout layout{.pipeline = 2, .pipeline_chunks = 2};
  dist::run_in_process(2, {.deadline_seconds = 10}, [&](dist::Transport& transport) {
    dist::Mesh mesh(layout, transport);
    const train::RunConfig run = run_of(layout, {});
    const model::Model model(config_of({}), {.mesh = &mesh});
    Arena arena(int64_t{1} << 30);
    Context ctx{Device::cpu, arena};
    train::Stepper stepper(ctx, model, run);
    stepper.initialise(1);
    if (model.has_moe(2)) *stepper.weights()[model.table().layer(2).moe.router].as<float>() = 3e38f;
    stepper.accumulate(ctx, Batches(0, 0, 8).all, 8 * kMicroTokens);
    const train::StepReport report = stepper.finish(ctx, 0.01, 0);
    EXPECT_FALSE(report.finite);
    EXPECT_EQ(report.blind_routers, std::vector<int64_t>{3});
  });
}

// One after the other, each layout goes on from the checkpoint of the one before, without a step in between.
TEST(Layout, CheckpointsBelongToNone) {
  const Problem problem{.min_tokens = kWaits};
  const TemporaryDirectory dir;
  std::map<std::string, Values> wanted;
  int64_t saved = 0;
  const auto state_of = [](const train::GatheredState& gathered) {
    std::map<std::string, Values> state;
    for (const auto& [name, view] : gathered.tensors()) state[name] = values_of(view);
    return state;
  };
  for (const dist::Layout& layout : {dist::Layout{},
                                     {.pipeline = 2},
                                     {.pipeline = 4},
                                     {.pipeline = 2, .pipeline_chunks = 2},
                                     {.data = 2, .expert = 2, .pipeline = 3},
                                     {.data = 2}}) {
    SCOPED_TRACE(layout.to_string());
    dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
      dist::Mesh mesh(layout, transport);
      const train::RunConfig run = run_of(layout, problem);
      const model::Model model(config_of(problem), {.mesh = &mesh});
      Arena arena(int64_t{1} << 30);
      Context ctx{Device::cpu, arena};
      train::Stepper stepper(ctx, model, run);
      if (saved == 0) {  // something in every tensor
        stepper.initialise(1);
        stepper.accumulate(ctx, Batches(0, 0, 8).all, 8 * kMicroTokens);
        stepper.finish(ctx, 0.01, 0);
      } else {
        const ckpt::Reader reader(ckpt::newest_valid(dir.path())->path);
        const train::StagedState staged(stepper.state());
        ckpt::load_all(reader, staged.tensors(), true);
        staged.put_back();
      }
      const train::GatheredState gathered(stepper.state(), &mesh.world);
      if (transport.rank() > 0) return;
      if (saved == 0) wanted = state_of(gathered);
      EXPECT_EQ(state_of(gathered), wanted);
      ckpt::CheckpointState state;
      state.step = ++saved;
      state.tensors = gathered.tensors();
      ckpt::save(dir.path(), state);
    });
  }
  EXPECT_EQ(saved, 6);
}

TEST(Layout, RepeatsBitForBit) {
  const Problem problem{.min_tokens = kWaits};
  const Result a = together({.data = 2, .expert = 4, .context = 2}, problem);
  const Result b = together({.data = 2, .expert = 4, .context = 2}, problem);
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.gradients, b.gradients);
  EXPECT_EQ(a.state, b.state);
  EXPECT_EQ(a.guard, b.guard);
}

}  // namespace
}  // namespace tessera::test
