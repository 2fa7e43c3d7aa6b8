// The plan of memory holds for the batches and evaluations that lie before a run, not for its first step only.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "support.h"
#include "train/memory_plan.h"

namespace tessera::test {
namespace {

using nlohmann::json;

// Few long documents and many short ones: sequences of one document beside sequences of thirty, and the more documents,
// the more chunks a KDA layer saves.
class Memory : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    write_small_run(*dir_, 12, "[checkpoint]\nevery = 4\nkeep_last = 3\n");
    std::string lines;
    for (int64_t i = 0; i < 1000; ++i) {
      const std::string text = i % 50 == 0 ? sample_text(400, static_cast<uint64_t>(i)) : std::to_string(i);
      lines += json{{"text", text}}.dump() + "\n";
    }
    write_file(dir_->path("mixed.jsonl"), lines);
    const Outcome built = tessera({"data", "build", dir_->path("mixed.jsonl"), "--out", dir_->path("mixed"),
                                   "--min-tokens", "1", "--valid-fraction", "0.1"});
    ASSERT_EQ(built.exit_code, 0) << built.err;
  }
  static void TearDownTestSuite() { delete dir_; }

  static json trained(const std::string& name, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments{"train",
                                       dir_->path("run.toml"),
                                       "--run.dir",
                                       dir_->path(name),
                                       "--data.store",
                                       dir_->path("mixed"),
                                       "--train.tokens_per_step",
                                       "256",
                                       "--train.micro_tokens",
                                       "128",
                                       "--optim.warmup_steps",
                                       "0",
                                       "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome o = tessera(arguments);
    EXPECT_EQ(o.exit_code, 0) << o.err;
    return json::parse(o.out, nullptr, false);
  }
  static TemporaryDirectory* dir_;
};

TemporaryDirectory* Memory::dir_ = nullptr;

TEST_F(Memory, PlanIsTheLargestBatchOfTheRun) {
  const json one = trained("one", {"--train.steps", "1"}), all = trained("all");
  for (const json& run : {one, all}) EXPECT_EQ(run.at("peak_bytes"), run.at("planned_peak_bytes"));
  EXPECT_GT(all.at("peak_bytes").get<double>(), 1.02 * one.at("peak_bytes").get<double>()) << "a test without a case";
}

TEST_F(Memory, PlanMemoryIsThePlanOfTheRun) {
  const Outcome o =
      tessera({"plan", "memory", dir_->path("run.toml"), "--run.dir", dir_->path("planned"), "--data.store",
               dir_->path("mixed"), "--train.tokens_per_step", "256", "--train.micro_tokens", "128", "--json"});
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const json planned = json::parse(o.out), run = trained("planned");
  EXPECT_FALSE(planned.at("documents_assumed").get<bool>());
  EXPECT_EQ(planned.at("peak_bytes"), run.at("peak_bytes"));
}

TEST_F(Memory, SelectiveRecomputeAndFeedForwardInBlocks) {
  for (const auto& more : std::vector<std::vector<std::string>>{
           {"--train.recompute_selective", "true", "--train.recompute", "[2]"}, {"--train.ffn_block_tokens", "48"}}) {
    const json run = trained("levels" + more[0], more);
    EXPECT_EQ(run.at("peak_bytes"), run.at("planned_peak_bytes"));
  }
}

TEST_F(Memory, RunThatDoesNotFitIsRefusedBeforeItBegins) {
  const Outcome o = tessera({"train", dir_->path("run.toml"), "--run.dir", dir_->path("refused"), "--model.file",
                             source_path("configs/models/kimi-linear-48b-a3b.toml")});
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_NE(o.err.find("the run needs"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("no setting is enough, choose a smaller model"), std::string::npos) << o.err;
  EXPECT_FALSE(std::filesystem::exists(dir_->path("refused")));
}

TEST_F(Memory, RecomputedLayersAndSmallLossBlocks) {
  const json run = trained("recomputed", {"--train.recompute_all", "true", "--train.loss_block_rows", "16"});
  EXPECT_EQ(run.at("peak_bytes"), run.at("planned_peak_bytes"));
}

TEST_F(Memory, EvaluationAlone) {
  const json run = trained("evaluated", {"--train.steps", "0"});
  EXPECT_EQ(run.at("peak_bytes"), run.at("planned_peak_bytes"));
  EXPECT_LT(run.at("static_bytes").get<int64_t>(), run.at("peak_bytes").get<int64_t>());
}

TEST_F(Memory, ResumedRunPlansWhatIsLeft) {
  trained("resumed");
  const json first = trained("first", {"--train.steps", "1"});
  int64_t differing = 0;
  for (const char* steps : {"13", "14", "15", "16"}) {
    const json run = trained("resumed", {"--train.steps", steps});
    EXPECT_EQ(run.at("resumed_from"), std::stoi(steps) - 1);
    EXPECT_EQ(run.at("peak_bytes"), run.at("planned_peak_bytes")) << steps;
    differing += run.at("peak_bytes") != first.at("peak_bytes");
  }
  EXPECT_GT(differing, 0) << "a test without a case";
}

TEST_F(Memory, DamagedNewestCheckpointLeavesMoreToDo) {
  trained("damaged");
  const std::string file = dir_->path("damaged/checkpoints/step-000000000012/data/part-000.safetensors");
  std::string bytes = read_file(file);
  bytes[bytes.size() - 100] ^= 1;
  write_file(file, bytes);
  const json run = trained("damaged");
  EXPECT_EQ(run.at("resumed_from"), 8);
  EXPECT_EQ(run.at("peak_bytes"), run.at("planned_peak_bytes"));
}

// Whatever the documents, a batch that is dropped has another one above it, and few are kept.
TEST(LargestBatches, KeepsTheOnesNoOtherCovers) {
  const auto kept = [](const std::vector<std::vector<int64_t>>& batches) {
    train::LargestBatches largest;
    for (const auto& offsets : batches) largest.add(offsets);
    return largest.count();
  };
  EXPECT_EQ(kept({}), 0);
  EXPECT_EQ(kept({{0, 100}, {0, 100}}), 1);
  EXPECT_EQ(kept({{0, 100}, {0, 50, 100}, {0, 1, 2, 100}}), 1);  // each has more documents and no fewer pieces
  EXPECT_EQ(kept({{0, 1, 2, 100}, {0, 50, 100}, {0, 100}}), 1);  // in any order
  EXPECT_EQ(kept({{0, 200}, {0, 10, 20, 30}}), 2);               // more tokens, more documents
  EXPECT_EQ(kept({{0, 17, 34, 64}, {0, 33, 48, 64}}), 2);        // 6 and 5 pieces of 16, 3 and 4 of 32
}

}  // namespace
}  // namespace tessera::test
