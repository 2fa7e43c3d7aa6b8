#include "core/cgroup.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Version 1 writes "no limit" as the largest multiple of a page; nothing real comes near this.
constexpr int64_t kNoLimit = int64_t{1} << 60;

std::optional<int64_t> read_number(const fs::path& path) {  // nothing for a missing file, "max" and other words
  std::ifstream file(path);
  int64_t number = 0;
  if (!(file >> number)) return std::nullopt;
  return number;
}

int64_t read_stat(const fs::path& path, const std::string& wanted) {
  std::ifstream file(path);
  std::string name;
  for (int64_t value = 0; file >> name >> value;) {
    if (name == wanted) return value;
  }
  return 0;
}

// File names of one version of the interface.
struct MemoryFiles {
  const char* limit;
  const char* used;
  const char* cache;  // the line of memory.stat
};
constexpr MemoryFiles kMemoryV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr MemoryFiles kMemoryV2 = {"memory.max", "memory.current", "inactive_file"};

void tighten_memory(CgroupLimits& limits, const fs::path& group, const MemoryFiles& files) {
  const std::optional<int64_t> limit = read_number(group / files.limit);
  if (!limit || *limit >= kNoLimit || (limits.memory_bytes != 0 && *limit >= limits.memory_bytes)) return;
  limits.memory_bytes = *limit;
  const int64_t used = read_number(group / files.used).value_or(0);
  limits.memory_used_bytes = std::max<int64_t>(used - read_stat(group / "memory.stat", files.cache), 0);
}

void tighten_cpus(CgroupLimits& limits, std::optional<int64_t> quota, std::optional<int64_t> period) {
  if (!quota || !period || *quota <= 0 || *period <= 0) return;
  const double cpus = static_cast<double>(*quota) / static_cast<double>(*period);
  if (limits.cpus == 0 || cpus < limits.cpus) limits.cpus = cpus;
}

void tighten_cpus_v2(CgroupLimits& limits, const fs::path& group) {  // "QUOTA PERIOD", QUOTA may be "max"
  std::ifstream file(group / "cpu.max");
  int64_t quota = 0, period = 0;
  if (file >> quota >> period) tighten_cpus(limits, quota, period);
}

// Calls visit for the group and each one above it. Inside a container the path may name groups of the host that are
// not mounted; their files are missing and count for nothing.
template <class Visit>
void for_each_level(const fs::path& mount, const std::string& group, Visit visit) {
  fs::path path = fs::path(group).relative_path();
  for (; !path.empty(); path = path.parent_path()) visit(mount / path);
  visit(mount);
}

bool names_controller(const std::string& controllers, const std::string& wanted) {
  std::istringstream list(controllers);
  for (std::string name; std::getline(list, name, ',');) {
    if (name == wanted) return true;
  }
  return false;
}

}  // namespace

CgroupLimits read_cgroup_limits(const std::string& root) {
  CgroupLimits limits;
  const fs::path mount = root + "/sys/fs/cgroup";
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "ID:CONTROLLERS:PATH", version 2 has no controllers here
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      for_each_level(mount, group, [&](const fs::path& level) {
        tighten_memory(limits, level, kMemoryV2);
        tighten_cpus_v2(limits, level);
      });
    }
    if (names_controller(controllers, "memory")) {
      for_each_level(mount / "memory", group, [&](const fs::path& l) { tighten_memory(limits, l, kMemoryV1); });
    }
    if (names_controller(controllers, "cpu")) {
      for_each_level(mount / controllers, group, [&](const fs::path& level) {
        tighten_cpus(limits, read_number(level / "cpu.cfs_quota_us"), read_number(level / "cpu.cfs_period_us"));
      });
    }
  }
  return limits;
}

}  // namespace tessera
