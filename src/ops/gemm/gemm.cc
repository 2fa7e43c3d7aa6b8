#include "ops/gemm/gemm.h"

#include <algorithm>
#include <chrono>
#include <dnnl.hpp>
#include <vector>

#include "core/parallel.h"
#include "ops/gemm/cuda.h"

namespace tessera::ops {
namespace {

void check_dnnl(dnnl_status_t status, const char* call) {
  TESSERA_CHECK(status == dnnl_success, "{} failed with oneDNN status {}", call, static_cast<int>(status));
}

template <class Real>
void scale_rows(int64_t m, int64_t n, Real beta, Real* c, int64_t ldc) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = beta == Real(0) ? Real(0) : beta * c[i * ldc + j];
  }
}

// Rounds a (rows, cols) matrix with leading dimension `ld` to a contiguous bf16 copy.
void round_to_bf16(int64_t rows, int64_t cols, const float* from, int64_t ld, bf16* to) {
  parallel_ranges(rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(cols, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < cols; ++j) to[i * cols + j] = bf16(from[i * ld + j]);
    }
  });
}

dnnl::engine& cpu_engine() {
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// C = alpha A B + beta C with bf16 A, B already rounded and contiguous as stored.
void bf16_matmul(Trans trans_a, Trans trans_b, int64_t m, int64_t n, int64_t k, float alpha, bf16* a, bf16* b,
                 float beta, float* c, int64_t ldc) {
  using dnnl::memory;
  const auto bf = memory::data_type::bf16;
  const memory::dims a_strides = trans_a == Trans::no ? memory::dims{k, 1} : memory::dims{1, m};
  const memory::dims b_strides = trans_b == Trans::no ? memory::dims{n, 1} : memory::dims{1, k};
  const memory::desc a_desc({m, k}, bf, a_strides);
  const memory::desc b_desc({k, n}, bf, b_strides);
  const memory::desc c_desc({m, n}, memory::data_type::f32, memory::dims{ldc, 1});
  dnnl::primitive_attr attributes;
  if (alpha != 1.0f) attributes.set_output_scales(0, {alpha});
  if (beta != 0.0f) {
    dnnl::post_ops ops;
    ops.append_sum(beta);
    attributes.set_post_ops(ops);
  }
  // oneDNN keeps made primitives in its own cache, so that a repeated shape costs a look-up.
  const dnnl::matmul matmul(dnnl::matmul::primitive_desc({a_desc, b_desc, c_desc}, attributes, cpu_engine()));
  dnnl::stream stream(cpu_engine());
  matmul.execute(stream, {{DNNL_ARG_SRC, memory(a_desc, cpu_engine(), a)},
                          {DNNL_ARG_WEIGHTS, memory(b_desc, cpu_engine(), b)},
                          {DNNL_ARG_DST, memory(c_desc, cpu_engine(), c)}});
  stream.wait();
}

}  // namespace

template <>
void gemm<float>(Trans trans_a, Trans trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                 int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  if (m == 0 || n == 0) return;
  if (k == 0) return scale_rows(m, n, beta, c, ldc);
  check_dnnl(dnnl_sgemm(trans_a == Trans::yes ? 'T' : 'N', trans_b == Trans::yes ? 'T' : 'N', m, n, k, alpha, a, lda, b,
                        ldb, beta, c, ldc),
             "dnnl_sgemm");
}

template <>
void gemm<double>(Trans trans_a, Trans trans_b, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
                  int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  parallel_ranges(m, std::max<int64_t>(1, 65536 / std::max<int64_t>(n * k, 1)), [&](int64_t begin, int64_t end) {
    std::vector<double> row(static_cast<size_t>(n));
    for (int64_t i = begin; i < end; ++i) {
      std::fill(row.begin(), row.end(), 0.0);
      for (int64_t p = 0; p < k; ++p) {
        const double a_ip = trans_a == Trans::yes ? a[p * lda + i] : a[i * lda + p];
        if (trans_b == Trans::no) {
          for (int64_t j = 0; j < n; ++j) row[static_cast<size_t>(j)] += a_ip * b[p * ldb + j];
        } else {
          for (int64_t j = 0; j < n; ++j) row[static_cast<size_t>(j)] += a_ip * b[j * ldb + p];
        }
      }
      for (int64_t j = 0; j < n; ++j) {
        const double old = beta == 0.0 ? 0.0 : beta * c[i * ldc + j];
        c[i * ldc + j] = old + alpha * row[static_cast<size_t>(j)];
      }
    }
  });
}

template <>
void gemm<float>(Product product, void* scratch, Trans trans_a, Trans trans_b, int64_t m, int64_t n, int64_t k,
                 float alpha, const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                 int64_t ldc) {
  if (product == Product::f32 || m == 0 || n == 0 || k == 0) {
    return gemm<float>(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  }
  bf16* a16 = static_cast<bf16*>(scratch);
  bf16* b16 = a16 + Arena::aligned(m * k * bytes_of(DType::bf16)) / bytes_of(DType::bf16);
  round_to_bf16(trans_a == Trans::no ? m : k, trans_a == Trans::no ? k : m, a, lda, a16);
  round_to_bf16(trans_b == Trans::no ? k : n, trans_b == Trans::no ? n : k, b, ldb, b16);
  bf16_matmul(trans_a, trans_b, m, n, k, alpha, a16, b16, beta, c, ldc);
}

template <>
void gemm<double>(Product, void*, Trans trans_a, Trans trans_b, int64_t m, int64_t n, int64_t k, double alpha,
                  const double* a, int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  gemm<double>(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

int64_t gemm_scratch_bytes(Product product, int64_t m, int64_t n, int64_t k) {
  if (product == Product::f32) return 0;
  return Arena::aligned(m * k * bytes_of(DType::bf16)) + Arena::aligned(k * n * bytes_of(DType::bf16));
}

bool cpu_has_bf16_products() {
  return dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core_bf16 && __builtin_cpu_supports("avx512bf16");
}

double measured_gemm_rate(Product product, Device device) {
  if (device == Device::cuda) return measured_gpu_gemm_rate();
  constexpr int64_t n = 2048;
  std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f), c(n * n);
  Arena arena(gemm_scratch_bytes(product, n, n, n) + Arena::kAlignment);
  void* scratch = arena.allocate(DType::u8, {gemm_scratch_bytes(product, n, n, n)}).data();
  double best = 1e30;
  for (int run = 0; run < 6; ++run) {  // the first makes the kernels
    if (product == Product::bf16 && run == 0) {
      gemm<float>(product, scratch, Trans::no, Trans::yes, n, n, n, 1.0f, a.data(), n, b.data(), n, 0.0f, c.data(), n);
    }
    const auto begin = std::chrono::steady_clock::now();
    if (product == Product::bf16) {
      bf16* a16 = static_cast<bf16*>(scratch);
      bf16_matmul(Trans::no, Trans::yes, n, n, n, 1.0f, a16, a16 + n * n, 0.0f, c.data(), n);
    } else {
      gemm<float>(Trans::no, Trans::yes, n, n, n, 1.0f, a.data(), n, b.data(), n, 0.0f, c.data(), n);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (run > 0) best = std::min(best, seconds);
  }
  return 2.0 * n * n * n / best;
}

}  // namespace tessera::ops
