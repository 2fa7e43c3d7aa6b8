// Sums over thread blocks in global memory, in a fixed order: blocks take turns, and the copy engine of an sm_90 chip
// adds. One thread of a block waits, adds, waits until all is written and passes the turn on. Who is waited for must
// have started before, or nobody moves: let blocks take their numbers as they start.
#pragma once

#include <cstdint>

namespace tessera::cuda {

__device__ inline void wait_for_turn(const int* turn, int mine) {
  for (;;) {
    int now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    if (now == mine) break;
    __nanosleep(64);
  }
  asm volatile("fence.proxy.async;" ::: "memory");  // the copy engine's additions come after those before them
}
__device__ inline void pass_turn(int* turn, int next) {
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(next) : "memory");
}

// to[i] += floats at address `from` of shared memory; part of the thread's batch of bulk copies, in no order with the
// batch's others. `bytes`: a multiple of 16, as both addresses are.
__device__ inline void add_floats(float* to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
// Until all batches of the thread have arrived in global memory.
__device__ inline void wait_for_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace tessera::cuda
