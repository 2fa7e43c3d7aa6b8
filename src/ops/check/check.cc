// Each mode binds a case's tensors to views of one arena, runs the engine, and compares in float64.
#include "ops/check/check.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "core/hash.h"
#include "core/philox.h"

namespace tessera::check {

int64_t Tensor::elements() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Tensor random_tensor(std::string name, std::vector<int64_t> shape, double scale, GradientRule gradient, uint64_t seed) {
  Tensor t{std::move(name), std::move(shape), {}, gradient, DType::none};
  const Philox philox(hash_of(t.name).low ^ (seed * 0x9E3779B97F4A7C15ull), Purpose::test);
  t.values.resize(static_cast<size_t>(t.elements()));
  for (size_t i = 0; i < t.values.size(); ++i) t.values[i] = scale * philox.normal(i);
  return t;
}

double relative_error(std::span<const double> got, std::span<const double> want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error) / (std::sqrt(norm) + 1e-8 * std::sqrt(static_cast<double>(std::max<size_t>(want.size(), 1))));
}

Result within(const std::string& op, const std::string& what, double error, double limit) {
  return {op, "cpu", what, error, limit, error <= limit};
}

namespace {

DType stored_type(const Tensor& t, DType working) { return t.dtype == DType::none ? working : t.dtype; }

void write_values(const Tensor& t, const View& view) {
  if (view.data() == nullptr) return;
  for (size_t i = 0; i < t.values.size(); ++i) {
    switch (view.dtype()) {
      case DType::f32: view.as<float>()[i] = static_cast<float>(t.values[i]); break;
      case DType::f64: view.as<double>()[i] = t.values[i]; break;
      case DType::i32: view.as<int32_t>()[i] = static_cast<int32_t>(t.values[i]); break;
      default: view.as<int64_t>()[i] = static_cast<int64_t>(t.values[i]); break;
    }
  }
}

std::vector<double> read_values(const View& view) {
  std::vector<double> out(static_cast<size_t>(view.elements()));
  for (size_t i = 0; i < out.size(); ++i) {
    switch (view.dtype()) {
      case DType::f32: out[i] = static_cast<double>(view.as<float>()[i]); break;
      case DType::f64: out[i] = view.as<double>()[i]; break;
      case DType::i32: out[i] = static_cast<double>(view.as<int32_t>()[i]); break;
      default: out[i] = static_cast<double>(view.as<int64_t>()[i]); break;
    }
  }
  return out;
}

View allocate_like(Arena& arena, const Tensor& t, DType working) {
  return arena.allocate(stored_type(t, working), Shape(std::span<const int64_t>(t.shape)));
}

// A case bound to storage: inputs filled, outputs poisoned, gradients that add started from 0.25.
struct Bound {
  static constexpr double kGradientStart = 0.25;
  std::vector<View> inputs, outputs, d_outputs, d_inputs;

  Bound(Arena& arena, DType working, const std::vector<Tensor>& in, const std::vector<Tensor>& out,
        const std::vector<Tensor>& d_out) {
    for (const Tensor& t : in) write_values(t, inputs.emplace_back(allocate_like(arena, t, working)));
    for (const Tensor& t : out) outputs.push_back(allocate_like(arena, t, working));
    if (d_out.empty()) return;
    for (const Tensor& t : d_out) write_values(t, d_outputs.emplace_back(allocate_like(arena, t, working)));
    for (const Tensor& t : in) {
      View view = t.gradient == GradientRule::none ? View() : allocate_like(arena, t, working);
      if (t.gradient == GradientRule::add) {
        Tensor start = t;
        std::fill(start.values.begin(), start.values.end(), kGradientStart);
        write_values(start, view);
      }
      d_inputs.push_back(view);
    }
  }

  std::vector<double> gradient(const std::vector<Tensor>& in, size_t i) const {
    std::vector<double> g = read_values(d_inputs[i]);
    if (in[i].gradient == GradientRule::add) {
      for (double& x : g) x -= kGradientStart;
    }
    return g;
  }
};

constexpr int64_t kArenaBytes = int64_t{4} << 30;  // address space only

// Gradients handed to backward: fixed normal values, so that the scalar under test is sum <d_out, out>.
std::vector<Tensor> output_weights(const std::vector<Tensor>& outputs) {
  std::vector<Tensor> weights;
  for (const Tensor& t : outputs) {
    Tensor w = random_tensor("weight of " + t.name, t.shape);
    if (t.gradient == GradientRule::none) std::fill(w.values.begin(), w.values.end(), 0.0);
    weights.push_back(std::move(w));
  }
  return weights;
}

double scalar(const std::vector<Tensor>& outputs, const std::vector<Tensor>& weights) {
  double sum = 0;
  for (size_t o = 0; o < outputs.size(); ++o) {
    if (outputs[o].gradient == GradientRule::none) continue;
    sum += std::inner_product(outputs[o].values.begin(), outputs[o].values.end(), weights[o].values.begin(), 0.0);
  }
  return sum;
}

// Central differences of the definition at up to `kSampled` spread elements of input i.
struct Differences {
  std::vector<size_t> where;
  std::vector<double> value;
};

Differences central_differences(const Case& c, std::vector<Tensor> inputs, size_t i,
                                const std::vector<Tensor>& weights) {
  constexpr size_t kSampled = 24;
  Differences d;
  std::vector<double>& x = inputs[i].values;
  double square = 0;
  for (double v : x) square += v * v;
  const double rms = x.empty() ? 1.0 : std::sqrt(square / static_cast<double>(x.size()));
  const double h = c.step * (rms > 0 ? rms : 1.0);
  const size_t stride = std::max<size_t>(1, x.size() / kSampled);
  for (size_t e = 0; e < x.size(); e += stride) {
    const double before = x[e];
    x[e] = before + h;
    const double up = scalar(c.reference(inputs), weights);
    x[e] = before - h;
    const double down = scalar(c.reference(inputs), weights);
    x[e] = before;
    d.where.push_back(e);
    d.value.push_back((up - down) / (2 * h));
  }
  return d;
}

}  // namespace

std::vector<Result> check_oracle(const OpTable& table, const Case& c) {
  const std::vector<Tensor> inputs = c.inputs();
  const std::vector<Tensor> want = c.reference(inputs);
  std::vector<Result> results;
  for (DType working : {DType::f32, DType::f64}) {
    Arena arena(kArenaBytes);
    arena.set_poison(true);
    Bound bound(arena, working, inputs, want, {});
    Context context{Device::cpu, arena};
    c.run({context, bound.inputs, bound.outputs, {}, {}});
    double worst = 0;
    for (size_t o = 0; o < want.size(); ++o) {
      const double error = relative_error(read_values(bound.outputs[o]), want[o].values);
      worst = error >= worst ? error : (std::isnan(error) ? error : worst);
      if (std::isnan(error)) break;
    }
    const bool f32 = working == DType::f32;
    results.push_back(within(table.op,
                             fmt::format("{} against the definition: {}", f32 ? "float32" : "float64", c.name), worst,
                             f32 ? c.limit_f32 : c.limit_f64));
  }
  return results;
}

std::vector<Result> check_gradient(const OpTable& table, const Case& c) {
  const std::vector<Tensor> inputs = c.inputs();
  const std::vector<Tensor> outputs = c.reference(inputs);
  const std::vector<Tensor> weights = output_weights(outputs);
  std::vector<std::vector<std::vector<double>>> gradients;  // [f64, f32][input]
  for (DType working : {DType::f64, DType::f32}) {
    Arena arena(kArenaBytes);
    arena.set_poison(true);
    Bound bound(arena, working, inputs, outputs, weights);
    Context context{Device::cpu, arena};
    c.run({context, bound.inputs, bound.outputs, bound.d_outputs, bound.d_inputs});
    auto& of_type = gradients.emplace_back();
    for (size_t i = 0; i < inputs.size(); ++i) of_type.push_back(bound.gradient(inputs, i));
  }
  std::vector<Result> results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].gradient == GradientRule::none || inputs[i].values.empty()) continue;
    const Differences d = central_differences(c, inputs, i, weights);
    std::vector<double> sampled;
    for (size_t e : d.where) sampled.push_back(gradients[0][i][e]);
    results.push_back(within(table.op, fmt::format("d {} by central differences: {}", inputs[i].name, c.name),
                             relative_error(sampled, d.value), c.limit_gradient));
    results.push_back(within(table.op, fmt::format("d {} float32 against float64: {}", inputs[i].name, c.name),
                             relative_error(gradients[1][i], gradients[0][i]), c.limit_f32));
  }
  return results;
}

std::vector<Result> check_supported(const OpTable& table, const Case& c) {
  const std::vector<Tensor> inputs = c.inputs();
  const std::vector<Tensor> outputs = c.reference(inputs);
  const std::vector<Tensor> weights = output_weights(outputs);
  int64_t peak[2], flops[2], taken = 0, stated = 0;
  for (Device device : {Device::cpu, Device::dry}) {
    Arena arena = device == Device::dry ? Arena::dry() : Arena(kArenaBytes);
    Ledger ledger;
    Bound bound(arena, DType::f32, inputs, outputs, weights);
    Context context{device, arena, &ledger};
    const int64_t base = arena.used();
    c.run({context, bound.inputs, bound.outputs, bound.d_outputs, bound.d_inputs});
    taken = arena.peak() - base;
    stated = ledger.total().saved_bytes + ledger.total().workspace_bytes;
    peak[device == Device::dry] = arena.peak();
    flops[device == Device::dry] = ledger.total().gemm_flops + ledger.total().vector_flops;
  }
  return {within(table.op, "dry run takes the memory of the real run: " + c.name,
                 static_cast<double>(std::abs(peak[0] - peak[1])), 0),
          within(table.op, "dry run counts the FLOPs of the real run: " + c.name,
                 static_cast<double>(std::abs(flops[0] - flops[1])), 0),
          within(table.op, "saved and workspace bytes cover what is taken: " + c.name,
                 static_cast<double>(std::max<int64_t>(taken - stated, 0)), 0)};
}

std::vector<Result> check_all(const OpTable& table) {
  std::vector<Result> all;
  const auto append = [&](std::vector<Result> part) { all.insert(all.end(), part.begin(), part.end()); };
  for (const Case& c : table.cases) {
    append(check_oracle(table, c));
    append(check_gradient(table, c));
    append(check_supported(table, c));
  }
  if (table.more) append(table.more());
  return all;
}

Speed measure(const OpTable& table, const SpeedCase& c, int repeats) {
  const std::vector<Tensor> inputs = c.inputs();
  std::vector<Tensor> outputs;
  for (const auto& shape : c.output_shapes) outputs.push_back(random_tensor("output", shape));
  Speed speed{table.op, c.name, 0, 0, 0, 0, 0, 0, 0};
  for (const bool backward : {false, true}) {
    Arena arena(int64_t{64} << 30);  // address space only
    Ledger ledger;
    Bound bound(arena, DType::f32, inputs, outputs, backward ? outputs : std::vector<Tensor>{});
    Context context{Device::cpu, arena, &ledger};
    const int64_t base = arena.used();
    std::vector<double> ms;
    for (int r = 0; r <= repeats; ++r) {  // the first warms caches and makes kernels
      ledger.clear();
      const auto begin = std::chrono::steady_clock::now();
      c.run({context, bound.inputs, bound.outputs, bound.d_outputs, bound.d_inputs});
      const double took = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      arena.release_to(base);
      if (r > 0) ms.push_back(took);
    }
    std::nth_element(ms.begin(), ms.begin() + repeats / 2, ms.end());
    const Costs total = ledger.total();
    (backward ? speed.forward_backward_ms : speed.forward_ms) = ms[static_cast<size_t>(repeats / 2)];
    (backward ? speed.forward_backward_flops : speed.forward_flops) = static_cast<double>(total.gemm_flops);
    (backward ? speed.forward_backward_bytes : speed.forward_bytes) = static_cast<double>(total.bytes_moved);
    speed.extra_bytes = arena.peak() - base;
  }
  return speed;
}

}  // namespace tessera::check
