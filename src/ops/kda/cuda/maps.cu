// Maps of states on the GPU: S1 = S0 T + X on V-first states, from scans of the document's pieces side by side
// (scan.cu, backward_scan.cu), and their fold into a state or into one another.
//
// A document of one piece has its map from the scan. One of several is folded: X through the maps of all pieces from 0,
// T through those of the second on from the first's, dX from the last piece through the transposes. A row of eight
// value channels needs no other: a block has eight rows of a head, a thread a key channel, all in f32. Bytes of a fold:
// the maps and the state once, the transition once more for every eight rows, from the L2 cache.
#include "core/cuda/kernel.h"
#include "ops/kda/cuda.h"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kRows = 8;

// `count` maps in the order in which they are applied, `step` elements from one to the next.
struct Maps {
  const float *transitions, *offsets;  // of the first map; offsets null: zeros
  int64_t count, step;
};

// to <- from through the maps, (H, D, D) each; `from` may be `to`, null: zeros.
template <int D, bool kTransposed>
__global__ void __launch_bounds__(D) fold_kernel(Maps maps, const float* from, float* to) {
  __shared__ __align__(16) float rows[D][kRows];  // key channels first
  const int64_t head = blockIdx.x / (D / kRows), part = blockIdx.x % (D / kRows);
  const int channel = static_cast<int>(threadIdx.x);
  const int64_t of_head = head * D * D, of_rows = of_head + part * kRows * D + channel;
  float s[kRows];
#pragma unroll
  for (int v = 0; v < kRows; ++v) s[v] = from == nullptr ? 0.0f : from[of_rows + v * D];
  for (int64_t j = 0; j < maps.count; ++j) {
#pragma unroll
    for (int v = 0; v < kRows; ++v) {
      rows[channel][v] = s[v];
      s[v] = maps.offsets == nullptr ? 0.0f : maps.offsets[j * maps.step + of_rows + v * D];
    }
    __syncthreads();
    const float* transition = maps.transitions + j * maps.step + of_head;
#pragma unroll 8
    for (int r = 0; r < D; ++r) {
      const float t = kTransposed ? transition[channel * D + r] : transition[r * D + channel];
#pragma unroll
      for (int v = 0; v < kRows; ++v) s[v] += t * rows[r][v];
    }
    __syncthreads();
  }
#pragma unroll
  for (int v = 0; v < kRows; ++v) to[of_rows + v * D] = s[v];
}

template <bool kTransposed>
void launch_fold(GpuStream stream, const Dims& d, const Maps& maps, const float* from, float* to) {
  const int64_t blocks = d.value_heads * (d.key_dim / kRows);
  const auto run = [&]<int D>() { launch(fold_kernel<D, kTransposed>, blocks, D, 0, stream)(maps, from, to); };
  if (d.key_dim == 32) return run.template operator()<32>();
  if (d.key_dim == 64) return run.template operator()<64>();
  run.template operator()<128>();
}

}  // namespace

void state_map(GpuStream stream, const Dims& d, const Inputs& in, const Plan& plan, const Workspace& w,
               const StateMap& map) {
  prepare(stream, d, in, plan, w);
  if (!plan.cut) return scan_maps(stream, d, in, plan, w, map.offset, map.transition);
  scan_maps(stream, d, in, plan, w, w.ends, w.transitions);
  const float *ends = w.ends.gpu<float>(), *transitions = w.transitions.gpu<float>();
  const int64_t step = d.value_heads * d.key_dim * d.key_dim;
  launch_fold<false>(stream, d, {transitions, ends, plan.pieces, step}, nullptr, map.offset.gpu<float>());
  if (!map.transition.present()) return;
  launch_fold<false>(stream, d, {transitions + step, nullptr, plan.pieces - 1, step}, transitions,
                     map.transition.gpu<float>());
}

void state_gradient_map(GpuStream stream, const Dims& d, const Inputs& in, const View& d_o, const Plan& plan,
                        const Workspace& w, const View& offset) {
  prepare(stream, d, in, plan, w);
  if (!plan.cut) return reverse_scan_maps(stream, d, d_o, plan, w, offset);
  scan_maps(stream, d, in, plan, w, View(), w.transitions);
  reverse_scan_maps(stream, d, d_o, plan, w, w.ends);
  const int64_t step = d.value_heads * d.key_dim * d.key_dim, last = (plan.pieces - 1) * step;
  launch_fold<true>(stream, d, {w.transitions.gpu<float>() + last, w.ends.gpu<float>() + last, plan.pieces, -step},
                    nullptr, offset.gpu<float>());
}

void fold(GpuStream stream, const StateMap& map, Pass pass, const View& state) {
  Dims d{};
  d.value_heads = state.dim(0), d.key_dim = state.dim(2);
  float* const s = state.gpu<float>();
  const Maps maps{map.transition.gpu<float>(), map.offset.gpu<float>(), 1, 0};
  if (pass == Pass::forward) return launch_fold<false>(stream, d, maps, s, s);
  launch_fold<true>(stream, d, maps, s, s);
}

}  // namespace tessera::ops::kda::cuda
