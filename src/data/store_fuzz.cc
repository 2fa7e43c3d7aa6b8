// Feeds one input to both readers of a store's descriptions: whatever it is, they refuse it or return.
#include <cstring>

#include "core/error.h"
#include "data/store_format.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const data::StoreMeta meta = data::parse_meta(bytes, "meta.json");
    data::parse_meta(data::write_meta(meta), "meta.json");
  } catch (const UserError&) {
  }
  std::vector<uint64_t> aligned(size / 8 + 1);
  if (size > 0) std::memcpy(aligned.data(), data, size);
  try {
    int64_t begin = 0;
    int64_t index = 0;
    for (const data::DocRecord& record :
         data::parse_index({reinterpret_cast<const char*>(aligned.data()), size}, "docs.idx")) {
      data::check_record(record, index++, begin, int64_t{1} << 40, "docs.idx");
      begin += record.tokens;
      data::histogram_bucket(record.tokens);
    }
  } catch (const UserError&) {
  }
  return 0;
}
