#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace tessera {

static spdlog::logger& logger() {
  static const auto made = [] {
    auto l = std::make_shared<spdlog::logger>("tessera", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    l->set_pattern("%H:%M:%S %^%l%$ %v");
    return l;
  }();
  return *made;
}

void set_log_prefix(const std::string& prefix) { logger().set_pattern("%H:%M:%S %^%l%$ " + prefix + "%v"); }

void write_info(const std::string& line) { logger().info(line); }
void write_warning(const std::string& line) { logger().warn(line); }

}  // namespace tessera
