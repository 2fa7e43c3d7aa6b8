#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/output.h"
#include "selfcheck/selfcheck.h"

namespace tessera::cli {
namespace {

struct Args {
  std::string only;
  Device device = Device::cpu;
  bool json = false, all = false;
};

// The row of each op that came closest to its limit, and every row that passed it.
std::string report_text(const std::vector<check::Result>& rows, bool all) {
  Table table({"op", "device", "check", "error", "limit", ""});
  const auto nearness = [](const check::Result& r) { return r.limit > 0 ? r.error / r.limit : r.error; };
  for (size_t begin = 0; begin < rows.size();) {
    size_t end = begin;
    while (end < rows.size() && rows[end].op == rows[begin].op) ++end;
    const auto worst = std::max_element(rows.begin() + int64_t(begin), rows.begin() + int64_t(end),
                                        [&](const auto& a, const auto& b) { return nearness(a) < nearness(b); });
    for (auto r = rows.begin() + int64_t(begin); r != rows.begin() + int64_t(end); ++r) {
      if (!all && r->pass && r != worst) continue;
      table.add({r->op, r->device, r->what, fmt::format("{:.1e}", r->error), fmt::format("{:.0e}", r->limit),
                 r->pass ? "good" : "FAILED"});
    }
    begin = end;
  }
  return table.text();
}

void run(const Args& args) {
  int64_t done = 0;
  const auto rows = selfcheck::run(args.only, args.device, [&](const std::vector<check::Result>& part) {
    done += static_cast<int64_t>(part.size());
    show_progress(fmt::format("{} checks, {} done", done, part.empty() ? "" : part.front().op));
  });
  clear_progress();
  const bool pass = std::ranges::all_of(rows, &check::Result::pass);
  if (args.json) {
    nlohmann::ordered_json checks = nlohmann::ordered_json::array();
    for (const auto& r : rows) {
      checks.push_back({{"op", r.op},
                        {"device", r.device},
                        {"what", r.what},
                        {"error", r.error},
                        {"limit", r.limit},
                        {"pass", r.pass}});
    }
    print_json({{"pass", pass}, {"checks", checks}});
  } else {
    const auto failed = std::ranges::count(rows, false, &check::Result::pass);
    print(report_text(rows, args.all) + fmt::format("\n{} checks, {} failed\n", rows.size(), failed));
  }
  if (!pass) throw CLI::RuntimeError(1);
}

}  // namespace

void add_selfcheck(CLI::App& app) {
  auto args = std::make_shared<Args>();
  CLI::App* command =
      app.add_subcommand("selfcheck", "Every op and the whole model against float64 and finite differences");
  command->add_option("op", args->only, "Only this op, or \"model\"");
  add_device_option(*command, args->device);
  command->add_flag("--all", args->all, "Show every check, not only the one nearest to its limit for each op");
  command->add_flag("--json", args->json, "Print every check as JSON");
  command->callback([args] { run(*args); });
}

}  // namespace tessera::cli
