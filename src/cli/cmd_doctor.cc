#include <dnnl.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/output.h"
#include "core/gpu.h"
#include "core/machine.h"
#include "dist/mpi_plugin.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string onednn_version() {
  const dnnl_version_t* version = dnnl_version();
  return fmt::format("{}.{}.{}", version->major, version->minor, version->patch);
}

std::string features_text(const CpuFeatures& f) {
  const auto mark = [](bool has, const char* name) { return std::string(has ? name : "no ") + (has ? "" : name); };
  return fmt::format("{}, {}, {}, {}", mark(f.avx2, "AVX2"), mark(f.avx512, "AVX-512"), mark(f.avx512_bf16, "bf16"),
                     mark(f.amx_bf16, "AMX"));
}

Json features_json(const CpuFeatures& f) {
  return {{"avx2", f.avx2}, {"avx512", f.avx512}, {"avx512_bf16", f.avx512_bf16}, {"amx_bf16", f.amx_bf16}};
}

std::string built_with(const dist::MpiPlugin& plugin) {
  return plugin.functions == nullptr ? "" : plugin.functions->built_with;
}

Json to_json(const Machine& m) {
  Json json = {{"cpu_model", m.cpu_model},
               {"physical_cores", m.physical_cores},
               {"logical_cpus", m.logical_cpus},
               {"usable_cpus", m.usable_cpus},
               {"cpu_features", features_json(m.cpu)},
               {"built_for", features_json(built_for())},
               {"memory_bytes", m.memory_bytes},
               {"memory_available_bytes", m.memory_available_bytes},
               {"usable_memory_bytes", m.usable_memory_bytes()},
               {"cgroup_memory_bytes", m.cgroup_memory_bytes},
               {"cgroup_cpus", m.cgroup_cpus},
               {"openmp_threads", m.openmp_threads},
               {"onednn_version", onednn_version()},
               {"disk_free_bytes", m.disk_free_bytes},
               {"gpu_build", gpu_build()},
               {"nvidia_driver", m.nvidia.version},
               {"mpirun", m.mpirun},
               {"mpi_library", m.mpi.name},
               {"mpi_version", m.mpi.version},
               {"nccl_library", m.nccl.name},
               {"nccl_version", m.nccl.version}};
  const dist::MpiPlugin plugin = dist::find_mpi_plugin();
  json["mpi_plugin"] = {{"path", plugin.path}, {"problem", plugin.problem}, {"built_with", built_with(plugin)}};
  json["gpus_present"] = Json::array();
  for (const auto& gpu : m.nvidia.gpus) {
    json["gpus_present"].push_back({{"name", gpu.name}, {"memory_bytes", gpu.memory_bytes}});
  }
  json["gpus_usable"] = Json::array();
  for (const GpuInfo& gpu : list_gpus()) {
    json["gpus_usable"].push_back({{"name", gpu.name},
                                   {"memory_bytes", gpu.memory_bytes},
                                   {"compute_capability", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)},
                                   {"driver_cuda", gpu.driver}});
  }
  json["network"] = Json::array();
  for (const auto& n : m.network) {
    json["network"].push_back({{"name", n.name}, {"up", n.up}, {"megabits_per_s", n.megabits_per_s}});
  }
  json["rdma"] = Json::array();
  for (const auto& r : m.rdma) json["rdma"].push_back({{"name", r.name}, {"state", r.state}, {"rate", r.rate}});
  json["findings"] = Json::array();
  for (const Finding& f : findings(m)) {
    json["findings"].push_back(
        {{"problem", f.problem}, {"what", f.what}, {"consequence", f.consequence}, {"advice", f.advice}});
  }
  return json;
}

void add_gpu_rows(const Machine& m, Table& table) {
  const std::vector<GpuInfo> usable = list_gpus();
  table.add({"GPU build", gpu_build()});
  table.add({"NVIDIA driver", m.nvidia.found ? m.nvidia.version : "not found"});
  for (const auto& gpu : m.nvidia.gpus) {
    table.add({"GPU", fmt::format("{}, {}{}", gpu.name, human_bytes(gpu.memory_bytes),
                                  usable.empty() ? ", not usable by this build" : "")});
  }
  for (const GpuInfo& gpu : usable) {
    table.add(
        {"CUDA device", fmt::format("{}, {}, compute capability {}.{}, driver up to CUDA {}", gpu.name,
                                    human_bytes(gpu.memory_bytes), gpu.compute_major, gpu.compute_minor, gpu.driver)});
  }
}

std::string found_text(const MessageLibrary& library) {
  return library.name.empty() ? "not found" : fmt::format("{}, {}", library.name, library.version);
}

void add_network_rows(const Machine& m, Table& table) {
  table.add({"mpirun", m.mpirun.empty() ? "not on PATH" : m.mpirun});
  table.add({"MPI", found_text(m.mpi)});
  const dist::MpiPlugin plugin = dist::find_mpi_plugin();
  table.add({"MPI plugin", plugin.functions == nullptr
                               ? "not usable: " + plugin.problem
                               : fmt::format("{}, built with {}", plugin.path, built_with(plugin))});
  table.add({"NCCL", found_text(m.nccl)});
  for (const auto& n : m.network) {
    const std::string speed = n.megabits_per_s == 0 ? "speed unknown" : fmt::format("{} Mbit/s", n.megabits_per_s);
    table.add({"network", fmt::format("{}, {}, {}", n.name, n.up ? "up" : "down", speed)});
  }
  for (const auto& r : m.rdma) table.add({"RDMA", fmt::format("{}, {}, {}", r.name, r.state, r.rate)});
}

std::string to_text(const Machine& m) {
  Table table;
  table.add({"CPU", m.cpu_model});
  table.add({"cores", fmt::format("{} physical, {} logical, {} usable by this process", m.physical_cores,
                                  m.logical_cpus, m.usable_cpus)});
  table.add({"vector units", features_text(m.cpu)});
  table.add({"this binary", "compiled for " + features_text(built_for())});
  table.add({"threads", fmt::format("{} (OpenMP)", m.openmp_threads)});
  table.add({"matrix products", "oneDNN " + onednn_version()});
  table.add(
      {"memory", fmt::format("{}, {} available", human_bytes(m.memory_bytes), human_bytes(m.memory_available_bytes))});
  table.add({"container limit",
             fmt::format("memory {}, CPUs {}", m.cgroup_memory_bytes == 0 ? "none" : human_bytes(m.cgroup_memory_bytes),
                         m.cgroup_cpus == 0 ? "none" : fmt::format("{:.3g}", m.cgroup_cpus))});
  table.add({"usable memory", human_bytes(m.usable_memory_bytes())});
  table.add({"disk free here", human_bytes(m.disk_free_bytes)});
  add_gpu_rows(m, table);
  add_network_rows(m, table);
  std::string text = table.text();
  for (const Finding& f : findings(m)) {
    text += fmt::format("\n{}: {}\n  means: {}\n  to do: {}\n", f.problem ? "problem" : "note", f.what, f.consequence,
                        f.advice);
  }
  return text;
}

}  // namespace

void add_doctor(CLI::App& app) {
  CLI::App* command = app.add_subcommand("doctor", "What was found on this machine, what is missing, and what to do");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON");
  command->callback([json] {
    const Machine machine = inspect_machine();
    if (*json) {
      print_json(to_json(machine));
    } else {
      print(to_text(machine));
    }
  });
}

}  // namespace tessera::cli
