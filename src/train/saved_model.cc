#include "train/saved_model.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "ckpt/checkpoint.h"
#include "core/log.h"

namespace tessera::train {

namespace fs = std::filesystem;
using nlohmann::json;

std::string to_json(const SavedState& s) {
  return json{{"model_toml", s.model_toml},
              {"tokenizer", s.tokenizer},
              {"run_toml", s.run_toml},
              {"schedule", {{"step", s.step}, {"tokens", s.tokens}, {"learning_rate", s.learning_rate}}},
              {"data", {{"plan_hash", s.plan_hash}, {"next_sequence", s.next_sequence}}},
              {"guard", json::parse(s.guard)}}
      .dump();
}

SavedState parse_saved_state(const std::string& text, const std::string& where) {
  try {
    const json j = json::parse(text);
    SavedState s;
    s.model_toml = j.at("model_toml");
    s.tokenizer = j.at("tokenizer");
    s.run_toml = j.at("run_toml");
    s.step = j.at("schedule").at("step");
    s.tokens = j.at("schedule").at("tokens");
    s.learning_rate = j.at("schedule").at("learning_rate");
    s.plan_hash = j.at("data").at("plan_hash");
    s.next_sequence = j.at("data").at("next_sequence");
    s.guard = j.at("guard").dump();
    return s;
  } catch (const json::exception& e) {
    fail_user("{}: the training state cannot be read ({}); this checkpoint was not written by a compatible version",
              where, e.what());
  }
}

std::shared_ptr<const data::Tokenizer> SavedModel::tokenizer() const {
  if (state.tokenizer.empty()) {
    fail_user(
        "{}: the checkpoint names no tokenizer (it was imported); name a tokenizer with "
        "--tokenizer",
        path);
  }
  if (state.tokenizer == "bytes") return data::load_tokenizer("bytes");
  // <run>/checkpoints/step-...: the vocabulary lies in the run directory.
  return data::load_tokenizer((fs::canonical(path).parent_path().parent_path() / state.tokenizer).string());
}

std::string find_checkpoint(const std::string& path) {
  if (fs::exists(fs::path(path) / "manifest.json")) return path;
  if (!fs::exists(path)) fail_user("{}: no such checkpoint or run directory; name one that `tessera train` made", path);
  const std::string root =
      fs::is_directory(fs::path(path) / "checkpoints") ? (fs::path(path) / "checkpoints").string() : path;
  std::vector<ckpt::Entry> skipped;
  const auto newest = ckpt::newest_valid(root, &skipped);
  if (newest) {
    for (const ckpt::Entry& e : skipped) log_warning("checkpoint {} is skipped: {}", e.path, e.problem);
    return newest->path;
  }
  if (skipped.empty()) fail_user("{}: holds no checkpoint; name a checkpoint or a run directory", path);
  fail_user("{}: none of {} checkpoints is valid; the newest: {}", path, skipped.size(), skipped.back().problem);
}

SavedModel load_saved_model(const std::string& path, Device device) {
  const std::string found = find_checkpoint(path);
  const ckpt::Reader reader(found);
  SavedState state = parse_saved_state(reader.manifest().state_json, found);
  model::Model model(model::parse_model_config(state.model_toml, found), {});
  reader.require_fingerprints(model.config().fingerprint(), "");
  Arena dry = Arena::dry();
  model::allocate_weights(dry, model.table(), DType::f32, false);
  Arena arena(dry.peak());
  model::Weights weights = model::allocate_weights(arena, model.table(), DType::f32, false);
  std::vector<ckpt::TensorRef> wanted;
  for (const auto& [name, view] : model::published_tensors(model.table(), weights.value))
    wanted.push_back({name, view});
  ckpt::load_all(reader, wanted, true);
  if (device == Device::cuda) {
    Arena plan = Arena::dry();
    model::allocate_weights(plan, model.table(), DType::bf16, false);
    Arena on_gpu(plan.peak(), Memory::gpu);
    const model::Weights host =
        std::exchange(weights, model::allocate_weights(on_gpu, model.table(), DType::bf16, false));
    model::assign(host.value, weights);
    return {found, std::move(state), std::move(model), std::move(on_gpu), std::move(weights)};
  }
  return {found, std::move(state), std::move(model), std::move(arena), std::move(weights)};
}

}  // namespace tessera::train
