// Linear on the GPU:   y = x W^T,   dx (+)= dy W,   dW += dy^T x,   each one product of cuBLASLt.
//
// Where the weight is float32 beside x in bf16 (the router), float32 operands are split into three parts in bf16, which
// hold all of their 24 bits, and the tensor cores multiply the parts: y = sum of x W_i^T, dW = sum of dy_i^T x, each
// one product with the parts side by side, whose sums are added in float32, smallest first. In dx, which is rounded to
// bf16, dy (W_1 + W_2) is enough and is one product over (dy_1, dy_2, dy_3, dy_1) and (W_1, W_1, W_1, W_2). Three times
// the operations at ten times the rate of float32.
#include <algorithm>

#include "core/cuda/kernel.h"
#include "ops/gemm/cuda.h"
#include "ops/linear/cuda.h"

namespace tessera::ops::linear::cuda {
namespace {

using namespace tessera::cuda;
using tessera::cuda::bf16;

constexpr int kThreads = 256;

// Which part of a value goes to each of its slots.
struct Slots {
  int count, part[4];
};
constexpr Slots kThreeParts{3, {0, 1, 2, 0}}, kDyParts{4, {0, 1, 2, 0}}, kWeightParts{4, {0, 0, 0, 1}};

// Where values with several slots lie: slot s of value (r, c) at r row + s slot + c.
struct Steps {
  int64_t row, slot;
};

// from (rows, columns), float32 -> the parts of (padded rows, padded columns), zeros outside.
__global__ void split(const float* from, int64_t stride, int64_t rows, int64_t columns, int64_t padded_rows,
                      int64_t padded_columns, Slots slots, Steps steps, bf16* to) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, r = i / padded_columns, c = i % padded_columns;
  if (r >= padded_rows) return;
  float rest = r < rows && c < columns ? from[r * stride + c] : 0.0f;
  bf16 parts[3];
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    parts[p] = __float2bfloat16_rn(rest);
    rest -= __bfloat162float(parts[p]);  // exact
  }
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (s == slots.count) break;
    const int p = slots.part[s];
    to[r * steps.row + s * steps.slot + c] = p == 0 ? parts[0] : p == 1 ? parts[1] : parts[2];
  }
}

// to (rows, columns) = or += the sum of three slots, the smallest first.
__global__ void add_slots(const float* from, Steps steps, int64_t rows, int64_t columns, bool add, float* to,
                          int64_t stride) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, r = i / columns, c = i % columns;
  if (r >= rows) return;
  const float* at = from + r * steps.row + c;
  const float sum = at[2 * steps.slot] + at[steps.slot] + at[0];
  float& out = to[r * stride + c];
  out = add ? out + sum : sum;
}

GpuProduct y_product(const View& x, const View& weight, const View& y) {
  return {.m = x.rows(),
          .n = weight.rows(),
          .k = weight.dim(1),
          .trans_b = Trans::yes,
          .a = operand(x),
          .b = operand(weight),
          .c = operand(y)};
}
GpuProduct dx_product(const View& dy, const View& weight, const View& dx, bool add) {
  return {.m = dy.rows(),
          .n = weight.dim(1),
          .k = weight.rows(),
          .a = operand(dy),
          .b = operand(weight),
          .c = operand(dx),
          .beta = add ? 1.0f : 0.0f};
}
GpuProduct dweight_product(const View& dy, const View& x, const View& dweight) {
  return {.m = dweight.rows(),
          .n = dweight.dim(1),
          .k = dy.rows(),
          .trans_a = Trans::yes,
          .a = operand(dy),
          .b = operand(x),
          .c = operand(dweight),
          .beta = 1};
}

bool mixed(const Inputs& in) { return in.x.dtype() != in.weight.dtype(); }

// Calls f(begin, rows) for each block of rows of x.
template <class F>
void for_blocks(const Dims& d, F&& f) {
  for (int64_t begin = 0; begin < d.tokens; begin += kSplitRows) f(begin, std::min(kSplitRows, d.tokens - begin));
}

// (rows, columns) into slots that follow one another by rows of `to`, `padded` of them each, or by columns.
void split_by_rows(GpuStream stream, const View& from, int64_t padded, const Slots& slots, const View& to) {
  const int64_t columns = from.dim(1);
  launch(split, ceil_div(padded * columns, kThreads), kThreads, 0, stream)(
      from.gpu<float>(), from.row_stride(), from.rows(), columns, padded, columns, slots,
      Steps{columns, padded * columns}, to.gpu<bf16>());
}
void split_by_columns(GpuStream stream, const View& from, int64_t padded, const Slots& slots, const View& to) {
  launch(split, ceil_div(from.rows() * padded, kThreads), kThreads, 0, stream)(
      from.gpu<float>(), from.row_stride(), from.rows(), from.dim(1), from.rows(), padded, slots,
      Steps{to.row_stride(), padded}, to.gpu<bf16>());
}
void add(GpuStream stream, const View& from, Steps steps, bool add_to, const View& to) {
  launch(add_slots, ceil_div(to.elements(), kThreads), kThreads, 0, stream)(
      from.gpu<float>(), steps, to.rows(), to.dim(1), add_to, to.gpu<float>(), to.row_stride());
}

void forward_mixed(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, const Workspace& w) {
  const int64_t padded = padded_out(d);
  split_by_rows(stream, in.weight, padded, kThreeParts, w.weight);
  for_blocks(d, [&](int64_t begin, int64_t rows) {
    const View sums = w.sums.row_range(0, rows);
    gemm(stream, y_product(in.x.row_range(begin, rows), w.weight, sums), w.product);
    add(stream, sums, {3 * padded, padded}, false, out.y.row_range(begin, rows));
  });
}

void backward_mixed(GpuStream stream, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads,
                    const Workspace& w) {
  const int64_t padded = padded_out(d);
  split_by_rows(stream, in.weight, padded, kWeightParts, w.weight);
  if (grads.weight.present()) w.sums.zero();
  for_blocks(d, [&](int64_t begin, int64_t rows) {
    const View dy = w.dy.row_range(0, rows);
    split_by_columns(stream, dout.y.row_range(begin, rows), padded, kDyParts, dy);
    if (grads.weight.present()) {
      gemm(stream, dweight_product(dy.column_range(0, 3 * padded), in.x.row_range(begin, rows), w.sums), w.product);
    }
    if (grads.x.present()) {
      gemm(stream, dx_product(dy, w.weight, grads.x.row_range(begin, rows), grads.add_to_x), w.product);
    }
  });
  if (grads.weight.present()) add(stream, w.sums, {d.in, padded * d.in}, true, grads.weight);
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, const Workspace& workspace) {
  if (mixed(in)) return forward_mixed(stream, d, in, out, workspace);
  gemm(stream, y_product(in.x, in.weight, out.y), workspace.product);
}

void backward(GpuStream stream, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads,
              const Workspace& workspace) {
  if (mixed(in)) return backward_mixed(stream, d, in, dout, grads, workspace);
  if (grads.x.present()) {
    gemm(stream, dx_product(dout.y, in.weight, grads.x, grads.add_to_x), workspace.product);
  }
  if (grads.weight.present()) gemm(stream, dweight_product(dout.y, in.x, grads.weight), workspace.product);
}

}  // namespace tessera::ops::linear::cuda
