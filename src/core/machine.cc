#include "core/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "core/cgroup.h"
#include "core/parallel.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);  // sysfs files that cannot be read (speed of a link that is down) give ""
  return line;
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

CpuFeatures features_of(const std::string& flags_line) {
  std::istringstream words(flags_line);
  std::set<std::string> flags;
  for (std::string flag; words >> flag;) flags.insert(flag);
  return {.avx2 = flags.contains("avx2") && flags.contains("fma"),
          .avx512 = flags.contains("avx512f") && flags.contains("avx512bw") && flags.contains("avx512vl"),
          .avx512_bf16 = flags.contains("avx512_bf16"),
          .amx_bf16 = flags.contains("amx_bf16")};
}

void read_cpuinfo(Machine& machine, const std::string& root) {
  std::ifstream file(root + "/proc/cpuinfo");
  std::set<std::pair<std::string, std::string>> cores;  // (socket, core)
  std::string socket;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string name = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    const std::string value = colon + 2 <= line.size() ? line.substr(colon + 2) : "";
    if (name == "processor") ++machine.logical_cpus;
    if (name == "model name") machine.cpu_model = value;
    if (name == "flags") machine.cpu = features_of(value);
    if (name == "physical id") socket = value;
    if (name == "core id") cores.emplace(socket, value);
  }
  machine.physical_cores = cores.empty() ? machine.logical_cpus : static_cast<int64_t>(cores.size());
}

void read_meminfo(Machine& machine, const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kib = 0;
    words >> name >> kib;
    if (name == "MemTotal:") machine.memory_bytes = kib * 1024;
    if (name == "MemAvailable:") machine.memory_available_bytes = kib * 1024;
  }
}

void read_network(Machine& machine, const std::string& root) {
  const fs::path net = root + "/sys/class/net";
  for (const std::string& name : names_in(net)) {
    if (name == "lo" || !fs::exists(net / name / "device")) continue;  // only what has hardware behind it
    const int64_t speed = std::atoll(first_line(net / name / "speed").c_str());
    machine.network.push_back({.name = name,
                               .up = first_line(net / name / "operstate") == "up",
                               .megabits_per_s = std::max<int64_t>(speed, 0)});
  }
  const fs::path rdma = root + "/sys/class/infiniband";
  for (const std::string& name : names_in(rdma)) {
    const fs::path port = rdma / name / "ports" / "1";
    machine.rdma.push_back({name, first_line(port / "state"), first_line(port / "rate")});
  }
}

std::string find_on_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream directories(path == nullptr ? "" : path);
  for (std::string directory; std::getline(directories, directory, ':');) {
    const std::string candidate = directory + "/" + program;
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

int64_t count_usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int64_t>(std::thread::hardware_concurrency());
}

}  // namespace

int64_t Machine::usable_memory_bytes() const {
  if (cgroup_memory_bytes == 0) return memory_available_bytes;
  return std::min(memory_available_bytes, std::max<int64_t>(cgroup_memory_bytes - cgroup_memory_used_bytes, 0));
}

Machine inspect_machine(const std::string& root) {
  Machine machine;
  read_cpuinfo(machine, root);
  read_meminfo(machine, root);
  read_network(machine, root);
  const CgroupLimits limits = read_cgroup_limits(root);
  machine.cgroup_memory_bytes = limits.memory_bytes;
  machine.cgroup_memory_used_bytes = limits.memory_used_bytes;
  machine.cgroup_cpus = limits.cpus;
  machine.usable_cpus = count_usable_cpus();
  machine.openmp_threads = thread_count();
  std::error_code error;
  const fs::space_info space = fs::space(".", error);
  machine.disk_free_bytes = error ? 0 : static_cast<int64_t>(space.available);
  machine.nvidia = read_nvidia_driver();
  machine.mpirun = find_on_path("mpirun");
  machine.mpi = read_mpi();
  machine.nccl = read_nccl();
  return machine;
}

CpuFeatures built_for() {
  CpuFeatures features;
#ifdef __AVX2__
  features.avx2 = true;
#endif
#ifdef __AVX512BW__
  features.avx512 = true;
#endif
#ifdef __AVX512BF16__
  features.avx512_bf16 = true;
#endif
#ifdef __AMX_BF16__
  features.amx_bf16 = true;
#endif
  return features;
}

}  // namespace tessera
