// The writing side. The order of the steps is the whole design: see checkpoint.h.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>

#include "ckpt/checkpoint.h"
#include "ckpt/directory.h"
#include "core/hash.h"

namespace tessera::ckpt {

namespace {

constexpr int64_t kMaxStep = 999'999'999'999;  // twelve digits in the name

void check_arguments(const CheckpointState& state, const SaveOptions& options) {
  TESSERA_CHECK(state.step >= 0 && state.step <= kMaxStep, "step {}", state.step);
  TESSERA_CHECK(state.attempt >= 0, "attempt {}", state.attempt);
  std::set<std::string_view> names;
  for (const TensorRef& tensor : state.tensors) {
    TESSERA_CHECK(tensor.view.present() && (tensor.view.data() != nullptr || tensor.view.bytes() == 0),
                  "tensor \"{}\" has no storage", tensor.name);
    TESSERA_CHECK(names.insert(tensor.name).second, "tensor \"{}\" is there twice", tensor.name);
  }
  if (options.keep_last < 1) fail_user("ckpt.keep_last is {}, wanted at least 1", options.keep_last);
  if (options.keep_every_steps < 0)
    fail_user("ckpt.keep_every_steps is {}, wanted 0 or more", options.keep_every_steps);
  if (options.file_bytes < 1) fail_user("ckpt.file_bytes is {}, wanted at least 1", options.file_bytes);
}

int64_t unix_ms() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

Manifest describe(const CheckpointState& state) {
  Manifest manifest;
  manifest.step = state.step;
  manifest.run_id = state.run_id;
  manifest.attempt = state.attempt;
  manifest.created_unix_ms = unix_ms();
  manifest.model_fingerprint = state.model_fingerprint;
  manifest.tokenizer_fingerprint = state.tokenizer_fingerprint;
  manifest.state_json = state.state_json;
  return manifest;
}

// Payload files of at most `file_bytes`; a larger tensor has one for itself.
std::vector<std::span<const TensorRef>> split_into_files(std::span<const TensorRef> tensors, int64_t file_bytes) {
  std::vector<std::span<const TensorRef>> parts;
  size_t begin = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i > begin && bytes + tensors[i].view.bytes() > file_bytes) {
      parts.push_back(tensors.subspan(begin, i - begin));
      begin = i;
      bytes = 0;
    }
    bytes += tensors[i].view.bytes();
  }
  if (begin < tensors.size()) parts.push_back(tensors.subspan(begin));
  return parts;
}

void write_part(const std::string& directory, std::span<const TensorRef> tensors, Manifest& manifest) {
  const int64_t part = static_cast<int64_t>(manifest.files.size());
  FileRecord file;
  file.path = fmt::format("data/part-{:03}.safetensors", part);
  std::vector<TensorSpec> specs;
  for (const TensorRef& tensor : tensors) specs.push_back(spec_of(tensor));
  // Step and attempt in the header: a file of another step under the same name has another header hash.
  SafetensorsWriter writer(join(directory, file.path), specs,
                           {{"attempt", std::to_string(manifest.attempt)},
                            {"format", "tessera-checkpoint"},
                            {"part", std::to_string(part)},
                            {"run_id", manifest.run_id},
                            {"step", std::to_string(manifest.step)}});
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto written = writer.append(tensors[i].view);
    manifest.tensors.push_back(
        {specs[i].name, specs[i].dtype, specs[i].shape, part, written.offset, written.bytes, written.hash});
  }
  file.size = writer.finish();
  file.header_bytes = writer.header_bytes();
  file.header_hash = writer.header_hash();
  manifest.files.push_back(std::move(file));
}

// Everything, durable, with COMMITTED last. Returns the bytes written.
int64_t write_directory(const std::string& directory, const CheckpointState& state, int64_t file_bytes) {
  const std::string data = join(directory, "data");
  make_directory(data);
  Manifest manifest = describe(state);
  std::vector<TensorRef> tensors = state.tensors;
  order_widest_first(tensors);
  for (std::span<const TensorRef> part : split_into_files(tensors, file_bytes)) write_part(directory, part, manifest);
  sync_directory(data);

  std::sort(manifest.tensors.begin(), manifest.tensors.end(),
            [](const TensorRecord& a, const TensorRecord& b) { return a.name < b.name; });
  const std::string text = to_json(manifest), line = commit_line(text, state.step);
  write_file_synced(join(directory, "manifest.json"), text);
  sync_directory(directory);
  write_file_atomic(join(directory, "COMMITTED"), line);  // half a mark would pass for damage
  int64_t bytes = static_cast<int64_t>(text.size() + line.size());
  for (const FileRecord& file : manifest.files) bytes += file.size;
  return bytes;
}

// Gives the complete directory its final name. Returns what stood there before, under its new name; empty: nothing.
std::string publish(const std::string& root, const std::string& tmp, const std::string& final_path) {
  std::string old;
  if (!path_exists(final_path)) {
    rename_path(tmp, final_path);
  } else if (exchange_paths(tmp, final_path)) {
    old = tmp;
  } else {
    // Without an exchange there is a moment without the final name; readers and clean_leftovers then take the committed
    // .tmp for it.
    old = join(root, ".trash-" + step_name(*parse_step(final_path.substr(final_path.rfind('/') + 1))));
    rename_path(final_path, old);
    rename_path(tmp, final_path);
  }
  return old;
}

// What follows the commit can no longer fail the save.
template <class F>
void warn_on_error(std::vector<std::string>& warnings, F&& f) {
  try {
    f();
  } catch (const Error& error) {
    warnings.push_back(error.what());
  }
}

}  // namespace

SaveReport save(const std::string& root, const CheckpointState& state, const SaveOptions& options) {
  static std::mutex one_at_a_time;
  const std::lock_guard guard(one_at_a_time);
  check_arguments(state, options);
  const WriterLock lock(root);
  SaveReport report;
  clean_leftovers(root, report.warnings);

  const std::string name = step_name(state.step);
  report.path = join(root, name);
  const std::string tmp =
      report.path + (path_exists(report.path) ? fmt::format(".a{:02}.tmp", state.attempt) : std::string(".tmp"));
  if (path_exists(tmp)) fail_user("{} is left from another run and could not be deleted; delete it", tmp);
  std::string replaced;
  try {
    report.bytes = write_directory(tmp, state, options.file_bytes);
    replaced = publish(root, tmp, report.path);
  } catch (...) {
    std::vector<std::string> ignored;  // the first failure is the one to tell
    warn_on_error(ignored, [&] {
      if (path_exists(tmp)) discard(root, tmp);
    });
    throw;
  }
  sync_directory(root);
  if (!replaced.empty()) warn_on_error(report.warnings, [&] { discard(root, replaced); });
  warn_on_error(report.warnings, [&] { write_file_atomic(join(root, "LATEST"), name + "\n"); });
  warn_on_error(report.warnings, [&] {
    report.removed = apply_retention(root, options.keep_last, options.keep_every_steps, state.step, report.warnings);
  });
  return report;
}

}  // namespace tessera::ckpt
