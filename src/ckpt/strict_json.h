// JSON of files that nobody vouches for: whole text, valid UTF-8, no duplicate keys, bounded depth, typed members.
// Every failure is a UserError that begins with `what` (usually the path).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tessera::ckpt {

// Integers at or above 2^53 are not exact in every JSON reader, so files of ours never hold any.
inline constexpr int64_t kMaxJsonInteger = (int64_t{1} << 53) - 1;

nlohmann::json parse_json(std::string_view text, const std::string& what);         // any value
nlohmann::json parse_json_object(std::string_view text, const std::string& what);  // the value must be an object

int64_t as_count(const nlohmann::json& value, const std::string& what);  // an integer in [0, 2^53)
std::string as_text(const nlohmann::json& value, const std::string& what);
// The member of an object, which must be there.
const nlohmann::json& member(const nlohmann::json& object, const char* key, const std::string& what);
// Exactly these keys, no other.
void check_keys(const nlohmann::json& object, std::initializer_list<const char*> keys, const std::string& what);

std::string dump_canonical(const nlohmann::json& value);  // sorted keys, no blanks; fails on text that is not UTF-8

}  // namespace tessera::ckpt
