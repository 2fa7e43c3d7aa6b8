// Bounds of the numbers that options take. Unlike CLI11's own, their messages say what is wanted in a few digits, and
// they refuse what is no number, NaN included.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera::cli {

CLI::Validator at_least(double least);
CLI::Validator between(double least, double most);

}  // namespace tessera::cli
