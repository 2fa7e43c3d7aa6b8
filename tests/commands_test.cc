// Commands that answer without a run: selfcheck, plan, bench, doctor. Their JSON is what scripts rely on.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "support.h"

namespace tessera::test {
namespace {

using nlohmann::json;

json json_of(std::vector<std::string> arguments) {
  arguments.push_back("--json");
  const Outcome o = tessera(arguments);
  EXPECT_EQ(o.exit_code, 0) << o.err;
  return json::parse(o.out, nullptr, false);
}

TEST(Commands, SelfcheckPassesForEveryOpAndTheWholeModel) {
  const json j = json_of({"selfcheck"});
  EXPECT_TRUE(j.at("pass").get<bool>());
  std::set<std::string> ops;
  for (const json& check : j.at("checks")) {
    ops.insert(check.at("op"));
    EXPECT_TRUE(check.at("pass").get<bool>()) << check;
    EXPECT_LE(check.at("error").get<double>(), check.at("limit").get<double>()) << check;
    EXPECT_EQ(check.at("device"), "cpu");
  }
  const std::set<std::string> wanted{"attn_res", "cross_entropy", "elementwise", "embedding",   "experts", "glu",
                                     "kda",      "l2_norm",       "linear",      "mla",         "model",   "rms_norm",
                                     "router",   "router_z_loss", "short_conv",  "sigmoid_gate"};
  EXPECT_EQ(ops, wanted);
}

TEST(Commands, PlanModelOfKimiK3) {
  const json j = json_of({"plan", "model", source_path("configs/models/kimi-k3.toml")});
  EXPECT_NEAR(j.at("total_params").get<double>() / 2.78e12, 1, 0.005);
  EXPECT_NEAR(j.at("active_params").get<double>() / 104.2e9, 1, 0.005);
  EXPECT_EQ(j.at("kda_state_bytes_per_sequence"), 434110464);
  EXPECT_EQ(j.at("latent_cache_bytes_per_token"), 27648);
  int64_t total = 0;
  for (const json& row : j.at("by_component")) total += row.at("total_params").get<int64_t>();
  EXPECT_EQ(total, j.at("total_params").get<int64_t>());
}

// Attention's share of a token grows with the context, everything else stays: differences are proportional, also where
// the FLOPs of a step pass 2^63.
TEST(Commands, PlanModelAtTenMillionTokens) {
  const auto at = [](int64_t context) {
    return json_of({"plan", "model", source_path("configs/models/kimi-k3.toml"), "--context", std::to_string(context)});
  };
  const json small = at(200'000), medium = at(1'000'000), large = at(10'000'000);
  for (const char* key : {"forward_flops_per_token", "step_flops_per_token"}) {
    const double from = small.at(key), to = medium.at(key), far = large.at(key);
    EXPECT_NEAR((far - to) / (to - from), 11.25, 1e-5) << key;
  }
  EXPECT_NEAR(large.at("activation_bytes").get<double>() / medium.at("activation_bytes").get<double>(), 10, 0.01);
}

TEST(Commands, BenchStepPlansExactlyWhatItUses) {
  for (const char* more : {"--kda-only", "--recompute-all"}) {
    const json j = json_of({"bench", "step", "--model", source_path("configs/models/nano.toml"), "--context", "96",
                            "--tokens", "192", "--steps", "1", more});
    EXPECT_EQ(j.at("peak_bytes"), j.at("planned_peak_bytes"));
    EXPECT_LT(j.at("static_bytes").get<int64_t>(), j.at("peak_bytes").get<int64_t>());
    for (const char* key : {"tokens_per_s", "flops_per_token", "mfu", "gemm_share", "first_step_s"}) {
      EXPECT_GT(j.at(key).get<double>(), 0) << key;
    }
  }
}

json plan_memory(const std::string& run_file, const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments{"plan", "memory", run_file};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return json_of(arguments);
}

// Neither the store of these run files nor a GPU is here.
TEST(Commands, PlanMemoryIsTheStepOfBench) {
  const TemporaryDirectory dir;
  const std::string model = source_path("configs/models/nano.toml"), run = dir.path("run.toml");
  write_file(run, "[model]\nfile = \"" + model + "\"\n[data]\nstore = \"nowhere\"\ncontext = 96\n" +
                      "[train]\ntokens_per_step = 384\nmicro_tokens = 192\n");
  for (const bool recompute : {false, true}) {
    std::vector<std::string> bench{"bench", "step", "--model", model, "--context", "96", "--steps", "1"};
    bench.insert(bench.end(), {"--tokens", "384", "--micro-tokens", "192"});
    if (recompute) bench.push_back("--recompute-all");
    const json planned = plan_memory(run, {"--train.recompute_all", recompute ? "true" : "false"});
    const json used = json_of(bench);
    EXPECT_EQ(used.at("step_tokens"), 384);
    EXPECT_EQ(used.at("micro_tokens"), 192);
    EXPECT_EQ(planned.at("peak_bytes"), used.at("peak_bytes"));
    EXPECT_EQ(planned.at("static_bytes"), used.at("static_bytes"));
    EXPECT_TRUE(planned.at("documents_assumed").get<bool>());
    EXPECT_TRUE(planned.at("fits").get<bool>());
    int64_t sum = 0, state = 0;
    for (const json& use : planned.at("uses")) {
      sum += use.at("at_peak_bytes").get<int64_t>();
      if (use.at("kind") == "state") state += use.at("at_peak_bytes").get<int64_t>();
    }
    EXPECT_EQ(sum, planned.at("peak_bytes").get<int64_t>());
    EXPECT_EQ(state, planned.at("static_bytes").get<int64_t>());
  }
}

json plan_preset(const std::string& name, std::vector<std::string> more = {}) {
  more.insert(more.end(), {"--model.file", source_path("configs/models/" + name + ".toml")});
  return plan_memory(source_path("configs/runs/" + name + ".toml"), more);
}

TEST(Commands, PlanMemoryOfTheH200Presets) {
  const auto model = [](const std::string& name) {
    const json j = json_of({"plan", "model", source_path("configs/models/" + name + ".toml")});
    return std::pair(j.at("total_params").get<double>(), j.at("active_params").get<double>());
  };
  const auto [total, active] = model("h200-3b-a0.5b");
  EXPECT_NEAR(total / 3e9, 1, 0.05);
  EXPECT_NEAR(active / 0.5e9, 1, 0.05);
  EXPECT_NEAR(model("h200-1m").first / 0.7e9, 1, 0.05);
  for (const char* name : {"h200-3b-a0.5b", "h200-1m"}) {
    const json j = plan_preset(name, {"--memory", "139"});
    EXPECT_TRUE(j.at("fits").get<bool>()) << name;
    EXPECT_EQ(j.at("device"), "cuda");
    EXPECT_LT(j.at("peak_bytes").get<double>(), 0.95 * 139 * double(1 << 30)) << name;
    EXPECT_EQ(j.at("usable_bytes").get<int64_t>(), int64_t{139} << 30);
  }
  const auto peak = [](const std::vector<std::string>& more) {
    return plan_preset("h200-1m", more).at("peak_bytes").get<double>();
  };
  const std::vector<std::string> whole{"--train.ffn_block_tokens", "0"}, kept{"--train.recompute_all", "false"};
  EXPECT_GT(peak(whole), 1.08 * peak({}));
  EXPECT_GT(peak(kept), 1.5 * peak({}));
}

TEST(Commands, PlanMemoryByLevelOfRecompute) {
  const auto peak = [](const std::vector<std::string>& more) {
    return plan_preset("h200-3b-a0.5b", more).at("peak_bytes").get<double>();
  };
  const double none = peak({"--train.recompute_selective", "false"}), selective = peak({}),
               some = peak({"--train.recompute", "[1, 2, 3, 4]"}), full = peak({"--train.recompute_all", "true"});
  EXPECT_GT(none, 1.1 * selective);
  EXPECT_GT(selective, 1.05 * some);
  EXPECT_GT(some, 1.1 * full);
}

TEST(Commands, PlanMemorySaysWhatMakesItFit) {
  const char* run = "h200-3b-a0.5b";
  const json j = plan_preset(run, {"--memory", "80"});
  EXPECT_FALSE(j.at("fits").get<bool>());
  ASSERT_FALSE(j.at("changes").empty());
  for (const json& change : j.at("changes")) {
    std::vector<std::string> more{"--memory", "80"};
    // "train.a = 1, train.b = 2" as --set train.a=1 --set train.b=2
    std::istringstream words(change.at("settings").get<std::string>());
    for (std::string key, equals, value; words >> key >> equals >> value;) {
      if (value.back() == ',') value.pop_back();
      more.insert(more.end(), {"--set", key + "=" + value});
    }
    const json changed = plan_preset(run, more);
    EXPECT_TRUE(changed.at("fits").get<bool>()) << change;
    EXPECT_EQ(changed.at("peak_bytes"), change.at("peak_bytes"));
  }
  EXPECT_TRUE(plan_preset(run, {"--memory", "30"}).at("changes").empty());  // the state alone is more
}

// What it asks of a GPU holds on a CPU as well.
TEST(Commands, GpuCheckOfResumeRunsOnACpu) {
  const TemporaryDirectory dir;
  const std::string command = "TESSERA=" TESSERA_BINARY " " + source_path("scripts/gpu-check") +
                              " --device cpu --only resume >" + dir.path("out") + " 2>&1";
  EXPECT_EQ(std::system(command.c_str()), 0);
  const std::string out = read_file(dir.path("out"));
  for (const char* line : {"resumed at step 4: ", "with train.recompute_selective: ", "with train.recompute_all: "}) {
    EXPECT_NE(out.find(line), std::string::npos) << out;
  }
}

TEST(Commands, BenchKda) {
  const json j = json_of({"bench", "kda", "--tokens", "256", "--heads", "2", "--dim", "32"});
  for (const char* key : {"forward_ms", "forward_backward_ms", "extra_bytes", "floor_ms"}) {
    EXPECT_GT(j.at(key).get<double>(), 0) << key;
  }
}

TEST(Commands, UnknownOpIsNamedWithTheKnownOnes) {
  for (const char* command : {"bench", "selfcheck"}) {
    const Outcome o = tessera({command, "kdaa"});
    EXPECT_EQ(o.exit_code, 2);
    EXPECT_NE(o.err.find("no op named 'kdaa'"), std::string::npos) << o.err;
    EXPECT_NE(o.err.find("short_conv"), std::string::npos) << o.err;
  }
}

}  // namespace
}  // namespace tessera::test
