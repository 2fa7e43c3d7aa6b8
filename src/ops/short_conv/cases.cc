#include "ops/short_conv/cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "ops/short_conv/op.h"
#include "ops/short_conv/reference.h"

namespace tessera::ops::short_conv {
namespace {

using check::GradientRule;
using check::Result;
using check::Tensor;

std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets{0};
  for (int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

// Inputs x, weight and, where used, the window; outputs y and the final window.
void run(const Dims& d, const Documents& documents, const check::Run& r) {
  const bool window = r.inputs.size() > 2;
  const Inputs in{r.inputs[0], r.inputs[1], window ? r.inputs[2] : View(), documents};
  forward(r.context, d, in, {r.outputs[0], r.outputs.size() > 1 ? r.outputs[1] : View()});
  if (r.d_outputs.empty()) return;
  backward(r.context, d, in, {r.d_outputs[0]}, {r.d_inputs[0], r.d_inputs[1], window ? r.d_inputs[2] : View()});
}

// `windows`: of how many documents; 0: of none.
std::vector<Tensor> inputs(const Dims& d, int64_t windows, double scale) {
  std::vector<Tensor> in{check::random_tensor("x", {d.tokens, d.channels}, scale),
                         check::random_tensor("weight", {d.channels, d.width}, 0.5, GradientRule::add)};
  in[1].exact = true;
  if (windows > 0) in.push_back(check::random_tensor("initial_window", {windows, d.width - 1, d.channels}, scale));
  return in;
}

enum class Window : uint8_t { none, first, all };

check::Case make_case(int64_t channels, int64_t width, const std::vector<int64_t>& lengths, Window window,
                      double scale = 1.0) {
  const std::vector<int64_t> offsets = offsets_of(lengths);
  const Dims d{offsets.back(), channels, width};
  const auto n = static_cast<int64_t>(lengths.size());
  const int64_t windows = window == Window::none ? 0 : window == Window::first ? 1 : n;
  return {.name = fmt::format("documents {} G {} W {}{} scale {}", fmt::join(lengths, "+"), channels, width,
                              windows == 0   ? ""
                              : windows == n ? " window"
                                             : " window of the first",
                              scale),
          .inputs = [=] { return inputs(d, windows, scale); },
          .reference =
              [=](const std::vector<Tensor>& in) {
                std::vector<double> before(size_t(n * (width - 1) * channels));
                if (windows > 0) std::copy(in[2].values.begin(), in[2].values.end(), before.begin());
                auto result = reference::forward(channels, width, offsets, in[0].values, in[1].values, before);
                return std::vector<Tensor>{
                    {"y", {d.tokens, channels}, std::move(result.y)},
                    {"final_window", {n, width - 1, channels}, std::move(result.final_window), GradientRule::none}};
              },
          .run = [=](const check::Run& r) { run(d, place_documents(r.context, offsets), r); }};
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("T {} G {} W {}", d.tokens, d.channels, d.width),
          .inputs = [=] { return inputs(d, 0, 1.0); },
          .output_shapes = {{d.tokens, d.channels}},
          .run =
              [=](const check::Run& r) {
                const std::vector<int64_t> offsets{0, d.tokens};
                run(d, place_documents(r.context, offsets), r);
              }};
}

// A document split at every point, the window carried in place over the cut, equals the document in one call; so does
// decode, one token a call.
Result split_equals_whole() {
  const Dims d{11, 20, 4};
  Arena arena(1 << 22);
  arena.set_poison(true);
  Context ctx{Device::cpu, arena};
  const auto view = [&](const Tensor& t) {
    const View v = arena.allocate(DType::f32, Shape(std::span<const int64_t>(t.shape)));
    std::transform(t.values.begin(), t.values.end(), v.as<float>(), [](double x) { return float(x); });
    return v;
  };
  const std::vector<Tensor> in = inputs(d, 1, 1.0);
  const View x = view(in[0]), weight = view(in[1]), start = view(in[2]);
  const View whole = arena.allocate(DType::f32, {d.tokens, d.channels}), y = arena.allocate(DType::f32, whole.shape());
  const View last = arena.allocate(DType::f32, start.shape()), window = arena.allocate(DType::f32, start.shape());
  const std::vector<int64_t> all{0, d.tokens};
  forward(ctx, d, {x, weight, start, {all}}, {whole, last});
  int64_t different = 0;
  const auto equal = [](const View& a, const View& b) {
    return std::equal(a.as<float>(), a.as<float>() + a.elements(), b.as<float>());
  };
  for (int64_t step = 1; step <= d.tokens; ++step) {
    std::copy_n(start.as<float>(), start.elements(), window.as<float>());
    for (int64_t t = 0; t < d.tokens; t += step) {
      const int64_t count = std::min(step, d.tokens - t);
      const std::vector<int64_t> offsets{0, count};
      forward(ctx, {count, d.channels, d.width}, {x.row_range(t, count), weight, window, {offsets}},
              {y.row_range(t, count), window});
    }
    different += !equal(y, whole) + !equal(window, last);
  }
  return check::within("short_conv", "split with the window carried equals the whole, bit for bit",
                       static_cast<double>(different), 0);
}

}  // namespace

const check::OpTable& table() {
  // Documents shorter than, as long as and longer than the window; empty ones first, in the middle and last. 259
  // channels are more than a tile.
  static const check::OpTable t{
      .op = "short_conv",
      .cases = {make_case(8, 4, {0}, Window::none), make_case(8, 4, {0}, Window::all),
                make_case(3, 4, {1}, Window::all), make_case(17, 4, {1}, Window::none),
                make_case(16, 4, {0, 1, 2, 3, 0, 4, 5, 17, 0}, Window::all),
                make_case(16, 4, {5, 0, 1, 1, 1, 2, 9}, Window::none), make_case(33, 4, {64, 65, 1}, Window::all),
                make_case(64, 4, {1, 1, 1, 1, 1}, Window::all), make_case(5, 2, {3, 1, 7}, Window::all),
                make_case(20, 4, {2, 0, 7, 1}, Window::first), make_case(6, 4, {0, 5}, Window::first),
                make_case(5, 1, {3, 0, 4}, Window::all), make_case(4, 8, {20, 3, 7, 8}, Window::all),
                make_case(67, 4, {6, 1, 40}, Window::all), make_case(6, 3, {19}, Window::all, 30.0)},
      .speed = {make_speed({8192, 1024, 4})},
      .more = [] { return std::vector<Result>{split_equals_whole()}; },
      // Documents across the strips of warps and the ranges of blocks; a window of 8 over several of them.
      .cuda_cases = {make_case(520, 4, {1500, 1, 0, 63, 64, 700, 3}, Window::all),
                     make_case(264, 8, {5, 1031, 2, 400}, Window::all), make_case(257, 4, {777, 333}, Window::none),
                     make_case(264, 4, {2, 300, 1}, Window::first), make_case(264, 4, {900, 300, 1}, Window::first)}};
  return t;
}

}  // namespace tessera::ops::short_conv
