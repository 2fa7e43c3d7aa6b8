#include "train/import_checkpoint.h"

#include <algorithm>
#include <set>

#include "ckpt/checkpoint.h"
#include "ckpt/collection.h"
#include "model/import.h"
#include "train/saved_model.h"

namespace tessera::train {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

// A_log comes as (H), (1, 1, H, 1), or padded with zeros beyond H (K3): matched by element count.
bool is_a_log(const std::string& name) { return name.ends_with(".A_log"); }

std::string shape_problem(const std::string& name, const ckpt::TensorInfo& info, const View& wanted) {
  const std::vector<int64_t> shape(wanted.shape().begin(), wanted.shape().end());
  int64_t elements = 1;
  for (int64_t extent : info.shape) elements *= extent;
  const bool fits = is_a_log(name) ? elements >= wanted.elements() : info.shape == shape;
  if (!fits) {
    return fmt::format("{}: shape {}, wanted {}", name, ckpt::shape_text(info.shape), ckpt::shape_text(shape));
  }
  if (info.stored != "F32" && info.stored != "BF16" && info.stored != "F16" && info.stored != "F64") {
    return fmt::format("{}: type {}, wanted F32, BF16 or F16", name, info.stored);
  }
  return "";
}

struct Match {
  std::string stored_name;
  View view;
};

// Pairs every tensor of ours with one of the files', or throws with everything that does not fit.
std::vector<Match> match(const ckpt::Collection& files, const std::vector<model::NamedView>& wanted,
                         const std::string& where) {
  std::vector<Match> matches;
  std::set<std::string> used;
  std::vector<std::string> problems;
  for (const auto& [name, view] : wanted) {
    const auto spellings = model::spellings(name);
    const auto found = std::ranges::find_if(spellings, [&](const auto& s) { return files.find(s) != nullptr; });
    if (found == spellings.end()) {
      problems.push_back(name + ": missing");
      continue;
    }
    used.insert(*found);
    const std::string problem = shape_problem(*found, *files.find(*found), view);
    if (!problem.empty()) problems.push_back(problem);
    matches.push_back({*found, view});
  }
  for (const std::string& name : files.names()) {
    if (!used.contains(name)) problems.push_back(name + ": not a tensor of this model");
  }
  if (problems.empty()) return matches;
  std::string list;
  for (size_t i = 0; i < problems.size() && i < 20; ++i) list += "\n  " + problems[i];
  if (problems.size() > 20) list += fmt::format("\n  ... and {} more", problems.size() - 20);
  fail_user("{}: {} tensors do not fit the model that config.json describes; nothing was imported:{}", where,
            problems.size(), list);
}

void load(const ckpt::Collection& files, const Match& m) {
  const std::vector<float> values = files.read_f32(m.stored_name);
  const size_t kept = static_cast<size_t>(m.view.elements());
  for (size_t i = kept; i < values.size(); ++i) {
    if (values[i] != 0.0f) {
      fail_user("{}: holds {} values for {} heads and the rest are not zero padding", m.stored_name, values.size(),
                kept);
    }
  }
  std::copy_n(values.begin(), kept, m.view.as<float>());
}

}  // namespace

ImportReport import_checkpoint(const std::string& config_file, const std::string& weights_path,
                               const std::string& out) {
  ImportReport report;
  report.config = model::import_hf_config(read_file(config_file, kMaxConfigBytes), config_file);
  const model::Model model(report.config, {});
  report.parameters = model.table().total();
  if (weights_path.empty()) return report;

  const ckpt::Collection files = ckpt::open_collection(weights_path);
  Arena dry = Arena::dry();
  model::allocate_weights(dry, model.table(), DType::f32, false);
  Arena arena(dry.peak());
  const model::Weights weights = model::allocate_weights(arena, model.table(), DType::f32, false);
  const auto wanted = model::published_tensors(model.table(), weights.value);
  ckpt::CheckpointState state;
  for (const Match& m : match(files, wanted, weights_path)) load(files, m);
  for (const auto& [name, view] : wanted) state.tensors.push_back({name, view});

  SavedState saved;
  saved.model_toml = model::dump_model_config(report.config);
  saved.tokenizer = "";
  state.run_id = report.config.name;
  state.model_fingerprint = report.config.fingerprint();
  state.state_json = to_json(saved);
  report.tensors = static_cast<int64_t>(wanted.size());
  report.checkpoint = ckpt::save(out, state).path;
  return report;
}

}  // namespace tessera::train
