// Products by cuBLASLt, which is column-major: C^T = op(B)^T op(A)^T is the same memory, so the operands change places
// and nothing is transposed.
//
// A plan (descriptors and algorithm) belongs to the full description of a product, alignment included: the heuristic
// takes longer than a small product, and must not answer differently when asked again. Descriptors are plain values
// here (cuBLASLt's opaque structs), so the cache owns nothing that needs an end.
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <vector>

#include "core/cuda/check.h"
#include "core/philox.h"
#include "ops/gemm/cuda.h"

namespace tessera::ops {
namespace {

void check_cublas(cublasStatus_t status, const char* call, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(std::string(__FILE__) + ":" + std::to_string(line) + ": " + call + ": " + cublasLtGetStatusName(status) +
              ", " + cublasLtGetStatusString(status));
}
#define TESSERA_CUBLAS(call) check_cublas((call), #call, __LINE__)

constexpr int64_t kWorkspaceAlignment = 256;
constexpr uint64_t kUsableWorkspace = kGemmWorkspaceBytes - kWorkspaceAlignment;

struct Operand {
  DType dtype;
  int64_t row_stride, batch_stride;
  uint32_t alignment;  // bytes; at most that of an arena, so that the place in memory does not change the algorithm
  auto operator<=>(const Operand&) const = default;
};

struct Key {
  int64_t m, n, k, batches;
  Trans trans_a, trans_b;
  Operand a, b, c, d;
  bool in_place;
  auto operator<=>(const Key&) const = default;
};

struct Plan {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a, b, c, d;
  cublasLtMatmulAlgo_t algorithm;
};

Operand describe(const GpuOperand& o, int64_t batches) {
  uint32_t alignment = Arena::kAlignment;
  while (reinterpret_cast<uintptr_t>(o.data) % alignment != 0) alignment /= 2;
  return {o.dtype, o.row_stride, batches > 1 ? o.batch_stride : 0, alignment};
}

std::string text(const Operand& o) {
  return fmt::format("{} rows {} apart, batches {}, aligned to {}", name_of(o.dtype), o.row_stride, o.batch_stride,
                     o.alignment);
}

std::string text(const Key& key) {
  return fmt::format("{} x ({}, {}, {}){}{}, A {}, B {}, C {}, D {}", key.batches, key.m, key.n, key.k,
                     key.trans_a == Trans::yes ? " A transposed" : "", key.trans_b == Trans::yes ? " B transposed" : "",
                     text(key.a), text(key.b), text(key.c), key.in_place ? "in its place" : text(key.d));
}

void check_types(const Key& key) {
  const DType in = key.a.dtype, out = key.c.dtype;
  const bool known =
      in == key.b.dtype && out == key.d.dtype &&
      ((in == DType::bf16 && (out == DType::bf16 || out == DType::f32)) || (in == DType::f32 && out == DType::f32));
  TESSERA_CHECK(known, "product of {} and {} into {}; wanted bf16 x bf16 into bf16 or f32, or all f32", name_of(in),
                name_of(key.b.dtype), name_of(out));
}

cublasLtHandle_t handle() {
  static const cublasLtHandle_t made = [] {
    cublasLtHandle_t h = nullptr;
    TESSERA_CUBLAS(cublasLtCreate(&h));
    return h;
  }();
  return made;
}

// `rows` and `columns` as stored: a row of ours is a column of cuBLASLt's.
cublasLtMatrixLayoutOpaque_t layout(const Operand& o, int64_t rows, int64_t columns, int64_t batches) {
  TESSERA_CHECK(o.row_stride >= columns, "rows of {} elements lie {} apart", columns, o.row_stride);
  cublasLtMatrixLayoutOpaque_t made;
  TESSERA_CUBLAS(cublasLtMatrixLayoutInit(&made, o.dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F,
                                          static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), o.row_stride));
  const int32_t count = static_cast<int32_t>(batches);
  TESSERA_CUBLAS(cublasLtMatrixLayoutSetAttribute(&made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)));
  TESSERA_CUBLAS(cublasLtMatrixLayoutSetAttribute(&made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &o.batch_stride,
                                                  sizeof(o.batch_stride)));
  return made;
}

template <class T>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  TESSERA_CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
}

// In cuBLASLt's order: our B is its A.
cublasLtMatmulPreferenceOpaque_t preference(const Key& key) {
  cublasLtMatmulPreferenceOpaque_t made;
  TESSERA_CUBLAS(cublasLtMatmulPreferenceInit(&made));
  set<uint64_t>(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kUsableWorkspace);
  // Long sums may be cut where the parts are kept in float32 and added in a step of its own.
  set<uint32_t>(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
  set<uint32_t>(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b.alignment);
  set<uint32_t>(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a.alignment);
  set<uint32_t>(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.c.alignment);
  set<uint32_t>(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.d.alignment);
  return made;
}

bool works_out_of_place(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t supported = 0;
  size_t written = 0;
  TESSERA_CUBLAS(cublasLtMatmulAlgoCapGetAttribute(&algorithm, CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT,
                                                   &supported, sizeof(supported), &written));
  return supported != 0;
}

// The first of cuBLASLt's answers, best first, that can leave C alone where D lies apart.
cublasLtMatmulAlgo_t choose(const Key& key, Plan& plan) {
  constexpr int kAnswers = 16;
  cublasLtMatmulPreferenceOpaque_t wanted = preference(key);
  std::array<cublasLtMatmulHeuristicResult_t, kAnswers> answers{};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle(), &plan.product, &plan.b, &plan.a, &plan.c, &plan.d, &wanted,
                                     key.in_place ? 1 : kAnswers, answers.data(), &count);
  const auto end = answers.begin() + (status == CUBLAS_STATUS_SUCCESS ? count : 0);
  const auto found = std::find_if(answers.begin(), end, [&](const cublasLtMatmulHeuristicResult_t& answer) {
    return answer.state == CUBLAS_STATUS_SUCCESS && (key.in_place || works_out_of_place(answer.algo));
  });
  TESSERA_CHECK(found != end, "cuBLASLt has no algorithm ({}) for {}", cublasLtGetStatusName(status), text(key));
  return found->algo;
}

Plan make_plan(const Key& key) {
  check_types(key);
  TESSERA_CHECK(key.batches < (int64_t{1} << 31), "product of {} batches", key.batches);
  Plan plan;
  TESSERA_CUBLAS(cublasLtMatmulDescInit(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const bool ta = key.trans_a == Trans::yes, tb = key.trans_b == Trans::yes;
  const cublasOperation_t first = tb ? CUBLAS_OP_T : CUBLAS_OP_N, second = ta ? CUBLAS_OP_T : CUBLAS_OP_N;
  TESSERA_CUBLAS(cublasLtMatmulDescSetAttribute(&plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof(first)));
  TESSERA_CUBLAS(cublasLtMatmulDescSetAttribute(&plan.product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof(second)));
  plan.a = layout(key.a, ta ? key.k : key.m, ta ? key.m : key.k, key.batches);
  plan.b = layout(key.b, tb ? key.n : key.k, tb ? key.k : key.n, key.batches);
  plan.c = layout(key.c, key.m, key.n, key.batches);
  plan.d = layout(key.d, key.m, key.n, key.batches);
  plan.algorithm = choose(key, plan);
  return plan;
}

Plan& plan_of(const Key& key) {
  static std::map<Key, Plan> plans;
  const auto found = plans.find(key);
  return found != plans.end() ? found->second : plans.emplace(key, make_plan(key)).first->second;
}

}  // namespace

void gemm(GpuStream stream, const GpuProduct& p, const View& workspace) {
  if (p.m == 0 || p.n == 0 || p.batches == 0) return;
  if (p.k == 0) {
    TESSERA_CHECK(p.beta == 1, "product over an empty sum with beta {}, wanted 1", p.beta);
    return;
  }
  const bool in_place = p.d.dtype == DType::none;
  const GpuOperand& d = in_place ? p.c : p.d;
  Plan& plan = plan_of({p.m, p.n, p.k, p.batches, p.trans_a, p.trans_b, describe(p.a, p.batches),
                        describe(p.b, p.batches), describe(p.c, p.batches), describe(d, p.batches), in_place});
  TESSERA_CHECK(workspace.bytes() >= kGemmWorkspaceBytes, "workspace of {} bytes for a product, wanted {}",
                workspace.bytes(), kGemmWorkspaceBytes);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(workspace.gpu<uint8_t>());
  void* aligned =
      reinterpret_cast<void*>((begin + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
  TESSERA_CUBLAS(cublasLtMatmul(handle(), &plan.product, &p.alpha, p.b.data, &plan.b, p.a.data, &plan.a, &p.beta,
                                p.c.data, &plan.c, d.data, &plan.d, &plan.algorithm, aligned, kUsableWorkspace,
                                stream));
}

// On random values: zeros run faster than any data will.
static View random_matrix(Arena& arena, int64_t n, uint64_t first_draw) {
  constexpr int64_t kPeriod = 1 << 20;
  const Philox random(1, Purpose::test);
  std::vector<tessera::bf16> block(kPeriod);
  for (size_t i = 0; i < block.size(); ++i) block[i] = tessera::bf16(float(2 * random.uniform(first_draw + i) - 1));
  const View matrix = arena.allocate(DType::bf16, {n, n}), all = matrix.reshaped({n * n});
  for (int64_t begin = 0; begin < n * n; begin += kPeriod) {
    copy(View(block.data(), DType::bf16, {kPeriod}), all.row_range(begin, kPeriod));
  }
  return matrix;
}

double measured_gpu_gemm_rate() {
  constexpr int64_t n = 8192;
  Arena arena(3 * n * n * bytes_of(DType::bf16) + Arena::aligned(kGemmWorkspaceBytes), Memory::gpu);
  const View a = random_matrix(arena, n, 0), b = random_matrix(arena, n, 1 << 20);
  const View c = arena.allocate(DType::bf16, {n, n}), workspace = gemm_workspace(arena);
  double best = 1e30;
  for (int run = 0; run < 6; ++run) {  // the first makes the plan
    gpu::wait();
    const auto begin = std::chrono::steady_clock::now();
    gemm(gpu::stream(),
         {.m = n, .n = n, .k = n, .trans_b = Trans::yes, .a = operand(a), .b = operand(b), .c = operand(c)}, workspace);
    gpu::wait();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (run > 0) best = std::min(best, seconds);
  }
  return 2.0 * n * n * n / best;
}

}  // namespace tessera::ops
