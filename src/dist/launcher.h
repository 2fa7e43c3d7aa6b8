// What started this process, from the environment: the variables by which launchers tell their processes apart.
#pragma once

#include <optional>
#include <string>

namespace tessera::dist {

struct Launcher {
  std::string name;
  int processes = 0;  // 0: it does not say
};

std::optional<Launcher> find_launcher();

}  // namespace tessera::dist
