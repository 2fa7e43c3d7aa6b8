#include "data/utf8.h"

#include <cstring>

namespace tessera::data {
namespace {

constexpr uint32_t kReplacement = 0xFFFD;

uint8_t byte_at(std::string_view text, size_t i) { return static_cast<uint8_t>(text[i]); }

// The range of the second byte is where overlong forms (E0, F0), surrogates (ED) and U+110000 up (F4) are excluded.
bool second_byte_fits(uint8_t lead, uint8_t second) {
  switch (lead) {
    case 0xE0: return second >= 0xA0 && second <= 0xBF;
    case 0xED: return second >= 0x80 && second <= 0x9F;
    case 0xF0: return second >= 0x90 && second <= 0xBF;
    case 0xF4: return second >= 0x80 && second <= 0x8F;
    default: return second >= 0x80 && second <= 0xBF;
  }
}

}  // namespace

int utf8_character(std::string_view text) {
  if (text.empty()) return 0;
  const uint8_t lead = byte_at(text, 0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return -1;
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == text.size()) return 0;
    const uint8_t b = byte_at(text, static_cast<size_t>(i));
    if (i == 1 ? !second_byte_fits(lead, b) : (b & 0xC0) != 0x80) return -1;
  }
  return length;
}

int64_t find_invalid_utf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    uint64_t eight = 0;
    if (i + sizeof eight <= text.size()) {  // most text is ASCII: eight bytes a step
      std::memcpy(&eight, text.data() + i, sizeof eight);
      if ((eight & 0x8080808080808080u) == 0) {
        i += sizeof eight;
        continue;
      }
    }
    const int length = utf8_character(text.substr(i));
    if (length <= 0) return static_cast<int64_t>(i);
    i += static_cast<size_t>(length);
  }
  return -1;
}

void append_utf8(uint32_t c, std::string& out) {
  if (c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) c = kReplacement;
  const auto put = [&out](uint32_t byte) { out.push_back(static_cast<char>(static_cast<uint8_t>(byte))); };
  if (c < 0x80) return put(c);
  if (c < 0x800) {
    put(0xC0 | (c >> 6));
  } else {
    if (c < 0x10000) {
      put(0xE0 | (c >> 12));
    } else {
      put(0xF0 | (c >> 18));
      put(0x80 | ((c >> 12) & 0x3F));
    }
    put(0x80 | ((c >> 6) & 0x3F));
  }
  put(0x80 | (c & 0x3F));
}

}  // namespace tessera::data
