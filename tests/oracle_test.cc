// The whole model against an independent implementation: transformers' logits, loss and every gradient.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ckpt/checkpoint.h"
#include "ckpt/safetensors.h"
#include "model/accounting.h"
#include "model/import.h"
#include "support.h"
#include "train/import_checkpoint.h"
#include "train/parity.h"

namespace tessera::test {
namespace {

const std::string kOracle = source_path("tests/data/kimi-linear-tiny/");

double relative_frobenius(const std::vector<float>& got, const std::vector<float>& want) {
  EXPECT_EQ(got.size(), want.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    error += std::pow(double(got[i]) - double(want[i]), 2);
    norm += std::pow(double(want[i]), 2);
  }
  return std::sqrt(error) / std::sqrt(norm);
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// A row range [begin, begin + count) of a tensor's leading index, as transformers stacks ours.
std::vector<float> slice(const std::vector<float>& all, int64_t part, int64_t parts) {
  const int64_t n = static_cast<int64_t>(all.size()) / parts;
  return {all.begin() + part * n, all.begin() + (part + 1) * n};
}

// transformers' gradient of the published tensor `name`.
std::vector<float> wanted_gradient(const ckpt::SafetensorsFile& oracle, const std::string& name) {
  std::string hf = "grad." + replaced(name, ".block_sparse_moe.", ".mlp.");
  const size_t experts = hf.find(".experts.");
  if (experts != std::string::npos && hf.find("shared") == std::string::npos) {
    const size_t number = experts + 9;
    const int64_t e = std::stoll(hf.substr(number));
    const std::string matrix = hf.substr(hf.find('.', number) + 1, 2);
    const std::string base = hf.substr(0, number);
    if (matrix == "w2") return slice(oracle.read_f32(base + "down_proj"), e, 8);
    return slice(slice(oracle.read_f32(base + "gate_up_proj"), e, 8), matrix == "w3", 2);
  }
  const std::string streams[] = {"q_conv1d", "k_conv1d", "v_conv1d"};
  for (int64_t i = 0; i < 3; ++i) {
    if (hf.find(streams[i]) != std::string::npos)
      return slice(oracle.read_f32(replaced(hf, streams[i], "conv1d")), i, 3);
  }
  for (const char* gate : {"A_log", "dt_bias", "f_a_proj", "f_b_proj"}) {
    const std::string moved =
        replaced(hf, std::string("self_attn.") + gate, std::string("self_attn.forget_gate.") + gate);
    if (oracle.find(moved) != nullptr) return oracle.read_f32(moved);
  }
  return oracle.read_f32(hf);
}

TEST(Oracle, LogitsLossAndEveryGradient) {
  const TemporaryDirectory dir;
  const train::ImportReport imported =
      train::import_checkpoint(kOracle + "hf-config.json", kOracle + "hf-model.safetensors", dir.path("imported"));
  EXPECT_EQ(imported.tensors, 151);
  const train::ParityReport report = train::write_parity(imported.checkpoint, kOracle + "oracle.safetensors",
                                                         dir.path("logits.safetensors"), dir.path("grads.safetensors"));
  const ckpt::SafetensorsFile oracle(kOracle + "oracle.safetensors");
  const ckpt::SafetensorsFile logits(dir.path("logits.safetensors")), grads(dir.path("grads.safetensors"));

  const auto want = oracle.read_f32("logits"), got = logits.read_f32("logits");
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(double(got[i]) - double(want[i])));
  EXPECT_LT(worst, 1e-4);
  EXPECT_NEAR(report.loss, double(oracle.read_f32("loss")[0]), 1e-5);

  double worst_gradient = 0;
  for (const ckpt::TensorInfo& t : grads.tensors()) {
    const double error = relative_frobenius(grads.read_f32(t.name), wanted_gradient(oracle, t.name));
    EXPECT_LT(error, 1e-3) << t.name;
    worst_gradient = std::max(worst_gradient, error);
  }
  EXPECT_EQ(grads.tensors().size(), 148u);  // all but the three router biases
  RecordProperty("worst_logit", std::to_string(worst));
  std::printf("largest logit difference %.2e, loss difference %.2e, worst gradient %.2e relative\n", worst,
              std::abs(report.loss - double(oracle.read_f32("loss")[0])), worst_gradient);
}

TEST(Oracle, CommandsGiveTheSame) {
  const TemporaryDirectory dir;
  const Outcome imported = tessera({"ckpt", "import", kOracle + "hf-config.json", "--weights",
                                    kOracle + "hf-model.safetensors", "--out", dir.path("imported")});
  ASSERT_EQ(imported.exit_code, 0) << imported.err;
  const Outcome eval = tessera({"eval", dir.path("imported"), "--ids", kOracle + "oracle.safetensors", "--logits",
                                dir.path("logits.safetensors"), "--grads", dir.path("grads.safetensors"), "--json"});
  ASSERT_EQ(eval.exit_code, 0) << eval.err;
  EXPECT_NE(eval.out.find("\"tokens\": 150"), std::string::npos) << eval.out;
  EXPECT_EQ(ckpt::SafetensorsFile(dir.path("logits.safetensors")).at("logits").shape, (std::vector<int64_t>{150, 97}));
}

struct Published {
  std::string file;
  double total, active, tolerance;
  int64_t state_bytes, cache_bytes;
};

class PublishedModel : public ::testing::TestWithParam<Published> {};

TEST_P(PublishedModel, ConfigurationAndModelFileDescribeTheSame) {
  const Published& p = GetParam();
  const model::ModelConfig imported =
      train::import_checkpoint(source_path("tests/data/" + p.file + "-config.json"), "", "").config;
  const std::string ours = p.file == "kimi-k3" ? "kimi-k3" : "kimi-linear-48b-a3b";
  const model::Model model(model::load_model_config(source_path("configs/models/" + ours + ".toml")), {});
  EXPECT_EQ(imported.fingerprint(), model.config().fingerprint());

  const model::ModelCosts costs = model::model_costs(model, 4096);
  EXPECT_NEAR(double(costs.total_params) / p.total, 1, p.tolerance);
  EXPECT_NEAR(double(costs.active_params) / p.active, 1, p.tolerance);
  EXPECT_EQ(costs.kda_state_bytes_per_sequence, p.state_bytes);
  EXPECT_EQ(costs.latent_cache_bytes_per_token, p.cache_bytes);
  // The dry run of the real step against the table: 2 FLOPs a multiply-add forward, twice that backward, and the
  // sequence-dependent part of attention on top.
  EXPECT_GT(double(costs.forward_flops_per_token), 2.0 * double(costs.active_params));
  EXPECT_LT(double(costs.forward_flops_per_token), 2.4 * double(costs.active_params));
}

INSTANTIATE_TEST_SUITE_P(Models, PublishedModel,
                         ::testing::Values(Published{"kimi-k3", 2.78e12, 104.2e9, 0.005, 434110464, 27648},
                                           Published{"kimi-linear", 49.1e9, 3.1e9, 0.01, 41943040, 8064}));

}  // namespace
}  // namespace tessera::test
