// The whole model on the GPU in bf16 against the CPU in float64, both on weights rounded to bf16.
//
// Rounding moves a layer's output by about 3e-3 and selection by the router is not continuous, so two models are
// compared: one whose tokens visit every expert (nothing can flip), and one that selects. How far a gradient may be off
// depends on the tensor, so each is held to what it moves by in float64 when the weights are rounded once more: the
// most of several such roundings, since one says little of a tensor of two elements. Held to a single other rounding,
// float64 itself exceeds a limit of 2 in half of the pairs of roundings of the models that select, and reaches 14.6;
// held to the most of seven others it never does (the worst of 48: 1.84).
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/philox.h"
#include "infer/decoder.h"
#include "selfcheck/selfcheck.h"

namespace tessera::selfcheck {

using check::Result;
using model::Model;
using model::ModelConfig;
using model::ParamId;

namespace {

constexpr double kLeastSensitivity = 0.03;  // relative, of a gradient: smaller ones are taken as this
constexpr int kRoundings = 8;
const std::vector<int64_t> kOffsets{0, 1, 1, 20, 150, 215};  // one-token and empty documents among the packed

struct Placed {
  Context& ctx;
  Arena& arena;
  model::Weights weights;
  model::Batch batch;
  View loss;
};

View host(const std::vector<int32_t>& v) {
  return View(const_cast<int32_t*>(v.data()), DType::i32, {static_cast<int64_t>(v.size())});
}

// Ids, targets and weights as every device gets them.
struct Problem {
  Model model;
  std::vector<int32_t> ids, targets;
  std::vector<std::vector<float>> values;  // one a parameter; matrices hold bf16 values

  explicit Problem(const ModelConfig& config) : model(config, {}) {
    Arena plan = Arena::dry();
    model::allocate_weights(plan, model.table(), DType::f32, false);
    Arena arena(plan.peak());
    const model::Weights w = model::allocate_weights(arena, model.table(), DType::f32, false);
    model::initialise(config, model.table(), w, 7);
    const Philox random(3, Purpose::test);
    uint64_t draw = 1000;
    for (ParamId id = 0; id < model.table().size(); ++id) {
      const model::Parameter& p = model.table()[id];
      std::vector<float>& v = values.emplace_back(w[id].as<float>(), w[id].as<float>() + p.elements());
      const bool constant = p.init == model::Init::ones || p.init == model::Init::zeros;
      const double scale = p.group == model::Group::buffer ? 0.02 : 0.2;
      for (float& x : v) {
        if (constant) x += float(scale * random.normal(draw++));
        if (!p.exact) x = float(bf16(x));
      }
    }
    for (int64_t t = 0; t < kOffsets.back(); ++t) {
      ids.push_back(static_cast<int32_t>(random.bits(uint64_t(t)) % uint64_t(config.vocabulary)));
      const auto target = static_cast<int32_t>(random.bits(uint64_t(t) + 500) % uint64_t(config.vocabulary));
      targets.push_back(t % 9 == 4 ? -1 : target);
    }
  }

  // Every weight moved by a relative N(0, 2^-9), about as one more rounding to bf16 would: one of many such draws.
  Problem rounded_again(int which) const {
    Problem moved = *this;
    const Philox random(100 + static_cast<uint64_t>(which), Purpose::test);
    uint64_t draw = 0;
    for (std::vector<float>& v : moved.values) {
      for (float& x : v) x *= float(1 + 0x1p-9 * random.normal(draw++));
    }
    return moved;
  }

  Placed place(Context& ctx, DType activations) const {
    const int64_t tokens = kOffsets.back();
    Placed p{ctx, ctx.arena, model::allocate_weights(ctx.arena, model.table(), activations, true), {}, {}};
    p.batch = {ctx.arena.allocate(DType::i32, {tokens}), ctx.arena.allocate(DType::i32, {tokens}),
               place_documents(ctx, kOffsets)};
    p.loss = ctx.arena.allocate(exact_type(activations), {tokens});
    if (ctx.dry()) return p;
    copy(host(ids), p.batch.ids);
    copy(host(targets), p.batch.targets);
    std::vector<View> views;
    for (size_t i = 0; i < values.size(); ++i) {
      views.push_back(View(const_cast<float*>(values[i].data()), DType::f32, p.weights.value[i].shape()));
    }
    if (activations == DType::f64) {
      for (size_t i = 0; i < views.size(); ++i) std::ranges::copy(values[i], p.weights.value[i].as<double>());
    } else {
      model::assign(views, p.weights);
    }
    return p;
  }
};

struct Answer {
  std::vector<double> loss;
  std::vector<std::vector<double>> gradients;  // one a parameter; empty for buffers
};

std::vector<double> read(const View& view) {
  std::vector<double> out(static_cast<size_t>(view.elements()));
  if (view.dtype() == DType::f64) {
    std::copy_n(view.as<double>(), out.size(), out.begin());
  } else {
    std::vector<float> values(out.size());
    copy(view, View(values.data(), DType::f32, view.shape()));
    std::ranges::copy(values, out.begin());
  }
  return out;
}

Answer answer(const Problem& problem, Device device) {
  const DType activations = device == Device::cuda ? DType::bf16 : DType::f64;
  const auto run = [&](Context& ctx) {
    Placed p = problem.place(ctx, activations);
    model::zero_gradients(p.weights);
    problem.model.forward_backward(ctx, p.weights, p.batch, 1.0, p.loss, nullptr);
    return p;
  };
  Arena dry = Arena::dry();
  Context dry_ctx{Device::dry, dry, nullptr, Product::f32, device};
  run(dry_ctx);
  Arena arena(dry.peak(), device == Device::cuda ? Memory::gpu : Memory::host);
  arena.set_poison(true);
  Context ctx{device, arena};
  const Placed p = run(ctx);
  Answer a{read(p.loss), {}};
  for (const View& g : p.weights.gradient) a.gradients.push_back(g.present() ? read(g) : std::vector<double>{});
  return a;
}

// By parameter: the most that one of several roundings of the weights moves its gradient by, relative.
std::vector<double> sensitivities(const Problem& problem, const Answer& want) {
  std::vector<double> most(want.gradients.size(), kLeastSensitivity);
  for (int draw = 0; draw < kRoundings; ++draw) {
    const Answer moved = answer(problem.rounded_again(draw), Device::cpu);
    for (size_t id = 0; id < most.size(); ++id) {
      most[id] = std::max(most[id], check::relative_error(moved.gradients[id], want.gradients[id]));
    }
  }
  return most;
}

// Losses of one document by decode against those of the float64 forward: both ways through the bf16 model round, so
// each is held to the exact one.
double decode_error(const Problem& problem, const Answer& want) {
  constexpr int64_t kPrompt = 20;
  const int64_t begin = kOffsets[3], tokens = kOffsets[4] - begin;
  Arena plan = Arena::dry();
  Context dry{Device::dry, plan, nullptr, Product::f32, Device::cuda};
  problem.place(dry, DType::bf16);
  Arena arena(plan.peak(), Memory::gpu);
  Context ctx{Device::cuda, arena};
  const Placed p = problem.place(ctx, DType::bf16);
  infer::Decoder decoder(problem.model, p.weights, tokens, Product::f32, Device::cuda);
  const std::span<const int32_t> ids = std::span(problem.ids).subspan(size_t(begin), size_t(tokens));
  std::vector<double> got, exact;
  for (int64_t t = kPrompt - 1; t < tokens; ++t) {
    const auto logits = decoder.append(t == kPrompt - 1 ? ids.first(kPrompt) : ids.subspan(size_t(t), 1));
    const int32_t target = problem.targets[size_t(begin + t)];
    if (target < 0) continue;
    const double top = *std::ranges::max_element(logits);
    double sum = 0;
    for (const float x : logits) sum += std::exp(double(x) - top);
    got.push_back(top + std::log(sum) - double(logits[size_t(target)]));
    exact.push_back(want.loss[size_t(begin + t)]);
  }
  return check::relative_error(got, exact);
}

ModelConfig cuda_size(ModelConfig c) {
  c.width = 64;
  c.vocabulary = 72;
  c.init_std = 0.1;
  c.kda.head_dim = 32;
  c.kda.gate_rank = 16;
  c.mla.nope_dim = c.mla.value_dim = 16;
  c.mla.rope_dim = 8;
  c.mla.kv_rank = 24;
  if (c.mla.q_rank > 0) c.mla.q_rank = 32;
  c.ffn.dense_hidden = 96;
  c.moe.hidden = 32;
  if (c.moe.latent > 0) c.moe.latent = 24;
  return c;
}

}  // namespace

std::vector<Result> check_model_cuda(const ModelConfig& small) {
  std::vector<Result> results;
  for (const bool selects : {false, true}) {
    ModelConfig config = cuda_size(small);
    if (!selects) config.moe.experts = config.moe.top_k = 4;
    const auto add = [&](const std::string& what, double error, double limit) {
      Result r = check::within(
          "model", fmt::format("{}, {}: {}", config.name, selects ? "top 2 of 6 experts" : "all experts", what), error,
          limit);
      r.device = "cuda";
      results.push_back(r);
    };
    const Problem problem(config);
    const Answer want = answer(problem, Device::cpu), got = answer(problem, Device::cuda);
    const Answer again = answer(problem, Device::cuda);
    add("losses by token, bf16 against float64", check::relative_error(got.loss, want.loss), selects ? 3e-2 : 1e-2);
    const std::vector<double> sensitivity = sensitivities(problem, want);
    double worst = 0;
    std::string of;
    for (size_t id = 0; id < want.gradients.size(); ++id) {
      const double error = check::relative_error(got.gradients[id], want.gradients[id]) / sensitivity[id];
      if (error <= worst) continue;
      worst = error;
      of = problem.model.table()[ParamId(id)].name;
    }
    add("worst gradient (" + of + "), bf16 against float64, over its sensitivity to rounded weights", worst, 2);
    add("twice gives the same bits", got.loss == again.loss && got.gradients == again.gradients ? 0 : 1, 0);
    add("losses by cached decode, bf16 against float64", decode_error(problem, want), selects ? 3e-2 : 1e-2);
  }
  return results;
}

}  // namespace tessera::selfcheck
