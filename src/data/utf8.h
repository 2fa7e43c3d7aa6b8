// UTF-8 as RFC 3629 defines it: no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::data {

// Bytes of the character that begins `text` (1 to 4); 0 when `text` ends inside a character (or is empty); -1 when it
// begins no character.
int utf8_character(std::string_view text);

// Offset of the first byte that belongs to no character, or -1 when all of `text` is UTF-8.
int64_t find_invalid_utf8(std::string_view text);

// Appends the character, U+FFFD for a code point that is none.
void append_utf8(uint32_t code_point, std::string& out);

}  // namespace tessera::data
