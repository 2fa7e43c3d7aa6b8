// Binds a struct of settings to TOML files and to the command line.
//
// A struct registers each of its fields once, with the key, the help line and the limits; its value at that moment is
// the default. From that one registration come reading, checking, overriding, `--help`, and the resolved configuration
// that is saved with a run. Unknown keys, wrong types and values out of range stop with a UserError that names file and
// line, what was found and what was wanted.
//
//   Options options;
//   options.add("train.steps", &config.steps, "optimizer steps", at_least(1));
//   options.load_file("run.toml");
//   options.set("train.steps", "200");  // as given on the command line: wins over any file
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/value.h"
#include "core/error.h"

namespace tessera::config {

struct KeyInfo {
  std::string key;  // "train.steps"; in a list of tables "data.source.N.path"
  std::string type;
  std::string default_value;  // as TOML
  std::string help;           // with limits and choices
};

class Options {
 public:
  // T: bool, int64_t, double, std::string, std::vector<std::string>, std::vector<int64_t>. `range` limits numbers and
  // each number of a list. `target` must outlive this object.
  template <class T>
  void add(std::string key, T* target, std::string help, Range range = {}) {
    add_setting({.key = std::move(key),
                 .help = std::move(help),
                 .wanted = {.like = T{}, .range = range, .choices = {}},
                 .fetch = [target] { return Value(*target); },
                 .store = [target](const Value& value) { *target = std::get<T>(value); }});
  }

  // An enum, by its names: add_choice("optim.kind", &config.kind, {{"muon", Kind::muon}, {"adamw", Kind::adamw}},
  // "...").
  template <class E>
  void add_choice(std::string key, E* target, std::vector<std::pair<std::string, E>> names, std::string help) {
    Wanted wanted{.like = std::string(), .range = {}, .choices = {}};
    for (const auto& [name, value] : names) wanted.choices.push_back(name);
    auto fetch = [target, names] {
      for (const auto& [name, value] : names) {
        if (value == *target) return Value(name);
      }
      throw Error("a choice holds a value that has no name");
    };
    auto store = [target, names](const Value& chosen) {
      for (const auto& [name, value] : names) {
        if (name == std::get<std::string>(chosen)) *target = value;
      }
    };
    add_setting({.key = std::move(key),
                 .help = std::move(help),
                 .wanted = std::move(wanted),
                 .fetch = std::move(fetch),
                 .store = std::move(store)});
  }

  // A list of tables, [[key]]: `bind(Options&, Element&)` registers the fields of one element, keys relative to it.
  // A file that names the list replaces it whole.
  template <class Element, class Bind>
  void add_tables(std::string key, std::vector<Element>* target, std::string help, Bind bind) {
    add_list({.key = std::move(key),
              .help = std::move(help),
              .size = [target] { return static_cast<int64_t>(target->size()); },
              .reset = [target](int64_t n) { *target = std::vector<Element>(static_cast<size_t>(n)); },
              .bind = [target, bind](int64_t i, Options& element) { bind(element, (*target)[static_cast<size_t>(i)]); },
              .bind_default =
                  [bind](Options& element) {
                    auto owner = std::make_shared<Element>();
                    bind(element, *owner);
                    element.owner_ = owner;
                  }});
  }

  void load_file(const std::string& path);
  void load_text(std::string_view toml, const std::string& name);  // `name` stands for the file in messages

  // One override from the command line, `key` as in keys() ("data.source.0.path" for the first table of a list, once
  // it is loaded). Text is what a file would hold; strings without quotes, lists also as "a,b,c".
  void set(const std::string& key, const std::string& text);

  bool is_set(const std::string& key) const;  // by a file or on the command line
  std::vector<KeyInfo> keys() const;

  // The configuration as it stands, in TOML, each key under its help line. Loading it gives the same dump.
  std::string dump() const;

 private:
  friend class Reader;
  enum class Given { nowhere, file, command_line };

  struct Setting {
    std::string key, help;
    Wanted wanted;
    std::function<Value()> fetch;
    std::function<void(const Value&)> store;
    std::string default_value = {};
    Given given = Given::nowhere;

    std::string help_text() const;  // with limits and choices
  };
  struct List {
    std::string key, help;
    std::function<int64_t()> size;
    std::function<void(int64_t)> reset;  // to n elements of default value
    std::function<void(int64_t, Options&)> bind;
    std::function<void(Options&)> bind_default;
    Given given = Given::nowhere;

    Options element(int64_t i) const;  // the fields of one element; its keys show as "KEY.i.FIELD" in messages
    std::string first_field() const;   // for examples in messages
  };

  void add_setting(Setting setting);
  void add_list(List list);
  void check_new_key(const std::string& key) const;
  Setting* find_setting(std::string_view key);
  List* find_list(std::string_view key);
  bool is_table(std::string_view path) const;
  std::vector<std::string> tables() const;  // "" first where it has keys; in order of registration
  std::vector<std::string> keys_of(std::string_view table) const;  // last parts of its settings and lists
  std::string suggestion(const std::string& key) const;            // "; did you mean ...?" or ""
  [[noreturn]] void fail_unknown_key(const std::string& where, const std::string& key) const;
  void write_flat(std::string& out) const;
  void write_lists(std::string& out, const std::string& prefix) const;

  std::vector<Setting> settings_;
  std::vector<List> lists_;
  std::string label_;            // before each key in messages: "data.source.0." inside a list
  std::shared_ptr<void> owner_;  // keeps the element of bind_default alive
};

}  // namespace tessera::config
