// Any bytes are either a manifest that survives a round trip through its canonical form, or a UserError.
#include "ckpt/manifest.h"
#include "core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera::ckpt;
  try {
    const std::string canonical = to_json(parse_manifest(std::as_bytes(std::span(data, size)), "fuzz"));
    if (to_json(parse_manifest(std::as_bytes(std::span(canonical)), "fuzz")) != canonical) __builtin_trap();
  } catch (const tessera::UserError&) {
  }
  return 0;
}
