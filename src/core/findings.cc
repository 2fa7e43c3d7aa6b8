// Judges the facts of a machine: what is missing or odd, what that means for a run, and what to do about it.
#include <algorithm>

#include "core/error.h"
#include "core/gpu.h"
#include "core/machine.h"

namespace tessera {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kLittleMemory = 4 * kGiB;  // the nano runs take about one; a build of Tessera about one a compiler
constexpr int64_t kLittleDisk = 5 * kGiB;    // a few checkpoints of the nano model and a corpus

void judge_cpu(const Machine& m, std::vector<Finding>& out) {
  const CpuFeatures built = built_for();
  if ((built.avx512 && !m.cpu.avx512) || (built.avx2 && !m.cpu.avx2)) {
    out.push_back({true, "this binary was compiled for another CPU", "it can stop with 'Illegal instruction'",
                   "build on this machine, or with -DTESSERA_NATIVE=OFF for any x86-64-v3 CPU"});
  } else if (m.cpu.avx512 && !built.avx512) {
    out.push_back({true, "this binary does not use the CPU's AVX-512",
                   "everything but the matrix products runs on vectors of half the width",
                   "build with -DTESSERA_NATIVE=ON"});
  }
  if (!m.cpu.avx512_bf16 && !m.cpu.amx_bf16) {
    out.push_back({false, "the CPU has no bf16 products", "train.product = \"bf16\" gains nothing here",
                   "keep train.product = \"f32\""});
  }
  const double allowed = m.cgroup_cpus > 0 ? std::min(m.cgroup_cpus, static_cast<double>(m.usable_cpus))
                                           : static_cast<double>(m.usable_cpus);
  if (m.openmp_threads > allowed + 0.5) {
    out.push_back({true, fmt::format("{} threads on {:.3g} CPUs", m.openmp_threads, allowed),
                   "threads wait for each other at every step",
                   fmt::format("set OMP_NUM_THREADS={}", std::max(1, static_cast<int>(allowed)))});
  } else if (2 * m.openmp_threads <= std::min(static_cast<double>(m.physical_cores), allowed)) {
    out.push_back({false, fmt::format("{} threads on {} cores", m.openmp_threads, m.physical_cores),
                   "most of the CPU stays idle", "unset OMP_NUM_THREADS to use them all"});
  }
}

void judge_memory_and_disk(const Machine& m, std::vector<Finding>& out) {
  const auto gib = [](int64_t bytes) { return static_cast<double>(bytes) / kGiB; };
  if (m.usable_memory_bytes() < kLittleMemory) {
    out.push_back({true, fmt::format("{:.1f} GiB of memory usable", gib(m.usable_memory_bytes())),
                   "only the smallest runs fit",
                   "close other programs, or ask for more; `tessera plan memory` says "
                   "what a run needs"});
  }
  if (m.cgroup_memory_bytes > 0 && m.cgroup_memory_bytes < m.memory_bytes) {
    out.push_back({false,
                   fmt::format("the container is limited to {:.1f} GiB of {:.1f}", gib(m.cgroup_memory_bytes),
                               gib(m.memory_bytes)),
                   "plans and runs go by the limit", "raise it for larger runs"});
  }
  if (m.disk_free_bytes < kLittleDisk) {
    out.push_back({true, fmt::format("{:.1f} GiB free in this directory", gib(m.disk_free_bytes)),
                   "checkpoints may not fit", "free some space, or set the run directory to another disk"});
  }
}

void judge_gpus(const Machine& m, std::vector<Finding>& out) {
  const size_t usable = list_gpus().size();
  if (!m.nvidia.found) {
    out.push_back({false, "no NVIDIA driver", "runs use the CPU", "on a machine with a GPU install its driver"});
  } else if (m.nvidia.gpus.size() > usable) {
    out.push_back({true, fmt::format("{} GPUs present, {} usable ({})", m.nvidia.gpus.size(), usable, gpu_build()),
                   "runs use the CPU",
                   "build with `cmake --preset cuda`, and keep the driver at least as new as that CUDA version"});
  }
}

void judge_network(const Machine& m, std::vector<Finding>& out) {
  if (m.nvidia.gpus.size() > 1 && m.nccl.name.empty()) {
    out.push_back({true, fmt::format("{} GPUs and no NCCL", m.nvidia.gpus.size()), "a run uses one GPU only",
                   "install libnccl2 of NVIDIA's repository, or the wheel nvidia-nccl-cu13 with its lib folder in "
                   "LD_LIBRARY_PATH"});
  }
  if (m.mpirun.empty() || m.mpi.name.empty()) {
    const char* missing = m.mpirun.empty() ? (m.mpi.name.empty() ? "no MPI" : "no mpirun on PATH") : "no MPI library";
    out.push_back({false, missing, "matters only to runs of several processes",
                   "for those install openmpi-bin and libopenmpi-dev"});
  }
  if (m.rdma.empty()) {
    out.push_back(
        {false, "no RDMA network", "matters only to runs over several machines", "nothing to do for a single machine"});
  }
}

}  // namespace

std::vector<Finding> findings(const Machine& machine) {
  std::vector<Finding> out;
  judge_cpu(machine, out);
  judge_memory_and_disk(machine, out);
  judge_gpus(machine, out);
  judge_network(machine, out);
  std::stable_partition(out.begin(), out.end(), [](const Finding& finding) { return finding.problem; });
  return out;
}

}  // namespace tessera
