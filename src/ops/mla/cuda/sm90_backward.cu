// Attention backward for sm_90, of heads of 128 + 64 / 128: the formulas of backward.cu in one pass, 1664 flops a pair
// instead of 2304. Floor at T 32768, H 16: 14.3 TFLOP, 18 ms at the 790 TFLOP/s of a large product; it takes 26.6.
//
// A block of threads owns 128 keys of one head and walks over the document's queries, 64 at a time from the last on,
// which the copy engine brings two tiles ahead. Two groups of 128 threads own 64 keys each and work on transposes,
//
//   S^T = K Q^T,  dP^T = V do^T,   dV += P^T do  (P^T from registers),   dS^T to shared memory,
//   dK += dS^T Q,   dQ tile = dS K  (each group 96 of its 192 columns, over all 128 keys)
//
// with dK and dV in registers, 160 of the 240 that a thread has. The others hold S, then P beside dP, then a part of
// dQ: P is kept rounded to bf16, as dV takes it, and dS is made of that. Half of dK comes after the next tile's S, so
// that the tensor cores have work while dQ is stored and exponentials are taken.
//
// dQ adds up over blocks of keys in float32 in global memory, in one order: block j of a document adds to a tile of
// queries as the j-th. A thread apart (write_sums) waits for its turn, lets the copy engine add 48 KiB from shared
// memory, and passes the turn on; groups wait for it only where it is a whole tile late. Turns cannot block each other:
// a block waits for the one before it in its document alone, and blocks take their numbers in the order in which they
// start, the longest first. Tiles of the sums are in the order in which threads hold them; a last kernel scales, rounds
// and sorts.
//
// What was tried, in TFLOP/s at T 32768, H 16 (H200, whose clock falls under this load: +-2 %): blocks of 16 heads
// beside each other 485, of 8 530, of 4 540, of 2 523, of 1 462 (few blocks of a head at a time read each tile of
// queries into the L2 cache too often; many wait for each other). Tiles prefetched into L2: 498 to 532. dV in one
// batch, dK split otherwise, a part of it before the groups meet: 525 to 540. Not right, but to see what is left:
// without turns 544, without adding dQ at all 643.
//
// Rows past the end of a document, of another document or zeros, have P = dS = 0.
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "core/cuda/tensor_map.h"
#include "core/cuda/turns.h"
#include "core/cuda/wgmma.h"
#include "ops/mla/cuda/sm90.h"

namespace tessera::ops::mla::cuda::sm90 {
namespace {

namespace mma = tessera::cuda::wgmma;
using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;
using Named = cutlass::arch::NamedBarrier;
using Major = mma::Major;

constexpr int kKeys = 128, kQueries = kQueryTile, kStages = 2;
constexpr int64_t kBeside = 4;                                      // heads whose blocks start in turn
constexpr int kBlockThreads = 3 * kGroup;                           // loader and writer, then two groups that multiply
constexpr int kKeyPanel = kKeys * 64, kQueryPanel = kQueries * 64;  // elements

// The tiles of queries that a block of keys sees: [begin, end) among those of its document, the first of which is
// `number` of its head.
struct Walk {
  int begin, end;
  int64_t number;
};
__device__ Walk walk_of(const Arguments& a, const Block& block) {
  return {max(block.first - block.position(0), 0) / kQueries, (block.queries + kQueries - 1) / kQueries,
          a.offsets[block.document] / kQueries + block.document};
}

struct Shared {
  alignas(1024) bf16 k[3][kKeyPanel];  // columns 0, 128, 64 and following: see multiply_tiles()
  alignas(1024) bf16 v[2][kKeyPanel];
  alignas(1024) bf16 q[kStages][3][kQueryPanel];
  alignas(1024) bf16 d_o[kStages][2][kQueryPanel];
  alignas(1024) bf16 ds[kKeyPanel];  // dS^T
  alignas(1024) float sums[2][kHalfSums];
  alignas(16) float terms[kStages][2][kQueries];
  uint64_t keys_full, full[kStages], empty[kStages], sums_full[2], sums_empty[2];
  Block block;
  Walk walk;
};
constexpr int kSharedBytes = sizeof(Shared);
static_assert(kSharedBytes <= 227 * 1024, "what a block of threads can have on sm_90");

constexpr uint32_t kKeyBytes = (3 + 2) * kKeyPanel * sizeof(bf16);
constexpr uint32_t kTermBytes = 2 * kQueries * sizeof(float);
constexpr uint32_t kStageBytes = (3 + 2) * kQueryPanel * sizeof(bf16) + kTermBytes;

struct Maps {
  CUtensorMap q, d_o, kv, k_shared;
};

__device__ void load_tiles(const Maps& maps, const Work& w, const Block& block, const Walk& walk, Shared& s) {
  if (walk.begin >= walk.end) return;
  using Load2 = cute::SM90_TMA_LOAD_2D;
  using Load3 = cute::SM90_TMA_LOAD_3D;
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const int head = int(block.head), key = int(block.key_begin) + block.first;
  Full::arrive_and_expect_tx(&s.keys_full, kKeyBytes);
  Load3::copy(&maps.kv, &s.keys_full, kHint, s.k[0], 0, head, key);
  Load3::copy(&maps.kv, &s.keys_full, kHint, s.k[2], 64, head, key);
  Load2::copy(&maps.k_shared, &s.keys_full, kHint, s.k[1], 0, key);
  for (int p = 0; p < 2; ++p) Load3::copy(&maps.kv, &s.keys_full, kHint, s.v[p], kNope + p * 64, head, key);
  for (int i = 0; i < walk.end - walk.begin; ++i) {
    const int tile = walk.end - 1 - i, query = int(block.query_begin) + tile * kQueries, stage = i % kStages;
    uint64_t* full = &s.full[stage];
    Empty::wait(&s.empty[stage], uint32_t(i / kStages + 1) % 2);
    Full::arrive_and_expect_tx(full, kStageBytes);
    for (int p = 0; p < 3; ++p) Load3::copy(&maps.q, full, kHint, s.q[stage][p], p * 64, head, query);
    for (int p = 0; p < 2; ++p) Load3::copy(&maps.d_o, full, kHint, s.d_o[stage][p], p * 64, head, query);
    const float* terms = w.terms + (block.head * w.query_numbers + walk.number + tile) * 2 * kQueries;
    cute::SM90_BULK_COPY_G2S::copy(terms, full, s.terms[stage], kTermBytes);
  }
}

// One half of a tile of sums; the first block of keys sets it.
__device__ void add_sums(float* to, const float* from, bool first) {
  constexpr int kBytes = kHalfSums * sizeof(float);
  if (first) {
    cute::SM90_BULK_COPY_S2G::copy(from, to, kBytes);
    return;
  }
  add_floats(to, shared_address(from), kBytes);
}

__device__ void write_sums(const Work& w, const Block& block, const Walk& walk, Shared& s) {
  const int64_t first_tile = (block.head - w.head_begin) * w.query_numbers + walk.number;
  const int mine = block.first / kKeys;
  uint32_t parity = 0;
  for (int tile = walk.end - 1; tile >= walk.begin; --tile, parity ^= 1) {
    float* to = w.sums + (first_tile + tile) * (2 * kHalfSums);
    int* turn = w.turns + 1 + first_tile + tile;
    if (mine > 0) wait_for_turn(turn, mine);
    for (int half = 0; half < 2; ++half) {
      Full::wait(&s.sums_full[half], parity);
      add_sums(to + half * kHalfSums, s.sums[half], mine == 0);
    }
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();  // shared memory has been read
    for (int half = 0; half < 2; ++half) Empty::arrive(&s.sums_empty[half]);
    wait_for_writes();  // and global memory written
    pass_turn(turn, mine + 1);
  }
}

// Of a group of 128 threads.
struct Sums {
  float dk[kKey / 2] = {}, dv[kValue / 2] = {};
};

// Where operands begin, from where shared memory does. Offsets are constants: what differs from product to product
// stays out of registers.
struct Operands {
  uint32_t base;  // address of Shared / 16

  __device__ mma::Operand columns(size_t offset) const { return mma::by_columns(base + uint32_t(offset / 16)); }
  __device__ mma::Operand rows(size_t offset, uint32_t panel) const {
    return mma::by_rows(base + uint32_t(offset / 16), panel);
  }
};
constexpr uint32_t kKeyPanelBytes = kKeyPanel * sizeof(bf16), kQueryPanelBytes = kQueryPanel * sizeof(bf16);

// sums = (64 keys of a group) (64 queries)^T over kPanels * 64 columns, each panel of keys in slot kSlots[panel].
template <int... kSlots>
__device__ void multiply_columns(float* sums, mma::Operand keys, mma::Operand queries) {
  using Mma = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::K>;
  constexpr uint32_t kSlot[] = {kSlots...};
#pragma unroll
  for (int k = 0; k < int(sizeof...(kSlots)) * 4; ++k) {
    const uint32_t in_panel = k % 4 * 32;
    mma::multiply<Mma>(keys.on(kSlot[k / 4] * kKeyPanelBytes + in_panel),
                       queries.on(k / 4 * kQueryPanelBytes + in_panel), sums, k > 0);
  }
}

// P^T of S^T, rounded. `ahead`: position of the tile's first query less that of the thread's first key.
__device__ void take_exponentials(float* p, float* scores, const float* lse, int column, int ahead, bool masked,
                                  float scale_log2) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 two = *reinterpret_cast<const float2*>(lse + n * 8 + column);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& x = scores[n * 4 + r * 2];
      float& y = scores[n * 4 + r * 2 + 1];
      x = exp2_fast(x * scale_log2 - two.x);
      y = exp2_fast(y * scale_log2 - two.y);
      if (masked) {
        const int here = ahead + n * 8 + column - r * 8;
        if (here < 0) x = 0;
        if (here < -1) y = 0;
      }
      p[n * 2 + r] = __uint_as_float(pack(x, y));
    }
  }
}

// dS^T of 16 queries (columns) to shared memory, rounded.
__device__ void write_ds(const float* p, const float* d_p, const float* delta, int lane, bool first_token,
                         uint32_t ds_row, int columns) {
  uint32_t ds[4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 two = *reinterpret_cast<const float2*>(delta + n * 8 + lane % 4 * 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = n * 2 + r;
      const uint32_t both = __float_as_uint(p[i]);
      float x = __uint_as_float(both << 16) * (d_p[2 * i] - two.x);
      if (n == 0 && first_token) x = 0;
      ds[i] = pack(x, __uint_as_float(both & 0xffff0000u) * (d_p[2 * i + 1] - two.y));
    }
  }
  const uint32_t address = ds_row + uint32_t(((columns / 8 + lane / 16) ^ (lane % 8)) * 16);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(ds[0]),
               "r"(ds[1]), "r"(ds[2]), "r"(ds[3])
               : "memory");
}

__device__ void write_key_sums(const Arguments& a, const Block& block, const Sums& sums, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int own = block.first + row + r * 8;
    if (own >= block.keys) continue;
    const int64_t at = (block.key_begin + own) * a.heads + block.head;
    bf16* dkv = a.dkv + at * (kNope + kValue) + lane % 4 * 2;
    float* part = a.dk_shared_parts + at * kRope + lane % 4 * 2;
    const auto store = [](bf16* to, float x, float y) {
      *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
    };
#pragma unroll
    for (int n = 0; n < kKey / 8; ++n) {
      const float x = sums.dk[n * 4 + r * 2] * a.scale, y = sums.dk[n * 4 + r * 2 + 1] * a.scale;
      if (n < kNope / 8) {
        store(dkv + n * 8, x, y);
      } else {
        *reinterpret_cast<float2*>(part + n * 8 - kNope) = make_float2(x, y);
      }
    }
#pragma unroll
    for (int n = 0; n < kValue / 8; ++n) {
      store(dkv + kNope + n * 8, sums.dv[n * 4 + r * 2], sums.dv[n * 4 + r * 2 + 1]);
    }
  }
}

template <int kGroupIndex>
__device__ void multiply_tiles(const Arguments& a, float scale_log2, Shared& s) {
  using ValueMma = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN>;
  using KeyMma = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<Major::K, Major::MN>;
  using QueryMma = cute::SM90::GMMA::MMA_64x96x16_F32BF16BF16_SS<Major::MN, Major::MN>;
  constexpr uint32_t kRowsOn = 2048;                       // 16 rows further on
  constexpr uint32_t kGroupRows = kGroupIndex * 64 * 128;  // bytes of a panel before the group's keys
  constexpr size_t kStageQ = sizeof(s.q[0]), kStageO = sizeof(s.d_o[0]);
  enum : uint32_t { kDsWritten = 0, kDsRead = 1 };

  Operands o{shared_address(&s) / 16};
  Sums sums;
  const auto start_scores = [&](float* scores, int stage) {
    mma::begin();
    multiply_columns<0, 2, 1>(scores, o.columns(offsetof(Shared, k) + kGroupRows),
                              o.columns(offsetof(Shared, q)).on(stage * kStageQ));
    mma::commit();
  };
  const auto start_dk = [&](int stage, int from) {  // over half of the queries
    const mma::Operand ds = o.columns(offsetof(Shared, ds) + kGroupRows);
    const mma::Operand q = o.rows(offsetof(Shared, q), kQueryPanelBytes).on(stage * kStageQ);
#pragma unroll
    for (int k = from; k < from + 2; ++k) {
      mma::multiply<KeyMma>(ds.on(k * 32), q.on(k * kRowsOn), sums.dk);
    }
    mma::commit();
  };
  if (s.walk.begin < s.walk.end) {
    Full::wait(&s.keys_full, 0);
    Full::wait(&s.full[0], 0);
    // S^T and dP^T share their registers and P^T, once it is rounded, lies beside them: or there would not be enough.
    float window[48], dq[48];
    float *p = window, *scores = window + 16, *d_p = window + 16;
    mma::settle<96>(sums.dk);
    mma::settle<64>(sums.dv);
    start_scores(scores, 0);
    mma::commit();  // in the place of dK of a tile before
    // Position of the tile's first query less that of the group's first key.
    int ahead = s.block.position((s.walk.end - 1) * kQueries) - s.block.first - kGroupIndex * 64;
#pragma unroll 1
    for (int i = 0;; ++i, ahead -= kQueries) {
      const int stage = i % kStages;
      int thread;  // asked for again, as the base is, so that nothing made of them is kept from tile to tile
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread), "+r"(o.base));
      thread %= kGroup;
      const int lane = thread % 32, warp_row = thread / 32 * 16;  // among the group's 64 keys
      const uint32_t ds_row = shared_address(s.ds) + uint32_t(kGroupIndex * 64 + warp_row + lane % 16) * 128;
      const bool last = i == s.walk.end - s.walk.begin - 1;
      mma::finished<1>();
      mma::settle<32>(scores);
      take_exponentials(p, scores, s.terms[stage][0], lane % 4 * 2, ahead - warp_row - lane / 4, ahead < 63,
                        scale_log2);

      mma::begin();
      multiply_columns<0, 1>(d_p, o.columns(offsetof(Shared, v) + kGroupRows),
                             o.columns(offsetof(Shared, d_o)).on(stage * kStageO));
      mma::commit();
      mma::finished<1>();  // dK of the tile before
      if (i > 0 && lane == 0) Empty::arrive(&s.empty[stage ^ 1]);
      mma::finished<0>();
      mma::settle<32>(d_p);
      if (i > 0) Named::sync(2 * kGroup, kDsRead + kGroupIndex);  // both groups are done with dS
      const bool first_token = kGroupIndex == 0 && ahead == 0 && s.block.first == 0 && lane % 4 == 0;
      const float* delta = s.terms[stage][1];
      const mma::Operand d_o = o.rows(offsetof(Shared, d_o), kQueryPanelBytes).on(stage * kStageO);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int k = half * 2; k < half * 2 + 2; ++k) {
          write_ds(p + k * 4, d_p + k * 8, delta + k * 16, lane, k == 0 && first_token, ds_row, k * 16);
        }
        mma::begin();
#pragma unroll
        for (int k = half * 2; k < half * 2 + 2; ++k) {
          const uint32_t four[4] = {__float_as_uint(p[k * 4]), __float_as_uint(p[k * 4 + 1]),
                                    __float_as_uint(p[k * 4 + 2]), __float_as_uint(p[k * 4 + 3])};
          mma::multiply<ValueMma>(four, d_o.on(k * kRowsOn), sums.dv);
        }
        mma::commit();
      }
      cutlass::arch::fence_view_async_shared();
      Named::sync(2 * kGroup, kDsWritten);
      mma::finished<0>();

      // 96 columns of K from panels of 64: 0 to 95 are slot 0 and the first half of slot 2; the rest, 128 and following
      // and then 96 to 127, slot 1 and the second half of slot 2, 64 bytes further on in each row.
      const mma::Operand keys = kGroupIndex == 0 ? o.rows(offsetof(Shared, k), 2 * kKeyPanelBytes)
                                                 : o.rows(offsetof(Shared, k[1]), kKeyPanelBytes + 64);
      const mma::Operand ds = o.rows(offsetof(Shared, ds), kKeyPanelBytes);
      mma::begin();
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        mma::multiply<QueryMma>(ds.on(k * kRowsOn), keys.on(k * kRowsOn), dq, k > 0);
      }
      mma::commit();
      start_dk(stage, 0);
      mma::finished<1>();
      mma::settle<48>(dq);
      if (!last) Named::arrive(2 * kGroup, kDsRead + 1 - kGroupIndex);
      Empty::wait(&s.sums_empty[kGroupIndex], uint32_t(i + 1) % 2);
      float4* to = reinterpret_cast<float4*>(s.sums[kGroupIndex]) + thread;
#pragma unroll
      for (int n = 0; n < 12; ++n) to[n * kGroup] = make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (lane == 0) Empty::arrive(&s.sums_full[kGroupIndex]);

      if (last) {
        mma::begin();
        start_dk(stage, 2);
        break;
      }
      Full::wait(&s.full[stage ^ 1], uint32_t(i + 1) / kStages % 2);
      start_scores(scores, stage ^ 1);
      start_dk(stage, 2);
    }
    mma::finished<0>();
    mma::settle<96>(sums.dk);
    mma::settle<64>(sums.dv);
  }
  const int thread = int(threadIdx.x) % kGroup;
  write_key_sums(a, s.block, sums, kGroupIndex * 64 + thread / 32 * 16 + thread % 32 / 4);
}

// The block of keys that starts as number `order`: kBeside heads beside each other, keys in their order.
__device__ bool find_keys(const Arguments& a, const Work& w, int order, Block& block) {
  const int64_t numbers = block_numbers<kKeys, Side::keys>(a), in_set = order % (numbers * kBeside);
  const int64_t first_head = order / (numbers * kBeside) * kBeside, width = min(kBeside, w.heads - first_head);
  return block_at<kKeys, Side::keys>(a, in_set / width, w.head_begin + first_head + in_set % width, block);
}

__global__ void __launch_bounds__(kBlockThreads, 1)
    key_kernel(const __grid_constant__ Maps maps, const Arguments a, const Work w) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  bool present = true;
  if (threadIdx.x == 0) {
    present = find_keys(a, w, atomicAdd(w.turns, 1), s.block);
    if (present) s.walk = walk_of(a, s.block);
    Full::init(&s.keys_full, 1);
    for (int i = 0; i < kStages; ++i) {
      Full::init(&s.full[i], 1);
      Empty::init(&s.empty[i], 2 * kGroup / 32);  // a lane of each multiplying warp
    }
    for (int i = 0; i < 2; ++i) {
      Empty::init(&s.sums_full[i], kGroup / 32);
      Empty::init(&s.sums_empty[i], 1);
    }
    cutlass::arch::fence_barrier_init();
  }
  if (!__syncthreads_and(present)) return;
  if (threadIdx.x < kGroup) {
    cutlass::arch::warpgroup_reg_dealloc<24>();
    if (threadIdx.x == 0) load_tiles(maps, w, s.block, s.walk, s);
    if (threadIdx.x == 32) write_sums(w, s.block, s.walk, s);
  } else {
    cutlass::arch::warpgroup_reg_alloc<240>();
    if (threadIdx.x < 2 * kGroup) {
      multiply_tiles<0>(a, w.scale_log2, s);
    } else {
      multiply_tiles<1>(a, w.scale_log2, s);
    }
  }
}

}  // namespace

bool takes(const Dims& d, const Inputs& in, const OutputGrads& dout) {
  return takes(d, in) && copy_engine_takes(dout.o);
}

void backward(GpuStream stream, const Dims& d, const Inputs& in, const OutputGrads& dout, const Arguments& a,
              const BackwardWorkspace& workspace) {
  const int64_t keys = a.key_tokens, kv = kNope + kValue;
  Maps maps;
  maps.q =
      tensor_map(in.q.data(), DType::bf16, {{kKey, 1, 64}, {d.heads, kKey, 1}, {d.tokens, d.heads * kKey, kQueries}});
  maps.d_o = tensor_map(dout.o.data(), DType::bf16,
                        {{kValue, 1, 64}, {d.heads, kValue, 1}, {d.tokens, d.heads * kValue, kQueries}});
  maps.kv = tensor_map(in.kv.data(), DType::bf16, {{kv, 1, 64}, {d.heads, kv, 1}, {keys, d.heads * kv, kKeys}});
  maps.k_shared = tensor_map(in.k_shared.data(), DType::bf16, {{kRope, 1, 64}, {keys, a.shared_stride, kKeys}});
  Work w;
  w.query_numbers = block_numbers<kQueries, Side::queries>(a);
  w.scale_log2 = a.scale * kLog2e;
  w.terms = workspace.terms.gpu<float>();
  w.sums = workspace.query_sums.gpu<float>();
  w.turns = workspace.turns.gpu<int32_t>();
  write_terms(stream, a, w);
  const int64_t heads = workspace.query_sums.dim(0);
  for (w.head_begin = 0; w.head_begin < d.heads; w.head_begin += heads) {
    w.heads = std::min(heads, d.heads - w.head_begin);
    workspace.turns.zero();
    launch(key_kernel, block_numbers<kKeys, Side::keys>(a) * w.heads, kBlockThreads, kSharedBytes, stream)(maps, a, w);
    round_sums(stream, a, w);
  }
}

}  // namespace tessera::ops::mla::cuda::sm90
