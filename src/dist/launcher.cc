#include "dist/launcher.h"

#include <cstdlib>

namespace tessera::dist {

std::optional<Launcher> find_launcher() {
  struct Known {
    const char *variable, *name;
  };
  // Of a Slurm step, not of the allocation (SLURM_NTASKS): a batch script has that one too, and is one process. Open
  // MPI's first: its daemons may themselves be Slurm's tasks.
  constexpr Known kKnown[] = {{"OMPI_COMM_WORLD_SIZE", "mpirun of Open MPI"},
                              {"PMI_SIZE", "mpiexec of MPICH or its kin"},
                              {"SLURM_STEP_NUM_TASKS", "srun"}};
  for (const Known& known : kKnown) {
    const char* text = std::getenv(known.variable);
    if (text != nullptr && std::atoi(text) > 0) return Launcher{known.name, std::atoi(text)};
  }
  if (std::getenv("PMIX_RANK") != nullptr) return Launcher{"a PMIx launcher", 0};
  return std::nullopt;
}

}  // namespace tessera::dist
