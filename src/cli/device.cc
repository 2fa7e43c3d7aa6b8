#include "cli/device.h"

#include <CLI/CLI.hpp>

namespace tessera::cli {

void add_device_option(CLI::App& command, std::function<void(Device)> chosen, bool anywhere) {
  command
      .add_option_function<std::string>(
          "--device",
          [chosen = std::move(chosen), anywhere](const std::string& name) {
            if (name == "cuda" && !anywhere) gpu::require();
            chosen(name == "cuda" ? Device::cuda : Device::cpu);
          },
          "Where to compute: cpu or cuda (one NVIDIA GPU)")
      ->default_str("cpu")
      ->check(CLI::IsMember({"cpu", "cuda"}));
}

void add_device_option(CLI::App& command, Device& device) {
  add_device_option(command, [&device](Device d) { device = d; });
}

}  // namespace tessera::cli
