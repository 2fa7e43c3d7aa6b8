#include "ckpt/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

#include "ckpt/strict_json.h"

namespace tessera::ckpt {

using nlohmann::json;

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian and read without swapping");

constexpr uint64_t kMaxHeaderBytes = uint64_t{100} << 20;

struct Format {
  std::string_view stored;
  DType dtype;
  int64_t bytes;
};
constexpr std::array<Format, 7> kFormats{{{"F32", DType::f32, 4},
                                          {"F64", DType::f64, 8},
                                          {"BF16", DType::bf16, 2},
                                          {"F16", DType::none, 2},
                                          {"I32", DType::i32, 4},
                                          {"I64", DType::i64, 8},
                                          {"U8", DType::u8, 1}}};

const Format& format_named(const std::string& stored, const std::string& what) {
  for (const Format& format : kFormats) {
    if (format.stored == stored) return format;
  }
  fail_user("{} has dtype \"{}\", wanted F32, F64, BF16, F16, I32, I64 or U8", what, stored);
}

// Elements x width, or a UserError when the product leaves 63 bits.
int64_t checked_bytes(const TensorInfo& tensor, int64_t width, const std::string& what) {
  int64_t bytes = width;
  bool empty = false;
  for (int64_t extent : tensor.shape) {
    empty |= extent == 0;
    if (extent != 0 && __builtin_mul_overflow(bytes, extent, &bytes)) {
      fail_user("{} has shape {}, whose size overflows 63 bits; the file is damaged", what, shape_text(tensor.shape));
    }
  }
  return empty ? 0 : bytes;
}

// One entry of the header. `limit` is the size of the data; offsets become absolute.
TensorInfo parse_tensor(const std::string& name, const json& entry, int64_t header_bytes, int64_t limit,
                        const std::string& path) {
  const std::string what = fmt::format("{}: tensor \"{}\"", path, name);
  check_keys(entry, {"dtype", "shape", "data_offsets"}, what);
  const Format& format = format_named(as_text(entry["dtype"], what + " dtype"), what);
  TensorInfo tensor{name, format.dtype, format.stored, {}, 0, 0};
  if (!entry["shape"].is_array())
    fail_user("{} has a shape of type {}, wanted a list", what, entry["shape"].type_name());
  for (const json& extent : entry["shape"]) tensor.shape.push_back(as_count(extent, what + " extent"));

  const json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) fail_user("{} wants data_offsets of two integers", what);
  const int64_t begin = as_count(offsets[0], what + " begin");
  const int64_t end = as_count(offsets[1], what + " end");
  if (begin > end || end > limit) {
    fail_user("{} lies at [{}, {}), wanted ascending offsets within {} data bytes; the file is damaged or truncated",
              what, begin, end, limit);
  }
  const int64_t wanted = checked_bytes(tensor, format.bytes, what);
  if (end - begin != wanted) {
    fail_user("{} has {} bytes, wanted {} for {} {}; the file is damaged", what, end - begin, wanted, format.stored,
              shape_text(tensor.shape));
  }
  tensor.offset = header_bytes + begin;
  tensor.bytes = end - begin;
  return tensor;
}

void check_tiling(const std::vector<TensorInfo>& tensors, int64_t header_bytes, int64_t file_bytes,
                  const std::string& path) {
  int64_t at = header_bytes;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.offset != at) {
      fail_user("{}: tensor \"{}\" begins at byte {}, wanted {} ({}); the file is damaged", path, tensor.name,
                tensor.offset, at, tensor.offset < at ? "overlap" : "hole");
    }
    at += tensor.bytes;
  }
  if (at != file_bytes) {
    fail_user("{}: the tensors end at byte {} and the file at {}; the file is truncated or has trailing bytes", path,
              at, file_bytes);
  }
}

// IEEE half to single, exact. Subnormal halves (below 2^-14) are m x 2^-24.
float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
  if (exponent == 0) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(mantissa) * 0x1.0p-24f));
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

// memcpy of each element, because a file may place a tensor at any byte.
template <class Stored, class Convert>
void convert_each(const std::byte* data, std::span<float> out, Convert convert) {
  for (size_t i = 0; i < out.size(); ++i) {
    Stored value;
    std::memcpy(&value, data + i * sizeof(Stored), sizeof(Stored));
    out[i] = convert(value);
  }
}

}  // namespace

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += fmt::format("{}{}", i ? ", " : "", shape[i]);
  return text + ")";
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& path) {
  uint64_t length = 0;
  if (file.size() < sizeof(length)) {
    fail_user("{}: {} bytes, a safetensors file has at least 8; it is truncated or of another kind", path, file.size());
  }
  std::memcpy(&length, file.data(), sizeof(length));
  if (length > kMaxHeaderBytes || length > file.size() - sizeof(length)) {
    fail_user(
        "{}: header of {} bytes in a file of {}, wanted at most {} and inside the file; it is truncated or not a "
        "safetensors file",
        path, length, file.size(), kMaxHeaderBytes);
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + sizeof(length), length);
  if (text.empty() || text.front() != '{')
    fail_user("{}: the header does not begin with '{{'; the file is damaged", path);

  SafetensorsHeader header;
  header.header_bytes = static_cast<int64_t>(sizeof(length) + length);
  const int64_t file_bytes = static_cast<int64_t>(file.size());
  const json root = parse_json_object(text, path);
  for (const auto& item : root.items()) {
    if (item.key() != "__metadata__") {
      header.tensors.push_back(
          parse_tensor(item.key(), item.value(), header.header_bytes, file_bytes - header.header_bytes, path));
      continue;
    }
    if (!item.value().is_object()) fail_user("{}: __metadata__ is not an object", path);
    for (const auto& entry : item.value().items()) {
      header.metadata[entry.key()] = as_text(entry.value(), fmt::format("{}: __metadata__ {}", path, entry.key()));
    }
  }
  // An empty tensor shares its offset with the next one and stands before it.
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
  });
  check_tiling(header.tensors, header.header_bytes, file_bytes, path);
  return header;
}

void convert_to_f32(const TensorInfo& tensor, const std::byte* data, std::span<float> out) {
  if (tensor.stored == "F32") {
    if (!out.empty()) std::memcpy(out.data(), data, out.size_bytes());
  } else if (tensor.stored == "F64") {
    convert_each<double>(data, out, [](double value) { return static_cast<float>(value); });
  } else if (tensor.stored == "BF16") {
    convert_each<bf16>(data, out, [](bf16 value) { return static_cast<float>(value); });
  } else if (tensor.stored == "F16") {
    convert_each<uint16_t>(data, out, half_to_float);
  } else {
    fail_user("tensor \"{}\" holds {}, wanted F32, F64, BF16 or F16 to convert to float", tensor.name, tensor.stored);
  }
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(path), header_(parse_safetensors(file_.bytes(), path)) {
  for (size_t i = 0; i < header_.tensors.size(); ++i) index_[header_.tensors[i].name] = i;
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.tensors[found->second];
}

const TensorInfo& SafetensorsFile::at(std::string_view name) const {
  const TensorInfo* tensor = find(name);
  if (tensor == nullptr) {
    fail_user("{}: no tensor \"{}\" among its {}; check the name or the file", path(), name, tensors().size());
  }
  return *tensor;
}

std::vector<float> SafetensorsFile::read_f32(std::string_view name) const {
  const TensorInfo& tensor = at(name);
  int64_t elements = 1;
  for (int64_t extent : tensor.shape) elements *= extent;
  std::vector<float> values(static_cast<size_t>(elements));
  convert_to_f32(tensor, data(tensor), values);
  return values;
}

}  // namespace tessera::ckpt
