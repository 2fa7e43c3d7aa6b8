// `--device cpu|cuda`, the same in every command that computes.
#pragma once

#include <functional>

#include "core/context.h"

namespace CLI {
class App;
}

namespace tessera::cli {

// UserError where "cuda" is asked for and cannot work on this machine.
void add_device_option(CLI::App& command, std::function<void(Device)> chosen);
void add_device_option(CLI::App& command, Device& device);

}  // namespace tessera::cli
