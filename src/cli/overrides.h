// Configuration keys on the command line: `--set train.steps=100`, or the flag of the key, `--train.steps 100`.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "config/options.h"

namespace CLI {
class App;
}

namespace tessera::cli {

class Overrides {
 public:
  // Declares `--set` and one flag a key, with the help, type and default of the key, grouped by table.
  void add_to(CLI::App& command, const std::vector<config::KeyInfo>& keys);

  // Call it after the file is loaded: keys inside lists of tables exist only then.
  void apply(config::Options& options) const;

  std::vector<std::string> arguments() const;  // that give the same to another command

 private:
  using Given = std::vector<std::pair<std::string, std::string>>;
  std::shared_ptr<Given> given_ = std::make_shared<Given>();  // shared: CLI11 keeps the callbacks that fill it
};

}  // namespace tessera::cli
