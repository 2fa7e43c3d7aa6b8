// The batch file for Slurm: what it asks for and what it refuses, its behaviour against a Slurm of shell functions,
// and, where Slurm is installed, the real thing (scripts/slurm-check).
#include "dist/slurm.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "support.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

class Slurm : public testing::Test {
 protected:
  void SetUp() override { write_small_run(dir_, 6, "[parallel]\ndata = 2\ncontext = 2\n"); }

  Outcome manifests(Words more) const {
    more.insert(more.begin(), {"plan", "manifests", dir_.path("run.toml")});
    return tessera(more);
  }
  TemporaryDirectory dir_;
};

bool has_line(const std::string& text, const std::string& wanted) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line == wanted) return true;
  }
  return false;
}

TEST_F(Slurm, BatchFileAsksForTheLayout) {
  const Outcome o = manifests({"--slurm", "--processes", "4", "--processes-per-node", "2"});
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_TRUE(o.out.starts_with("#!/bin/bash\n"));
  for (const char* line : {"job-name=run", "nodes=2", "ntasks=4", "ntasks-per-node=2", "cpus-per-task=2", "requeue",
                           "open-mode=append", "signal=B:USR1@300"}) {
    EXPECT_TRUE(has_line(o.out, fmt::format("#SBATCH --{}", line))) << line << "\n" << o.out;
  }
  EXPECT_TRUE(has_line(o.out, "#SBATCH --chdir=" + fs::current_path().string()));
  EXPECT_TRUE(has_line(o.out, "run_dir=" + dir_.path("run")));
  EXPECT_TRUE(has_line(o.out, "command=(\"${TESSERA:-$tessera}\" train " + dir_.path("run.toml") + ")")) << o.out;
  EXPECT_NE(o.out.find("4 processes (data 2 x context 2), 2 a node"), std::string::npos);
  EXPECT_EQ(o.out.find("gpus"), std::string::npos);
}

TEST_F(Slurm, ProcessesOfANode) {
  const struct {
    Words given;
    int nodes, per_node;
  } cases[] = {
      {{}, 1, 4},
      {{"--parallel.ranks_per_node", "2"}, 2, 2},
      {{"--parallel.ranks_per_node", "2", "--processes-per-node", "1"}, 4, 1},
      {{"--parallel.ranks_per_node", "8"}, 1, 4},
      {{"--device", "cuda"}, 1, 4},
      {{"--device", "cuda", "--parallel.data", "4", "--parallel.context", "4", "--train.micro_tokens", "256"}, 2, 8}};
  for (const auto& c : cases) {
    Words given = c.given;
    given.push_back("--slurm");
    const Outcome o = manifests(given);
    ASSERT_EQ(o.exit_code, 0) << o.err;
    EXPECT_TRUE(has_line(o.out, fmt::format("#SBATCH --nodes={}", c.nodes))) << o.out;
    EXPECT_TRUE(has_line(o.out, fmt::format("#SBATCH --ntasks-per-node={}", c.per_node))) << o.out;
    const bool cuda = given.front() == "--device";
    EXPECT_EQ(has_line(o.out, fmt::format("#SBATCH --gpus-per-node={}", c.per_node)), cuda) << o.out;
    EXPECT_EQ(o.out.find("--device cuda)") != std::string::npos, cuda) << o.out;
  }
}

TEST_F(Slurm, WritesAFileOnce) {
  const std::string file = dir_.path("job.sh");
  const Outcome o = manifests({"--slurm", "--out", file});
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_EQ(o.out, "");
  EXPECT_EQ(read_file(file), manifests({"--slurm"}).out);
  const Outcome again = manifests({"--slurm", "--out", file});
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_NE(again.err.find(file + ": is there already"), std::string::npos) << again.err;
}

TEST_F(Slurm, RefusesWhatNoJobCanBe) {
  const struct {
    Words given;
    const char* message;
  } cases[] = {{{}, "--slurm"},
               {{"--slurm", "--processes", "8"}, "[parallel] is of 4 (data 2 x context 2), and --processes is 8; "},
               {{"--slurm", "--processes-per-node", "3"}, "4 processes do not fill nodes of 3; "},
               {{"--slurm", "--processes-per-node", "0"}, "--processes-per-node"},
               {{"--slurm", "--run.dir", "two\nlines"}, "line break"},
               {{"--slurm", "--out", "/nowhere/job.sh"}, "/nowhere/job.sh"}};
  for (const auto& c : cases) {
    const Outcome o = manifests(c.given);
    EXPECT_EQ(o.exit_code, 2) << c.message;
    EXPECT_EQ(o.out, "");
    EXPECT_NE(o.err.find(c.message), std::string::npos) << o.err;
  }
}

// The batch file with commands of Slurm that write down how they were called; `srun` is the shell text of one.
class BatchFile : public testing::Test {
 protected:
  Outcome run(const std::string& srun) {
    const std::string functions = fmt::format(
        "srun() {{ echo \"srun $*\" >>'{0}'; {1}; }}\n"
        "scontrol() {{ echo \"scontrol $*\" >>'{0}'; }}\n"
        "scancel() {{ echo \"scancel $*\" >>'{0}'; touch '{2}'; }}\n"
        "export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=node1 TESSERA=/bin/tessera\n",
        dir_.path("calls"), srun, dir_.path("asked"));
    const dist::SlurmJob job = {.name = "a job",
                                .layout = "data 2",
                                .directory = dir_.path(),
                                .binary = "/else/where/tessera",
                                .run_file = "it's.toml",
                                .arguments = {"--set", "a=$b"},
                                .run_directory = dir_.path("a run"),
                                .processes = 2,
                                .processes_per_node = 1};
    fs::remove(dir_.path("calls"));
    write_file(dir_.path("job.sh"), functions + dist::slurm_batch_file(job));
    return run_program({"bash", dir_.path("job.sh")});
  }
  std::string calls() const { return read_file(dir_.path("calls")); }
  bool requeued() const { return has_line(calls(), "scontrol requeue 7"); }
  TemporaryDirectory dir_;
};

TEST_F(BatchFile, StartsTheCommandAsItWasGiven) {
  EXPECT_EQ(run("return 0").exit_code, 0);
  EXPECT_EQ(calls(), "srun --mpi=pmix --kill-on-bad-exit=1 /bin/tessera train it's.toml --set a=$b\n");
}

TEST_F(BatchFile, QueuesAgainUnlessTheUserIsWrong) {
  EXPECT_EQ(run("return 2").exit_code, 2);
  EXPECT_FALSE(requeued()) << calls();
  EXPECT_EQ(run("return 137").exit_code, 0);
  EXPECT_TRUE(requeued()) << calls();
}

TEST_F(BatchFile, GivesUpOnTheThirdFailureWithoutACheckpoint) {
  const std::string checkpoint = "mkdir -p '" + dir_.path("a run/checkpoints/step-00000000000") + "{}'; return 1";
  for (const char* srun : {"return 1", "return 1"}) {
    run(srun);
    EXPECT_TRUE(requeued());
  }
  for (int step = 1; step <= 4; ++step) {  // each of them gets on
    run(fmt::format(fmt::runtime(checkpoint), step));
    EXPECT_TRUE(requeued());
  }
  run("return 1");
  EXPECT_TRUE(requeued());
  const Outcome last = run("return 1");
  EXPECT_EQ(last.exit_code, 1);
  EXPECT_FALSE(requeued());
  EXPECT_NE(last.out.find("3 failures in a row without a new checkpoint"), std::string::npos) << last.out;
}

TEST_F(BatchFile, SavesBeforeTheTimeLimitAndQueuesAgain) {
  const std::string until_asked =
      fmt::format("kill -USR1 $$; while [ ! -e '{}' ]; do sleep 0.01; done; sleep 0.1; return 0", dir_.path("asked"));
  EXPECT_EQ(run(until_asked).exit_code, 0);
  EXPECT_TRUE(has_line(calls(), "scancel --signal=TERM 7")) << calls();
  EXPECT_TRUE(requeued()) << calls();
}

TEST(SlurmCheck, RealSlurmStartsAJobAgain) {
  if (geteuid() != 0) GTEST_SKIP() << "scripts/slurm-check wants root";
  const bool installed = run_program({"which", "munged", "slurmctld", "slurmd", "srun"}).exit_code == 0;
  if (!installed && std::getenv("TESSERA_SLURM") == nullptr) {
    GTEST_SKIP() << "Slurm is not installed; TESSERA_SLURM=1 lets scripts/slurm-check install it";
  }
  if (const std::string why = why_no_mpi(); !why.empty()) GTEST_SKIP() << why;
  const Outcome o = run_program({"env", std::string("TESSERA=") + TESSERA_BINARY, "ASAN_OPTIONS=detect_leaks=0",
                                 source_path("scripts/slurm-check")});
  if (o.exit_code == 77) GTEST_SKIP() << o.err;
  EXPECT_EQ(o.exit_code, 0) << o.out << o.err;
}

}  // namespace
}  // namespace tessera::test
