// Log lines, to stderr: what happened beside the results, which go to stdout.
#pragma once

#include <fmt/core.h>

#include <string>

namespace tessera {

void set_log_prefix(const std::string& prefix);  // before every line from now on: who speaks, among several processes
void write_info(const std::string& line);
void write_warning(const std::string& line);

template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  write_info(fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  write_warning(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tessera
