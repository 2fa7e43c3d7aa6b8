// The batch file that runs a job of several processes under Slurm, and starts it again when its nodes fail.
//
// One srun starts all processes; whatever ends one ends all (job.h), so that what is left to do is to put the whole job
// back into the queue: training resumes by itself from its newest checkpoint, on whichever nodes Slurm then gives.
// Slurm requeues by itself when it notices a dead node. srun often notices first, and a batch file that ended then
// would have failed for good: so the file asks for it, too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::dist {

struct SlurmJob {
  std::string name;
  std::string layout;            // for the reader: "data 2 x context 4"
  std::string directory;         // where relative paths begin
  std::string binary, run_file;  // `binary train run_file arguments...`
  std::vector<std::string> arguments;
  std::string run_directory;  // of the run, for its checkpoints
  int64_t processes = 1, processes_per_node = 1;
  int64_t threads = 0;  // CPUs of a process; 0: left to the cluster
  bool gpus = false;    // one for each process
};

// UserError: nodes that would not all be full, or a path that no batch file can hold.
std::string slurm_batch_file(const SlurmJob& job);

}  // namespace tessera::dist
