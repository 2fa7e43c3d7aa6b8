// Reading TOML into Options: files and command-line overrides. The only file that knows toml++.
#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "config/nearest.h"
#include "config/options.h"

namespace tessera::config {
namespace {

std::string found_string(std::string_view text) {
  constexpr size_t kShown = 60;
  if (text.size() <= kShown) return fmt::format("the string {}", toml_string(text));
  size_t end = kShown;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // not inside a UTF-8 sequence
  return fmt::format("the string {}... of {} bytes", toml_string(text.substr(0, end)), text.size());
}

std::string found(const toml::node& node) {
  if (const auto* v = node.as_string()) return found_string(v->get());
  if (const auto* v = node.as_integer()) return fmt::format("the integer {}", v->get());
  if (const auto* v = node.as_floating_point()) return fmt::format("the number {}", to_toml(Value(v->get())));
  if (const auto* v = node.as_boolean()) return fmt::format("the value {}", v->get());
  if (const auto* v = node.as_array()) return fmt::format("a list of {} values", v->size());
  if (node.is_table()) return "a table";
  return "a date or time";
}

// Hints where the mistake is a known one.
std::string hint(const toml::node& node, const Wanted& wanted) {
  const auto* real = node.as_floating_point();
  if (real != nullptr && std::holds_alternative<int64_t>(wanted.like)) {
    const double value = real->get();
    const bool whole = std::abs(value) < 0x1p53 && value == std::floor(value);
    if (whole) return fmt::format("; write {}", static_cast<int64_t>(value));
  }
  const auto* text = node.as_string();
  if (text == nullptr) return "";
  if (!wanted.choices.empty()) return did_you_mean(nearest(text->get(), wanted.choices));
  const std::string_view plain = text->get();
  const bool number = !plain.empty() && plain.find_first_not_of("0123456789+-._e") == std::string_view::npos;
  if (number || plain == "true" || plain == "false") return "; write it without quotes";
  return "";
}

// The node as a value of the type of `wanted.like`; nothing if it is of another type.
std::optional<Value> convert(const toml::node& node, const Wanted& wanted);

template <class Item>
std::optional<Value> convert_list(const toml::node& node) {
  const toml::array* array = node.as_array();
  if (array == nullptr) return std::nullopt;
  std::vector<Item> items;
  for (const toml::node& item : *array) {
    const std::optional<Value> value = convert(item, {.like = Item{}, .range = {}, .choices = {}});
    if (!value) return std::nullopt;
    items.push_back(std::get<Item>(*value));
  }
  return items;
}

std::optional<Value> convert(const toml::node& node, const Wanted& wanted) {
  struct {
    const toml::node& node;
    std::optional<Value> operator()(bool) const {
      return node.is_boolean() ? std::optional<Value>(node.as_boolean()->get()) : std::nullopt;
    }
    std::optional<Value> operator()(int64_t) const {
      return node.is_integer() ? std::optional<Value>(node.as_integer()->get()) : std::nullopt;
    }
    std::optional<Value> operator()(double) const {
      if (node.is_integer()) return static_cast<double>(node.as_integer()->get());
      return node.is_floating_point() ? std::optional<Value>(node.as_floating_point()->get()) : std::nullopt;
    }
    std::optional<Value> operator()(const std::string&) const {
      return node.is_string() ? std::optional<Value>(node.as_string()->get()) : std::nullopt;
    }
    std::optional<Value> operator()(const std::vector<std::string>&) const { return convert_list<std::string>(node); }
    std::optional<Value> operator()(const std::vector<int64_t>&) const { return convert_list<int64_t>(node); }
  } as{node};
  return std::visit(as, wanted.like);
}

// In a list the item that is wrong is worth more than the list: the first one that alone breaks the rule.
const toml::node& culprit(const toml::node& node, const Wanted& wanted) {
  const toml::array* array = node.as_array();
  if (array == nullptr) return node;
  Wanted item = wanted;
  if (std::holds_alternative<std::vector<int64_t>>(wanted.like)) {
    item.like = int64_t{0};
  } else if (std::holds_alternative<std::vector<std::string>>(wanted.like)) {
    item.like = std::string();
  } else {
    return node;
  }
  for (const toml::node& candidate : *array) {
    const std::optional<Value> value = convert(candidate, item);
    if (!value || !item.holds(*value)) return candidate;
  }
  return node;
}

std::string read_whole_file(const std::string& path);

}  // namespace

// Walks one parsed document along the registered keys, in the order of its lines.
class Reader {
 public:
  Reader(Options& options, std::string name, Options::Given given)
      : options_(options), name_(std::move(name)), given_(given) {}

  void read_table(const toml::table& table, const std::string& prefix) {
    std::vector<std::pair<const toml::key*, const toml::node*>> entries;
    for (auto&& [key, node] : table) entries.emplace_back(&key, &node);
    std::stable_sort(entries.begin(), entries.end(),
                     [](const auto& a, const auto& b) { return a.first->source().begin < b.first->source().begin; });
    for (const auto& [key, node] : entries) read_entry(*key, *node, prefix);
  }

  void read_setting(Options::Setting& setting, const toml::node& node, const std::string& where) {
    const std::optional<Value> value = convert(node, setting.wanted);
    if (!value || !setting.wanted.holds(*value)) {
      const toml::node& wrong = culprit(node, setting.wanted);
      fail_user("{}: {}: found {}, wanted {}{} ({})", where, options_.label_ + setting.key, found(wrong),
                setting.wanted.to_string(), hint(wrong, setting.wanted), setting.help);
    }
    if (setting.given == Options::Given::command_line && given_ == Options::Given::file) return;
    setting.store(*value);
    setting.given = given_;
  }

 private:
  std::string where(const toml::source_region& source) const { return fmt::format("{}:{}", name_, source.begin.line); }

  void read_entry(const toml::key& key, const toml::node& node, const std::string& prefix) {
    const std::string part(key.str());
    const std::string path = prefix + part;
    const std::string place = where(key.source());
    // A quoted key with a dot inside is one part in TOML, so it cannot be one of ours.
    if (part.empty() || part.find('.') != std::string::npos) {
      fail_user("{}: unknown key {}; write nested keys without quotes", place, toml_string(options_.label_ + path));
    }
    if (Options::Setting* setting = options_.find_setting(path)) return read_setting(*setting, node, place);
    if (Options::List* list = options_.find_list(path)) return read_list(*list, node, place);
    if (options_.is_table(path)) {
      if (const toml::table* inner = node.as_table()) return read_table(*inner, path + ".");
      std::string known;
      for (const std::string& name : options_.keys_of(path)) known += (known.empty() ? "" : ", ") + name;
      fail_user("{}: {}: found {}, wanted a table: [{}], then its keys a line each ({})", place, options_.label_ + path,
                found(node), options_.label_ + path, known);
    }
    if (node.is_table() || node.is_array_of_tables()) fail_unknown_table(path, place);
    options_.fail_unknown_key(place, path);
  }

  [[noreturn]] void fail_unknown_table(const std::string& path, const std::string& place) const {
    std::vector<std::string> known = options_.tables();
    std::erase(known, std::string());
    for (const Options::List& list : options_.lists_) known.push_back(list.key);
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
    const std::string similar = nearest(path, known);
    fail_user("{}: unknown table [{}]{} (known tables: {})", place, options_.label_ + path,
              similar.empty() ? "" : fmt::format("; did you mean [{}]?", options_.label_ + similar),
              names.empty() ? "none" : names);
  }

  void read_list(Options::List& list, const toml::node& node, const std::string& place) {
    const toml::array* array = node.as_array();
    if (array == nullptr || (!array->empty() && !array->is_array_of_tables())) {
      fail_user("{}: {}: found {}, wanted a list of tables: [[{}]] in double brackets before each ({})", place,
                options_.label_ + list.key, found(node), options_.label_ + list.key, list.help);
    }
    list.reset(static_cast<int64_t>(array->size()));
    list.given = given_;
    for (size_t i = 0; i < array->size(); ++i) {
      Options element = list.element(static_cast<int64_t>(i));
      element.label_ = options_.label_ + element.label_;
      Reader(element, name_, given_).read_table(*array->get(i)->as_table(), "");
    }
  }

  Options& options_;
  std::string name_;  // of the file
  Options::Given given_;
};

void Options::load_file(const std::string& path) { load_text(read_whole_file(path), path); }

void Options::load_text(std::string_view toml, const std::string& name) {
  toml::table table;
  try {
    table = toml::parse(toml, name);
  } catch (const toml::parse_error& error) {
    const toml::source_position at = error.source().begin;
    fail_user("{}:{}:{}: not valid TOML: {}", name, at.line, at.column, error.description());
  }
  Reader(*this, name, Given::file).read_table(table, "");
}

namespace {

// Override text as the TOML that a file would hold: strings get their quotes, lists their brackets.
std::string as_toml(const std::string& text, const Wanted& wanted) {
  if (std::holds_alternative<std::string>(wanted.like)) return toml_string(text);
  const bool strings = std::holds_alternative<std::vector<std::string>>(wanted.like);
  const bool list = strings || std::holds_alternative<std::vector<int64_t>>(wanted.like);
  if (!list || text.starts_with('[')) return text;
  std::string toml = "[";
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) toml += (strings ? toml_string(item) : item) + ", ";
  return toml + "]";
}

}  // namespace

void Options::set(const std::string& key, const std::string& text) {
  const std::string where = "command line";
  if (Setting* setting = find_setting(key)) {
    toml::table table;
    try {
      table = toml::parse("value = " + as_toml(text, setting->wanted));
    } catch (const toml::parse_error&) {
    }
    if (table.size() != 1) {  // not TOML, or more than one key
      fail_user("{}: {}: found '{}', wanted {} ({})", where, label_ + key, text, setting->wanted.to_string(),
                setting->help);
    }
    return Reader(*this, where, Given::command_line).read_setting(*setting, *table.get("value"), where);
  }
  for (List& list : lists_) {
    if (list.key == key) {
      fail_user("{}: {} is a list of tables; set one field of one table, such as {}.0.{}", where, label_ + key,
                label_ + key, list.first_field());
    }
    if (!key.starts_with(list.key + ".")) continue;
    const std::string rest = key.substr(list.key.size() + 1);
    const size_t dot = std::min(rest.find('.'), rest.size());
    int64_t index = -1;
    const auto parsed = std::from_chars(rest.data(), rest.data() + dot, index);
    if (parsed.ptr != rest.data() + dot || index < 0 || index >= list.size() || dot == rest.size()) {
      fail_user("{}: {}: the list has {} tables, wanted {}.I.{} with I from 0 and below {}", where, label_ + key,
                list.size(), label_ + list.key, list.first_field(), list.size());
    }
    Options element = list.element(index);
    element.label_ = label_ + element.label_;
    return element.set(rest.substr(dot + 1), text);
  }
  fail_unknown_key(where, key);
}

namespace {

// What is in the directory of a path that could not be read, for the message.
std::string what_is_near(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::path directory = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  if (!std::filesystem::is_directory(directory, error)) {
    return fmt::format("; there is no directory '{}'", directory.string());
  }
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    if (entry.path().extension() == ".toml") names.push_back(entry.path().filename().string());
  }
  if (names.empty()) return fmt::format("; '{}' holds no .toml file", directory.string());
  std::sort(names.begin(), names.end());
  const std::string similar = nearest(path.filename().string(), names);
  constexpr size_t kShown = 10;
  std::string list;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) list += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kShown) list += fmt::format(" and {} more", names.size() - kShown);
  return fmt::format("{} ('{}' holds {})", did_you_mean(similar), directory.string(), list);
}

std::string read_whole_file(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    fail_user("'{}' is a directory, wanted a TOML file{}", path, what_is_near(std::filesystem::path(path) / "x"));
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file.is_open() && file.peek() != std::ifstream::traits_type::eof()) text << file.rdbuf();
  if (!file.is_open() || file.bad() || text.bad()) {
    const char* reason = errno == 0 ? "read error" : std::strerror(errno);
    fail_user("cannot read the TOML file '{}': {}{}", path, reason, what_is_near(path));
  }
  return text.str();
}

}  // namespace
}  // namespace tessera::config
