#include "config/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::config {
namespace {

// Limits are written like the integers that most of them are.
std::string number(double value) { return fmt::format("{}", value); }

std::string real_to_toml(double value) {
  std::string text = fmt::format("{}", value);
  // TOML tells floats from integers by a point, an exponent or a name (inf).
  if (std::isfinite(value) && text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

template <class Items, class Write>
std::string list_to_toml(const Items& items, Write write) {
  std::string text = "[";
  for (const auto& item : items) text += (text.size() > 1 ? ", " : "") + write(item);
  return text + "]";
}

std::string joined_choices(const std::vector<std::string>& choices) {
  std::string text;
  for (const std::string& choice : choices) text += (text.empty() ? "" : ", ") + toml_string(choice);
  return text;
}

}  // namespace

std::string Range::to_string() const {
  const bool has_min = std::isfinite(min);
  const bool has_max = std::isfinite(max);
  if (has_min && has_max && !above_min) return fmt::format("from {} to {}", number(min), number(max));
  std::string text;
  if (has_min) text += (above_min ? "above " : "at least ") + number(min);
  if (has_max) text += (has_min ? ", at most " : "at most ") + number(max);
  return text;
}

std::string Wanted::to_string() const {
  if (!choices.empty()) return "one of " + joined_choices(choices);
  const std::string limits = range.to_string();
  struct {
    std::string limits;
    std::string operator()(bool) const { return "true or false"; }
    std::string operator()(int64_t) const { return "an integer" + limits; }
    std::string operator()(double) const { return "a number" + limits; }
    std::string operator()(const std::string&) const { return "a string in quotes"; }
    std::string operator()(const std::vector<std::string>&) const {
      return "a list of strings, such as [\"a\", \"b\"]";
    }
    std::string operator()(const std::vector<int64_t>&) const {
      return "a list of integers" + limits + ", such as [1, 2]";
    }
  } describe{limits.empty() ? "" : ", " + limits};
  return std::visit(describe, like);
}

std::string Wanted::type_name() const {
  if (!choices.empty()) return "choice";
  static const char* const names[] = {"true/false", "integer", "number", "string", "strings", "integers"};
  static_assert(std::size(names) == std::variant_size_v<Value>);
  return names[like.index()];
}

bool Wanted::holds(const Value& value) const {
  if (value.index() != like.index()) return false;
  if (const auto* integer = std::get_if<int64_t>(&value)) return range.holds(static_cast<double>(*integer));
  if (const auto* real = std::get_if<double>(&value)) return range.holds(*real);
  if (const auto* list = std::get_if<std::vector<int64_t>>(&value)) {
    return std::all_of(list->begin(), list->end(), [&](int64_t i) { return range.holds(static_cast<double>(i)); });
  }
  const auto* text = std::get_if<std::string>(&value);
  return text == nullptr || choices.empty() || std::find(choices.begin(), choices.end(), *text) != choices.end();
}

std::string toml_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\t': out += "\\t"; break;
      case '\r': out += "\\r"; break;
      default: {
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7f) {
          out += fmt::format("\\u{:04X}", byte);
        } else {
          out += c;
        }
      }
    }
  }
  return out + "\"";
}

std::string to_toml(const Value& value) {
  struct {
    std::string operator()(bool b) const { return b ? "true" : "false"; }
    std::string operator()(int64_t i) const { return fmt::format("{}", i); }
    std::string operator()(double d) const { return real_to_toml(d); }
    std::string operator()(const std::string& s) const { return toml_string(s); }
    std::string operator()(const std::vector<std::string>& list) const { return list_to_toml(list, toml_string); }
    std::string operator()(const std::vector<int64_t>& list) const { return list_to_toml(list, *this); }
  } write;
  return std::visit(write, value);
}

}  // namespace tessera::config
