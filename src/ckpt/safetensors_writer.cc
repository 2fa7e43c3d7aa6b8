#include "ckpt/safetensors_writer.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "ckpt/safetensors.h"
#include "ckpt/strict_json.h"

namespace tessera::ckpt {

namespace {

int64_t bytes_of_spec(const TensorSpec& spec) {
  int64_t bytes = bytes_of(spec.dtype);
  for (int64_t extent : spec.shape) bytes *= extent;
  return bytes;
}

std::string header_text(const std::vector<TensorSpec>& specs, const std::map<std::string, std::string>& metadata) {
  nlohmann::json root = nlohmann::json::object();
  if (!metadata.empty()) root["__metadata__"] = metadata;
  int64_t at = 0;
  for (const TensorSpec& spec : specs) {
    TESSERA_CHECK(!root.contains(spec.name) && spec.name != "__metadata__", "tensor name \"{}\" is taken", spec.name);
    TESSERA_CHECK(at % bytes_of(spec.dtype) == 0,
                  "tensor \"{}\" of {} begins at byte {}: widest types must stand first", spec.name,
                  name_of(spec.dtype), at);
    const int64_t end = at + bytes_of_spec(spec);
    root[spec.name] = {{"dtype", stored_name(spec.dtype)}, {"shape", spec.shape}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = dump_canonical(root);
  const int64_t used = static_cast<int64_t>(sizeof(uint64_t) + text.size());
  const int64_t padded = (used + SafetensorsWriter::kHeaderAlignment - 1) / SafetensorsWriter::kHeaderAlignment *
                         SafetensorsWriter::kHeaderAlignment;
  text.append(static_cast<size_t>(padded - used), ' ');
  return text;
}

}  // namespace

std::string_view stored_name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "F32";
    case DType::f64: return "F64";
    case DType::bf16: return "BF16";
    case DType::i32: return "I32";
    case DType::i64: return "I64";
    case DType::u8: return "U8";
    case DType::none: break;
  }
  throw Error("an absent view has no safetensors type");
}

TensorSpec spec_of(const TensorRef& ref) {
  return {ref.name, ref.view.dtype(), std::vector<int64_t>(ref.view.shape().begin(), ref.view.shape().end())};
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorSpec> specs,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path), specs_(std::move(specs)) {
  const std::string text = header_text(specs_, metadata);
  const uint64_t length = text.size();
  header_bytes_ = static_cast<int64_t>(sizeof(length) + text.size());
  Hasher hasher;
  hasher.add_number(static_cast<int64_t>(length));
  hasher.add(text);
  header_hash_ = hasher.digest().hex();
  file_.write({reinterpret_cast<const char*>(&length), sizeof(length)});
  file_.write(text);
}

SafetensorsWriter::Written SafetensorsWriter::append(const View& view) {
  TESSERA_CHECK(next_ < specs_.size(), "more tensors than the {} announced for {}", specs_.size(), file_.path());
  const TensorSpec& spec = specs_[next_++];
  const TensorSpec given = spec_of({spec.name, view});
  TESSERA_CHECK(given.dtype == spec.dtype && given.shape == spec.shape, "tensor \"{}\" is {} {}, announced as {} {}",
                spec.name, name_of(given.dtype), shape_text(given.shape), name_of(spec.dtype), shape_text(spec.shape));
  TESSERA_CHECK(view.data() != nullptr || view.bytes() == 0, "tensor \"{}\" has no storage", spec.name);

  Written written{file_.size(), view.bytes(), {}};
  const auto* base = static_cast<const std::byte*>(view.data());
  const bool contiguous = view.contiguous();
  const int64_t runs = view.bytes() == 0 ? 0 : contiguous ? 1 : view.rows();
  const int64_t run_bytes = contiguous ? view.bytes() : view.row_elements() * bytes_of(view.dtype());
  Hasher hasher;
  for (int64_t run = 0; run < runs; ++run) {
    const std::byte* from = base + run * view.row_stride() * bytes_of(view.dtype());
    for (int64_t done = 0; done < run_bytes; done += FileWriter::kPieceBytes) {
      const std::string_view piece = text_of(from + done, std::min(FileWriter::kPieceBytes, run_bytes - done));
      hasher.add(piece);
      file_.write(piece);
    }
  }
  written.hash = hasher.digest().hex();
  return written;
}

int64_t SafetensorsWriter::finish() {
  TESSERA_CHECK(next_ == specs_.size(), "{} of {} tensors written to {}", next_, specs_.size(), file_.path());
  file_.close();
  return file_.size();
}

void order_widest_first(std::vector<TensorRef>& tensors) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorRef& a, const TensorRef& b) {
    return bytes_of(a.view.dtype()) > bytes_of(b.view.dtype());
  });
}

void write_safetensors(const std::string& path, std::span<const TensorRef> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorRef> ordered(tensors.begin(), tensors.end());
  order_widest_first(ordered);
  std::vector<TensorSpec> specs;
  for (const TensorRef& tensor : ordered) specs.push_back(spec_of(tensor));
  const std::string partial = path + ".partial";
  try {
    SafetensorsWriter writer(partial, std::move(specs), metadata);
    for (const TensorRef& tensor : ordered) writer.append(tensor.view);
    writer.finish();
    rename_path(partial, path);
  } catch (...) {
    ::unlink(partial.c_str());
    throw;
  }
}

}  // namespace tessera::ckpt
