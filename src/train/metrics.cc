#include "train/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/file.h"

namespace tessera::train {

using nlohmann::ordered_json;

namespace {

// Length of the leading rows whose step is at most `step`; a torn last line is not counted.
int64_t bytes_to_keep(const std::string& path, int64_t step) {
  std::ifstream in(path);
  std::string line;
  int64_t keep = 0;
  while (std::getline(in, line)) {
    if (in.eof()) break;
    const auto row = nlohmann::json::parse(line, nullptr, false);
    if (!row.is_object() || !row.contains("step") || !row["step"].is_number_integer() ||
        row["step"].get<int64_t>() > step)
      break;
    keep += static_cast<int64_t>(line.size()) + 1;
  }
  return keep;
}

ordered_json balance_json(const StepReport& report) {
  ordered_json j;
  double max_vio = 0, floor = 0, spread = 0, min_load = 1e300, mass = 0;
  int64_t dead = 0;
  for (const auto& layer : report.balance) {
    max_vio = std::max(max_vio, layer.max_vio);
    floor = std::max(floor, layer.floor);
    spread = std::max(spread, layer.spread);
    min_load = std::min(min_load, layer.min_load);
    mass = std::max(mass, layer.largest_bin_mass);
    dead += layer.dead;
  }
  j["max_vio"] = max_vio;
  j["sampling_floor"] = floor;
  j["min_load"] = report.balance.empty() ? 0 : min_load;
  j["dead_experts"] = dead;
  j["bias_spread"] = spread;
  j["largest_bin_mass"] = mass;
  return j;
}

ordered_json eval_json(const EvalReport& r) {
  ordered_json j;
  j["loss"] = r.loss;
  j["bits_per_byte"] = r.bits_per_byte;
  j["tokens"] = r.tokens;
  j["bytes"] = r.bytes;
  j["documents"] = r.documents;
  j["loss_by_position"] = ordered_json::array();
  for (const auto& p : r.loss_by_position) {
    j["loss_by_position"].push_back(
        {{"from", p.from}, {"to", p.to}, {"loss", p.loss}, {"ci", p.ci}, {"tokens", p.tokens}});
  }
  auto& routing = j["routing"];
  routing["max_vio"] = r.routing.max_vio;
  routing["sampling_floor"] = r.routing.sampling_floor;
  routing["dead_experts"] = r.routing.dead_experts;
  routing["min_utilisation"] = r.routing.min_utilisation;
  routing["layers"] = ordered_json::array();
  for (const auto& l : r.routing.layers) {
    routing["layers"].push_back(
        {{"layer", l.layer}, {"max_vio", l.max_vio}, {"min_load", l.min_load}, {"dead", l.dead}});
  }
  return j;
}

ordered_json traffic_json(const std::vector<AxisTraffic>& traffic) {
  ordered_json axes = ordered_json::array();
  for (const AxisTraffic& a : traffic) {
    ordered_json j{{"axis", a.axis},
                   {"inside_bytes_per_step", a.inside},
                   {"across_bytes_per_step", a.across},
                   {"formula_inside_bytes_per_step", a.formula_inside},
                   {"formula_across_bytes_per_step", a.formula_across}};
    if (a.balanced_per_token > 0) {
      j["formula_bytes_per_step_at_rows_sent"] = a.formula_at_rows;
      j["rows_per_token"] = a.rows_per_token;
      j["balanced_rows_per_token"] = a.balanced_per_token;
    }
    axes.push_back(j);
  }
  return axes;
}

}  // namespace

std::string to_json(const EvalReport& report) { return eval_json(report).dump(); }
std::string to_json(const std::vector<AxisTraffic>& traffic) { return traffic_json(traffic).dump(); }

MetricsLog::MetricsLog(const std::string& path, int64_t step) : path_(path) {
  const int64_t keep = bytes_to_keep(path, step);
  if (::access(path.c_str(), F_OK) == 0 && ::truncate(path.c_str(), keep) != 0) {
    fail_user("{}: cannot be cut back to step {} ({})", path, step, std::strerror(errno));
  }
  file_ = std::fopen(path.c_str(), "a");
  if (file_ == nullptr) fail_io("open", path, errno);
}

MetricsLog::~MetricsLog() {
  if (file_ != nullptr) std::fclose(file_);
}

void MetricsLog::write_line(const std::string& line) {
  const std::string with_end = line + "\n";
  if (std::fwrite(with_end.data(), 1, with_end.size(), file_) != with_end.size() || std::fflush(file_) != 0) {
    fail_io("write", path_, errno);
  }
}

void MetricsLog::write(const StepRow& row) {
  ordered_json j;
  j["step"] = row.step;
  j["tokens"] = row.tokens;
  j["loss"] = row.loss;
  j["bits_per_byte"] = row.bits_per_byte;
  j["learning_rate"] = row.learning_rate;
  j["gradient_norm"] = row.report.gradient_norm;
  j["clip_scale"] = row.report.clip_scale;
  j["finite"] = row.report.finite;
  if (!row.report.blind_routers.empty()) j["blind_routers"] = row.report.blind_routers;
  if (row.report.heads_clipped > 0) j["heads_clipped"] = row.report.heads_clipped;
  j["balance"] = balance_json(row.report);
  j["time"] = {{"seconds", row.seconds}, {"tokens_per_s", row.tokens_per_s}};
  write_line(j.dump());
}

void MetricsLog::write(int64_t step, const EvalReport& report) {
  write_line(ordered_json{{"step", step}, {"eval", eval_json(report)}}.dump());
}

void MetricsLog::write(int64_t step, const std::vector<AxisTraffic>& traffic) {
  write_line(ordered_json{{"step", step}, {"traffic", traffic_json(traffic)}}.dump());
}

void MetricsLog::write(const GuardEvent& event) {
  ordered_json j{{"layer", event.layer}, {"what", event.what}};
  if (!event.experts.empty()) j["experts"] = event.experts;
  if (!event.detail.empty()) j["detail"] = event.detail;
  for (const auto& [name, values] : event.vectors) j[name] = values;
  write_line(ordered_json{{"step", event.step}, {"guard", j}}.dump());
}

}  // namespace tessera::train
