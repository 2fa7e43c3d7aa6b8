// Values of configuration keys: their types, their limits, and their TOML text.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera::config {

using Value = std::variant<bool, int64_t, double, std::string, std::vector<std::string>, std::vector<int64_t>>;

// Limits of a number, or of each number of a list. NaN is outside every range, the default one included.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  // min itself is outside

  bool holds(double value) const { return (above_min ? value > min : value >= min) && value <= max; }
  std::string to_string() const;  // "at least 1", "from 0 to 1", "" without limits
};

inline Range at_least(double min) { return {.min = min}; }
inline Range at_most(double max) { return {.max = max}; }
inline Range above(double min) { return {.min = min, .above_min = true}; }
inline Range between(double min, double max) { return {.min = min, .max = max}; }

// What a key takes: the type of `like`, the range, and for a choice the names allowed.
struct Wanted {
  Value like;
  Range range;
  std::vector<std::string> choices;

  std::string to_string() const;         // "an integer, at least 1", for messages
  std::string type_name() const;         // "integer", for tables of keys
  bool holds(const Value& value) const;  // right type, in range, and one of the choices
};

std::string toml_string(std::string_view text);  // a TOML basic string
std::string to_toml(const Value& value);         // doubles in the shortest form that reads back to the same bits

}  // namespace tessera::config
