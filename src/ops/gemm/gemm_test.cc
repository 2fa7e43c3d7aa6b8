#include "ops/gemm/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/philox.h"

namespace tessera::ops {
namespace {

template <class Real>
std::vector<Real> random_values(int64_t n, uint64_t seed) {
  const Philox philox(seed, Purpose::test);
  std::vector<Real> v(static_cast<size_t>(n));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<Real>(philox.normal(i));
  return v;
}

struct Problem {
  int64_t m, n, k;
  Trans ta, tb;
  double alpha, beta;
};

// RMS error of gemm<Real> relative to a triple loop in float64, leading dimensions 3 larger than needed.
template <class Real>
double relative_error(const Problem& p, Product product) {
  const int64_t lda = (p.ta == Trans::yes ? p.m : p.k) + 3, ldb = (p.tb == Trans::yes ? p.k : p.n) + 3, ldc = p.n + 3;
  const auto a = random_values<Real>((p.ta == Trans::yes ? p.k : p.m) * lda, 1);
  const auto b = random_values<Real>((p.tb == Trans::yes ? p.n : p.k) * ldb, 2);
  auto c = random_values<Real>(p.m * ldc, 3);
  const auto before = c;
  if (p.beta == 0.0) std::fill(c.begin(), c.end(), std::numeric_limits<Real>::quiet_NaN());
  Arena arena(gemm_scratch_bytes(product, p.m, p.n, p.k) + 64);
  void* scratch = arena.allocate(DType::u8, {gemm_scratch_bytes(product, p.m, p.n, p.k)}).data();
  gemm<Real>(product, scratch, p.ta, p.tb, p.m, p.n, p.k, Real(p.alpha), a.data(), lda, b.data(), ldb, Real(p.beta),
             c.data(), ldc);
  double error = 0, norm = 1e-300;
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      double want = p.beta * double(before[size_t(i * ldc + j)]);
      for (int64_t q = 0; q < p.k; ++q) {
        want += p.alpha * double(a[size_t(p.ta == Trans::yes ? q * lda + i : i * lda + q)]) *
                double(b[size_t(p.tb == Trans::yes ? j * ldb + q : q * ldb + j)]);
      }
      const double got = double(c[size_t(i * ldc + j)]);
      error += (got - want) * (got - want);
      norm += want * want;
    }
  }
  return std::sqrt(error / norm);
}

class GemmTest : public ::testing::TestWithParam<Problem> {};

TEST_P(GemmTest, AgreesWithTripleLoop) {
  EXPECT_LT(relative_error<float>(GetParam(), Product::f32), 2e-6);
  EXPECT_LT(relative_error<double>(GetParam(), Product::f32), 1e-14);
  if (cpu_has_bf16_products()) {
    EXPECT_LT(relative_error<float>(GetParam(), Product::bf16), 5e-3);  // 2^-9 an operand
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GemmTest,
                         ::testing::Values(Problem{1, 1, 1, Trans::no, Trans::no, 1, 0},
                                           Problem{5, 7, 0, Trans::no, Trans::no, 1, 0.5},
                                           Problem{0, 7, 3, Trans::no, Trans::no, 1, 0},
                                           Problem{33, 65, 17, Trans::no, Trans::yes, 1, 0},
                                           Problem{33, 65, 17, Trans::yes, Trans::no, -2, 1},
                                           Problem{16, 16, 129, Trans::yes, Trans::yes, 0.5, 0.25},
                                           Problem{128, 48, 96, Trans::no, Trans::no, 1, 1}));

}  // namespace
}  // namespace tessera::ops
