// Each mode binds a case's tensors to views of one arena, runs the engine, and compares in float64.
#include "ops/check/check.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <numeric>

#include "core/hash.h"
#include "core/philox.h"

namespace tessera::check {

int64_t Tensor::elements() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

static void fill_normal(Tensor& t, int64_t count, double scale, uint64_t seed) {
  const Philox philox(hash_of(t.name).low ^ (seed * 0x9E3779B97F4A7C15ull), Purpose::test);
  t.values.resize(static_cast<size_t>(count));
  for (size_t i = 0; i < t.values.size(); ++i) t.values[i] = scale * philox.normal(i);
}

Tensor random_tensor(std::string name, std::vector<int64_t> shape, double scale, GradientRule gradient, uint64_t seed) {
  Tensor t{std::move(name), std::move(shape), {}, gradient, DType::none};
  fill_normal(t, t.elements(), scale, seed);
  return t;
}

Tensor periodic_tensor(std::string name, std::vector<int64_t> shape, int64_t period, double scale,
                       GradientRule gradient) {
  Tensor t{std::move(name), std::move(shape), {}, gradient, DType::none};
  fill_normal(t, std::min(t.elements(), period), scale, 0);
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

DType stored_type(const Tensor& t, DType working) {
  if (t.dtype != DType::none) return t.dtype;
  return t.exact ? exact_type(working) : working;
}
// Gradients of parameters are kept exactly; those of activations have their activation's type.
DType gradient_type(const Tensor& t, DType working) {
  return t.gradient == GradientRule::add ? exact_type(working) : stored_type(t, working);
}

bool adds(const Tensor& t) { return t.gradient == GradientRule::add || t.gradient == GradientRule::add_activation; }

// What a gradient that is added to holds before: in bf16 little, or its digits would push out those of the sum.
double gradient_start(const Tensor& t) { return t.gradient == GradientRule::add ? 0.25 : 0x1p-8; }

// Calls f with a value of the element's C++ type.
template <class F>
void dispatch_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::f64: return f(double{});
    case DType::bf16: return f(bf16{});
    case DType::i32: return f(int32_t{});
    default: return f(int64_t{});
  }
}
template <class T>
T encode(double x) {
  if constexpr (std::is_same_v<T, bf16>)
    return bf16(static_cast<float>(x));
  else
    return static_cast<T>(x);
}
template <class T>
double decode(T x) {
  if constexpr (std::is_same_v<T, bf16>)
    return static_cast<double>(static_cast<float>(x));
  else
    return static_cast<double>(x);
}

void write_values(const Tensor& t, const View& view) {
  if (view.data() == nullptr) return;
  dispatch_element(view.dtype(), [&](auto element) {
    using T = decltype(element);
    std::vector<T> host(t.values.size());
    std::ranges::transform(t.values, host.begin(), encode<T>);
    const int64_t period = static_cast<int64_t>(host.size());
    TESSERA_CHECK(period > 0 || view.elements() == 0, "tensor {} has no values", t.name);
    const View all = view.reshaped({view.elements()});
    for (int64_t begin = 0; begin < view.elements(); begin += period) {
      const int64_t count = std::min(period, view.elements() - begin);
      copy(View(host.data(), view.dtype(), {count}), all.row_range(begin, count));
    }
  });
}

std::vector<double> read_values(const View& view) {
  std::vector<double> out(static_cast<size_t>(view.elements()));
  dispatch_element(view.dtype(), [&](auto element) {
    using T = decltype(element);
    std::vector<T> host(out.size());
    copy(view, View(host.data(), view.dtype(), view.shape()));
    std::ranges::transform(host, out.begin(), decode<T>);
  });
  return out;
}

// The values that storage in `working` keeps.
std::vector<Tensor> rounded(std::vector<Tensor> tensors, DType working) {
  for (Tensor& t : tensors) {
    dispatch_element(stored_type(t, working), [&](auto element) {
      using T = decltype(element);
      for (double& x : t.values) x = decode<T>(encode<T>(x));
    });
  }
  return tensors;
}

View allocate_like(Arena& arena, const Tensor& t, DType dtype) {
  return arena.allocate(dtype, Shape(std::span<const int64_t>(t.shape)));
}

// A case bound to storage: inputs filled, outputs poisoned, gradients that add started from gradient_start.
struct Bound {
  std::vector<View> inputs, outputs, d_outputs, d_inputs;

  Bound(Arena& arena, DType working, const std::vector<Tensor>& in, const std::vector<Tensor>& out,
        const std::vector<Tensor>& d_out) {
    for (const Tensor& t : in) write_values(t, inputs.emplace_back(allocate_like(arena, t, stored_type(t, working))));
    for (const Tensor& t : out) outputs.push_back(allocate_like(arena, t, stored_type(t, working)));
    if (d_out.empty()) return;
    for (const Tensor& t : d_out) {
      write_values(t, d_outputs.emplace_back(allocate_like(arena, t, stored_type(t, working))));
    }
    for (const Tensor& t : in) {
      View view = t.gradient == GradientRule::none ? View() : allocate_like(arena, t, gradient_type(t, working));
      if (adds(t)) {
        Tensor start = t;
        std::fill(start.values.begin(), start.values.end(), gradient_start(t));
        write_values(start, view);
      }
      d_inputs.push_back(view);
    }
  }

  std::vector<double> gradient(const std::vector<Tensor>& in, size_t i) const {
    std::vector<double> g = read_values(d_inputs[i]);
    if (adds(in[i])) {
      for (double& x : g) x -= gradient_start(in[i]);
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
    w.exact = t.exact;
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

// ---- GPU ----

namespace {

struct CudaRun {
  std::vector<std::vector<double>> outputs, gradients;  // gradients empty: forward only
  int64_t peak = 0, planned_peak = 0;
};

CudaRun run_cuda(const Case& c, DType working, const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
                 const std::vector<Tensor>& weights) {
  CudaRun result;
  {
    Arena arena = Arena::dry();
    Bound bound(arena, working, inputs, outputs, weights);
    Context context{Device::dry, arena, nullptr, Product::bf16, Device::cuda};
    c.run({context, bound.inputs, bound.outputs, bound.d_outputs, bound.d_inputs});
    result.planned_peak = arena.peak();
  }
  Arena arena(result.planned_peak, Memory::gpu);
  arena.set_poison(true);
  Bound bound(arena, working, inputs, outputs, weights);
  Context context{Device::cuda, arena, nullptr, Product::bf16};
  c.run({context, bound.inputs, bound.outputs, bound.d_outputs, bound.d_inputs});
  for (const View& view : bound.outputs) result.outputs.push_back(read_values(view));
  for (size_t i = 0; i < bound.d_inputs.size(); ++i) {
    result.gradients.push_back(bound.d_inputs[i].present() ? bound.gradient(inputs, i) : std::vector<double>{});
  }
  result.peak = arena.peak();
  return result;
}

// Gradients by the float64 backward on the CPU: what check_gradient proves by differences.
std::vector<std::vector<double>> exact_gradients(const Case& c, const std::vector<Tensor>& inputs,
                                                 const std::vector<Tensor>& outputs,
                                                 const std::vector<Tensor>& weights) {
  Arena arena(kArenaBytes);
  Bound bound(arena, DType::f64, inputs, outputs, weights);
  Context context{Device::cpu, arena};
  c.run({context, bound.inputs, bound.outputs, bound.d_outputs, bound.d_inputs});
  std::vector<std::vector<double>> gradients;
  for (size_t i = 0; i < inputs.size(); ++i) {
    gradients.push_back(bound.d_inputs[i].present() ? bound.gradient(inputs, i) : std::vector<double>{});
  }
  return gradients;
}

bool same_bits(const std::vector<std::vector<double>>& a, const std::vector<std::vector<double>>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t e = 0; e < a[i].size(); ++e) {
      if (std::bit_cast<uint64_t>(a[i][e]) != std::bit_cast<uint64_t>(b[i][e])) return false;
    }
  }
  return a.size() == b.size();
}

Result cuda_row(const OpTable& table, const Case& c, DType working, const std::string& what, double error,
                double limit) {
  Result r = within(table.op, fmt::format("{} {}: {}", name_of(working), what, c.name), error, limit);
  r.device = "cuda";
  return r;
}

}  // namespace

std::vector<Result> check_cuda(const OpTable& table, const Case& c) {
  std::vector<Result> results;
  for (const DType working : table.cuda_types) {
    const bool half = working == DType::bf16;
    const std::vector<Tensor> inputs = rounded(c.inputs(), working);
    const std::vector<Tensor> want = c.reference(inputs);
    const std::vector<Tensor> weights = rounded(output_weights(want), working);
    const auto add = [&](const std::string& what, double error, double limit) {
      results.push_back(cuda_row(table, c, working, what, error, limit));
    };
    const CudaRun forward = run_cuda(c, working, inputs, want, {});
    for (size_t o = 0; o < want.size(); ++o) {
      add(want[o].name + " against the definition", relative_error(forward.outputs[o], want[o].values),
          half ? c.limit_bf16 : c.limit_f32);
    }
    const CudaRun first = run_cuda(c, working, inputs, want, weights);
    const CudaRun again = run_cuda(c, working, inputs, want, weights);
    const auto exact = exact_gradients(c, inputs, want, weights);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].gradient == GradientRule::none || inputs[i].values.empty()) continue;
      add("d " + inputs[i].name + " against float64", relative_error(first.gradients[i], exact[i]),
          !half                       ? c.limit_f32
          : inputs[i].bf16_limit != 0 ? inputs[i].bf16_limit
                                      : c.limit_bf16_gradient);
    }
    add("twice gives the same bits",
        same_bits(first.outputs, again.outputs) && same_bits(first.gradients, again.gradients) ? 0 : 1, 0);
    add("dry run takes the memory of the real run", double(std::abs(first.peak - first.planned_peak)), 0);
  }
  return results;
}

std::vector<Result> check_all_cuda(const OpTable& table) {
  std::vector<Result> all;
  std::vector<const Case*> cases;
  for (const Case& c : table.cases) {
    if (!table.on_cuda || table.on_cuda(c)) cases.push_back(&c);
  }
  for (const Case& c : table.cuda_cases) cases.push_back(&c);
  for (const Case* one : cases) {
    const Case& c = *one;
    try {
      const auto part = check_cuda(table, c);
      all.insert(all.end(), part.begin(), part.end());
    } catch (const Error& e) {  // one op that cannot launch must not hide what the others do
      all.push_back({table.op, "cuda", fmt::format("{}: {}", c.name, e.what()), std::nan(""), 0, false});
    }
  }
  return all;
}

// ---- speed ----

constexpr int64_t kSpeedPeriod = 1'000'003;  // prime

// Seconds of one call; on a GPU until the work is done.
static double timed(const std::function<void()>& call, Device device) {
  if (device == Device::cuda) gpu::wait();
  const auto begin = std::chrono::steady_clock::now();
  call();
  if (device == Device::cuda) gpu::wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Speed measure(const OpTable& table, const SpeedCase& c, Device device, int repeats) {
  const std::vector<Tensor> inputs = c.inputs();
  std::vector<Tensor> outputs;
  for (const auto& shape : c.output_shapes) outputs.push_back(periodic_tensor("output", shape, kSpeedPeriod));
  for (const size_t o : c.exact_outputs) outputs[o].exact = true;
  Speed speed{table.op, c.name, 0, 0, 0, 0, 0, 0, 0};
  for (const bool backward : {false, true}) {
    const bool cuda = device == Device::cuda;
    const DType working = cuda ? DType::bf16 : DType::f32;
    const std::vector<Tensor> d_outputs = backward ? outputs : std::vector<Tensor>{};
    Ledger ledger;
    int64_t peak = int64_t{64} << 30;  // address space only
    {
      Arena dry = Arena::dry();
      Bound bound(dry, working, inputs, outputs, d_outputs);
      Context context{Device::dry, dry, &ledger, Product::bf16, device};
      c.run({context, bound.inputs, bound.outputs, bound.d_outputs, bound.d_inputs});
      if (cuda) peak = dry.peak();
    }
    Arena arena(peak, cuda ? Memory::gpu : Memory::host);
    Bound bound(arena, working, inputs, outputs, d_outputs);
    Context context{device, arena};
    const int64_t base = arena.used();
    std::vector<double> ms;
    for (int r = 0; r <= repeats; ++r) {  // the first warms caches and makes kernels
      const double took = timed(
          [&] {
            c.run({context, bound.inputs, bound.outputs, bound.d_outputs, bound.d_inputs});
          },
          device);
      arena.release_to(base);
      if (r > 0) ms.push_back(1e3 * took);
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
