#include "ops/experts/cases.h"

#include <cmath>
#include <numeric>

#include "core/philox.h"
#include "ops/experts/cuda.h"
#include "ops/experts/reference.h"

namespace tessera::ops::experts {
namespace {

using check::GradientRule;
using check::Tensor;

constexpr glu::Activation kSitu{.kind = glu::Kind::situ};
constexpr glu::Activation kSwiGlu{.kind = glu::Kind::swiglu};

Grads grads_of(const check::Run& r) {
  return {r.d_inputs[0], r.d_inputs[2], r.d_inputs[3], r.d_inputs[4], r.d_inputs[5]};
}

void run(const Dims& d, const check::Run& r) {
  const bool backward_too = !r.d_outputs.empty();
  Saved saved;
  if (backward_too) saved = allocate_saved(r.context, d, r.inputs[0].dtype());
  const Inputs in = inputs_of(r);
  const View squares = r.outputs.size() > 1 ? r.outputs[1] : View();  // the speed cases do without
  squares.zero();
  forward(r.context, d, in, {r.outputs[0], squares}, backward_too ? &saved : nullptr);
  if (!backward_too) return;
  backward(r.context, d, in, saved, {r.d_outputs[0]}, grads_of(r));
}

std::string name_of(const Dims& d, Routing routing) {
  static constexpr const char* kNames[] = {"spread", "crowded", "half used", "skewed"};
  return fmt::format("T {} E {} k {} L {} F {} {} {}", d.tokens, d.experts, d.top_k, d.width, d.hidden,
                     d.activation.kind == glu::Kind::situ ? "SiTU" : "SwiGLU", kNames[size_t(routing)]);
}

check::Case make_case(Dims d, Routing routing = Routing::spread) {
  // In bf16 an output passes four roundings of up to 2^-9 (pre-activations, h, expert output, y) and a gradient five:
  // 4e-3 together at sizes where errors average. A single token's sums may cancel; float32 holds those shapes to 1e-4.
  const bool single = d.tokens <= 1;
  return {.name = name_of(d, routing),
          .inputs = [=] { return make_inputs(d, routing); },
          .reference =
              [=](const std::vector<Tensor>& in) {
                const auto want = reference::forward(d, in[0].values, in[1].values, in[2].values, in[3].values,
                                                     in[4].values, in[5].values);
                return std::vector<Tensor>{{"y", {d.tokens, d.width}, want.y},
                                           {"squares", {d.experts}, want.squares, GradientRule::none, DType::f64}};
              },
          .run = [=](const check::Run& r) { run(d, r); },
          .limit_bf16 = single ? 3e-2 : 6e-3,
          .limit_bf16_gradient = single ? 5e-2 : 8e-3};
}

check::SpeedCase make_speed(Dims d, Routing routing = Routing::spread) {
  return {.name = name_of(d, routing),
          .inputs = [=] { return make_inputs(d, routing); },
          .output_shapes = {{d.tokens, d.width}},
          .run = [=](const check::Run& r) { run(d, r); }};
}

// The grouped products without what moves rows around them.
void run_products(const Dims& d, const check::Run& r) {
  constexpr int kTimes = 8;
  const DType dtype = r.inputs[0].dtype();
  const Inputs in = inputs_of(r);
  const int64_t flops = kTimes * 6 * d.tokens * d.top_k * d.width * d.hidden;
  const Saved saved = cuda::allocate_saved(r.context.arena, d, dtype);
  {
    OpScope op(r.context, "experts_products", Pass::forward, {.gemm_flops = flops});
    const auto workspace = cuda::allocate_forward(r.context.arena, d, dtype);
    if (!r.context.dry()) cuda::repeat_forward_products(r.context.stream(), d, in, saved, workspace, kTimes);
  }
  if (r.d_outputs.empty()) return;
  OpScope op(r.context, "experts_products", Pass::backward, {.gemm_flops = 2 * flops});
  const auto workspace = cuda::allocate_backward(r.context.arena, d, dtype);
  if (r.context.dry()) return;
  cuda::repeat_backward_products(r.context.stream(), d, in, saved, {r.d_outputs[0]}, grads_of(r), workspace, kTimes);
}

check::SpeedCase make_products_speed(Dims d, Routing routing) {
  check::SpeedCase c = make_speed(d, routing);
  c.name = "products alone, 8 times: " + c.name;
  c.run = [=](const check::Run& r) { run_products(d, r); };
  return c;
}

}  // namespace

Inputs inputs_of(const check::Run& r) {
  return {r.inputs[0], r.inputs[1], r.inputs[2], r.inputs[3], r.inputs[4], r.inputs[5]};
}

std::vector<double> choose_experts(const Dims& d, Routing routing) {
  const Philox philox(7, Purpose::test);
  std::vector<double> chosen;
  std::vector<int64_t> pool(size_t(d.experts));
  for (int64_t t = 0; t < d.tokens; ++t) {
    std::iota(pool.begin(), pool.end(), int64_t{0});
    for (int64_t s = 0; s < d.top_k; ++s) {
      const int64_t slot = t * d.top_k + s;
      const uint64_t left = uint64_t(d.experts - s);
      size_t ahead = size_t(philox.bits(uint64_t(slot)) % left);
      if (routing == Routing::crowded && s == 0) ahead = 0;
      if (routing == Routing::skewed) ahead = size_t(double(left) * std::pow(philox.uniform(uint64_t(slot)), 1.5));
      const size_t pick = size_t(s) + ahead;
      std::swap(pool[size_t(s)], pool[pick]);
      const int64_t expert = pool[size_t(s)];
      const bool empty = routing == Routing::half_used && (t == 0 || slot % 3 == 1 || expert % 2 == 1);
      chosen.push_back(empty ? -1.0 : double(expert));
    }
  }
  return chosen;
}

// Experts' matrices of unit gain. Values repeat after a million, so that the sizes of a GPU's benchmark are made at
// once.
static Tensor matrix(const char* name, const std::vector<int64_t>& shape) {
  constexpr int64_t kPeriod = (1 << 20) + 7;
  const int64_t count = shape[0] * shape[1] * shape[2];
  Tensor t = check::random_tensor(name, {std::min(count, kPeriod)}, 1 / std::sqrt(double(shape[2])), GradientRule::add);
  t.shape = shape;
  t.values.resize(size_t(count));
  for (size_t i = kPeriod; i < t.values.size(); ++i) t.values[i] = t.values[i - kPeriod];
  return t;
}

std::vector<Tensor> make_inputs(const Dims& d, Routing routing) {
  Tensor weights = check::random_tensor("weights", {d.tokens, d.top_k}, 0.2);
  for (double& p : weights.values) p += 1 / double(d.top_k);
  weights.exact = true;
  return {check::random_tensor("x", {d.tokens, d.width}),
          {"indices", {d.tokens, d.top_k}, choose_experts(d, routing), GradientRule::none, DType::i32},
          weights,
          matrix("w1", {d.experts, d.hidden, d.width}),
          matrix("w3", {d.experts, d.hidden, d.width}),
          matrix("w2", {d.experts, d.width, d.hidden})};
}

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "experts",
      // Rows of an expert around the block of 256 and the segment of 1024; 5000 tokens: segments of an eighth.
      .cases = {make_case({0, 4, 2, 8, 6, kSitu}), make_case({1, 4, 2, 8, 6, kSitu}),
                make_case({1, 1, 1, 3, 5, kSwiGlu}), make_case({37, 5, 3, 16, 24, kSitu}),
                make_case({37, 5, 3, 16, 24, kSwiGlu}), make_case({20, 64, 2, 7, 9, kSitu}),
                make_case({45, 6, 3, 12, 10, kSitu}, Routing::half_used),
                make_case({255, 2, 1, 5, 4, kSitu}, Routing::crowded),
                make_case({257, 2, 1, 5, 4, kSitu}, Routing::crowded),
                make_case({513, 4, 2, 4, 6, kSitu}, Routing::crowded), make_case({1025, 1, 1, 4, 3, kSitu}),
                make_case({5000, 3, 2, 4, 3, kSitu}, Routing::crowded)},
      .speed = {make_speed({8192, 16, 2, 96, 128, kSitu}), make_speed({8192, 64, 6, 256, 256, kSitu})},
      // Around the blocks of 128 rows; more tiles than multiprocessors, none of them whole; several chunks of the sort.
      .cuda_cases = {make_case({127, 2, 1, 64, 64, kSitu}, Routing::crowded),
                     make_case({128, 2, 1, 64, 64, kSitu}, Routing::crowded),
                     make_case({129, 2, 1, 64, 64, kSwiGlu}, Routing::crowded),
                     make_case({300, 5, 3, 512, 256, kSitu}, Routing::half_used),
                     make_case({2200, 8, 2, 264, 520, kSitu}, Routing::skewed), make_case({64, 200, 4, 16, 32, kSitu}),
                     make_case({3000, 7, 3, 8, 16, kSitu}, Routing::half_used)},
      .cuda_speed = {make_speed({65536, 116, 8, 640, 512, kSitu}),
                     make_speed({8192, 128, 8, 768, 1536, kSitu}, Routing::skewed),
                     make_products_speed({8192, 128, 8, 768, 1536, kSitu}, Routing::skewed)}};
  return t;
}

}  // namespace tessera::ops::experts
