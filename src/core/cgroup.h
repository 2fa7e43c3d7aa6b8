// Limits that a container or a batch system set on this process (control groups, version 1 and 2).
#pragma once

#include <cstdint>
#include <string>

namespace tessera {

struct CgroupLimits {
  int64_t memory_bytes = 0;       // the tightest limit from this process's group up to the root; 0: none
  int64_t memory_used_bytes = 0;  // in the group with that limit, without file cache that the kernel can drop
  double cpus = 0;                // CPU seconds a second; 0: no limit
};

// `root` goes before /proc and /sys: "" for this machine, a directory for tests.
CgroupLimits read_cgroup_limits(const std::string& root = "");

}  // namespace tessera
