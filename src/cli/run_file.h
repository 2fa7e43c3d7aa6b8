// The run file of a command, and what its command line changes of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/overrides.h"
#include "core/gpu.h"
#include "train/run_config.h"

namespace tessera::cli {

class RunFile {
 public:
  // Declares the positional `run`, `--device`, `--set` and a flag for each key. Must outlive the command. `anywhere`:
  // of device.h.
  void add_to(CLI::App& command, bool anywhere);

  train::RunConfig load() const;
  const std::string& path() const { return path_; }
  std::vector<std::string> changes() const;  // arguments that make the same of it in another command

 private:
  std::string path_;
  Overrides overrides_;
  std::optional<Device> device_;
};

}  // namespace tessera::cli
