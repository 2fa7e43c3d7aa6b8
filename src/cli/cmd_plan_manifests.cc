#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/ranges.h"
#include "cli/run_file.h"
#include "core/file.h"
#include "dist/slurm.h"
#include "train/run_config.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kGpusPerNode = 8;

struct Args {
  RunFile run;
  int64_t processes = 0, processes_per_node = 0;  // 0: not given
  bool slurm = false;                             // the one form there is
  std::string out;
};

int64_t processes_per_node(const Args& args, const train::RunConfig& config) {
  const int64_t all = config.parallel.processes();
  if (args.processes_per_node > 0) return args.processes_per_node;
  if (config.job.ranks_per_node > 0) return std::min(config.job.ranks_per_node, all);
  return config.device == Device::cuda ? std::min(kGpusPerNode, all) : all;
}

void plan_manifests(const Args& args) {
  const train::RunConfig config = args.run.load();
  const int64_t processes = config.parallel.processes();
  if (args.processes > 0 && args.processes != processes) {
    fail_user(
        "{}: [parallel] is of {} ({}), and --processes is {}; `tessera plan layout {} --processes {}` says what to set",
        args.run.path(), processes, config.parallel.to_string(), args.processes, args.run.path(), args.processes);
  }
  const dist::SlurmJob job = {.name = fs::path(args.run.path()).stem(),
                              .layout = config.parallel.to_string(),
                              .directory = fs::current_path(),
                              .binary = fs::read_symlink("/proc/self/exe"),
                              .run_file = args.run.path(),
                              .arguments = args.run.changes(),
                              .run_directory = config.dir,
                              .processes = processes,
                              .processes_per_node = processes_per_node(args, config),
                              .threads = config.threads,
                              .gpus = config.device == Device::cuda};
  const std::string text = dist::slurm_batch_file(job);
  if (args.out.empty()) return print(text);
  if (path_exists(args.out)) fail_user("{}: is there already; name a file that is not", args.out);
  write_file_atomic(args.out, text);
}

}  // namespace

void add_plan_manifests(CLI::App& group) {
  auto args = std::make_shared<Args>();
  CLI::App* command = group.add_subcommand(
      "manifests", "The batch file that runs a run's [parallel] on a cluster, and starts it again when nodes fail");
  args->run.add_to(*command, true);
  command->add_flag("--slurm", args->slurm, "For Slurm, with srun and PMIx")->required();
  command->add_option("--processes", args->processes, "Refuse a [parallel] of another number")->check(at_least(1));
  command
      ->add_option(
          "--processes-per-node", args->processes_per_node,
          fmt::format("Not given: parallel.ranks_per_node; without it {} GPUs, on CPUs all processes", kGpusPerNode))
      ->check(at_least(1));
  command->add_option("--out", args->out, "File to make; not given: print it");
  command->callback([args] { plan_manifests(*args); });
}

}  // namespace tessera::cli
