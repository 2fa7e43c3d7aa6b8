// Commands that answer without a run: selfcheck, plan, bench, doctor. Their JSON is what scripts rely on.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

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
