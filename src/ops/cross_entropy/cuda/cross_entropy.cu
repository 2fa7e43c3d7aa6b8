// Output head and cross-entropy on the GPU. Per block of rows, with G = scale (softmax(logits) - onehot(target)):
//
//   logits = x W^T (float32);   loss = log sum exp(logits) - logits[target];   dx = G W;   dW += G^T x
//
// One kernel for the block between the products, a thread block a row. A row of 163,840 logits fits neither registers
// nor shared memory, so it is read twice: maximum and sum together (the sum is rescaled as the maximum grows), then the
// gradient, which is written in place. As bf16 it takes the first half of the row: a tile of it lands on logits that
// were read before the tile's barrier. Floor: 10 bytes a logit (4 + 4 read, 2 written), 0.35 ms for 1024 rows of
// 163,840 at 4.8 TB/s, beside three products of 0.8 ms each at 990 TFLOP/s for a width of 2304.
#include <algorithm>

#include "core/cuda/kernel.h"
#include "ops/cross_entropy/cuda.h"
#include "ops/gemm/cuda.h"

namespace tessera::ops::cross_entropy::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 512;
constexpr int64_t kTile = kThreads * 8;  // logits of a row that the block holds at a time
constexpr float kLowest = -3.402823466e38f;

struct Arguments {
  float* logits;
  int64_t vocabulary;
  bool whole;  // rows can be read and written eight elements at a time
  const int32_t* targets;
  float* loss;
  float scale;
};

// Maximum of a row and the sum of exp(x - maximum), the same in every thread.
struct Statistics {
  float top, sum;
};

__device__ Statistics statistics(const float* row, int64_t n, bool whole, float* shared) {
  float top = kLowest, sum = 0;
  for (int64_t c = threadIdx.x * 8; c < n; c += kTile) {
    float x[8];
    load8(row + c, n - c, whole, x);
    float higher = top;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = c + i < n ? x[i] : kLowest;
      higher = fmaxf(higher, x[i]);
    }
    sum *= __expf(top - higher);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += c + i < n ? __expf(x[i] - higher) : 0.0f;
    top = higher;
  }
  const float of_warp = warp_max(top);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = of_warp;
  __syncthreads();
  float highest = shared[0];
  for (int w = 1; w < kThreads / 32; ++w) highest = fmaxf(highest, shared[w]);
  return {highest, block_sum(sum * __expf(top - highest), shared)};
}

// Writes the gradient of a row over its logits. Ends without a barrier.
template <class T>
__device__ void write_gradient(float* row, int64_t n, bool whole, Statistics s, int32_t target, float scale) {
  T* gradient = reinterpret_cast<T*>(row);
  const float factor = scale / s.sum;
  for (int64_t begin = 0; begin < n; begin += kTile) {
    const int64_t c = begin + threadIdx.x * 8;
    float x[8];
    load8(row + c, n - c, whole, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = factor * __expf(x[i] - s.top) - (c + i == target ? scale : 0.0f);
    if (sizeof(T) < sizeof(float)) __syncthreads();  // others have read what the shorter elements cover
    store8(gradient + c, n - c, whole, x);
  }
}

template <class T>
__device__ void write_zeros(float* row, int64_t n, bool whole) {
  const float zeros[8] = {};
  for (int64_t c = threadIdx.x * 8; c < n; c += kTile) store8(reinterpret_cast<T*>(row) + c, n - c, whole, zeros);
}

template <class T, bool kGradient>
__global__ void __launch_bounds__(kThreads) row_kernel(Arguments a) {
  __shared__ float shared[kThreads / 32];
  float* row = a.logits + blockIdx.x * a.vocabulary;
  const int32_t target = a.targets[blockIdx.x];
  if (target == -1) {
    if (threadIdx.x == 0) a.loss[blockIdx.x] = 0;
    if (kGradient) write_zeros<T>(row, a.vocabulary, a.whole);
    return;
  }
  const bool inside = target >= 0 && target < a.vocabulary;
  const float logit = inside ? row[target] : __int_as_float(0x7fc00000);  // NaN: the step must not go on unseen
  const Statistics s = statistics(row, a.vocabulary, a.whole, shared);
  // The two large terms are subtracted first: log(sum) alone decides where they are equal, however large they are.
  if (threadIdx.x == 0) a.loss[blockIdx.x] = (s.top - logit) + logf(s.sum);
  if (kGradient) write_gradient<T>(row, a.vocabulary, a.whole, s, target, inside ? a.scale : logit);
}

// Calls f(begin, rows) for each block of rows; the last may be short.
template <class F>
void for_blocks(const Dims& d, F&& f) {
  for (int64_t begin = 0; begin < d.tokens; begin += d.block_rows) f(begin, std::min(d.block_rows, d.tokens - begin));
}

// The logits of a block, and its losses; with kGradient the logits become their gradient.
template <class T, bool kGradient>
void run_block(GpuStream stream, const Dims& d, const Inputs& in, double scale, const Outputs& out,
               const Workspace& workspace, int64_t begin, int64_t rows) {
  const View logits = workspace.logits.row_range(0, rows);
  gemm(stream,
       {.m = rows,
        .n = d.vocabulary,
        .k = d.width,
        .trans_b = Trans::yes,
        .a = operand(in.x.row_range(begin, rows)),
        .b = operand(in.weight),
        .c = operand(logits)},
       workspace.products);
  launch(row_kernel<T, kGradient>, rows, kThreads, 0, stream)(Arguments{.logits = logits.gpu<float>(),
                                                                        .vocabulary = d.vocabulary,
                                                                        .whole = eights(logits),
                                                                        .targets = in.targets.gpu<int32_t>() + begin,
                                                                        .loss = out.loss.gpu<float>() + begin,
                                                                        .scale = static_cast<float>(scale)});
}

// The gradient of the logits of a block, where the logits were.
View gradient_of_block(const Dims& d, DType dtype, const View& logits, int64_t rows) {
  const int64_t stride = d.vocabulary * bytes_of(DType::f32) / bytes_of(dtype);
  return View(logits.data(), dtype, {rows, stride}, Memory::gpu).column_range(0, d.vocabulary);
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, const Workspace& workspace) {
  dispatch(in.x.dtype(), [&](auto element) {
    for_blocks(d, [&](int64_t begin, int64_t rows) {
      run_block<decltype(element), false>(stream, d, in, 0, out, workspace, begin, rows);
    });
  });
}

void forward_backward(GpuStream stream, const Dims& d, const Inputs& in, double scale, const Outputs& out,
                      const Grads& grads, const Workspace& workspace) {
  dispatch(in.x.dtype(), [&](auto element) {
    using T = decltype(element);
    for_blocks(d, [&](int64_t begin, int64_t rows) {
      run_block<T, true>(stream, d, in, scale, out, workspace, begin, rows);
      const GpuOperand gradient = operand(gradient_of_block(d, in.x.dtype(), workspace.logits, rows));
      gemm(stream,
           {.m = rows,
            .n = d.width,
            .k = d.vocabulary,
            .a = gradient,
            .b = operand(in.weight),
            .c = operand(grads.x.row_range(begin, rows))},
           workspace.products);
      gemm(stream,
           {.m = d.vocabulary,
            .n = d.width,
            .k = rows,
            .trans_a = Trans::yes,
            .a = gradient,
            .b = operand(in.x.row_range(begin, rows)),
            .c = operand(grads.weight),
            .beta = 1},
           workspace.products);
    });
  });
}

}  // namespace tessera::ops::cross_entropy::cuda
