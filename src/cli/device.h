// `--device cpu|cuda`, the same in every command that computes.
#pragma once

#include <functional>

#include "core/context.h"

namespace CLI {
class App;
}

namespace tessera::cli {

// UserError where "cuda" is asked for and cannot work on this machine, unless it is `anywhere` that is asked about.
void add_device_option(CLI::App& command, std::function<void(Device)> chosen, bool anywhere = false);
void add_device_option(CLI::App& command, Device& device);

}  // namespace tessera::cli
