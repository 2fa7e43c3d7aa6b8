#include "cli/overrides.h"

#include <CLI/CLI.hpp>

namespace tessera::cli {

void Overrides::add_to(CLI::App& command, const std::vector<config::KeyInfo>& keys) {
  const auto given = given_;
  const auto set = [given](const std::vector<std::string>& assignments) {
    for (const std::string& assignment : assignments) {
      const size_t equals = assignment.find('=');
      if (equals == std::string::npos || equals == 0) {
        fail_user("command line: --set: found '{}', wanted KEY=VALUE, such as --set train.steps=100", assignment);
      }
      given->emplace_back(assignment.substr(0, equals), assignment.substr(equals + 1));
    }
  };
  command.add_option_function<std::vector<std::string>>("--set", set, "Override one key of the file; may be repeated")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all();
  for (const config::KeyInfo& info : keys) {
    if (info.key.find(".N.") != std::string::npos) continue;  // fields of lists: by --set, with a number for N
    const size_t dot = info.key.rfind('.');
    command
        .add_option_function<std::string>(
            "--" + info.key, [given, key = info.key](const std::string& text) { given->emplace_back(key, text); },
            info.help)
        ->type_name(info.type)
        ->default_str(info.default_value)
        ->group("Keys of [" + (dot == std::string::npos ? std::string() : info.key.substr(0, dot)) + "]");
  }
}

void Overrides::apply(config::Options& options) const {
  for (const auto& [key, text] : *given_) options.set(key, text);
}

std::vector<std::string> Overrides::arguments() const {
  std::vector<std::string> all;
  for (const auto& [key, text] : *given_) all.insert(all.end(), {"--set", key + "=" + text});
  return all;
}

}  // namespace tessera::cli
