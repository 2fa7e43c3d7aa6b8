#include "config/options.h"

#include <algorithm>

#include "config/nearest.h"

namespace tessera::config {
namespace {

std::string_view parent_of(std::string_view key) {
  const size_t dot = key.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : key.substr(0, dot);
}

std::string_view last_part_of(std::string_view key) {
  const size_t dot = key.rfind('.');
  return dot == std::string_view::npos ? key : key.substr(dot + 1);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

void add_unique(std::vector<std::string>& words, std::string_view word) {
  if (std::find(words.begin(), words.end(), word) == words.end()) words.emplace_back(word);
}

std::string comment(const std::string& help) {
  std::string out = "# ";
  for (const char c : help) out += c == '\n' ? std::string("\n# ") : std::string(1, c);
  return out + "\n";
}

bool bare_key(std::string_view key) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
           c == '.';
  };
  return !key.empty() && key.front() != '.' && key.back() != '.' && key.find("..") == std::string_view::npos &&
         std::all_of(key.begin(), key.end(), allowed);
}

}  // namespace

std::string Options::Setting::help_text() const {
  const std::string range = wanted.range.to_string();
  if (!wanted.choices.empty()) return help + " (" + joined(wanted.choices) + ")";
  return range.empty() ? help : help + " (" + range + ")";
}

Options Options::List::element(int64_t i) const {
  Options fields;
  fields.label_ = fmt::format("{}.{}.", key, i);
  bind(i, fields);
  return fields;
}

std::string Options::List::first_field() const {
  Options fields;
  bind_default(fields);
  return fields.settings_.empty() ? "FIELD" : fields.settings_.front().key;
}

void Options::check_new_key(const std::string& key) const {
  TESSERA_CHECK(bare_key(key), "configuration key '{}' needs quotes in TOML", key);
  const auto clashes = [&](const std::string& other) {
    return other == key || other.starts_with(key + ".") || key.starts_with(other + ".");
  };
  for (const Setting& other : settings_) TESSERA_CHECK(!clashes(other.key), "key '{}' beside '{}'", key, other.key);
  for (const List& other : lists_) TESSERA_CHECK(!clashes(other.key), "key '{}' beside '{}'", key, other.key);
}

void Options::add_setting(Setting setting) {
  check_new_key(setting.key);
  const Value value = setting.fetch();
  setting.default_value = to_toml(value);
  TESSERA_CHECK(setting.wanted.holds(value), "default {} of '{}', wanted {}", setting.default_value, setting.key,
                setting.wanted.to_string());
  settings_.push_back(std::move(setting));
}

void Options::add_list(List list) {
  check_new_key(list.key);
  lists_.push_back(std::move(list));
}

Options::Setting* Options::find_setting(std::string_view key) {
  const auto found = std::find_if(settings_.begin(), settings_.end(), [&](const auto& s) { return s.key == key; });
  return found == settings_.end() ? nullptr : &*found;
}

Options::List* Options::find_list(std::string_view key) {
  const auto found = std::find_if(lists_.begin(), lists_.end(), [&](const auto& l) { return l.key == key; });
  return found == lists_.end() ? nullptr : &*found;
}

bool Options::is_set(const std::string& key) const {
  for (const Setting& setting : settings_) {
    if (setting.key == key) return setting.given != Given::nowhere;
  }
  for (const List& list : lists_) {
    if (list.key == key) return list.given != Given::nowhere;
  }
  throw Error(fmt::format("is_set of the unregistered key '{}'", key));
}

bool Options::is_table(std::string_view path) const {
  const std::string prefix = std::string(path) + ".";
  const auto inside = [&](const auto& item) { return item.key.starts_with(prefix); };
  return std::any_of(settings_.begin(), settings_.end(), inside) || std::any_of(lists_.begin(), lists_.end(), inside);
}

std::vector<std::string> Options::tables() const {
  std::vector<std::string> found;
  const auto at_top = [](const auto& item) { return parent_of(item.key).empty(); };
  if (std::any_of(settings_.begin(), settings_.end(), at_top) || std::any_of(lists_.begin(), lists_.end(), at_top)) {
    found.emplace_back();
  }
  for (const Setting& setting : settings_) add_unique(found, parent_of(setting.key));
  for (const List& list : lists_) add_unique(found, parent_of(list.key));
  return found;
}

std::vector<std::string> Options::keys_of(std::string_view table) const {
  std::vector<std::string> found;
  for (const Setting& setting : settings_) {
    if (parent_of(setting.key) == table) found.emplace_back(last_part_of(setting.key));
  }
  for (const List& list : lists_) {
    if (parent_of(list.key) == table) found.emplace_back(last_part_of(list.key));
  }
  return found;
}

std::string Options::suggestion(const std::string& key) const {
  const std::string table(parent_of(key));
  const std::string name(last_part_of(key));
  const std::string in_table = nearest(name, keys_of(table));
  if (!in_table.empty()) return did_you_mean(label_ + (table.empty() ? in_table : table + "." + in_table));

  std::vector<std::string> all;
  for (const Setting& setting : settings_) all.push_back(setting.key);
  for (const List& list : lists_) all.push_back(list.key);
  const auto same_name = std::find_if(all.begin(), all.end(), [&](const auto& k) { return last_part_of(k) == name; });
  if (same_name != all.end()) return did_you_mean(label_ + *same_name);  // the right key in the wrong table
  const std::string anywhere = nearest(key, all);
  return anywhere.empty() ? "" : did_you_mean(label_ + anywhere);
}

void Options::fail_unknown_key(const std::string& where, const std::string& key) const {
  const std::string table(parent_of(key));
  const std::vector<std::string> known = keys_of(table);
  std::string shown = label_ + table;
  if (shown.ends_with('.')) shown.pop_back();
  const std::string place = shown.empty() ? "at the top" : "of [" + shown + "]";
  if (!known.empty()) {
    fail_user("{}: unknown key '{}'{} (known keys {}: {})", where, label_ + key, suggestion(key), place, joined(known));
  }
  std::vector<std::string> all_tables = tables();
  std::erase(all_tables, std::string());
  for (const List& list : lists_) add_unique(all_tables, list.key);
  fail_user("{}: unknown key '{}'{} (known tables: {})", where, label_ + key, suggestion(key), joined(all_tables));
}

std::vector<KeyInfo> Options::keys() const {
  std::vector<KeyInfo> infos;
  for (const Setting& setting : settings_) {
    infos.push_back({setting.key, setting.wanted.type_name(), setting.default_value, setting.help_text()});
  }
  for (const List& list : lists_) {
    Options element;
    list.bind_default(element);
    for (KeyInfo info : element.keys()) {
      info.key = list.key + ".N." + info.key;
      infos.push_back(std::move(info));
    }
  }
  return infos;
}

// The keys outside lists, by table. Empty lists are written too, since leaving them out would mean their default.
void Options::write_flat(std::string& out) const {
  for (const std::string& table : tables()) {
    std::string body;
    for (const Setting& setting : settings_) {
      if (parent_of(setting.key) != table) continue;
      body += comment(setting.help_text());
      body += fmt::format("{} = {}\n", last_part_of(setting.key), to_toml(setting.fetch()));
    }
    for (const List& list : lists_) {
      if (parent_of(list.key) != table || list.size() != 0) continue;
      body += comment(list.help) + fmt::format("{} = []\n", last_part_of(list.key));
    }
    if (body.empty()) continue;
    if (!out.empty()) out += "\n";
    if (!table.empty()) out += fmt::format("[{}]\n", table);
    out += body;
  }
}

void Options::write_lists(std::string& out, const std::string& prefix) const {
  for (const List& list : lists_) {
    for (int64_t i = 0; i < list.size(); ++i) {
      const Options element = list.element(i);
      if (!out.empty()) out += "\n";
      out += comment(list.help) + fmt::format("[[{}{}]]\n", prefix, list.key);
      for (const Setting& setting : element.settings_) {
        out += comment(setting.help_text()) + fmt::format("{} = {}\n", setting.key, to_toml(setting.fetch()));
      }
      for (const List& inner : element.lists_) {
        if (inner.size() == 0) out += comment(inner.help) + fmt::format("{} = []\n", inner.key);
      }
      element.write_lists(out, prefix + list.key + ".");
    }
  }
}

std::string Options::dump() const {
  std::string out;
  write_flat(out);
  write_lists(out, "");
  return out;
}

}  // namespace tessera::config
