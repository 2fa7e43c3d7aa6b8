// `ckpt export` and `ckpt diff`: what is exported is what was imported or trained, bit for bit.
#include "model/export.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "ckpt/diff.h"
#include "ckpt/safetensors_writer.h"
#include "core/dtype.h"
#include "data/tokenizer.h"
#include "model/import.h"
#include "support.h"
#include "train/export_checkpoint.h"
#include "train/import_checkpoint.h"

namespace tessera::test {
namespace {

using nlohmann::json;

const std::string kPublished = source_path("tests/data/kimi-linear-tiny/");

// A dense FFN has one of two names (model/import.h).
void expect_same(const std::string& a, const std::string& b) {
  const ckpt::Collection one = ckpt::open_collection(a), other = ckpt::open_collection(b);
  ASSERT_EQ(one.names().size(), other.names().size());
  for (const std::string& name : one.names()) {
    const auto names = model::spellings(name);
    const auto found = std::ranges::find_if(names, [&](const auto& n) { return other.find(n) != nullptr; });
    ASSERT_NE(found, names.end()) << name;
    EXPECT_EQ(one.at(name).shape, other.at(*found).shape) << name;
    EXPECT_EQ(one.at(name).stored, other.at(*found).stored) << name;
    EXPECT_EQ(one.read_f32(name), other.read_f32(*found)) << name;
  }
}

// A run of a few steps on a model that published files can describe. Its directory is "run".
void train_small(const TemporaryDirectory& dir, const std::string& prefix) {
  write_small_run(dir, 6);
  std::string model = read_file(dir.path("model.toml"));
  model.replace(model.find("gate_rank = 8"), 13, "gate_rank = 16");
  model.replace(model.find("heads = 2"), 9, "heads = 3");
  write_file(dir.path("model.toml"), prefix + model);
  const Outcome o = tessera({"train", dir.path("run.toml")});
  ASSERT_EQ(o.exit_code, 0) << o.err;
}

TEST(Export, ImportedModelComesOutAsItWent) {
  const TemporaryDirectory dir;
  train::import_checkpoint(kPublished + "hf-config.json", kPublished + "hf-model.safetensors", dir.path("imported"));
  const train::ExportReport r =
      train::export_checkpoint(dir.path("imported"), dir.path("exported"), {.matrices = DType::f32});
  EXPECT_EQ(r.tensors, 151);
  EXPECT_EQ(r.files, 1);
  expect_same(kPublished + "hf-model.safetensors", dir.path("exported"));  // shapes too: A_log is (1, 1, H, 1)
  const std::string config = dir.path("exported/config.json");
  EXPECT_EQ(model::first_difference(model::import_hf_config(read_file(config), config),
                                    model::import_hf_config(read_file(kPublished + "hf-config.json"), "published")),
            "");
  EXPECT_EQ(ckpt::open_collection(dir.path("exported")).files().front().metadata().at("format"), "pt");
}

// Both families: K3's names have a prefix, its description a wrapping, its A_log zeros behind the heads.
TEST(Export, TrainedModelComesBack) {
  for (const std::string prefix : {"", "tensor_prefix = \"language_model.\"\n"}) {
    const TemporaryDirectory dir;
    train_small(dir, prefix);
    const Outcome out = tessera({"ckpt", "export", dir.path("run"), "--out", dir.path("model"), "--dtype", "f32"});
    ASSERT_EQ(out.exit_code, 0) << out.err;
    const Outcome in = tessera(
        {"ckpt", "import", dir.path("model/config.json"), "--weights", dir.path("model"), "--out", dir.path("again")});
    ASSERT_EQ(in.exit_code, 0) << in.err;
    const Outcome same = tessera({"ckpt", "diff", dir.path("run"), dir.path("again"), "--shared"});
    EXPECT_EQ(same.exit_code, 0) << same.out << same.err;
    EXPECT_NE(same.out.find(", 0 differ"), std::string::npos) << same.out;
    const ckpt::Collection files = ckpt::open_collection(dir.path("model"));
    const std::string a_log =
        prefix.empty() ? "model.layers.0.self_attn.A_log" : "language_model.model.layers.0.self_attn.A_log";
    EXPECT_EQ(files.at(a_log).shape, prefix.empty() ? (std::vector<int64_t>{1, 1, 3, 1}) : (std::vector<int64_t>{4}));
    const json config = json::parse(read_file(dir.path("model/config.json")));
    EXPECT_EQ(config.contains("text_config"), !prefix.empty());
    const json& text = prefix.empty() ? config : config.at("text_config");
    EXPECT_EQ(text.at("eos_token_id"), data::load_tokenizer("bytes")->eos_id());
    EXPECT_TRUE(text.at("pad_token_id").is_null()) << "Kimi Linear's own lies outside of a small vocabulary";
  }
}

TEST(Export, MatricesAreRoundedAndTheRestIsExact) {
  const TemporaryDirectory dir;
  train_small(dir, "");
  train::export_checkpoint(dir.path("run"), dir.path("f32"), {.matrices = DType::f32});
  train::export_checkpoint(dir.path("run"), dir.path("bf16"));
  const ckpt::Collection exact = ckpt::open_collection(dir.path("f32")),
                         rounded = ckpt::open_collection(dir.path("bf16"));
  ASSERT_EQ(exact.names(), rounded.names());
  int64_t matrices = 0;
  for (const std::string& name : exact.names()) {
    const std::vector<float> want = exact.read_f32(name), got = rounded.read_f32(name);
    const bool matrix = rounded.at(name).stored == "BF16";
    matrices += matrix;
    for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i], matrix ? float(bf16(want[i])) : want[i]) << name;
  }
  EXPECT_GT(matrices, 20);
  for (const char* name :
       {"model.norm.weight", "model.layers.0.self_attn.A_log", "model.layers.1.block_sparse_moe.gate.weight"}) {
    EXPECT_EQ(rounded.at(name).stored, "F32") << name;
  }
}

TEST(Export, LargeModelsComeInSeveralFilesWithAnIndex) {
  const TemporaryDirectory dir;
  train_small(dir, "");
  train::export_checkpoint(dir.path("run"), dir.path("one"));
  const train::ExportReport r = train::export_checkpoint(dir.path("run"), dir.path("many"), {.file_bytes = 20'000});
  EXPECT_GT(r.files, 3);
  const json index = json::parse(read_file(dir.path("many/model.safetensors.index.json")));
  EXPECT_EQ(index.at("metadata").at("total_size"), r.tensor_bytes);
  EXPECT_EQ(std::ssize(index.at("weight_map")), r.tensors);
  expect_same(dir.path("one"), dir.path("many"));
}

TEST(Export, WhatCannotBeSaidIsRefusedAndNothingWritten) {
  const TemporaryDirectory dir;
  write_small_run(dir, 6);  // its gate has another rank than the heads' width
  ASSERT_EQ(tessera({"train", dir.path("run.toml")}).exit_code, 0);
  const Outcome unsaid = tessera({"ckpt", "export", dir.path("run"), "--out", dir.path("model")});
  EXPECT_EQ(unsaid.exit_code, 2);
  EXPECT_NE(unsaid.err.find("[kda] gate_rank = 8, not gate_rank = 16"), std::string::npos) << unsaid.err;
  EXPECT_FALSE(std::filesystem::exists(dir.path("model")));
  const Outcome there = tessera({"ckpt", "export", dir.path("run"), "--out", dir.path("store")});
  EXPECT_EQ(there.exit_code, 2);
  EXPECT_NE(there.err.find("is there already"), std::string::npos) << there.err;
}

TEST(Diff, NamesWhatDiffersAndByHowMuch) {
  const TemporaryDirectory dir;
  std::vector<float> a{1, 2, 3, 4}, b{1, 2.5, 3, 4}, one{7};
  const auto view = [](std::vector<float>& v, Shape shape) { return View(v.data(), DType::f32, shape); };
  ckpt::write_safetensors(
      dir.path("a.safetensors"),
      std::vector<ckpt::TensorRef>{
          {"x", view(a, {4})}, {"turned", view(a, {2, 2})}, {"same", view(one, {1})}, {"left", view(one, {1})}});
  ckpt::write_safetensors(
      dir.path("b.safetensors"),
      std::vector<ckpt::TensorRef>{{"x", view(b, {4})}, {"turned", view(a, {4})}, {"same", view(one, {1})}});
  const std::vector<std::string> command{"ckpt", "diff", dir.path("a.safetensors"), dir.path("b.safetensors"),
                                         "--json"};
  const Outcome o = tessera(command);
  EXPECT_EQ(o.exit_code, 1) << o.err;
  const json found = json::parse(o.out);
  EXPECT_EQ(found.at("same"), 1);
  ASSERT_EQ(found.at("different").size(), 3u);
  EXPECT_EQ(found.at("different").at(0).at("what"), "only in the first");
  EXPECT_EQ(found.at("different").at(1).at("what"), "shapes (2, 2) and (4)");
  const json& x = found.at("different").at(2);
  EXPECT_EQ(x.at("name"), "x");
  EXPECT_EQ(x.at("differing"), 1);
  EXPECT_EQ(x.at("largest"), 0.5);
  EXPECT_NEAR(x.at("relative").get<double>(), 0.5 / std::sqrt(30.0), 1e-12);
  EXPECT_EQ(tessera({"ckpt", "diff", dir.path("a.safetensors"), dir.path("a.safetensors")}).exit_code, 0);
}

}  // namespace
}  // namespace tessera::test
