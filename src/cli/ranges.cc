#include "cli/ranges.h"

#include <fmt/format.h>

namespace tessera::cli {

static CLI::Validator bounded(double least, double most, const std::string& wanted) {
  const auto check = [=](std::string& text) {
    double value = 0;
    const bool inside = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
    return inside ? std::string() : fmt::format("found {}, wanted a number {}", text, wanted);
  };
  return CLI::Validator(check, wanted);
}

CLI::Validator at_least(double least) {
  return bounded(least, std::numeric_limits<double>::max(), fmt::format("of at least {}", least));
}

CLI::Validator between(double least, double most) {
  return bounded(least, most, fmt::format("from {} to {}", least, most));
}

}  // namespace tessera::cli
