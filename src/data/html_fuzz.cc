// The stripper must end on any input, and keep UTF-8 what was UTF-8.
#include <cstdlib>

#include "data/html.h"
#include "data/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view html(reinterpret_cast<const char*>(data), size);
  const std::string text = tessera::data::html_to_text(html);
  if (tessera::data::find_invalid_utf8(html) < 0 && tessera::data::find_invalid_utf8(text) >= 0) std::abort();
  return 0;
}
