#include "ckpt/strict_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "core/error.h"

namespace tessera::ckpt {

using nlohmann::json;

namespace {

constexpr int kMaxDepth = 64;  // writing a value out again recurses once a level

// The library keeps the last of two equal keys without a word; a damaged or forged header must not pass like that.
class DuplicateKeys {
 public:
  explicit DuplicateKeys(const std::string& what) : what_(what) {}

  bool operator()(int depth, json::parse_event_t event, const json& value) {
    if (depth > kMaxDepth) fail_user("{}: JSON nested deeper than {}; the file is damaged", what_, kMaxDepth);
    if (event == json::parse_event_t::object_start) open_.emplace_back();
    if (event == json::parse_event_t::object_end) open_.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!open_.back().insert(key).second) {
        fail_user("{}: key \"{}\" stands twice in one JSON object; the file is damaged", what_, key);
      }
    }
    return true;
  }

 private:
  const std::string& what_;
  std::vector<std::unordered_set<std::string>> open_;
};

}  // namespace

json parse_json(std::string_view text, const std::string& what) {
  try {
    DuplicateKeys duplicates(what);
    return json::parse(text.begin(), text.end(), [&](int depth, json::parse_event_t event, json& value) {
      return duplicates(depth, event, value);
    });
  } catch (const json::parse_error& error) {
    fail_user("{}: damaged JSON at byte {} of {} ({}); restore the file from its source", what, error.byte, text.size(),
              error.what());
  } catch (const json::exception& error) {
    fail_user("{}: damaged JSON ({}); restore the file from its source", what, error.what());
  }
}

json parse_json_object(std::string_view text, const std::string& what) {
  json value = parse_json(text, what);
  if (!value.is_object()) fail_user("{}: the JSON is of type {}, wanted an object", what, value.type_name());
  return value;
}

int64_t as_count(const json& value, const std::string& what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(kMaxJsonInteger)) {
    fail_user("{} is {} ({}), wanted an integer from 0 to 2^53 - 1", what,
              value.is_primitive() ? value.dump(-1, ' ', true, json::error_handler_t::replace) : "not a number",
              value.type_name());
  }
  return value.get<int64_t>();
}

std::string as_text(const json& value, const std::string& what) {
  if (!value.is_string()) fail_user("{} is of type {}, wanted a string", what, value.type_name());
  return value.get<std::string>();
}

const json& member(const json& object, const char* key, const std::string& what) {
  if (!object.is_object()) fail_user("{} is of type {}, wanted an object", what, object.type_name());
  const auto found = object.find(key);
  if (found == object.end()) fail_user("{} has no \"{}\"", what, key);
  return *found;
}

void check_keys(const json& object, std::initializer_list<const char*> keys, const std::string& what) {
  for (const char* key : keys) member(object, key, what);
  for (const auto& item : object.items()) {
    const auto equal = [&](const char* key) { return item.key() == key; };
    if (std::none_of(keys.begin(), keys.end(), equal)) fail_user("{} has the unknown key \"{}\"", what, item.key());
  }
}

std::string dump_canonical(const json& value) {
  try {
    return value.dump();
  } catch (const json::exception& error) {
    fail_user("names and texts in a checkpoint must be UTF-8 ({})", error.what());
  }
}

}  // namespace tessera::ckpt
