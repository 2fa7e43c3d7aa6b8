// Products of groups of rows for sm_90: bf16 operands, float32 sums in registers, wgmma fed by the copy engine.
//
// A block of threads walks over tiles of 128 x 256 (one block a multiprocessor, tiles dealt in turn). One thread loads
// 64-deep stages of both operands, four in flight; two groups of 128 threads own 64 rows of the tile each, multiply
// (m64n256k16: 80 bytes of shared memory a cycle of the 128 there are) and store. A tile of 128 x 256 needs 48 KiB a
// stage of 1024 cycles: 48 bytes a cycle and multiprocessor from the second-level cache, of some 64.
//
// Nothing here depends on an expert's number of rows but the list of tiles: rows are whole blocks of 128 of one expert,
// so a tile never sees two experts, one map covers all rows and one all experts, and no map changes on the way. Padding
// rows are zeros; they make the ragged depth of the gradient form whole, too.
//
// Results leave through two 8 KiB buffers a group, 128 bytes of each row at a time. The gradient form lets the copy
// engine add: each element of c gets exactly one addition a call, so its bits cannot depend on an order, and no thread
// waits for the old value.
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "core/cuda/kernel.h"
#include "core/cuda/tensor_map.h"
#include "ops/experts/cuda.h"
#include "ops/experts/cuda/products.h"

namespace tessera::ops::experts::cuda::sm90 {
namespace {

using namespace tessera::cuda;
using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;
using Major = cute::GMMA::Major;
using Element = cute::bfloat16_t;

constexpr int kTileM = kBlockRows, kTileN = 256, kTileK = 64, kStages = 4;
constexpr int kGroup = 128, kThreads = 3 * kGroup;  // a group that loads, two that multiply
constexpr int kBlocks = 132;                        // multiprocessors of an H100 or H200
constexpr int kOutRows = 64, kOutBytes = 128, kOutBuffers = 2;

// Whose operands are contiguous along the depth.
template <Form kForm>
struct Operands {
  static constexpr Major kMajorA = kForm == Form::gradient ? Major::MN : Major::K;
  static constexpr Major kMajorB = kForm == Form::transposed ? Major::K : Major::MN;

  // Atoms are laid along the depth first where it is not the contiguous index: one box of 64 x 64 is one run of memory.
  template <Major kMajor, int kExtent>
  using Layout =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_SW128_Atom<Element, kMajor>{},
                                   cute::Shape<cute::Int<kExtent>, cute::Int<kTileK>, cute::Int<kStages>>{},
                                   cute::conditional_t<kMajor == Major::K, cute::Step<cute::_1, cute::_2, cute::_3>,
                                                       cute::Step<cute::_2, cute::_1, cute::_3>>{}));
  using LayoutA = Layout<kMajorA, kTileM>;
  using LayoutB = Layout<kMajorB, kTileN>;
  using Mma = decltype(cute::make_tiled_mma(cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<kMajorA, kMajorB>{},
                                            cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
};

struct Shared {
  alignas(1024) Element a[kStages][kTileM * kTileK];
  alignas(1024) Element b[kStages][kTileN * kTileK];
  alignas(1024) uint8_t out[2][kOutBuffers][kOutRows * kOutBytes];
  uint64_t full[kStages], empty[kStages];
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // the base is aligned by hand
static_assert(kSharedBytes <= 227 * 1024, "what a block of threads can have on sm_90");
constexpr uint32_t kStageBytes = (kTileM + kTileN) * kTileK * sizeof(Element);

struct Maps {
  CUtensorMap a[2], b[2], c[2];  // by term
};

// What is to be done. `outputs` terms have a c each, `summed` terms share one; one of the two is 1.
struct Work {
  int outputs, summed, experts;
  int m_tiles = 0, n_tiles = 0;  // of one c; m_tiles for the gradient form only
  int width = 0, depth = 0;      // N; stages of one term, not for the gradient form
  const int64_t *offsets = nullptr, *counts = nullptr;
  const int32_t* blocks = nullptr;
};

struct Tile {
  int output, expert, m, n;  // m, n: elements
  int first_row, depth;      // gradient: rows of the expert; depth in stages, of all terms
};

template <Form kForm>
__device__ int count_tiles(const Work& w) {
  if (kForm == Form::gradient) return w.experts * w.outputs * w.m_tiles * w.n_tiles;
  return int(w.offsets[w.experts] / kBlockRows) * w.outputs * w.n_tiles;
}

// Neighbouring tiles share rows, and then their expert's weights.
template <Form kForm>
__device__ Tile tile_at(const Work& w, int index) {
  Tile t;
  t.n = index % w.n_tiles * kTileN;
  index /= w.n_tiles;
  if constexpr (kForm == Form::gradient) {
    t.m = index % w.m_tiles * kTileM;
    index /= w.m_tiles;
    t.output = index % w.outputs;
    t.expert = index / w.outputs;
    t.first_row = int(w.offsets[t.expert]);
    t.depth = int((w.counts[t.expert] + kTileK - 1) / kTileK);
  } else {
    t.output = index % w.outputs;
    const int block = index / w.outputs;
    t.m = block * kTileM;
    t.expert = w.blocks[block];
    t.first_row = 0;
    t.depth = w.depth * w.summed;
  }
  return t;
}

// A place in the ring of stages. The barriers' parity turns over with it.
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <Form kForm>
__device__ void load_stage(const Maps& maps, const Work& w, const Tile& t, int step, Shared& s, int stage) {
  using Load2 = cute::SM90_TMA_LOAD_2D;
  using Load3 = cute::SM90_TMA_LOAD_3D;
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int kBox = 64 * kTileK;  // elements of a box of 64 x 64
  uint64_t* full = &s.full[stage];
  if constexpr (kForm == Form::gradient) {
    const int row = t.first_row + step * kTileK;
    for (int i = 0; i < kTileM / 64; ++i) {
      Load2::copy(&maps.a[t.output], full, kHint, s.a[stage] + i * kBox, t.m + i * 64, row);
    }
    for (int i = 0; i < kTileN / 64; ++i) {
      Load2::copy(&maps.b[t.output], full, kHint, s.b[stage] + i * kBox, t.n + i * 64, row);
    }
  } else {
    const int term = w.summed > 1 ? step / w.depth : t.output;
    const int k = (w.summed > 1 ? step % w.depth : step) * kTileK;
    Load2::copy(&maps.a[term], full, kHint, s.a[stage], k, t.m);
    if constexpr (kForm == Form::transposed) {
      Load3::copy(&maps.b[term], full, kHint, s.b[stage], k, t.n, t.expert);
    } else {
      for (int i = 0; i < kTileN / 64; ++i) {
        Load3::copy(&maps.b[term], full, kHint, s.b[stage] + i * kBox, t.n + i * 64, k, t.expert);
      }
    }
  }
}

template <Form kForm>
__device__ void load_tiles(const Maps& maps, const Work& w, Shared& s) {
  const int tiles = count_tiles<kForm>(w);
  Place place;
  for (int index = int(blockIdx.x); index < tiles; index += int(gridDim.x)) {
    const Tile t = tile_at<kForm>(w, index);
    for (int step = 0; step < t.depth; ++step) {
      Empty::wait(&s.empty[place.stage], place.parity ^ 1);
      Full::arrive_and_expect_tx(&s.full[place.stage], kStageBytes);
      load_stage<kForm>(maps, w, t, step, s, place.stage);
      place.advance();
    }
  }
}

// Columns [first, first + 128 bytes) of a group's 64 rows of sums into `to`, swizzled as the copy engine reads it:
// 16-byte piece p of row r lies at piece p ^ (r % 8). Sum i of a thread is element (warp * 16 + lane / 4 + 8 (i / 2 %
// 2), i / 4 * 8 + lane % 4 * 2 + i % 2).
template <int kFirst, class Sums>
__device__ void write_bf16(const Sums& sums, uint8_t* to) {
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x % kGroup / 32);
  // Each lane gives the address of one row of one of the four 8 x 8 matrices of a store: rows 0 and 8, pieces 0 and 1.
  const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
  const uint32_t base = cute::cast_smem_ptr_to_uint(to) + uint32_t(row * kOutBytes);
#pragma unroll
  for (int piece = 0; piece < 8; piece += 2) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (kFirst / 8 + piece + i / 2) * 4 + i % 2 * 2;
      const __nv_bfloat162 two = __floats2bfloat162_rn(sums(at), sums(at + 1));
      packed[i] = reinterpret_cast<const uint32_t&>(two);
    }
    const uint32_t address = base + uint32_t(((piece + lane / 16) ^ (lane % 8)) * 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(packed[0]),
                 "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
  }
}
template <int kFirst, class Sums>
__device__ void write_f32(const Sums& sums, uint8_t* to) {
  const int lane = int(threadIdx.x % 32), row = int(threadIdx.x % kGroup / 32) * 16 + lane / 4;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const int at = (kFirst / 8 + block) * 4, piece = block * 2 + lane % 4 / 2;
    uint8_t* upper = to + row * kOutBytes + (piece ^ (row % 8)) * 16 + lane % 2 * 8;  // (row + 8) % 8 is the same
    *reinterpret_cast<float2*>(upper) = make_float2(sums(at), sums(at + 1));
    *reinterpret_cast<float2*>(upper + 8 * kOutBytes) = make_float2(sums(at + 2), sums(at + 3));
  }
}

// A group's 64 x 256 sums to c. `stores` counts its stores over all tiles.
template <Form kForm, class Sums>
__device__ void store_tile(const CUtensorMap& c, const Work& w, const Tile& t, int group, const Sums& sums, Shared& s,
                           uint32_t& stores) {
  constexpr int kColumns = kForm == Form::gradient ? kOutBytes / 4 : kOutBytes / 2;
  const bool issues = threadIdx.x % kGroup == 0;
  const auto meet = [&] { cutlass::arch::NamedBarrier::sync(kGroup, uint32_t(group)); };
  cute::for_each(cute::make_int_sequence<kTileN / kColumns>{}, [&](auto part) {
    constexpr int kFirst = decltype(part)::value * kColumns;
    if (t.n + kFirst >= w.width) return;
    uint8_t* buffer = s.out[group][stores % kOutBuffers];
    ++stores;
    if (issues) cute::tma_store_wait<kOutBuffers - 1>();  // the buffer's last store has read it
    meet();
    if constexpr (kForm == Form::gradient) {
      write_f32<kFirst>(sums, buffer);
    } else {
      write_bf16<kFirst>(sums, buffer);
    }
    cute::tma_store_fence();
    meet();
    if (!issues) return;
    if constexpr (kForm == Form::gradient) {
      cute::SM90_TMA_REDUCE_ADD_3D::copy(&c, buffer, t.n + kFirst, t.m + group * kOutRows, t.expert);
    } else {
      cute::SM90_TMA_STORE_2D::copy(&c, buffer, t.n + kFirst, t.m + group * kOutRows);
    }
    cute::tma_store_arrive();
  });
}

template <Form kForm>
__device__ void multiply_tiles(const Maps& maps, const Work& w, Shared& s) {
  using O = Operands<kForm>;
  const int thread = int(threadIdx.x) - kGroup;
  const int group = __shfl_sync(0xffffffffu, thread / kGroup, 0);
  typename O::Mma mma;
  const auto slice = mma.get_slice(group * kGroup);
  const auto a = cute::make_tensor(cute::make_smem_ptr(&s.a[0][0]), typename O::LayoutA{});
  const auto b = cute::make_tensor(cute::make_smem_ptr(&s.b[0][0]), typename O::LayoutB{});
  const auto fragments_a = slice.make_fragment_A(slice.partition_A(a));  // (MMA, M, K, stage): descriptors
  const auto fragments_b = slice.make_fragment_B(slice.partition_B(b));
  auto sums = cute::partition_fragment_C(mma, cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{});
  const auto release = [&](int stage) {
    if (thread % 32 == 0) Empty::arrive(&s.empty[stage]);
  };

  const int tiles = count_tiles<kForm>(w);
  Place place;
  uint32_t stores = 0;
  for (int index = int(blockIdx.x); index < tiles; index += int(gridDim.x)) {
    const Tile t = tile_at<kForm>(w, index);
    if (t.depth == 0) continue;
    int last = 0;
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    for (int step = 0; step < t.depth; ++step) {
      Full::wait(&s.full[place.stage], place.parity);
      cute::warpgroup_fence_operand(sums);
      cute::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kTileK / 16; ++k) {
        cute::gemm(mma, fragments_a(cute::_, cute::_, k, place.stage), fragments_b(cute::_, cute::_, k, place.stage),
                   sums);
        mma.accumulate_ = cute::GMMA::ScaleOut::One;
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();  // the step before this one has read its stage
      cute::warpgroup_fence_operand(sums);
      if (step > 0) release(last);
      last = place.stage;
      place.advance();
    }
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(sums);
    release(last);
    store_tile<kForm>(maps.c[t.output], w, t, group, sums, s, stores);
  }
  if (threadIdx.x % kGroup == 0) cute::tma_store_wait<0>();  // shared memory lives as long as its readers
}

template <Form kForm>
__global__ void __launch_bounds__(kThreads, 1) multiply_kernel(const __grid_constant__ Maps maps, const Work work) {
  extern __shared__ uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      Full::init(&shared.full[stage], 1);
      Empty::init(&shared.empty[stage], 2 * kGroup / 32);  // a lane of each multiplying warp
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) load_tiles<kForm>(maps, work, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    multiply_tiles<kForm>(maps, work, shared);
  }
}

template <Form kForm>
void multiply_as(GpuStream stream, const Groups& groups, bool sum, Terms terms) {
  constexpr bool kGradient = kForm == Form::gradient;
  const Term& first = *terms.begin();
  Maps maps;
  for (int i = 0; i < 2; ++i) {  // the second's are not used where there is one term
    const Term& term = terms.begin()[i < int(terms.size()) ? i : 0];
    maps.a[i] = tensor_map(term.a, 64, kGradient ? 64 : kTileM);
    maps.b[i] = tensor_map(term.b, 64, kForm == Form::transposed ? kTileN : 64);
    maps.c[i] = tensor_map(term.c, kGradient ? kOutBytes / 4 : kOutBytes / 2, kOutRows);
  }
  const int count = int(terms.size());
  Work work{.outputs = sum ? 1 : count, .summed = sum ? count : 1, .experts = int(groups.experts)};
  work.width = int(first.c.dim(first.c.rank() - 1));
  work.n_tiles = int(ceil_div(work.width, kTileN));
  work.m_tiles = kGradient ? int(ceil_div(first.c.dim(1), kTileM)) : 0;
  work.depth = kGradient ? 0 : int(ceil_div(first.a.dim(1), kTileK));
  work.offsets = groups.offsets.gpu<int64_t>();
  work.counts = groups.counts.gpu<int64_t>();
  work.blocks = groups.blocks.gpu<int32_t>();
  const int64_t tiles =
      work.outputs * work.n_tiles * (kGradient ? groups.experts * work.m_tiles : groups.rows / kBlockRows);
  TESSERA_CHECK(tiles < (int64_t{1} << 31) - kBlocks, "experts: {} tiles in one product", tiles);
  launch(multiply_kernel<kForm>, std::min<int64_t>(tiles, kBlocks), kThreads, kSharedBytes, stream)(maps, work);
}

}  // namespace

bool takes(const Term& term) {
  return term.a.dtype() == DType::bf16 && copy_engine_takes(term.a) && copy_engine_takes(term.b) &&
         copy_engine_takes(term.c);
}

void multiply(GpuStream stream, const Groups& groups, Form form, Terms terms) {
  switch (form) {
    case Form::transposed: return multiply_as<Form::transposed>(stream, groups, false, terms);
    case Form::plain: return multiply_as<Form::plain>(stream, groups, false, terms);
    case Form::plain_sum: return multiply_as<Form::plain>(stream, groups, true, terms);
    case Form::gradient: return multiply_as<Form::gradient>(stream, groups, false, terms);
  }
}

}  // namespace tessera::ops::experts::cuda::sm90
