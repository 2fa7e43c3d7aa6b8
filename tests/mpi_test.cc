// Several processes over MPI, started by mpirun as a user starts them: what they compute together, and how they end
// when one of them fails.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "collectives.h"
#include "dist/in_process.h"
#include "support.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

class Mpi : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_mpi(); !why.empty()) GTEST_SKIP() << why;
  }
};

Outcome mpirun(int processes, const std::vector<std::string>& command) {
  return run_program(mpirun_command(processes, command));
}
Outcome probe(int processes, const std::string& mode) { return mpirun(processes, {MPI_PROBE, mode}); }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// What Tessera itself says; mpirun says more.
std::vector<std::string> messages(const Outcome& o) {
  std::vector<std::string> ours;
  for (const std::string& line : lines_of(o.err)) {
    if (line.starts_with("tessera: ")) ours.push_back(line);
  }
  return ours;
}

using Lines = std::vector<std::string>;

Lines in_process(int processes) {
  Lines hashes(static_cast<size_t>(processes));
  dist::run_in_process(processes, {}, [&](dist::Transport& transport) {
    hashes[static_cast<size_t>(transport.rank())] = Collectives(transport).run();
  });
  return hashes;
}

TEST_F(Mpi, CollectivesEqualThoseInOneProcess) {
  for (const int processes : {2, 3, 4, 8}) {
    const Outcome o = probe(processes, "collectives");
    EXPECT_EQ(o.exit_code, 0) << o.err;
    EXPECT_EQ(lines_of(o.out), in_process(processes));
  }
}

TEST_F(Mpi, LongMessagesGoInPieces) { EXPECT_EQ(lines_of(probe(3, "pieces").out), in_process(3)); }

TEST_F(Mpi, TwoThreadsOnTwoChannels) { EXPECT_EQ(lines_of(probe(3, "threads").out), in_process(3)); }

TEST_F(Mpi, NodesAreFoundOrSet) {
  EXPECT_EQ(lines_of(probe(3, "nodes").out), (Lines{"found 0, set 0", "found 0, set 0", "found 0, set 1"}));
}

TEST_F(Mpi, ProcessesOfOneMachineShareItsThreads) {
  const int alone = std::stoi(mpirun(1, {"--bind-to", "none", MPI_PROBE, "thread-count"}).out);
  const Lines counts = lines_of(mpirun(alone + 1, {"--bind-to", "none", MPI_PROBE, "thread-count"}).out);
  EXPECT_EQ(counts, Lines(static_cast<size_t>(alone + 1), "1"));
}

TEST_F(Mpi, LogsNameTheRankAmongSeveral) {
  EXPECT_NE(probe(2, "log").err.find("info rank 1: here"), std::string::npos);
  EXPECT_EQ(probe(1, "log").err.find("rank"), std::string::npos);
}

TEST_F(Mpi, WhatOneProcessThrowsEndsAllWithOneMessage) {
  const struct {
    const char* mode;
    int exit_code;
    const char* message;
  } cases[] = {{"user-error", 2, "tessera: rank 2: the disk is full"},
               {"exception", 1, "tessera: rank 2: something broke"},
               {"unknown-exception", 1, "tessera: rank 2: an exception of an unknown type"}};
  for (const auto& c : cases) {
    const Outcome o = probe(3, c.mode);
    EXPECT_EQ(o.exit_code, c.exit_code) << o.err;
    EXPECT_EQ(messages(o), Lines{c.message});
  }
}

TEST_F(Mpi, AProcessThatDiesEndsAllAndIsNamed) {
  const struct {
    int processes;
    const char *mode, *how;
  } cases[] = {{2, "killed", "signal 9"},
               {3, "killed", "signal 9"},
               {4, "killed", "signal 9"},
               {3, "exits", "improperly"},
               {3, "thread-exception", "something broke"}};
  for (const auto& c : cases) {
    const Outcome o = probe(c.processes, c.mode);
    EXPECT_GT(o.exit_code, 0) << c.mode;
    EXPECT_NE(o.err.find(fmt::format("process rank {} with PID", c.processes - 1)), std::string::npos) << o.err;
    EXPECT_NE(o.err.find(c.how), std::string::npos) << o.err;
    EXPECT_EQ(messages(o), Lines{}) << c.mode;
  }
}

TEST_F(Mpi, AProcessThatHangsIsLostAfterTheDeadline) {
  for (const int processes : {2, 4}) {
    const Outcome o = probe(processes, "stopped");
    EXPECT_EQ(o.exit_code, 1) << o.err;
    ASSERT_EQ(messages(o).size(), 1u) << o.err;
    const std::string wanted =
        fmt::format("all_gather along the world axis: no answer from rank {} in 2 s", processes - 1);
    EXPECT_TRUE(messages(o).front().ends_with(wanted)) << o.err;
  }
}

TEST_F(Mpi, ProcessesThatWereGivenDifferentThingsSayWhichOnce) {
  const Outcome o = probe(3, "differ");
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_EQ(messages(o).size(), 1u) << o.err;
  EXPECT_NE(o.err.find("  train.steps: 300 on ranks 0, 2; 200 on rank 1\n"
                       "  data: 0 on ranks 0-1; 1 on rank 2\n"),
            std::string::npos)
      << o.err;
}

TEST_F(Mpi, AnotherMpiOrNoneIsSaid) {
  const Outcome other = run_program({"env", "PMI_SIZE=3", "ASAN_OPTIONS=detect_leaks=0", MPI_PROBE, "collectives"});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_NE(other.err.find("mpiexec of MPICH or its kin started 3 processes, and "), std::string::npos) << other.err;
  EXPECT_NE(other.err.find("knows of 1; start it with the mpirun of that MPI"), std::string::npos) << other.err;

  const TemporaryDirectory dir;
  const std::string moved = dir.path("mpi_probe"), plugin = dir.path("libtessera_mpi.so");
  fs::copy_file(MPI_PROBE, moved);
  const Outcome none = mpirun(2, {moved, "collectives"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_NE(none.err.find("there is no " + plugin), std::string::npos) << none.err;
  EXPECT_NE(none.err.find("run scripts/setup"), std::string::npos) << none.err;
  write_file(plugin, "no library");
  const Outcome damaged = mpirun(2, {moved, "collectives"});
  EXPECT_EQ(damaged.exit_code, 2);
  EXPECT_NE(damaged.err.find("is not on this machine (" + plugin), std::string::npos) << damaged.err;
  EXPECT_EQ(run_program({moved, "collectives"}).exit_code, 0);  // one process needs neither
}

// The run of write_small_run in a pipeline, eight micro-batches a step.
nlohmann::json trained(const TemporaryDirectory& dir, const std::string& name, int64_t steps, int processes,
                       int64_t chunks = 1, int context = 1) {
  Lines command = {TESSERA_BINARY, "train", dir.path("run.toml"), "--run.dir", dir.path(name), "--json"};
  for (const auto& [key, value] : {std::pair{"train.micro_tokens", std::string("128")},
                                   {"train.steps", fmt::to_string(steps)},
                                   {"optim.schedule", "constant"},
                                   {"optim.warmup_steps", "0"},
                                   {"parallel.pipeline", fmt::to_string(processes)},
                                   {"parallel.pipeline_chunks", fmt::to_string(chunks)},
                                   {"parallel.context", fmt::to_string(context)}}) {
    command.insert(command.end(), {std::string("--") + key, value});
  }
  const Outcome o = mpirun(processes * context, command);
  EXPECT_EQ(o.exit_code, 0) << o.err;
  return nlohmann::json::parse(o.out, nullptr, false);
}

Lines rows_of(const TemporaryDirectory& dir, const std::string& name) {
  return lines_of(read_file(dir.path(name) + "/metrics.jsonl"));
}
// Loss, step by step.
std::vector<double> losses_of(const TemporaryDirectory& dir, const std::string& name) {
  std::vector<double> losses;
  for (const std::string& line : rows_of(dir, name)) {
    const auto row = nlohmann::json::parse(line);
    if (row.contains("gradient_norm")) losses.push_back(row.at("loss"));
  }
  return losses;
}

void expect_near(const std::vector<double>& losses, const std::vector<double>& wanted) {
  ASSERT_EQ(losses.size(), wanted.size());
  for (size_t s = 0; s < wanted.size(); ++s) EXPECT_NEAR(losses[s], wanted[s], 1e-3 * wanted[s]);
}

// Its losses, its evaluations, and the guard's events from layers of other processes.
TEST_F(Mpi, PipelineTrainsAsOneProcess) {
  const TemporaryDirectory dir;
  write_small_run(dir, 6, "[guard]\nwindow = 2\ngrace = 2\naudit = 2\n");
  const nlohmann::json wanted = trained(dir, "one", 6, 1);
  for (const int processes : {2, 3}) {
    const std::string name = fmt::format("pipeline{}", processes);
    const nlohmann::json result = trained(dir, name, 6, processes);
    EXPECT_EQ(losses_of(dir, name).front(), losses_of(dir, "one").front());
    EXPECT_EQ(result.at("first_bits_per_byte"), wanted.at("first_bits_per_byte"));
    expect_near(losses_of(dir, name), losses_of(dir, "one"));
    EXPECT_EQ(rows_of(dir, name).size(), rows_of(dir, "one").size() + 1);  // what a step moved
    EXPECT_EQ(result.at("peak_bytes"), result.at("planned_peak_bytes"));
    EXPECT_LT(result.at("static_bytes").get<int64_t>(), wanted.at("static_bytes").get<int64_t>());
  }
}

TEST_F(Mpi, InterleavedPipelineTrainsAsOneProcess) {
  const TemporaryDirectory dir;
  write_small_run(dir, 2);
  std::string model = read_file(dir.path("model.toml"));
  write_file(dir.path("model.toml"), model.replace(model.find("layers = 3"), 10, "layers = 4"));
  const nlohmann::json wanted = trained(dir, "one", 2, 1), result = trained(dir, "interleaved", 2, 2, 2);
  EXPECT_EQ(result.at("first_bits_per_byte"), wanted.at("first_bits_per_byte"));
  EXPECT_EQ(losses_of(dir, "interleaved").front(), losses_of(dir, "one").front());
  expect_near(losses_of(dir, "interleaved"), losses_of(dir, "one"));
  EXPECT_EQ(result.at("peak_bytes"), result.at("planned_peak_bytes"));
}

// The last process has MLA alone, whose memory is that of the documents that cross.
TEST_F(Mpi, PipelineOfCutSequences) {
  const TemporaryDirectory dir;
  write_small_run(dir, 2);
  trained(dir, "one", 2, 1);
  trained(dir, "cut", 2, 3, 1, 2);
  expect_near(losses_of(dir, "cut"), losses_of(dir, "one"));
}

TEST_F(Mpi, PipelinesGoOnFromEachOthersCheckpoints) {
  const TemporaryDirectory dir;
  write_small_run(dir, 6);
  trained(dir, "one", 6, 1);
  trained(dir, "moved", 2, 1);
  trained(dir, "moved", 4, 2);
  EXPECT_EQ(trained(dir, "moved", 6, 3).at("resumed_from"), 4);
  expect_near(losses_of(dir, "moved"), losses_of(dir, "one"));
}

TEST_F(Mpi, APipelineWhoseProcessHangsNamesItsAxis) {
  const Outcome o = probe(2, "pipeline-stopped");
  EXPECT_EQ(o.exit_code, 1) << o.err;
  ASSERT_EQ(messages(o).size(), 1u) << o.err;
  EXPECT_TRUE(messages(o).front().ends_with("send_receive along the pipeline axis: no answer from rank 1 in 2 s"))
      << o.err;
}

TEST_F(Mpi, TrainSpeaksOnceAndOnlyOfUse) {
  const Outcome o = mpirun(3, {TESSERA_BINARY, "train", "missing.toml"});
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_EQ(o.out, "");
  ASSERT_EQ(messages(o).size(), 1u) << o.err;
  EXPECT_NE(messages(o).front().find("cannot read the TOML file 'missing.toml'"), std::string::npos);

  const TemporaryDirectory dir;
  write_small_run(dir, 8);
  const Outcome one = mpirun(1, {TESSERA_BINARY, "train", dir.path("run.toml")});
  EXPECT_EQ(one.exit_code, 0) << one.err;
  EXPECT_NE(one.out.find("finished at step 8 of 8"), std::string::npos) << one.out;
  EXPECT_EQ(one.err.find("rank"), std::string::npos) << one.err;
}

std::vector<double> losses_of(const std::string& run_dir) {
  std::vector<double> losses;
  for (const std::string& line : lines_of(read_file(run_dir + "/metrics.jsonl"))) {
    const nlohmann::json row = nlohmann::json::parse(line);
    if (row.contains("learning_rate")) losses.push_back(row.at("loss"));
  }
  return losses;
}

TEST_F(Mpi, ProcessesThatShareHeadsTrainAsOneDoesAndOneGoesOn) {
  const TemporaryDirectory dir;
  write_small_run(dir, 6);
  const auto train = [&](const char* to, int64_t steps, const char* tensor) {
    return std::vector<std::string>{TESSERA_BINARY, "train",         dir.path("run.toml"),  "--run.dir",
                                    dir.path(to),   "--train.steps", fmt::to_string(steps), "--parallel.tensor",
                                    tensor};
  };
  const Outcome one = run_program(train("one", 6, "1")), two = mpirun(2, train("two", 6, "2"));
  ASSERT_EQ(one.exit_code, 0) << one.err;
  ASSERT_EQ(two.exit_code, 0) << two.err;
  const Outcome on = run_program(train("two", 8, "1"));
  ASSERT_EQ(on.exit_code, 0) << on.err;
  EXPECT_EQ(run_program(train("one", 8, "1")).exit_code, 0);
  const std::vector<double> wanted = losses_of(dir.path("one")), losses = losses_of(dir.path("two"));
  ASSERT_EQ(wanted.size(), 8u);
  ASSERT_EQ(losses.size(), 8u);
  for (size_t s = 0; s < wanted.size(); ++s) EXPECT_NEAR(losses[s], wanted[s], 1e-3 * wanted[s]) << "step " << s;
  EXPECT_EQ(mpirun(2, train("three", 6, "1")).exit_code, 2);
}

TEST_F(Mpi, TrainSaysWhatAStepMoved) {
  const TemporaryDirectory dir;
  write_small_run(dir, 8);
  const std::vector<std::string> command = {TESSERA_BINARY,      "train", dir.path("run.toml"), "--parallel.data", "2",
                                            "--parallel.expert", "2"};
  const Outcome o = mpirun(2, command);
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_NE(o.out.find("bytes of a step"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("a token's row went to"), std::string::npos) << o.out;
  const Lines rows = lines_of(read_file(dir.path("run/metrics.jsonl")));
  const auto last = nlohmann::json::parse(rows.back());
  EXPECT_EQ(last.at("step"), 8);
  ASSERT_EQ(last.at("traffic").size(), 3u);
  EXPECT_EQ(last.at("traffic").at(1).at("axis"), "replica");
  EXPECT_GT(last.at("traffic").at(1).at("inside_bytes_per_step"), 0);
}

}  // namespace
}  // namespace tessera::test
