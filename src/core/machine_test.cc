#include "core/machine.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/cgroup.h"
#include "core/gpu.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// A made-up /proc and /sys.
class MachineTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tessera_machine_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root = pattern;
  }
  void TearDown() override { fs::remove_all(root); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }

  std::string root;
};

TEST_F(MachineTest, ReadsCpuMemoryAndNetwork) {
  std::string cpuinfo;
  for (int cpu = 0; cpu < 4; ++cpu) {
    cpuinfo += "processor\t: " + std::to_string(cpu) +
               "\nmodel name\t: Some CPU 9000\nphysical id\t: 0\ncore id\t\t: " + std::to_string(cpu / 2) +
               "\nflags\t\t: fpu avx2 fma avx512f avx512bw avx512vl avx512_bf16\nempty\t:\n\n";
  }
  write("/proc/cpuinfo", cpuinfo);
  write("/proc/meminfo", "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:   600 kB\n");
  write("/sys/class/net/lo/operstate", "unknown\n");
  write("/sys/class/net/virtual0/operstate", "up\n");
  write("/sys/class/net/eth0/operstate", "up\n");
  write("/sys/class/net/eth0/speed", "25000\n");
  write("/sys/class/net/eth0/device/vendor", "x\n");
  write("/sys/class/net/eth1/operstate", "down\n");
  write("/sys/class/net/eth1/speed", "-1\n");
  write("/sys/class/net/eth1/device/vendor", "x\n");
  write("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
  write("/sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n");
  const Machine machine = inspect_machine(root);
  EXPECT_EQ(machine.cpu_model, "Some CPU 9000");
  EXPECT_EQ(machine.logical_cpus, 4);
  EXPECT_EQ(machine.physical_cores, 2);
  EXPECT_EQ(machine.cpu, (CpuFeatures{.avx2 = true, .avx512 = true, .avx512_bf16 = true, .amx_bf16 = false}));
  EXPECT_EQ(machine.memory_bytes, 1000 * 1024);
  EXPECT_EQ(machine.usable_memory_bytes(), 600 * 1024);
  ASSERT_EQ(machine.network.size(), 2u);
  EXPECT_EQ(machine.network[0].name, "eth0");
  EXPECT_TRUE(machine.network[0].up);
  EXPECT_EQ(machine.network[0].megabits_per_s, 25000);
  EXPECT_EQ(machine.network[1].megabits_per_s, 0);
  ASSERT_EQ(machine.rdma.size(), 1u);
  EXPECT_EQ(machine.rdma[0].rate, "400 Gb/sec (4X NDR)");
}

TEST_F(MachineTest, EmptyRootGivesZeros) {
  const Machine machine = inspect_machine(root);
  EXPECT_EQ(machine.logical_cpus, 0);
  EXPECT_EQ(machine.usable_memory_bytes(), 0);
  EXPECT_TRUE(machine.network.empty());
  EXPECT_FALSE(findings(machine).empty());
}

TEST_F(MachineTest, CgroupVersion2TakesTheTightestLevel) {
  write("/proc/self/cgroup", "0::/batch/job\n");
  write("/sys/fs/cgroup/batch/job/memory.max", "max\n");
  write("/sys/fs/cgroup/batch/job/cpu.max", "max 100000\n");
  write("/sys/fs/cgroup/batch/memory.max", "1000000\n");
  write("/sys/fs/cgroup/batch/memory.current", "500000\n");
  write("/sys/fs/cgroup/batch/memory.stat", "anon 300000\ninactive_file 100000\n");
  write("/sys/fs/cgroup/batch/cpu.max", "150000 100000\n");
  const CgroupLimits limits = read_cgroup_limits(root);
  EXPECT_EQ(limits.memory_bytes, 1000000);
  EXPECT_EQ(limits.memory_used_bytes, 400000);
  EXPECT_EQ(limits.cpus, 1.5);
}

TEST_F(MachineTest, CgroupVersion1) {
  write("/proc/self/cgroup", "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\nbroken line\n");
  write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "100\n");
  write("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 300\n");
  write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  const CgroupLimits limits = read_cgroup_limits(root);
  EXPECT_EQ(limits.memory_bytes, 2000000);
  EXPECT_EQ(limits.memory_used_bytes, 0);
  EXPECT_EQ(limits.cpus, 0);
}

TEST(Machine, UsableMemoryIsTheSmallerOfAvailableAndLimit) {
  Machine machine;
  machine.memory_available_bytes = 1000;
  machine.cgroup_memory_bytes = 800;
  machine.cgroup_memory_used_bytes = 300;
  EXPECT_EQ(machine.usable_memory_bytes(), 500);
  machine.cgroup_memory_used_bytes = 900;
  EXPECT_EQ(machine.usable_memory_bytes(), 0);
}

TEST(Machine, ProblemsComeFirstAndSayWhatToDo) {
  Machine machine;
  machine.physical_cores = machine.logical_cpus = machine.usable_cpus = 8;
  machine.openmp_threads = 8;
  machine.cgroup_cpus = 2;
  const std::vector<Finding> found = findings(machine);
  ASSERT_FALSE(found.empty());
  EXPECT_TRUE(found.front().problem);
  bool threads = false, ended = false;
  for (const Finding& finding : found) {
    threads = threads || finding.advice == "set OMP_NUM_THREADS=2";
    EXPECT_FALSE(ended && finding.problem);
    ended = ended || !finding.problem;
    EXPECT_FALSE(finding.what.empty() || finding.consequence.empty() || finding.advice.empty());
  }
  EXPECT_TRUE(threads);
}

TEST(Machine, ThisOneHasCpusAndMemory) {
  const Machine machine = inspect_machine();
  EXPECT_GT(machine.logical_cpus, 0);
  EXPECT_GT(machine.usable_cpus, 0);
  EXPECT_GT(machine.usable_memory_bytes(), 0);
  EXPECT_LE(machine.usable_memory_bytes(), machine.memory_bytes);
  EXPECT_FALSE(read_nvidia_driver("libno-such-library.so").found);
  EXPECT_FALSE(gpu_build().empty());
}

}  // namespace
}  // namespace tessera
