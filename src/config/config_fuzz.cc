// Any bytes as a run file: either read, and then the dump reads back to itself, or refused with a UserError.
#include <cstdint>
#include <string_view>

#include "config/options.h"

using tessera::config::Options;

namespace {

struct Item {
  std::string path;
  double weight = 1;
};

struct Settings {
  int64_t steps = 1;
  double rate = 0.5;
  bool on = false;
  std::string name;
  std::vector<std::string> tags;
  std::vector<int64_t> lengths;
  std::vector<Item> items;
};

void bind(Options& options, Settings& s) {
  options.add("steps", &s.steps, "integer");
  options.add("t.rate", &s.rate, "number", tessera::config::at_least(0));
  options.add("t.on", &s.on, "boolean");
  options.add("t.name", &s.name, "string");
  options.add("t.tags", &s.tags, "strings");
  options.add("t.lengths", &s.lengths, "integers");
  options.add_tables("item", &s.items, "list", [](Options& o, Item& item) {
    o.add("path", &item.path, "string");
    o.add("weight", &item.weight, "number");
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Settings settings;
  Options options;
  bind(options, settings);
  try {
    options.load_text(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  } catch (const tessera::UserError&) {
    return 0;
  }
  Settings again;
  Options second;
  bind(second, again);
  second.load_text(options.dump(), "dump");
  if (second.dump() != options.dump()) __builtin_trap();
  return 0;
}
