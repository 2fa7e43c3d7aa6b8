// XXH3-128 of bytes, whole or in pieces, as 32 lower-case hexadecimal digits. It finds damage and names content; it is
// no protection against forgery. It runs faster than memory delivers, so hashing while writing costs nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace tessera {

struct Hash128 {
  uint64_t low = 0, high = 0;

  bool operator==(const Hash128&) const = default;
  std::string hex() const;  // 32 lower-case digits, high half first
};

class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(Hasher&&) noexcept;
  Hasher& operator=(Hasher&&) noexcept;

  void add(std::string_view bytes);
  void add_field(std::string_view bytes);  // its length is hashed too, so that ("ab", "c") and ("a", "bc") differ
  void add_number(int64_t value);
  Hash128 digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

Hash128 hash_of(std::string_view bytes);
std::string hash_hex(std::string_view bytes);
bool is_hash_hex(std::string_view text);

}  // namespace tessera
