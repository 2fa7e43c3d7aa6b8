#include "dist/mpi/machines.h"

#include <sched.h>

#include <algorithm>
#include <new>
#include <thread>

#include "dist/mpi/check.h"

namespace tessera::dist::mpi {

Machines::Machines(MPI_Comm world) {
  TESSERA_MPI(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here_));
  TESSERA_MPI(MPI_Comm_rank(here_, &share_.rank));
  number_machines(world);
  share_cpus();
  share_memory();
}

Machines::~Machines() {
  MPI_Win_free(&window_);
  MPI_Comm_free(&here_);
}

// A machine is known by the lowest rank on it.
void Machines::number_machines(MPI_Comm world) {
  int rank = 0, size = 0;
  TESSERA_MPI(MPI_Comm_rank(world, &rank));
  TESSERA_MPI(MPI_Comm_size(world, &size));
  int lowest = rank;
  TESSERA_MPI(MPI_Bcast(&lowest, 1, MPI_INT, 0, here_));
  machine_of_.resize(static_cast<size_t>(size));
  TESSERA_MPI(MPI_Allgather(&lowest, 1, MPI_INT, machine_of_.data(), 1, MPI_INT, world));
  std::vector<int> known = machine_of_;
  std::ranges::sort(known);
  known.erase(std::unique(known.begin(), known.end()), known.end());
  for (int& machine : machine_of_) machine = static_cast<int>(std::ranges::lower_bound(known, machine) - known.begin());
}

// Each CPU counts in equal parts for the processes that may run on it: right whether the launcher bound them to cores,
// to sockets or not at all.
void Machines::share_cpus() {
  int processes = 0;
  TESSERA_MPI(MPI_Comm_size(here_, &processes));
  cpu_set_t own;
  CPU_ZERO(&own);
  if (sched_getaffinity(0, sizeof own, &own) != 0) {  // more CPUs than the set has room for
    share_.cpus = double(std::thread::hardware_concurrency()) / processes;
    CPU_ZERO(&own);
  }
  std::vector<cpu_set_t> all(static_cast<size_t>(processes));
  TESSERA_MPI(MPI_Allgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, here_));
  for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &own)) continue;
    share_.cpus += 1.0 / double(std::ranges::count_if(all, [&](const cpu_set_t& set) { return CPU_ISSET(cpu, &set); }));
  }
}

void Machines::share_memory() {
  using Flag = std::atomic<int>;
  static_assert(Flag::is_always_lock_free);
  MPI_Aint bytes = share_.rank == 0 ? sizeof(Flag) : 0;
  int unit = 0;
  void* base = nullptr;
  TESSERA_MPI(MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, here_, &base, &window_));
  TESSERA_MPI(MPI_Win_shared_query(window_, 0, &bytes, &unit, &base));
  spoken_ = share_.rank == 0 ? new (base) Flag(0) : static_cast<Flag*>(base);
  TESSERA_MPI(MPI_Barrier(here_));
}

bool Machines::speak_first() { return spoken_->exchange(1) == 0; }

}  // namespace tessera::dist::mpi
