// Attention forward for sm_90: blocks of 128 queries of one document and head against tiles of 128 keys, by wgmma fed
// by the copy engine. The same mathematics as forward.cu, whose comment has the formulas.
//
// A block of threads is one group of 128 that loads (one thread of it) and two that multiply, 64 queries each. S
// (64 x 128) and O (64 x 128) of a group live in its registers, and so does P as the A operand of P V: between two
// products nothing but keys and values is read from shared memory. Keys and values have two stages of their own, as
// values are done with later than keys.
//
// What keeps the tensor cores fed while exponents are taken (16 a cycle, 1024 cycles for a tile whose products take
// 2560): a group issues S of the next tile and only then P V of this one, so that its softmax runs under its own P V;
// and the two groups take turns at issuing, so that the softmax of one runs under the products of the other.
//
// Rows of neighbouring documents that a box brings along are masked as keys (they stand after every query) and not
// written as queries. Floor: 2 (192 + 128) flops a causal pair at the tensor cores' rate.
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "core/cuda/tensor_map.h"
#include "ops/mla/cuda/rows.h"
#include "ops/mla/cuda/sm90.h"

namespace tessera::ops::mla::cuda::sm90 {
namespace {

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;
using Turn = cutlass::arch::NamedBarrier;
using Major = cute::GMMA::Major;
using Element = cute::bfloat16_t;

constexpr int kQueries = 128, kKeys = 128, kStages = 2;
constexpr int kGroups = 2, kBlockThreads = (kGroups + 1) * kGroup;
constexpr int kBoxColumns = 64;  // 128 bytes

// A box of 64 columns is one run of memory: atoms are laid along the rows first.
using QueryLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_SW128_Atom<Element, Major::K>{},
                                                 cute::Shape<cute::Int<kQueries>, cute::Int<kKey>>{}));
using KeyLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_SW128_Atom<Element, Major::K>{},
                                               cute::Shape<cute::Int<kKeys>, cute::Int<kKey>, cute::Int<kStages>>{},
                                               cute::Step<cute::_1, cute::_2, cute::_3>{}));
using ValueLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_SW128_Atom<Element, Major::MN>{},
                                                 cute::Shape<cute::Int<kValue>, cute::Int<kKeys>, cute::Int<kStages>>{},
                                                 cute::Step<cute::_2, cute::_1, cute::_3>{}));
using Groups = cute::Layout<cute::Shape<cute::Int<kGroups>, cute::_1, cute::_1>>;
using ScoreMma =
    decltype(cute::make_tiled_mma(cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K>{}, Groups{}));
using ValueMma =
    decltype(cute::make_tiled_mma(cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN>{}, Groups{}));

struct Shared {
  alignas(1024) Element q[kQueries * kKey];
  alignas(1024) Element k[kStages][kKeys * kKey];
  alignas(1024) Element v[kStages][kKeys * kValue];
  uint64_t full_q, full_k[kStages], full_v[kStages], empty_k[kStages], empty_v[kStages];
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // the base is aligned by hand
static_assert(kSharedBytes <= 227 * 1024, "what a block of threads can have on sm_90");

struct Maps {
  CUtensorMap q, kv, k_shared;  // (T, H 192), (Tk, H 256), (Tk, 64)
};

// Box c of `columns` / 64 lies behind those before it.
__device__ void load_box(const CUtensorMap& map, uint64_t* full, Element* to, int box, int64_t column, int64_t row) {
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  cute::SM90_TMA_LOAD_2D::copy(&map, full, kHint, to + box * kKeys * kBoxColumns, int(column), int(row));
}

__device__ void load(const Maps& maps, const Block& block, int tiles, Shared& s) {
  static_assert(kQueries == kKeys, "one size of box");
  const int64_t query = block.query_begin + block.first;
  Full::arrive_and_expect_tx(&s.full_q, sizeof(s.q));
  for (int i = 0; i < kKey / kBoxColumns; ++i) {
    load_box(maps.q, &s.full_q, s.q, i, block.head * kKey + i * kBoxColumns, query);
  }
  const int64_t head = block.head * (kNope + kValue);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages;
    const uint32_t free = (tile / kStages % 2) ^ 1;
    const int64_t key = block.key_begin + int64_t(tile) * kKeys;
    Empty::wait(&s.empty_k[stage], free);
    Full::arrive_and_expect_tx(&s.full_k[stage], sizeof(s.k[0]));
    for (int i = 0; i < kNope / kBoxColumns; ++i) {
      load_box(maps.kv, &s.full_k[stage], s.k[stage], i, head + i * kBoxColumns, key);
    }
    load_box(maps.k_shared, &s.full_k[stage], s.k[stage], kNope / kBoxColumns, 0, key);
    Empty::wait(&s.empty_v[stage], free);
    Full::arrive_and_expect_tx(&s.full_v[stage], sizeof(s.v[0]));
    for (int i = 0; i < kValue / kBoxColumns; ++i) {
      load_box(maps.kv, &s.full_v[stage], s.v[stage], i, head + kNope + i * kBoxColumns, key);
    }
  }
}

// A thread's part of a group's rows: two rows each, with every fourth pair of columns. Sum i of a fragment is element
// (warp 16 + lane / 4 + 8 (i / 2 % 2), i / 4 * 8 + lane % 4 * 2 + i % 2).
struct Softmax {
  float maximum[2] = {-INFINITY, -INFINITY};  // of the unscaled logits
  float sum[2] = {};                          // over the thread's own columns

  // Logits to weights; what has been summed must fade by fade[0], fade[1]. `row`: position of the thread's first row,
  // whose keys at and past `key` are these. Every row sees key 0: its maximum is finite from the first tile on.
  template <class Scores>
  __device__ void take(Scores& s, int row, int key, float scale_log2, float (&fade)[2]) {
    constexpr int kCount = decltype(cute::size(s))::value;
    if (key + kKeys - 1 > row) {
      const int first = key + int(threadIdx.x % 4) * 2;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (first + i / 4 * 8 + i % 2 > row + i / 2 % 2 * 8) s(i) = -INFINITY;
      }
    }
    float top[2] = {maximum[0], maximum[1]}, offset[2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s(i));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = over_row(top[h], true);
      fade[h] = exp2_fast((maximum[h] - top[h]) * scale_log2);
      maximum[h] = top[h];
      offset[h] = top[h] * scale_log2;
      sum[h] *= fade[h];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s(i) = exp2_fast(s(i) * scale_log2 - offset[i / 2 % 2]);
      sum[i / 2 % 2] += s(i);
    }
  }
};

template <class Weights, class Scores>
__device__ void round_weights(Weights& p, const Scores& s) {  // the order of both is the same
  uint32_t* pairs = reinterpret_cast<uint32_t*>(&p(0));
#pragma unroll
  for (int i = 0; i < decltype(cute::size(s))::value / 2; ++i) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(s(2 * i), s(2 * i + 1));
    pairs[i] = reinterpret_cast<const uint32_t&>(two);
  }
}

template <class Mixture>
__device__ void write_rows(const Arguments& a, const Block& block, int row, const Softmax& softmax, const Mixture& o) {
  const int lane = int(threadIdx.x % 32);
  float top = -INFINITY;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int own = row + h * 8;
    const float sum = over_row(softmax.sum[h], false), inverse = 1 / sum;
    if (own >= block.queries) continue;
    const float maximum = softmax.maximum[h] * a.scale;
    top = fmaxf(top, maximum);
    const int64_t at = (block.query_begin + own) * a.heads + block.head;
    auto* to = reinterpret_cast<__nv_bfloat162*>(a.o + at * kValue) + lane % 4;
#pragma unroll
    for (int n = 0; n < kValue / 8; ++n) {
      to[n * 4] = __floats2bfloat162_rn(o(n * 4 + h * 2) * inverse, o(n * 4 + h * 2 + 1) * inverse);
    }
    if (a.lse != nullptr && lane % 4 == 0) a.lse[at] = maximum + logf(sum);
  }
  if (a.max_logit == nullptr) return;
  top = warp_max(top);
  if (lane == 0 && top > -INFINITY) raise(a.max_logit + block.head, top);
}

__device__ void attend(const Arguments& a, const Block& block, int tiles, Shared& s) {
  const int thread = int(threadIdx.x) - kGroup;
  const int group = __shfl_sync(0xffffffffu, thread / kGroup, 0);
  ScoreMma score;
  ValueMma mix;
  const auto score_slice = score.get_slice(group * kGroup);
  const auto mix_slice = mix.get_slice(group * kGroup);
  const auto q =
      score_slice.make_fragment_A(score_slice.partition_A(cute::make_tensor(cute::make_smem_ptr(s.q), QueryLayout{})));
  const auto k = score_slice.make_fragment_B(
      score_slice.partition_B(cute::make_tensor(cute::make_smem_ptr(&s.k[0][0]), KeyLayout{})));
  const auto v = mix_slice.make_fragment_B(
      mix_slice.partition_B(cute::make_tensor(cute::make_smem_ptr(&s.v[0][0]), ValueLayout{})));
  const auto tile_shape = cute::Shape<cute::Int<kQueries>, cute::Int<kKeys>>{};
  auto scores = cute::partition_fragment_C(score, tile_shape);
  auto o = cute::partition_fragment_C(mix, cute::Shape<cute::Int<kQueries>, cute::Int<kValue>>{});
  auto p = cute::make_tensor<Element>(cute::partition_shape_A(mix, tile_shape));
  cute::clear(o);
  mix.accumulate_ = cute::GMMA::ScaleOut::One;

  const auto issue_scores = [&](int tile) {
    Full::wait(&s.full_k[tile % kStages], tile / kStages % 2);
    cute::warpgroup_fence_operand(scores);
    cute::warpgroup_arrive();
    score.accumulate_ = cute::GMMA::ScaleOut::Zero;
#pragma unroll
    for (int i = 0; i < kKey / 16; ++i) {
      cute::gemm(score, q(cute::_, cute::_, i), k(cute::_, cute::_, i, tile % kStages), scores);
      score.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  };
  const auto issue_mixture = [&](int tile) {
    Full::wait(&s.full_v[tile % kStages], tile / kStages % 2);
    cute::warpgroup_fence_operand(o);
    cute::warpgroup_fence_operand(p);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      cute::gemm(mix, p(cute::_, cute::_, i), v(cute::_, cute::_, i, tile % kStages), o);
    }
    cute::warpgroup_commit_batch();
  };
  const auto release = [&](uint64_t* empty) {
    if (thread % 32 == 0) Empty::arrive(empty);
  };
  const auto take_turn = [&] { Turn::sync(kGroups * kGroup, uint32_t(group)); };
  const auto give_turn = [&] { Turn::arrive(kGroups * kGroup, uint32_t(1 - group)); };

  const int row = block.first + group * 64 + thread % kGroup / 32 * 16 + thread % 32 / 4,
            position = block.position(row);
  const float scale_log2 = a.scale * kLog2e;
  Softmax softmax;
  float fade[2];
  if (group == 1) give_turn();
  Full::wait(&s.full_q, 0);
  take_turn();
  issue_scores(0);
  give_turn();
  cute::warpgroup_wait<0>();
  cute::warpgroup_fence_operand(scores);
  release(&s.empty_k[0]);
  softmax.take(scores, position, 0, scale_log2, fade);  // nothing to fade yet
  round_weights(p, scores);
  for (int tile = 1; tile < tiles; ++tile) {
    take_turn();
    issue_scores(tile);
    issue_mixture(tile - 1);
    give_turn();
    cute::warpgroup_wait<1>();
    cute::warpgroup_fence_operand(scores);
    release(&s.empty_k[tile % kStages]);
    softmax.take(scores, position, tile * kKeys, scale_log2, fade);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(o);
    release(&s.empty_v[(tile - 1) % kStages]);
    if (__any_sync(0xffffffffu, fade[0] != 1 || fade[1] != 1)) {
#pragma unroll
      for (int i = 0; i < decltype(cute::size(o))::value; ++i) o(i) *= fade[i / 2 % 2];
    }
    round_weights(p, scores);
  }
  issue_mixture(tiles - 1);
  cute::warpgroup_wait<0>();
  cute::warpgroup_fence_operand(o);
  write_rows(a, block, row, softmax, o);
}

__global__ void __launch_bounds__(kBlockThreads, 1)
    forward_kernel(const __grid_constant__ Maps maps, const Arguments a) {
  extern __shared__ uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  Block block;
  if (!find_block<kQueries, Side::queries>(a, block)) return;
  const int tiles = (min(block.position(block.first + kQueries), block.keys) + kKeys - 1) / kKeys;
  if (threadIdx.x == 0) {
    Full::init(&shared.full_q, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      Full::init(&shared.full_k[stage], 1);
      Full::init(&shared.full_v[stage], 1);
      Empty::init(&shared.empty_k[stage], kGroups * kGroup / 32);  // a lane of each multiplying warp
      Empty::init(&shared.empty_v[stage], kGroups * kGroup / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    cutlass::arch::warpgroup_reg_dealloc<24>();
    if (threadIdx.x == 0) load(maps, block, tiles, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<240>();
    attend(a, block, tiles, shared);
  }
}

}  // namespace

bool takes(const Dims& d, const Inputs& in) {
  return has_sm90_kernels(d) && d.tokens > 0 && d.heads > 0 && d.logit_scale() > 0 && copy_engine_takes(in.q) &&
         copy_engine_takes(in.kv) && copy_engine_takes(in.k_shared);
}

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Arguments& a) {
  const Maps maps{
      tensor_map(in.q.reshaped({d.tokens, d.heads * kKey}), kBoxColumns, kQueries),
      tensor_map(in.kv.reshaped({a.key_tokens, d.heads * (kNope + kValue)}), kBoxColumns, kKeys),
      tensor_map(in.k_shared, kBoxColumns, kKeys),
  };
  launch(forward_kernel, block_numbers<kQueries, Side::queries>(a) * d.heads, kBlockThreads, kSharedBytes, stream)(maps,
                                                                                                                   a);
}

}  // namespace tessera::ops::mla::cuda::sm90
