// The processes that mpirun or srun started together, and how they end together.
//
// MPI is loaded at run time, from libtessera_mpi.so beside the binary, and only where a launcher started several
// processes: one process needs none of it. NCCL is loaded where such a job computes on GPUs.
//
// Whatever ends one process ends all, in bounded time and with one message: an exception in one (run), a process that
// is killed (the launcher), one that hangs (the deadline of every call).
#pragma once

#include <functional>
#include <memory>

#include "dist/communicator.h"

namespace tessera::config {
class Options;
}

namespace tessera::dist {

struct JobOptions {  // of [parallel] in a run file
  double deadline_seconds = 600;
  int64_t ranks_per_node = 0;              // 0: as found
  int64_t piece_bytes = int64_t{1} << 30;  // longest single message: MPI counts in 32 bits. Smaller ones are for tests

  void bind(config::Options& options);
};

// How this process shares its machine with others of the job.
struct Share {
  int rank = 0;     // among those of this machine
  double cpus = 0;  // of those that this process may run on, its part
};

class Job {
 public:
  // Joins the others, or is a job of one. Logs carry the rank from now on, and OpenMP gets this process's part of the
  // machine's CPUs unless OMP_NUM_THREADS is set. UserError: several processes, and no MPI that can connect them.
  Job();
  ~Job();  // after run()
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  void set(const JobOptions& options) { options_ = options; }
  void use_gpus();  // one for each process, and gpu() between them

  Transport& host() { return *host_; }
  Transport* gpu() { return gpu_.get(); }  // null: without use_gpus(), and alone
  int rank() const { return host_->rank(); }
  int size() const { return host_->size(); }
  bool first() const { return rank() == 0; }  // the one that speaks to the user
  Communicator world();                       // everyone, before there is a mesh

  // Calls `work` and waits until every process is done with it. Alone, what it throws goes to the caller; among
  // several, it is printed and ends the job, with exit code 2 for a UserError and 1 else.
  void run(const std::function<void()>& work);

 private:
  void share_cpus();

  JobOptions options_;
  Share share_;
  std::unique_ptr<Transport> host_, gpu_;  // hold on to options_
};

}  // namespace tessera::dist
