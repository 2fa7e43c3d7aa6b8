// One step of a small model on any layout of processes, and what is compared of it.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "ckpt/checkpoint.h"
#include "core/philox.h"
#include "dist/in_process.h"
#include "support.h"
#include "train/gathered_state.h"
#include "train/memory_plan.h"
#include "train/step.h"

namespace tessera::test {

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
  // What the usual model leaves out: more heads, a query latent, a low-rank output gate, no gate of MLA, experts at
  // full width.
  bool other_model = false;
  double qk_clip = 0.1;  // some heads are above it
  auto operator<=>(const Problem&) const = default;
};

inline model::ModelConfig config_of(const Problem& problem) {
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
  if (!problem.other_model) return c;
  c.kda.heads = c.mla.heads = 4;
  c.kda.head_dim = 8;
  c.kda.output_gate = model::OutputGate::low_rank;
  c.mla.q_rank = 12;
  c.mla.output_gate = false;
  c.moe.latent = 0;
  c.moe.shared = 2;
  return c;
}

inline train::RunConfig run_of(const dist::Layout& layout, const Problem& problem) {
  train::RunConfig run;
  run.parallel = layout;
  run.train.micro_tokens = kMicroTokens;
  run.optim.qk_clip = problem.qk_clip;
  run.guard.window = 1;
  run.balance.min_tokens = problem.min_tokens;
  return run;
}

// Documents shorter than the convolution, of one token at the end, and one that fills a micro-batch.
inline std::vector<int64_t> offsets_of(int64_t micro_batch) {
  if (micro_batch % 3 == 1) return {0, kMicroTokens};
  if (micro_batch % 3 == 2) return {0, 2, 3, 70, kMicroTokens};
  return {0, 40, 43, 43, kMicroTokens - 1, kMicroTokens};
}

inline std::vector<int32_t> ids_of(int64_t step, int64_t micro_batch, uint64_t what) {
  const Philox random(7 + static_cast<uint64_t>(step), Purpose::test, static_cast<uint64_t>(micro_batch));
  std::vector<int32_t> ids;
  for (uint64_t t = 0; t < kMicroTokens; ++t) {
    // Zipf-like, so that the routers have something to balance
    ids.push_back(static_cast<int32_t>(random.bits(2 * t + what) % 64 * (random.bits(900 + t) % 64) / 64));
  }
  return ids;
}

constexpr auto kNone = model::Recompute::none, kCheap = model::Recompute::cheap, kFull = model::Recompute::full;

// Each kind of recompute somewhere.
inline std::vector<model::Recompute> recompute_of(const Problem& problem) {
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
  std::vector<int64_t> clipped;             // heads, by QK-clip
  std::map<std::string, Values> gradients;  // of the first step
  std::map<std::string, Values> state;      // after the first step, all of a checkpoint
  std::string guard;
};

inline Values values_of(const View& view) {
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

inline void expect_same_bits(const std::string& name, const Values& here, dist::Communicator& axis) {
  Values everyones(here.size() * static_cast<size_t>(axis.size()));
  const View all(everyones.data(), DType::f64, {axis.size(), std::ssize(here)});
  std::ranges::copy(here, all.at(axis.rank()).as<double>());
  axis.all_gather(all);
  for (int r = 0; r < axis.size(); ++r) {
    EXPECT_TRUE(std::ranges::equal(here, std::span(all.at(r).as<double>(), here.size()))) << name << ", process " << r;
  }
}

// What the processes of the tensor axis have between them: parts of a whole, terms of a sum, or all the same.
inline Values along_tensor(const Values& here, const model::Parameter& p, dist::Communicator& axis) {
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

// Everyone's gradients, summed; expert stacks and cut parameters whole. In a pipeline those of the process's layers.
inline std::map<std::string, Values> gradients_of(const train::Stepper& stepper, dist::Mesh* mesh) {
  std::map<std::string, Values> gradients;
  const model::ParameterTable& table = stepper.model().table();
  for (model::ParamId id = 0; id < table.size(); ++id) {
    const View& gradient = stepper.weights().d(id);
    if (!gradient.present()) continue;
    const model::Parameter& p = table[id];
    const int64_t row = gradient.row_elements(),
                  rows = p.stack > 0 ? stepper.model().config().moe.experts : gradient.rows();
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

inline Result train(const dist::Layout& layout, const Problem& problem, dist::Mesh* mesh) {
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

inline const Result& alone(const Problem& problem) {
  static std::map<Problem, Result> results;
  if (!results.contains(problem)) results[problem] = train({}, problem, nullptr);
  return results.at(problem);
}

// Of the first process, and of everyone's layers.
inline Result together(const dist::Layout& layout, const Problem& problem) {
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
inline double relative_difference(const Values& a, const Values& b) {
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

inline void expect_same_counts(const std::string& name, const Values& counts, const Values& wanted, Forward forward) {
  double moved = 0;
  for (size_t i = 0; i < wanted.size(); ++i) moved += std::fabs(counts.at(i) - wanted[i]);
  EXPECT_LE(moved, forward == Forward::same_bits || !name.ends_with(".histogram") ? 0 : 12) << name;
}

inline void expect_same(const Result& result, const Result& wanted, Forward forward) {
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

inline void expect_same_as_alone(const dist::Layout& layout, Forward forward, bool other_model = false) {
  SCOPED_TRACE(layout.to_string());
  for (const double min_tokens : {kMovesAtOnce, kWaits}) {
    const Problem problem{.min_tokens = min_tokens, .other_model = other_model};
    expect_same(together(layout, problem), alone(problem), forward);
  }
}

// Calls f(stepper, ctx, mesh) in every process of a layout.
template <class F>
void on_layout(const dist::Layout& layout, const Problem& problem, F&& f) {
  dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
    dist::Mesh of_several(layout, transport);
    dist::Mesh* mesh = layout.processes() > 1 ? &of_several : nullptr;
    const train::RunConfig run = run_of(layout, problem);
    const model::Model model(config_of(problem), {.mesh = mesh});
    Arena arena(int64_t{1} << 30);
    Context ctx{Device::cpu, arena};
    train::Stepper stepper(ctx, model, run);
    f(stepper, ctx, mesh);
  });
}

}  // namespace tessera::test
