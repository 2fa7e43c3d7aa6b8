// What this machine offers, read from /proc, /sys and the dynamic loader: the facts behind `tessera doctor` and the
// memory that a run may use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

struct CpuFeatures {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx_bf16 = false;
  bool operator==(const CpuFeatures&) const = default;
};

struct NetworkInterface {
  std::string name;
  bool up = false;
  int64_t megabits_per_s = 0;  // 0: the driver does not say
};

struct RdmaDevice {
  std::string name, state, rate;  // of port 1, as the kernel writes them
};

struct NvidiaDriver {
  bool found = false;
  std::string version;
  struct Gpu {
    std::string name;
    int64_t memory_bytes = 0;
  };
  std::vector<Gpu> gpus;
};

struct MessageLibrary {  // between processes
  std::string name;      // under which the loader finds it; "" for none
  std::string version;   // as it says itself
};

struct Machine {
  std::string cpu_model;
  int64_t physical_cores = 0;
  int64_t logical_cpus = 0;
  int64_t usable_cpus = 0;  // that this process may run on
  CpuFeatures cpu;

  int64_t memory_bytes = 0;
  int64_t memory_available_bytes = 0;
  int64_t cgroup_memory_bytes = 0;       // the tightest limit above this process; 0: none
  int64_t cgroup_memory_used_bytes = 0;  // of that limit, without file cache that the kernel can drop
  double cgroup_cpus = 0;                // CPU time per second allowed; 0: no limit

  int openmp_threads = 0;
  int64_t disk_free_bytes = 0;  // of the current directory
  NvidiaDriver nvidia;
  std::string mpirun;  // its path; "" where PATH has none
  MessageLibrary mpi, nccl;
  std::vector<NetworkInterface> network;
  std::vector<RdmaDevice> rdma;

  int64_t usable_memory_bytes() const;  // what a run may take now
};

// `root` goes before /proc and /sys: "" for this machine, a directory for tests.
Machine inspect_machine(const std::string& root = "");

NvidiaDriver read_nvidia_driver(const char* library = "libnvidia-ml.so.1");
MessageLibrary read_mpi();
MessageLibrary read_nccl();

CpuFeatures built_for();  // what the compiler was allowed to use

// What is missing or odd, what that means, and what to do about it. Problems first.
struct Finding {
  bool problem = false;  // false: fine as it is, good to know
  std::string what, consequence, advice;
};
std::vector<Finding> findings(const Machine& machine);

}  // namespace tessera
