#include "core/hash.h"

#include <fmt/core.h>

// Inlined: the packaged library is built for the oldest x86-64, the inlined code for the CPU that we compile for.
#define XXH_INLINE_ALL
#if defined(__GNUC__) && !defined(__clang__)  // its AVX-512 intrinsics start from undefined registers on purpose
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <xxhash.h>

namespace tessera {

std::string Hash128::hex() const { return fmt::format("{:016x}{:016x}", high, low); }

struct Hasher::State {
  XXH3_state_t xxh;
};

Hasher::Hasher() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh); }
Hasher::~Hasher() = default;
Hasher::Hasher(Hasher&&) noexcept = default;
Hasher& Hasher::operator=(Hasher&&) noexcept = default;

void Hasher::add(std::string_view bytes) {
  if (!bytes.empty()) XXH3_128bits_update(&state_->xxh, bytes.data(), bytes.size());
}

void Hasher::add_field(std::string_view bytes) {
  add_number(static_cast<int64_t>(bytes.size()));
  add(bytes);
}

void Hasher::add_number(int64_t value) { add({reinterpret_cast<const char*>(&value), sizeof value}); }

Hash128 Hasher::digest() const {
  const XXH128_hash_t h = XXH3_128bits_digest(&state_->xxh);
  return {h.low64, h.high64};
}

Hash128 hash_of(std::string_view bytes) {
  const XXH128_hash_t h = XXH3_128bits(bytes.data(), bytes.size());
  return {h.low64, h.high64};
}

std::string hash_hex(std::string_view bytes) { return hash_of(bytes).hex(); }

bool is_hash_hex(std::string_view text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace tessera
