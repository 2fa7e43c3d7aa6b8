// Any bytes are either a valid safetensors file, whose tensors then lie inside it, or a UserError.
#include "ckpt/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera::ckpt;
  const auto file = std::as_bytes(std::span(data, size));
  try {
    for (const TensorInfo& tensor : parse_safetensors(file, "fuzz").tensors) {
      const auto bytes = file.subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.bytes));
      if (bytes.size() != static_cast<size_t>(tensor.bytes) || tensor.offset + tensor.bytes > int64_t(size))
        __builtin_trap();
    }
  } catch (const tessera::UserError&) {
  }
  return 0;
}
