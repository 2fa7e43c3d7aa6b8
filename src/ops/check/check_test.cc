// What the tables themselves rely on.
#include "ops/check/check.h"

#include <gtest/gtest.h>

namespace tessera::check {
namespace {

TEST(Check, SpeedCaseRepeatsTheValuesOfALargeTensor) {
  const Tensor full = random_tensor("x", {7, 3}), periodic = periodic_tensor("x", {7, 3}, 5);
  EXPECT_EQ(periodic.values, std::vector<double>(full.values.begin(), full.values.begin() + 5));
  EXPECT_EQ(periodic.elements(), 21);
  EXPECT_EQ(periodic_tensor("x", {7, 3}, 22).values, full.values);
  int calls = 0;
  const SpeedCase c{.name = "periodic",
                    .inputs =
                        [&] {
                          return std::vector<Tensor>{periodic, periodic_tensor("none", {0, 3}, 5)};
                        },
                    .output_shapes = {{2}, {2}},
                    .run =
                        [&](const check::Run& r) {
                          if (r.context.dry()) return;
                          ++calls;
                          for (int64_t i = 0; i < 21; ++i) {
                            EXPECT_EQ(r.inputs[0].as<float>()[i], float(full.values[size_t(i % 5)])) << i;
                          }
                        },
                    .exact_outputs = {1}};
  measure({.op = "none", .cases = {}}, c, Device::cpu, 1);
  EXPECT_EQ(calls, 4);  // warmed and timed, without and with backward
}

TEST(Check, ATensorWithoutValuesIsRefused) {
  const SpeedCase c{.name = "none",
                    .inputs =
                        [] {
                          return std::vector<Tensor>{{"x", {3}, {}}};
                        },
                    .output_shapes = {{1}},
                    .run = [](const check::Run&) {}};
  EXPECT_THROW(measure({.op = "none", .cases = {}}, c, Device::cpu, 1), Error);
}

}  // namespace
}  // namespace tessera::check
