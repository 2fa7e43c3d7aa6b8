// Sampling, evaluation and the figures about checkpoints, after a short training.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "support.h"

namespace tessera::test {
namespace {

using nlohmann::json;

class Trained : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    write_small_run(*dir_, 40, "[checkpoint]\nevery = 10\nkeep_last = 2\n");
    const Outcome run = tessera({"train", dir_->path("run.toml"), "--json"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    result_ = json::parse(run.out);
  }
  static void TearDownTestSuite() { delete dir_; }

  static std::string run_dir() { return dir_->path("run"); }
  static std::string text(std::vector<std::string> more) {
    std::vector<std::string> arguments{"generate", run_dir(), "--tokens", "60"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome o = tessera(arguments);
    EXPECT_EQ(o.exit_code, 0) << o.err;
    EXPECT_EQ(o.err, "");
    return o.out;
  }
  static json figures(const std::vector<std::string>& arguments) {
    const Outcome o = tessera(arguments);
    EXPECT_EQ(o.exit_code, 0) << o.err;
    return json::parse(o.out);
  }

  static TemporaryDirectory* dir_;
  static json result_;
};

TemporaryDirectory* Trained::dir_ = nullptr;
json Trained::result_;

TEST_F(Trained, TrainingLearnsAndSaysSo) {
  EXPECT_EQ(result_.at("step"), 40);
  EXPECT_EQ(result_.at("stopped_early"), false);
  EXPECT_EQ(result_.at("dead_experts"), 0);
  EXPECT_LT(result_.at("bits_per_byte").get<double>(), 0.6 * result_.at("first_bits_per_byte").get<double>());
  // The plan holds: what was measured lies within 2 % of what was planned.
  const double planned = result_.at("planned_peak_bytes"), peak = result_.at("peak_bytes");
  EXPECT_NEAR(peak / planned, 1, 0.02);
}

TEST_F(Trained, GreedyTextIsTheSameEveryTime) {
  const std::string first = text({"--prompt", "the state", "--temperature", "0"});
  EXPECT_EQ(text({"--prompt", "the state", "--temperature", "0", "--seed", "9"}), first);
  EXPECT_TRUE(first.starts_with("the state")) << first;
  EXPECT_GT(first.size(), 20u);
}

TEST_F(Trained, SameSeedSameText) {
  const std::string first = text({"--prompt", "the state", "--seed", "5"});
  EXPECT_EQ(text({"--prompt", "the state", "--seed", "5"}), first);
  EXPECT_NE(text({"--prompt", "the state", "--seed", "6"}), first);
  // So little probability that only the likeliest token is left.
  EXPECT_EQ(text({"--prompt", "the state", "--top-p", "0.000001"}),
            text({"--prompt", "the state", "--temperature", "0"}));
}

TEST_F(Trained, PromptFromAFile) {
  write_file(dir_->path("prompt.txt"), "every token writes");
  EXPECT_EQ(text({"--prompt-file", dir_->path("prompt.txt"), "--seed", "2"}),
            text({"--prompt", "every token writes", "--seed", "2"}));
  EXPECT_FALSE(text({}).empty());  // without a prompt: the beginning of a document
}

TEST_F(Trained, GenerateFigures) {
  const json j = figures({"generate", run_dir(), "--prompt", "the state", "--tokens", "30", "--json"});
  EXPECT_EQ(j.at("prompt"), "the state");
  EXPECT_EQ(j.at("prompt_tokens"), 9);
  EXPECT_TRUE(j.at("generated_tokens") == 30 || j.at("ended") == true) << j;
  EXPECT_EQ(j.at("text").get<std::string>().empty(), j.at("generated_tokens") == 0);
  EXPECT_GT(j.at("tokens_per_s").get<double>(), 0);
  EXPECT_GT(j.at("cache_bytes").get<int64_t>(), 0);
  EXPECT_EQ(j.at("checkpoint"), result_.at("checkpoint"));
}

TEST_F(Trained, BoundsOfSamplingAreRefused) {
  const std::vector<std::vector<std::string>> wrong = {{"--top-p", "1.5"},      {"--top-p", "-0.1"},
                                                       {"--temperature", "-1"}, {"--temperature", "nan"},
                                                       {"--tokens", "0"},       {"--tokens", "many"}};
  for (const auto& option : wrong) {
    const Outcome o = tessera({"generate", run_dir(), option[0], option[1]});
    EXPECT_EQ(o.exit_code, 2) << option[0] << " " << option[1];
    EXPECT_EQ(o.out, "");
    EXPECT_NE(o.err.find(option[0] + ": found " + option[1] + ", wanted a number"), std::string::npos) << o.err;
  }
}

TEST_F(Trained, EvalFigures) {
  const json j = figures({"eval", run_dir(), "--json"});
  EXPECT_GT(j.at("bits_per_byte").get<double>(), 0);
  EXPECT_LT(j.at("bits_per_byte").get<double>(), 8);
  EXPECT_TRUE(std::isfinite(j.at("loss").get<double>()));
  int64_t from = 0, tokens = 0;
  for (const json& bucket : j.at("loss_by_position")) {
    EXPECT_EQ(bucket.at("from"), from);
    from = bucket.at("to");
    EXPECT_GT(bucket.at("loss").get<double>(), 0);
    EXPECT_GE(bucket.at("ci").get<double>(), 0);
    tokens += bucket.at("tokens").get<int64_t>();
  }
  EXPECT_EQ(tokens, j.at("tokens"));
  const json& routing = j.at("routing");
  EXPECT_GE(routing.at("max_vio").get<double>(), 0);
  EXPECT_GT(routing.at("sampling_floor").get<double>(), 0);
  EXPECT_EQ(routing.at("dead_experts"), 0);
  EXPECT_GT(routing.at("min_utilisation").get<double>(), 0);
  EXPECT_LE(routing.at("min_utilisation").get<double>(), 1);
  EXPECT_EQ(routing.at("layers").size(), 2u);
}

TEST_F(Trained, EvalOfTheSameTextIsTheOneOfTheRun) {
  const json j = figures({"eval", run_dir(), "--tokens", "2048", "--json"});
  EXPECT_NEAR(j.at("bits_per_byte").get<double>(), result_.at("bits_per_byte").get<double>(), 1e-4);
}

TEST_F(Trained, CheckpointFigures) {
  const json list = figures({"ckpt", "list", run_dir(), "--json"}).at("checkpoints");
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].at("step"), 30);
  EXPECT_EQ(list[1].at("step"), 40);
  EXPECT_EQ(list[1].at("path"), result_.at("checkpoint"));
  EXPECT_EQ(list[1].at("committed"), true);
  EXPECT_EQ(list[1].at("problem"), "");

  const json inspect = figures({"ckpt", "inspect", run_dir(), "--json"});
  EXPECT_EQ(inspect.at("step"), 40);
  EXPECT_EQ(inspect.at("next_sequence"), 40 * 8);
  EXPECT_EQ(inspect.at("tokenizer"), "bytes");
  EXPECT_EQ(inspect.at("tokens"), result_.at("tokens"));
  EXPECT_FALSE(inspect.at("plan_hash").get<std::string>().empty());
  ASSERT_FALSE(inspect.at("tensors").empty());
  for (const char* key : {"name", "dtype", "shape", "bytes", "hash"}) {
    EXPECT_TRUE(inspect["tensors"][0].contains(key)) << key;
  }

  const json verify = figures({"ckpt", "verify", run_dir(), "--json"});
  EXPECT_EQ(verify.at("pass"), true);
  EXPECT_EQ(verify.at("step"), 40);
  EXPECT_EQ(verify.at("tensors"), inspect.at("tensors").size());
  EXPECT_TRUE(verify.at("bad").empty());
}

}  // namespace
}  // namespace tessera::test
