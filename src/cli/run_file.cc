#include "cli/run_file.h"

#include <CLI/CLI.hpp>

#include "cli/device.h"

namespace tessera::cli {

static const char* name_of_device(Device device) { return device == Device::cuda ? "cuda" : "cpu"; }

void RunFile::add_to(CLI::App& command, bool anywhere) {
  command.add_option("run", path_, "Run file (configs/runs/*.toml)")->required();
  add_device_option(
      command, [this](Device device) { device_ = device; }, anywhere);
  train::RunConfig defaults;
  config::Options options;
  defaults.bind(options);
  overrides_.add_to(command, options.keys());
}

train::RunConfig RunFile::load() const {
  return train::load_run_config(path_, [&](config::Options& o) {
    overrides_.apply(o);
    if (device_) o.set("run.device", name_of_device(*device_));
  });
}

std::vector<std::string> RunFile::changes() const {
  std::vector<std::string> arguments = overrides_.arguments();
  if (device_) arguments.insert(arguments.end(), {"--device", name_of_device(*device_)});
  return arguments;
}

}  // namespace tessera::cli
