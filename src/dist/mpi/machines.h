// Which processes share a machine, and what they share on it.
#pragma once

#include <mpi.h>

#include <atomic>
#include <vector>

#include "dist/job.h"

namespace tessera::dist::mpi {

class Machines {
 public:
  explicit Machines(MPI_Comm world);  // every process makes one at the same time
  ~Machines();
  Machines(const Machines&) = delete;
  Machines& operator=(const Machines&) = delete;

  int machine_of(int rank) const { return machine_of_[static_cast<size_t>(rank)]; }
  const Share& share() const { return share_; }
  bool speak_first();  // true for one caller on each machine, once

 private:
  void number_machines(MPI_Comm world);
  void share_cpus();
  void share_memory();

  MPI_Comm here_ = MPI_COMM_NULL;
  MPI_Win window_ = MPI_WIN_NULL;
  std::atomic<int>* spoken_ = nullptr;  // in memory of all processes of the machine
  std::vector<int> machine_of_;
  Share share_;
};

}  // namespace tessera::dist::mpi
