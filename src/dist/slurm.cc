#include "dist/slurm.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.h"

namespace tessera::dist {
namespace {

// One word of a shell's command line, and of an #SBATCH line, which is split by the same rules.
std::string quoted(const std::string& text) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/+,=:@%";
  if (std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < ' '; })) {
    fail_user("'{}' has a line break or another control character, which a batch file cannot hold; rename it", text);
  }
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string word;
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return fmt::format("'{}'", word);
}

// What no setting changes. Failures that come again at once are not the machines': the third in a row without a new
// checkpoint ends the job.
constexpr const char* kBody = R"sh(
# Slurm asks 300 s before the time limit: the processes save and leave, and the job goes on in its next turn.
asked=no
trap 'interrupted=yes asked=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

newest() { find "$run_dir/checkpoints" -maxdepth 1 -name 'step-????????????' 2>/dev/null | sort | tail -n 1; }
say() { echo "batch file: $(date +%FT%T) start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST: $1"; }
before=$(newest)
say "newest checkpoint: ${before:-none}"

srun --mpi=pmix --kill-on-bad-exit=1 "${command[@]}" &
# The signal interrupts `wait`.
while interrupted=no; wait $!; code=$?; [ "$interrupted" = yes ]; do :; done

say "srun ended with $code"
[ "$code$asked" = 0no ] && exit 0
[ "$code" = 2 ] && exit 2 # a mistake in the run file, a full disk: the message is above
if [ "$asked" = no ]; then
  failures=$run_dir/slurm-$SLURM_JOB_ID.failures
  mkdir -p "$run_dir"
  [ "$(newest)" = "$before" ] || rm -f "$failures"
  echo "$code" >>"$failures"
  if [ "$(wc -l <"$failures")" -ge 3 ]; then
    say "3 failures in a row without a new checkpoint; not started again"
    exit "$code"
  fi
fi
say "back into the queue"
scontrol requeue "$SLURM_JOB_ID"
)sh";

}  // namespace

std::string slurm_batch_file(const SlurmJob& job) {
  const int64_t per_node = job.processes_per_node;
  if (job.processes % per_node != 0) {
    fail_user("{} process{} not fill nodes of {}; choose a --processes-per-node that divides {}", job.processes,
              job.processes == 1 ? " does" : "es do", per_node, job.processes);
  }
  const int64_t nodes = job.processes / per_node;
  std::string text = fmt::format(
      "#!/bin/bash\n"
      "# {}: {}, {} a node. Written by `tessera plan manifests --slurm`.\n"
      "#   sbatch FILE     with what your cluster wants, such as --partition, --account and --time, before FILE\n"
      "# Every node must see the directories below. TESSERA=PATH names another binary.\n",
      quoted(job.run_file),
      job.processes == 1 ? "one process" : fmt::format("{} processes ({})", job.processes, job.layout), per_node);
  const auto option = [&](const std::string& name, const std::string& value) {
    text += fmt::format("#SBATCH --{}={}\n", name, quoted(value));
  };
  option("job-name", job.name);
  option("chdir", job.directory);
  option("output", "%x-%j.log");
  option("nodes", fmt::to_string(nodes));
  option("ntasks", fmt::to_string(job.processes));
  option("ntasks-per-node", fmt::to_string(per_node));
  if (job.threads > 0) option("cpus-per-task", fmt::to_string(job.threads));
  if (job.gpus) option("gpus-per-node", fmt::to_string(per_node));
  text +=
      "#SBATCH --requeue\n#SBATCH --open-mode=append\n#SBATCH --signal=B:USR1@300\n"
      "set -uo pipefail\n\n";
  // srun does not take it over from the job.
  if (job.threads > 0) text += fmt::format("export SRUN_CPUS_PER_TASK={}\n", job.threads);
  text += fmt::format("run_dir={}\ntessera={}\n", quoted(job.run_directory), quoted(job.binary));
  text += fmt::format("command=(\"${{TESSERA:-$tessera}}\" train {}", quoted(job.run_file));
  for (const std::string& argument : job.arguments) text += fmt::format(" {}", quoted(argument));
  return text + ")\n" + kBody;
}

}  // namespace tessera::dist
