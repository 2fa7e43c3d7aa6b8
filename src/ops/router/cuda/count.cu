// Counts of one micro-batch on the GPU, as count.cc on the CPU. Integers are added with atomics, whose order cannot
// show; the sums of weights are float64 in a fixed order: kParts ranges of tokens, each summed token by token by one
// warp, then the parts in order.
//
// The histogram is E increments a token. A block of threads owns 8 experts, whose 8 B counters lie in shared memory
// (16 KB at 512 bins), and a range of tokens; it reads 32 bytes of a row at a time, so all blocks together read the
// logits once.
#include <algorithm>

#include "ops/router/cuda/scores.h"

namespace tessera::ops::router::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kLanes = 8, kHistogramThreads = 256;  // experts and threads of a block of the histogram
static_assert(kLanes * kMaxBins * 4 <= 224 * 1024, "a block of Hopper has 227 KB of shared memory");
constexpr int64_t kHistogramBlocks = 1056;  // about eight a multiprocessor
constexpr int64_t kMinTokens = 256;         // of a block, to be worth clearing and adding its counters

struct Arguments {
  int64_t tokens;
  int experts, top_k;
  bool softmax;
  const float* logits = nullptr;
  int64_t stride = 0;
  const float* bias = nullptr;
  const int32_t* chosen = nullptr;  // (T, k)
  const float *weights = nullptr, *cutoff = nullptr;
  float2* row_scale = nullptr;  // softmax only
  uint8_t* by_bias = nullptr;
};

__device__ void add(int64_t* to, int64_t count) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(count));
}

// Experts that come before expert j in the order of s.
template <int N>
__device__ int rank_of(const float (&s)[N], int experts, int lane, int j, float s_j) {
  unsigned before = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int other = lane + 32 * i;
    if (other < experts && (s[i] > s_j || (s[i] == s_j && other < j))) ++before;
  }
  return int(__reduce_add_sync(kAllLanes, before));
}

// Which selections the bias alone made; a warp a row.
template <int N>
__global__ void __launch_bounds__(kThreads) mark_kernel(Arguments a) {
  const int lane = int(threadIdx.x % 32);
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= a.tokens) return;
  const int32_t* chosen = a.chosen + row * a.top_k;
  uint8_t* marks = a.by_bias + row * a.top_k;
  if (chosen[0] < 0) {
    for (int r = lane; r < a.top_k; r += 32) marks[r] = 0;
    return;
  }
  const float* logits = a.logits + row * a.stride;
  float s[N];
  load_row(logits, a.experts, lane, s);
  const Scale scale = a.softmax ? softmax_scale(s, a.experts, lane) : Scale{};
  if (a.softmax && lane == 0) a.row_scale[row] = make_float2(scale.max, scale.inverse_sum);
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = score_of(a.softmax, s[i], scale);
  const auto score = [&](int j) { return score_of(a.softmax, logits[j], scale); };

  // The selected are the k best of s exactly when the last of them, the one of lowest s and then of highest index, has
  // k - 1 before it.
  unsigned long long last = ~0ull;
  for (int r = lane; r < a.top_k; r += 32) {
    const unsigned long long key =
        (static_cast<unsigned long long>(key_of(score(chosen[r]))) << 32) | ~unsigned(chosen[r]);
    last = key < last ? key : last;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const unsigned long long other = __shfl_xor_sync(kAllLanes, last, offset);
    last = other < last ? other : last;
  }
  const int last_chosen = int(~unsigned(last));
  const bool all_best = rank_of(s, a.experts, lane, last_chosen, score(last_chosen)) < a.top_k;
  for (int r = 0; r < a.top_k; ++r) {
    const int rank = all_best ? 0 : rank_of(s, a.experts, lane, chosen[r], score(chosen[r]));
    if (r % 32 == lane) marks[r] = rank >= a.top_k ? 1 : 0;
  }
}

// One warp, one part of the tokens. A token's experts differ, so lanes never meet at a counter.
__global__ void __launch_bounds__(32)
    count_part(Arguments a, int64_t* load, int64_t* by_bias, int64_t* tokens, double* parts) {
  extern __shared__ double weights[];  // (E), then two (E) of integers
  int* loads = reinterpret_cast<int*>(weights + a.experts);
  int* marked = loads + a.experts;
  const int lane = int(threadIdx.x);
  for (int j = lane; j < a.experts; j += 32) weights[j] = 0, loads[j] = 0, marked[j] = 0;
  __syncwarp();
  const int64_t begin = a.tokens * blockIdx.x / gridDim.x, end = a.tokens * (blockIdx.x + 1) / gridDim.x;
  int64_t counted = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (a.chosen[i * a.top_k] < 0) continue;
    ++counted;
    for (int64_t slot = i * a.top_k + lane; slot < (i + 1) * a.top_k; slot += 32) {
      const int j = a.chosen[slot];
      weights[j] += double(a.weights[slot]);
      ++loads[j];
      marked[j] += a.by_bias[slot];
    }
    __syncwarp();
  }
  for (int j = lane; j < a.experts; j += 32) {
    parts[int64_t(blockIdx.x) * a.experts + j] = weights[j];
    if (loads[j] > 0) add(load + j, loads[j]);
    if (marked[j] > 0) add(by_bias + j, marked[j]);
  }
  if (lane == 0) add(tokens, counted);
}

__global__ void add_parts(const double* parts, int64_t experts, double* weight) {
  const int64_t j = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j >= experts) return;
  double sum = 0;
  for (int64_t p = 0; p < kParts; ++p) sum += parts[p * experts + j];
  weight[j] += sum;
}

struct Bins {
  bool centred;
  double width;  // h
  int count;     // B
};

// bins.h: where a margin r = cutoff - s is counted. Edges in float64, bins in float32.
struct LaneBins {
  float bias, begin, per_unit;

  LaneBins() = default;
  __device__ LaneBins(const Bins& bins, float own, float least, float most) : bias(own) {
    const double low = coordinate(bins, least - 1), high = coordinate(bins, most + 1);
    begin = float(low);
    per_unit = float(bins.count / (high - low));
  }
  __device__ double coordinate(const Bins& bins, float r) const {
    return bins.centred ? asinh((double(r) - double(bias)) / bins.width) : double(r);
  }
  __device__ int bin_of(const Bins& bins, float inverse_width, float r) const {
    const float y = bins.centred ? asinhf((r - bias) * inverse_width) : r;
    return int(fminf(fmaxf((y - begin) * per_unit, 0.0f), float(bins.count - 1)));
  }
};

__global__ void __launch_bounds__(kHistogramThreads)
    histogram_kernel(Arguments a, Bins bins, int64_t splits, int32_t* histogram) {
  extern __shared__ int32_t counts[];  // (kLanes, B)
  __shared__ float extremes[2][kHistogramThreads / 32];
  __shared__ LaneBins lanes[kLanes];
  const int tid = int(threadIdx.x), lane = tid % kLanes;
  const int first = int(blockIdx.x / splits) * kLanes, expert = first + lane;
  for (int i = tid; i < kLanes * bins.count; i += kHistogramThreads) counts[i] = 0;
  float least = INFINITY, most = -INFINITY;
  for (int j = tid; j < a.experts; j += kHistogramThreads) {
    least = fminf(least, a.bias[j]);
    most = fmaxf(most, a.bias[j]);
  }
  least = -warp_max(-least), most = warp_max(most);
  if (tid % 32 == 0) extremes[0][tid / 32] = least, extremes[1][tid / 32] = most;
  __syncthreads();
  for (int w = 0; w < kHistogramThreads / 32; ++w) {
    least = fminf(least, extremes[0][w]);
    most = fmaxf(most, extremes[1][w]);
  }
  if (tid < kLanes && expert < a.experts) lanes[tid] = LaneBins(bins, a.bias[expert], least, most);
  __syncthreads();
  if (expert < a.experts) {
    const LaneBins own = lanes[lane];
    const float inverse_width = float(1 / bins.width);
    const int64_t split = blockIdx.x % splits;
    const int64_t begin = a.tokens * split / splits, end = a.tokens * (split + 1) / splits;
    for (int64_t i = begin + tid / kLanes; i < end; i += kHistogramThreads / kLanes) {
      if (a.chosen[i * a.top_k] < 0) continue;
      Scale scale;
      if (a.softmax) scale = {a.row_scale[i].x, a.row_scale[i].y};
      const float s = score_of(a.softmax, a.logits[i * a.stride + expert], scale);
      atomicAdd(&counts[lane * bins.count + own.bin_of(bins, inverse_width, a.cutoff[i] - s)], 1);
    }
  }
  __syncthreads();
  for (int i = tid; i < kLanes * bins.count; i += kHistogramThreads) {
    const int32_t count = counts[i];  // 0 for lanes past the last expert
    if (count > 0) atomicAdd(&histogram[int64_t(first) * bins.count + i], count);
  }
}

}  // namespace

void count(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, const BalanceOptions& options,
           const Counters& counters, const CountWorkspace& w) {
  if (d.tokens == 0) return;
  Arguments a{
      .tokens = d.tokens, .experts = int(d.experts), .top_k = int(d.top_k), .softmax = d.score == Score::softmax};
  a.logits = in.logits.gpu<float>(), a.stride = in.logits.row_stride();
  a.bias = in.bias.gpu<float>();
  a.chosen = out.experts.gpu<int32_t>();
  a.weights = out.weights.gpu<float>(), a.cutoff = out.cutoff.gpu<float>();
  a.row_scale = a.softmax ? reinterpret_cast<float2*>(w.row_scale.gpu<float>()) : nullptr;
  a.by_bias = w.by_bias.gpu<uint8_t>();
  choose_places(d.experts,
                [&]<int N>() { launch(mark_kernel<N>, ceil_div(d.tokens, kWarps), kThreads, 0, stream)(a); });
  double* parts = w.weights.gpu<double>();
  launch(count_part, kParts, 32, d.experts * 16, stream)(
      a, counters.load.gpu<int64_t>(), counters.by_bias.gpu<int64_t>(), counters.tokens.gpu<int64_t>(), parts);
  launch(add_parts, ceil_div(d.experts, 128), 128, 0, stream)(parts, d.experts, counters.weight.gpu<double>());
  if (!counters.histogram.present() || d.top_k == d.experts) return;
  const int64_t groups = ceil_div(d.experts, kLanes);
  const int64_t splits = std::clamp<int64_t>(kHistogramBlocks / groups, 1, ceil_div(d.tokens, kMinTokens));
  const Bins bins{options.method == Balance::quantile_centred, options.width, int(options.bins)};
  launch(histogram_kernel, groups * splits, kHistogramThreads, kLanes * options.bins * 4, stream)(
      a, bins, splits, counters.histogram.gpu<int32_t>());
}

}  // namespace tessera::ops::router::cuda
