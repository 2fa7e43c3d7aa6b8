#include "train/export_checkpoint.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "ckpt/safetensors_writer.h"
#include "model/export.h"
#include "train/saved_model.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

// As published: Kimi Linear's A_log is (1, 1, H, 1); K3 has zeros up to a power of two behind its heads.
View published_a_log(const View& view, bool padded, std::deque<std::vector<float>>& room) {
  if (!padded) return view.reshaped({1, 1, view.elements(), 1});
  std::vector<float>& wide = room.emplace_back(std::bit_ceil(static_cast<uint64_t>(view.elements())));
  std::copy_n(view.as<float>(), view.elements(), wide.begin());
  return {wide.data(), DType::f32, {std::ssize(wide)}};
}

std::vector<ckpt::TensorRef> published(const model::Model& model, const model::Weights& weights,
                                       std::deque<std::vector<float>>& room) {
  std::vector<ckpt::TensorRef> tensors;
  const bool padded = !model.config().tensor_prefix.empty();
  for (const auto& [name, view] : model::published_tensors(model.table(), weights.value)) {
    tensors.push_back({name, name.ends_with(".A_log") ? published_a_log(view, padded, room) : view});
  }
  return tensors;
}

// Consecutive tensors, as many as a file may hold.
std::vector<std::vector<ckpt::TensorRef>> into_files(const std::vector<ckpt::TensorRef>& tensors, int64_t most) {
  std::vector<std::vector<ckpt::TensorRef>> files;
  int64_t bytes = 0;
  for (const ckpt::TensorRef& tensor : tensors) {
    if (files.empty() || bytes + tensor.view.bytes() > most) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += tensor.view.bytes();
    files.back().push_back(tensor);
  }
  return files;
}

void write_tensors(const std::string& folder, const std::vector<std::vector<ckpt::TensorRef>>& files,
                   ExportReport& report) {
  nlohmann::json weight_map = nlohmann::json::object();
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name =
        files.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    ckpt::write_safetensors(folder + "/" + name, files[i], {{"format", "pt"}});
    for (const ckpt::TensorRef& tensor : files[i]) {
      weight_map[tensor.name] = name;
      report.tensor_bytes += tensor.view.bytes();
      ++report.tensors;
    }
  }
  report.files = std::ssize(files);
  if (files.size() == 1) return;
  const nlohmann::json index{{"metadata", {{"total_size", report.tensor_bytes}}}, {"weight_map", weight_map}};
  write_file_synced(folder + "/model.safetensors.index.json", index.dump(2) + "\n");
}

// A vocabulary lies in the run directory: <run>/checkpoints/step-...
void copy_vocabulary(const SavedModel& saved, const std::string& folder) {
  if (saved.state.tokenizer.empty() || saved.state.tokenizer == "bytes") return;
  const fs::path from = fs::canonical(saved.path).parent_path().parent_path() / saved.state.tokenizer;
  if (fs::exists(from)) fs::copy_file(from, fs::path(folder) / from.filename());
}

}  // namespace

ExportReport export_checkpoint(const std::string& checkpoint, const std::string& out, const ExportOptions& options) {
  if (path_exists(out)) fail_user("{}: is there already; name a directory that is not", out);
  const SavedModel saved = load_saved_model(checkpoint);
  const model::ParameterTable& table = saved.model.table();
  model::ExportedWith with{.weights_type = options.matrices == DType::bf16 ? "bfloat16" : "float32"};
  if (!saved.state.tokenizer.empty()) with.end_of_document = saved.tokenizer()->eos_id();
  const std::string config = model::export_hf_config(saved.model.config(), with, saved.path);

  Arena plan = Arena::dry();
  model::allocate_weights(plan, table, options.matrices, false);
  Arena arena(plan.peak());
  const model::Weights weights = model::allocate_weights(arena, table, options.matrices, false);
  model::assign(saved.weights.value, weights);

  std::deque<std::vector<float>> room;
  ExportReport report;
  report.path = out;
  const std::string partial = out + ".partial";
  fs::remove_all(partial);
  make_directory(partial);
  try {
    write_tensors(partial, into_files(published(saved.model, weights, room), options.file_bytes), report);
    write_file_synced(partial + "/config.json", config);
    copy_vocabulary(saved, partial);
    sync_directory(partial);
    rename_path(partial, out);
  } catch (...) {
    fs::remove_all(partial);
    throw;
  }
  return report;
}

}  // namespace tessera::train
