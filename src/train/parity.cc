#include "train/parity.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "ckpt/safetensors.h"
#include "ckpt/safetensors_writer.h"
#include "model/accounting.h"
#include "train/saved_model.h"

namespace tessera::train {
namespace {

std::vector<int32_t> read_ids(const std::string& path, int64_t vocabulary) {
  const ckpt::SafetensorsFile file(path);
  const ckpt::TensorInfo& info = file.at("ids");
  if (info.dtype != DType::i64 && info.dtype != DType::i32) {
    fail_user("{}: tensor 'ids' is {}; wanted I32 or I64", path, info.stored);
  }
  const int64_t count = info.bytes / bytes_of(info.dtype);
  if (count < 2) fail_user("{}: tensor 'ids' has {} elements; a next-token loss needs two", path, count);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (size_t i = 0; i < ids.size(); ++i) {
    int64_t id = 0;
    int32_t narrow = 0;
    const std::byte* from = file.data(info) + int64_t(i) * bytes_of(info.dtype);
    if (info.dtype == DType::i64) {
      std::memcpy(&id, from, sizeof id);
    } else {
      std::memcpy(&narrow, from, sizeof narrow);
      id = narrow;
    }
    if (id < 0 || id >= vocabulary) {
      fail_user("{}: id {} at position {} is outside the model's vocabulary of {}", path, id, i, vocabulary);
    }
    ids[i] = static_cast<int32_t>(id);
  }
  return ids;
}

}  // namespace

ParityReport write_parity(const std::string& checkpoint, const std::string& ids_file, const std::string& logits_file,
                          const std::string& gradients_file) {
  const SavedModel saved = load_saved_model(checkpoint);
  const model::ModelConfig& c = saved.model.config();
  const std::vector<int32_t> values = read_ids(ids_file, c.vocabulary);
  const int64_t tokens = static_cast<int64_t>(values.size());
  const std::array<int64_t, 2> one_document{0, tokens};

  // Weights stay where they are; gradients, logits and one step go into an arena of the size a dry run tells.
  Arena dry = Arena::dry();
  model::allocate_weights(dry, saved.model.table(), DType::f32, true);
  const int64_t step = model::dry_step(saved.model, {one_document}, DType::f32, Product::f32, false).peak_bytes;
  Arena arena(dry.peak() + step + 4 * tokens * (c.vocabulary + c.width + 4) + (1 << 20));
  Context ctx{Device::cpu, arena};
  const View ids = arena.allocate(DType::i32, {tokens}), targets = arena.allocate(DType::i32, {tokens});
  const View loss = arena.allocate(DType::f32, {tokens});
  std::ranges::copy(values, ids.as<int32_t>());
  std::copy(values.begin() + 1, values.end(), targets.as<int32_t>());
  targets.as<int32_t>()[tokens - 1] = -1;

  ParityReport report{tokens, 0};
  if (!logits_file.empty()) {
    Arena::Scope scope(arena);
    const View hidden = arena.allocate(DType::f32, {tokens, c.width});
    const View logits = arena.allocate(DType::f32, {tokens, c.vocabulary});
    saved.model.hidden(ctx, saved.weights, ids, {one_document}, nullptr, hidden);
    saved.model.logits(ctx, saved.weights, hidden, logits);
    ckpt::write_safetensors(logits_file, std::vector<ckpt::TensorRef>{{"logits", logits}});
  }
  model::Weights weights = saved.weights;
  weights.gradient = model::allocate_weights(arena, saved.model.table(), DType::f32, true).gradient;
  saved.model.forward_backward(ctx, weights, {ids, targets, {one_document}}, 1.0 / double(tokens - 1), loss, nullptr);
  for (int64_t t = 0; t < tokens; ++t) report.loss += double(loss.as<float>()[t]) / double(tokens - 1);
  if (!gradients_file.empty()) {
    std::vector<ckpt::TensorRef> named;
    for (const auto& [name, view] : model::published_tensors(saved.model.table(), weights.gradient)) {
      named.push_back({name, view});
    }
    ckpt::write_safetensors(gradients_file, named);
  }
  return report;
}

}  // namespace tessera::train
