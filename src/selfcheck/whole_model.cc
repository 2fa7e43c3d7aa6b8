// Checks of the whole model. The float64 run uses the very code of the float32 run, so central differences of its loss
// prove the wiring of every backward; that the ops compute what they should is proven op by op.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/philox.h"
#include "infer/decoder.h"
#include "selfcheck/selfcheck.h"

namespace tessera::selfcheck {

using check::Result;
using model::Model;
using model::ModelConfig;
using model::OutputGate;
using model::ParamId;

namespace {

constexpr int64_t kArenaBytes = int64_t{2} << 30;          // address space only
const std::vector<int64_t> kOffsets{0, 1, 1, 20, 53, 70};  // one-token and empty documents among the packed

ModelConfig tiny_kimi_linear() {
  ModelConfig c;
  c.name = "kimi-linear";
  c.layers = 3;
  c.width = 24;
  c.vocabulary = 29;
  c.init_std = 0.15;
  c.mla_layers = {3};
  c.kda = {.heads = 2,
           .head_dim = 8,
           .gate = ops::kda::Gate::unbounded,
           .output_gate = OutputGate::low_rank,
           .gate_rank = 8,
           .chunk = 16};
  c.mla = {.heads = 2, .q_rank = 0, .kv_rank = 12, .nope_dim = 8, .rope_dim = 4, .value_dim = 8, .output_gate = false};
  c.ffn = {.activation = {ops::glu::Kind::swiglu, 4, 25}, .dense_layers = 1, .dense_hidden = 32};
  c.moe = {.experts = 6,
           .top_k = 2,
           .hidden = 16,
           .latent = 0,
           .latent_norm = false,
           .shared = 1,
           .scale = 2.446,
           .router_init_std = 0.5};
  return c;
}

ModelConfig tiny_kimi_k3() {
  ModelConfig c = tiny_kimi_linear();
  c.name = "kimi-k3";
  c.kda.gate = ops::kda::Gate::bounded;
  c.kda.output_gate = OutputGate::full;
  c.mla.q_rank = 16;
  c.mla.output_gate = true;
  c.ffn.activation.kind = ops::glu::Kind::situ;
  c.moe.latent = 12;
  c.moe.latent_norm = true;
  c.moe.shared = 2;
  c.moe.scale = 1;
  c.residual.attn_res_block = 2;
  return c;
}

// A model with its weights, one packed batch, and the sum of its losses.
struct Bench {
  Model model;
  Arena arena{kArenaBytes};
  Context ctx{Device::cpu, arena};
  model::Weights weights;
  View ids, targets, loss;

  Bench(const ModelConfig& config, DType dtype, model::ModelOptions options = {}) : model(config, std::move(options)) {
    weights = model::allocate_weights(arena, model.table(), dtype, true);
    model::initialise(config, model.table(), weights, 7);
    vary_constants(dtype);
    ids = arena.allocate(DType::i32, {kOffsets.back()});
    targets = arena.allocate(DType::i32, {kOffsets.back()});
    loss = arena.allocate(dtype, {kOffsets.back()});
    const Philox random(3, Purpose::test);
    for (int64_t t = 0; t < kOffsets.back(); ++t) {
      ids.as<int32_t>()[t] = static_cast<int32_t>(random.bits(uint64_t(t)) % uint64_t(config.vocabulary));
      targets.as<int32_t>()[t] =
          t % 9 == 4 ? -1 : static_cast<int32_t>(random.bits(uint64_t(t) + 500) % uint64_t(config.vocabulary));
    }
  }

  // Ones and zeros of the initialisation would hide errors in gains, mixes and biases.
  void vary_constants(DType dtype) {
    const Philox random(11, Purpose::test);
    uint64_t draw = 0;
    for (ParamId id = 0; id < model.table().size(); ++id) {
      const model::Init init = model.table()[id].init;
      if (init != model::Init::ones && init != model::Init::zeros) continue;
      const double scale = model.table()[id].group == model::Group::buffer ? 0.02 : 0.2;
      dispatch_real(dtype, [&](auto real) {
        using Real = decltype(real);
        Real* value = weights[id].as<Real>();
        for (int64_t i = 0; i < weights[id].elements(); ++i) value[i] += Real(scale * random.normal(draw++));
      });
    }
  }

  model::Batch batch() const { return {ids, targets, {kOffsets}}; }
  double evaluate() {
    model.evaluate(ctx, weights, batch(), loss, nullptr);
    return total();
  }
  double forward_backward() {
    model::zero_gradients(weights);
    model.forward_backward(ctx, weights, batch(), 1.0, loss, nullptr);
    return total();
  }
  double total() const {
    double sum = 0;
    dispatch_real(loss.dtype(), [&](auto real) {
      for (int64_t t = 0; t < loss.elements(); ++t) sum += double(loss.as<decltype(real)>()[t]);
    });
    return sum;
  }
};

// The larger of the two; NaN once it was seen.
double larger(double worst, double error) { return std::isnan(worst) || error <= worst ? worst : error; }

std::vector<double> values(const View& view) {
  std::vector<double> out(static_cast<size_t>(view.elements()));
  dispatch_real(view.dtype(), [&](auto real) { std::copy_n(view.as<decltype(real)>(), out.size(), out.begin()); });
  return out;
}

Result row(const ModelConfig& c, const std::string& what, double error, double limit) {
  return check::within("model", fmt::format("{}: {}", c.name, what), error, limit);
}

// The float64 backward at a few elements of every parameter.
std::vector<Result> check_gradients(const ModelConfig& config) {
  Bench bench(config, DType::f64);
  bench.forward_backward();
  std::vector<Result> results;
  for (ParamId id = 0; id < bench.model.table().size(); ++id) {
    const model::Parameter& p = bench.model.table()[id];
    if (p.group == model::Group::buffer) continue;
    double* value = bench.weights[id].as<double>();
    const double* gradient = bench.weights.d(id).as<double>();
    std::vector<double> got, want;
    const int64_t stride = std::max<int64_t>(1, p.elements() / 8) | 1;
    for (int64_t i = 0; i < p.elements(); i += stride) {
      const double before = value[i], h = 1e-5;
      value[i] = before + h;
      const double up = bench.evaluate();
      value[i] = before - h;
      const double down = bench.evaluate();
      value[i] = before;
      got.push_back(gradient[i]);
      want.push_back((up - down) / (2 * h));
    }
    // Differences of a loss near 200 carry noise of 1e-8: below a gradient of 0.1 the comparison is absolute.
    double norm = 0, error = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      norm += want[i] * want[i];
      error += (got[i] - want[i]) * (got[i] - want[i]);
    }
    results.push_back(row(config, "d " + p.name + " by central differences",
                          std::sqrt(error) / std::max(std::sqrt(norm), 0.1), 1e-6));
  }
  return results;
}

std::vector<Result> check_precision(const ModelConfig& config) {
  Bench f64(config, DType::f64), f32(config, DType::f32);
  const double want = f64.forward_backward(), got = f32.forward_backward();
  double worst = 0;
  for (ParamId id = 0; id < f64.model.table().size(); ++id) {
    if (f64.model.table()[id].group == model::Group::buffer) continue;
    worst = larger(worst, check::relative_error(values(f32.weights.d(id)), values(f64.weights.d(id))));
  }
  return {row(config, "loss in float32 against float64", std::abs(got / want - 1), 1e-5),
          row(config, "losses by token in float32 against float64",
              check::relative_error(values(f32.loss), values(f64.loss)), 1e-4),
          row(config, "worst gradient in float32 against float64", worst, 1e-4)};
}

std::vector<Result> check_packing(const ModelConfig& config) {
  Bench bench(config, DType::f64);
  bench.evaluate();
  const std::vector<double> packed = values(bench.loss);
  std::vector<double> separate;
  for (size_t n = 0; n + 1 < kOffsets.size(); ++n) {
    const int64_t begin = kOffsets[n], tokens = kOffsets[n + 1] - begin;
    const std::array<int64_t, 2> alone{0, tokens};
    if (tokens == 0) continue;
    bench.model.evaluate(bench.ctx, bench.weights,
                         {bench.ids.row_range(begin, tokens), bench.targets.row_range(begin, tokens), {alone}},
                         bench.loss.row_range(0, tokens), nullptr);
    const std::vector<double> one = values(bench.loss.row_range(0, tokens));
    separate.insert(separate.end(), one.begin(), one.end());
  }
  return {
      row(config, "packed documents = each alone, losses by token", check::relative_error(packed, separate), 1e-12)};
}

// Loss and gradients of two ways of running the model: tensors that differ in a bit.
double differing(Bench& one, Bench& other) {
  double count = std::abs(one.forward_backward() - other.forward_backward());
  for (ParamId id = 0; id < one.model.table().size(); ++id) {
    if (one.model.table()[id].group == model::Group::buffer) continue;
    count += values(one.weights.d(id)) != values(other.weights.d(id));
  }
  return count;
}

std::vector<Result> check_recompute(const ModelConfig& config) {
  using model::Recompute;
  const auto layers = static_cast<size_t>(config.layers);
  std::vector<Recompute> mixed(layers, Recompute::full);
  mixed[0] = Recompute::cheap;
  mixed[layers / 2] = Recompute::none;
  double difference = 0;
  for (const std::vector<Recompute>& levels :
       {std::vector(layers, Recompute::cheap), std::vector(layers, Recompute::full), mixed}) {
    Bench saved(config, DType::f32), recomputed(config, DType::f32, {.recompute = levels});
    difference += differing(saved, recomputed);
  }
  return {row(config, "recompute none = cheap = full, bit for bit (tensors that differ)", difference, 0)};
}

// Sums over tokens are added block by block, in another order. The rest is token by token, so errors are roundings.
std::vector<Result> check_ffn_blocks(const ModelConfig& config) {
  Bench whole(config, DType::f64), blocks(config, DType::f64, {.ffn_block_tokens = 7});
  whole.forward_backward(), blocks.forward_backward();
  double worst = check::relative_error(values(blocks.loss), values(whole.loss));
  for (ParamId id = 0; id < whole.model.table().size(); ++id) {
    if (whole.model.table()[id].group == model::Group::buffer) continue;
    worst = std::max(worst, check::relative_error(values(blocks.weights.d(id)), values(whole.weights.d(id))));
  }
  return {row(config, "feed-forward in blocks of tokens = at once, losses and the worst gradient", worst, 1e-12)};
}

// Log-probabilities of a sequence by decode against the forward over all of it.
std::vector<Result> check_decode(const ModelConfig& config) {
  constexpr int64_t kTokens = 40, kPrompt = 18;
  Bench bench(config, DType::f32);
  const std::span<const int32_t> ids(bench.ids.as<int32_t>(), kTokens);
  infer::Decoder decoder(bench.model, bench.weights, kTokens, Product::f32);
  const std::array<int64_t, 2> one{0, kTokens};
  const View hidden = bench.arena.allocate(DType::f32, {kTokens, config.width});
  const View logits = bench.arena.allocate(DType::f32, {kTokens, config.vocabulary});
  bench.model.hidden(bench.ctx, bench.weights, bench.ids.row_range(0, kTokens), {one}, nullptr, hidden);
  bench.model.logits(bench.ctx, bench.weights, hidden, logits);
  const auto log_probabilities = [&](const float* row_logits) {
    std::vector<double> p(row_logits, row_logits + config.vocabulary);
    const double top = *std::max_element(p.begin(), p.end());
    double sum = 0;
    for (double x : p) sum += std::exp(x - top);
    for (double& x : p) x -= top + std::log(sum);
    return p;
  };
  double worst = 0;
  for (int64_t t = kPrompt - 1; t < kTokens; ++t) {
    const auto got = decoder.append(t == kPrompt - 1 ? ids.first(kPrompt) : ids.subspan(size_t(t), 1));
    const std::vector<double> a = log_probabilities(got.data());
    const std::vector<double> b = log_probabilities(logits.as<float>() + t * config.vocabulary);
    for (size_t i = 0; i < a.size(); ++i) worst = larger(worst, std::abs(a[i] - b[i]));
  }
  return {row(config, "cached decode = forward, largest difference of log-probabilities", worst, 1e-4)};
}

}  // namespace

std::vector<ModelConfig> tiny_models() {
  ModelConfig full = tiny_kimi_k3();
  full.name = "full-attn-res";
  full.residual = {.attn_res_block = 0, .attn_res_full = true};
  return {tiny_kimi_linear(), tiny_kimi_k3(), full};
}

std::vector<Result> check_model(const ModelConfig& config) {
  std::vector<Result> all;
  for (const auto& part : {check_gradients(config), check_precision(config), check_packing(config),
                           check_recompute(config), check_ffn_blocks(config), check_decode(config)}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace tessera::selfcheck
