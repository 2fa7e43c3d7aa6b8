#include "ops/embedding/cases.h"

#include "core/philox.h"
#include "ops/embedding/op.h"
#include "ops/embedding/reference.h"

namespace tessera::ops::embedding {
namespace {

using check::GradientRule;
using check::Tensor;

void run(const Dims& d, const check::Run& r) {
  const Inputs in{r.inputs[0], r.inputs[1]};
  forward(r.context, d, in, {r.outputs[0]});
  if (!r.d_outputs.empty()) backward(r.context, d, in, {r.d_outputs[0]}, {r.d_inputs[1]});
}

// Random ids with the first and the last of the vocabulary among them.
Tensor random_ids(const Dims& d) {
  Tensor ids{"ids", {d.tokens}, {}, GradientRule::none, DType::i32};
  const Philox philox(17, Purpose::test);
  for (int64_t t = 0; t < d.tokens; ++t) {
    ids.values.push_back(
        static_cast<double>(philox.bits(static_cast<uint64_t>(t)) % static_cast<uint64_t>(d.vocabulary)));
  }
  if (d.tokens > 0) ids.values.front() = static_cast<double>(d.vocabulary - 1);
  if (d.tokens > 1) ids.values.back() = 0;
  return ids;
}

std::vector<Tensor> inputs(const Dims& d) {
  return {random_ids(d), check::random_tensor("weight", {d.vocabulary, d.width}, 1.0, GradientRule::add)};
}

check::Case make_case(Dims d) {
  return {.name = fmt::format("T {} vocabulary {} D {}", d.tokens, d.vocabulary, d.width),
          .inputs = [=] { return inputs(d); },
          .reference =
              [=](const std::vector<Tensor>& in) {
                return std::vector<Tensor>{
                    {"y", {d.tokens, d.width}, reference::forward(d.tokens, d.width, in[0].values, in[1].values)}};
              },
          .run = [=](const check::Run& r) { run(d, r); }};
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("T {} vocabulary {} D {}", d.tokens, d.vocabulary, d.width),
          .inputs = [=] { return inputs(d); },
          .output_shapes = {{d.tokens, d.width}},
          .run = [=](const check::Run& r) { run(d, r); }};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "embedding",
      // 200 tokens of 5 ids: every row is a sum of many; 130 x 272: several threads and a short last line.
      .cases = {make_case({0, 5, 8}), make_case({1, 1, 1}), make_case({1, 7, 33}), make_case({200, 5, 17}),
                make_case({130, 64, 272})},
      .speed = {make_speed({8192, 32000, 512})},
      // Ids of many tiles, of one and of a part; one, two and three passes of the sort.
      .cuda_cases = {make_case({9001, 7, 264}), make_case({2049, 1, 33}), make_case({5000, 700, 1032}),
                     make_case({4097, 70000, 24})}};
  return t;
}

}  // namespace tessera::ops::embedding
