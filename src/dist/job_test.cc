#include "dist/job.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "config/options.h"
#include "dist/agreement.h"
#include "dist/in_process.h"
#include "dist/launcher.h"
#include "dist/ranks.h"

namespace tessera::dist {
namespace {

// The environment of launchers, put back at the end: the tests themselves may run under one.
class LauncherTest : public testing::Test {
 protected:
  static constexpr const char* kNames[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
                                           "PMIX_RANK"};
  void SetUp() override {
    for (const char* name : kNames) {
      const char* value = std::getenv(name);
      before.emplace_back(name, value == nullptr ? "" : value);
      unsetenv(name);
    }
  }
  void TearDown() override {
    for (const auto& [name, value] : before) {
      value.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), value.c_str(), 1);
    }
  }
  std::vector<std::pair<std::string, std::string>> before;
};

TEST_F(LauncherTest, IsKnownByItsVariables) {
  EXPECT_FALSE(find_launcher());
  setenv("SLURM_NTASKS", "8", 1);  // of the allocation: a batch script has it too
  EXPECT_FALSE(find_launcher());
  setenv("PMIX_RANK", "0", 1);
  EXPECT_EQ(find_launcher()->processes, 0);
  setenv("SLURM_STEP_NUM_TASKS", "2", 1);
  EXPECT_EQ(find_launcher()->name, "srun");
  setenv("OMPI_COMM_WORLD_SIZE", "8", 1);
  EXPECT_EQ(find_launcher()->processes, 8);
}

TEST_F(LauncherTest, AJobOfOneNeedsNoMpi) {
  for (const char* processes : {"", "1"}) {
    setenv("OMPI_COMM_WORLD_SIZE", processes, 1);
    Job job;
    EXPECT_EQ(job.size(), 1);
    EXPECT_TRUE(job.first());
    job.use_gpus();
    EXPECT_EQ(job.gpu(), nullptr);
    EXPECT_THROW(job.run([] { fail_user("wrong"); }), UserError);
    EXPECT_THROW(job.host().abort("wrong", kUserMistake), UserError);
  }
}

TEST(JobOptions, Keys) {
  JobOptions job;
  config::Options options;
  job.bind(options);
  options.load_text("[parallel]\ndeadline_seconds = 2.5\nranks_per_node = 4\n", "run.toml");
  EXPECT_EQ(job.deadline_seconds, 2.5);
  EXPECT_EQ(job.ranks_per_node, 4);
  EXPECT_THROW(options.set("parallel.deadline_seconds", "0"), UserError);
}

TEST(Ranks, AreNamedInRanges) {
  EXPECT_EQ(name_ranks({3}), "rank 3");
  EXPECT_EQ(name_ranks({0, 1, 2, 5, 7, 8}), "ranks 0-2, 5, 7-8");
}

// What each of the processes gets to read; "" where it may go on.
std::vector<std::string> complaints(const std::vector<Facts>& facts) {
  std::vector<std::string> texts(facts.size());
  run_in_process(static_cast<int>(facts.size()), {}, [&](Transport& transport) {
    std::vector<int> everyone;
    for (int r = 0; r < transport.size(); ++r) everyone.push_back(r);
    Communicator world("world", everyone, 0, transport, nullptr);
    const auto rank = static_cast<size_t>(world.rank());
    try {
      require_same(world, facts[rank]);
    } catch (const UserError& e) {
      texts[rank] = e.what();
    }
  });
  return texts;
}

TEST(Agreement, GoesOnWhereAllHaveTheSame) {
  const Facts facts = {{"binary", "abc"}, {"run.dir", "a: 1;\n b"}, {"", ""}};
  EXPECT_EQ(complaints({facts, facts, facts}), std::vector<std::string>(3));
  EXPECT_EQ(complaints({{}, {}}), std::vector<std::string>(2));
  EXPECT_EQ(complaints({{{"a", "1"}, {"b", "2"}}, {{"b", "2"}, {"a", "1"}}}), std::vector<std::string>(2));
}

TEST(Agreement, NamesEveryDifferenceToEveryProcess) {
  const std::vector<std::string> texts = complaints({
      {{"binary", "abc"}, {"train.steps", "300"}, {"data", "x"}},
      {{"binary", "abc"}, {"train.steps", "200"}, {"data", "x"}},
      {{"binary", "abc"}, {"train.steps", "300"}, {"data", "y"}, {"train.extra", "true"}},
      {{"binary", "abc"}, {"train.steps", "300"}, {"data", "z"}},
  });
  EXPECT_EQ(texts, std::vector<std::string>(4,
                                            "the processes of this job were not given the same:"
                                            "\n  train.steps: 300 on ranks 0, 2-3; 200 on rank 1"
                                            "\n  data: x on ranks 0-1; y on rank 2; z on rank 3"
                                            "\n  train.extra: not set on ranks 0-1, 3; true on rank 2"
                                            "\nstart all of them with one binary, run file and data"));
}

TEST(Agreement, TheBinaryHasOneHash) {
  EXPECT_EQ(hash_of_binary(), hash_of_binary());
  EXPECT_EQ(hash_of_binary().size(), 32u);
}

}  // namespace
}  // namespace tessera::dist
