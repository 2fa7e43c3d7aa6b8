// The reading side: one tensor, all of them, or every byte without keeping any.
#include <algorithm>
#include <set>

#include "ckpt/checkpoint.h"
#include "ckpt/directory.h"
#include "ckpt/safetensors.h"
#include "core/hash.h"
#include "core/parallel.h"

namespace tessera::ckpt {

namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;  // stays in the cache between read and hash

// Reads [offset, offset + bytes) piece by piece to where `place(done, left)` says, and compares the hash of all.
// Returns what is wrong; empty: nothing.
template <class Place>
std::string read_hashed(const File& file, int64_t offset, int64_t bytes, const std::string& wanted_hash,
                        Place&& place) {
  Hasher hasher;
  for (int64_t done = 0; done < bytes;) {
    const std::pair<std::byte*, int64_t> piece = place(done, std::min(bytes - done, kPieceBytes));
    const int64_t n = file.read_at(piece.first, piece.second, offset + done);
    hasher.add(text_of(piece.first, n));
    if (n < piece.second) {
      return fmt::format("{} ends at byte {}, wanted {} bytes from {}", file.path(), offset + done + n, bytes, offset);
    }
    done += n;
  }
  const std::string hash = hasher.digest().hex();
  if (hash == wanted_hash) return {};
  return fmt::format("bytes {} to {} of {} have hash {}, wanted {}", offset, offset + bytes, file.path(), hash,
                     wanted_hash);
}

std::string check_range(const File& file, int64_t offset, int64_t bytes, const std::string& wanted_hash) {
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(bytes, kPieceBytes)));
  return read_hashed(file, offset, bytes, wanted_hash,
                     [&](int64_t, int64_t left) { return std::pair(buffer.data(), left); });
}

// Why `record` cannot fill `view`; empty: it can.
std::string mismatch(const TensorRecord& record, const TensorRef& wanted) {
  const TensorSpec spec = spec_of(wanted);
  if (record.dtype != spec.dtype) {
    return fmt::format("{}: type is {}, wanted {}", record.name, name_of(record.dtype), name_of(spec.dtype));
  }
  if (record.shape != spec.shape) {
    return fmt::format("{}: shape is {}, wanted {}", record.name, shape_text(record.shape), shape_text(spec.shape));
  }
  return {};
}

// At most this many lines a kind: a whole other model would fill the terminal.
constexpr size_t kMaxLines = 100;

std::string section(const char* title, const std::vector<std::string>& lines) {
  if (lines.empty()) return {};
  std::string text = fmt::format("\n{} ({}):", title, lines.size());
  for (size_t i = 0; i < std::min(lines.size(), kMaxLines); ++i) text += "\n  " + lines[i];
  if (lines.size() > kMaxLines) text += fmt::format("\n  ... and {} more", lines.size() - kMaxLines);
  return text;
}

void check_all_fit(const Manifest& manifest, std::span<const TensorRef> wanted, bool allow_extra,
                   const std::string& path) {
  std::vector<std::string> missing, extra, wrong;
  std::set<std::string_view> names;
  for (const TensorRef& ref : wanted) {
    TESSERA_CHECK(names.insert(ref.name).second, "tensor \"{}\" is wanted twice", ref.name);
    TESSERA_CHECK(ref.view.data() != nullptr || ref.view.bytes() == 0, "tensor \"{}\" has no storage", ref.name);
    const TensorRecord* record = manifest.find(ref.name);
    if (record == nullptr) {
      missing.push_back(ref.name);
    } else if (std::string why = mismatch(*record, ref); !why.empty()) {
      wrong.push_back(std::move(why));
    }
  }
  for (const TensorRecord& record : manifest.tensors) {
    if (!allow_extra && !names.contains(record.name)) extra.push_back(record.name);
  }
  if (missing.empty() && extra.empty() && wrong.empty()) return;
  fail_user(
      "{} does not fit the model; nothing loaded. Use the configuration that wrote it, or another checkpoint.{}{}{}",
      path, section("missing in the checkpoint", missing), section("in the checkpoint only", extra),
      section("of another type or shape", wrong));
}

}  // namespace

Reader::Reader(const std::string& path) : path_(path), manifest_(read_complete_manifest(path)) {
  for (const FileRecord& file : manifest_.files) files_.push_back(File::open_read(join(path, file.path)));
}

Reader open(const std::string& path) { return Reader(path); }

void Reader::require_fingerprints(std::string_view model, std::string_view tokenizer) const {
  const auto require = [&](const char* what, std::string_view found, std::string_view wanted) {
    if (wanted.empty() || found == wanted) return;
    fail_user(
        "{} was written for {} {}, this run has {} {}; use the configuration that wrote it, or another checkpoint",
        path_, what, found, what, wanted);
  };
  require("model", manifest_.model_fingerprint, model);
  require("tokenizer", manifest_.tokenizer_fingerprint, tokenizer);
}

std::string Reader::fetch(const TensorRecord& tensor, const View& destination) const {
  auto* base = static_cast<std::byte*>(destination.data());
  const int64_t width = bytes_of(tensor.dtype);
  const int64_t row_bytes = destination.contiguous() ? tensor.bytes : destination.row_elements() * width;
  const int64_t stride_bytes = destination.row_stride() * width;
  return read_hashed(file_of(tensor), tensor.offset, tensor.bytes, tensor.hash, [&](int64_t done, int64_t left) {
    const int64_t row = done / row_bytes, within = done % row_bytes;
    return std::pair(base + row * stride_bytes + within, std::min(left, row_bytes - within));
  });
}

bool Reader::holds(const TensorRef& wanted) const {
  const TensorRecord* tensor = manifest_.find(wanted.name);
  return tensor != nullptr && mismatch(*tensor, wanted).empty();
}

void Reader::read_into(std::string_view name, const View& destination) const {
  const TensorRecord* tensor = manifest_.find(name);
  if (tensor == nullptr) fail_user("{}: no tensor \"{}\" among its {}", path_, name, manifest_.tensors.size());
  const TensorRef wanted{std::string(name), destination};
  if (const std::string why = mismatch(*tensor, wanted); !why.empty()) fail_user("{}: tensor {}", path_, why);
  if (const std::string why = fetch(*tensor, destination); !why.empty()) {
    fail_user("{}: tensor {} is damaged ({}); use another checkpoint", path_, name, why);
  }
}

std::string Reader::check(const TensorRecord& tensor) const {
  return check_range(file_of(tensor), tensor.offset, tensor.bytes, tensor.hash);
}

std::string Reader::check_header(const FileRecord& file) const {
  const auto index = static_cast<size_t>(&file - manifest_.files.data());
  return check_range(files_[index], 0, file.header_bytes, file.header_hash);
}

void load_all(const Reader& reader, std::span<const TensorRef> wanted, bool allow_extra) {
  const Manifest& manifest = reader.manifest();
  check_all_fit(manifest, wanted, allow_extra, reader.path());
  std::vector<std::string> why(wanted.size());
  parallel_items(static_cast<int64_t>(wanted.size()), [&](int64_t i) {
    const TensorRef& ref = wanted[static_cast<size_t>(i)];
    why[static_cast<size_t>(i)] = reader.fetch(*manifest.find(ref.name), ref.view);
  });
  std::vector<std::string> damaged;
  for (size_t i = 0; i < why.size(); ++i) {
    if (!why[i].empty()) damaged.push_back(wanted[i].name + ": " + why[i]);
  }
  if (!damaged.empty()) {
    fail_user("{} is damaged; what was loaded from it is useless, load another checkpoint{}", reader.path(),
              section("damaged tensors", damaged));
  }
}

Verification verify(const std::string& path) {
  if (!is_directory(path)) fail_user("{} is no directory; name a checkpoint such as .../step-N", path);
  Verification result;
  std::optional<Reader> reader;
  try {
    result.step = read_manifest(path).step;
    reader.emplace(path);
  } catch (const Error& error) {
    result.bad.push_back({"", error.what()});
    return result;
  }
  const Manifest& manifest = reader->manifest();
  result.tensors = static_cast<int64_t>(manifest.tensors.size());
  for (const FileRecord& file : manifest.files) {
    if (const std::string why = reader->check_header(file); !why.empty()) result.bad.push_back({"", "header: " + why});
  }
  std::vector<std::string> why(manifest.tensors.size());
  parallel_items(result.tensors, [&](int64_t i) {
    why[static_cast<size_t>(i)] = reader->check(manifest.tensors[static_cast<size_t>(i)]);
  });
  for (size_t i = 0; i < why.size(); ++i) {
    if (!why[i].empty()) result.bad.push_back({manifest.tensors[i].name, why[i]});
  }
  result.pass = result.bad.empty();
  return result;
}

Inspection inspect(const std::string& path) {
  Inspection result;
  result.path = path;
  result.manifest = read_complete_manifest(path);
  result.bytes = directory_bytes(path);
  result.tensor_bytes = result.manifest.tensor_bytes();
  return result;
}

}  // namespace tessera::ckpt
