#include "train/network.h"

#include <algorithm>

#include "core/parallel.h"
#include "train/memory_plan.h"

namespace tessera::train {
namespace {

// infrastructure.md 3.1: NVLink, one switch tier of 400 Gb/s.
constexpr double kMib = double(int64_t{1} << 20);
constexpr Link kNvlink{2e-6, 450e9, kMib}, kOneSwitch{5e-6, 50e9, kMib};
constexpr double kEfficiency = 0.80,
                 kEfficiencyOfMany = 0.65;  // of large messages, and of rows to many experts at once

// A fifth of 989 TFLOP/s is what steps reach on one H200; of an H100 the same is assumed (bench/README.md).
constexpr double kHopperFlops = 200e12;
constexpr int64_t kGib = int64_t{1} << 30;
constexpr int64_t kH200Usable = 139 * kGib, kH100Usable = 78 * kGib;  // less the driver's own
constexpr int64_t kGpusPerNode = 8;

// A core of two reaches 78 GFLOP/s in steps of the preset `small` (bench/README.md). Processes of a machine copy
// through memory; between machines, 10 Gb/s.
constexpr double kCoreFlops = 75e9;
constexpr Link kSharedMemory{20e-6, 5e9, kMib / 16}, kEthernet{50e-6, 1.25e9, kMib / 16};

double seconds_over(double bytes, double messages, double efficiency, const Link& link) {
  const double rate = efficiency * link.bytes_per_s;
  return messages * (link.alpha_seconds + link.half_bytes / rate) + bytes / rate;
}

}  // namespace

std::vector<std::string> names_of_gpus() { return {"h200", "h100"}; }

std::optional<Target> gpu_target(const std::string& name) {
  const Target h200{"H200", kHopperFlops, kH200Usable, kGpusPerNode, kNvlink, kOneSwitch};
  if (name == "h200") return h200;
  if (name == "h100") return Target{"H100", kHopperFlops, kH100Usable, kGpusPerNode, kNvlink, kOneSwitch};
  return std::nullopt;
}

Target cpu_target(int64_t processes) {
  const double cores = double(thread_count()) / double(processes);
  return {"this CPU", kCoreFlops * cores, usable_bytes(Device::cpu) / processes, processes, kSharedMemory, kEthernet};
}

double seconds_of(const Flow& flow, const Target& target) {
  const double efficiency = flow.rows > 0 ? kEfficiencyOfMany : kEfficiency;
  return std::max(seconds_over(flow.inside, flow.messages_inside, efficiency, target.inside),
                  seconds_over(flow.across, flow.messages_across, efficiency, target.across));
}

}  // namespace tessera::train
