// metrics.jsonl: one JSON object a line, for a step or an evaluation. Everything in a row but "time" is a function of
// the run alone, so an interrupted and resumed run writes the same rows as one that was not. Several processes end with
// a row of what they sent.
#pragma once

#include <cstdio>
#include <string>

#include "train/evaluate.h"
#include "train/guard.h"
#include "train/step.h"
#include "train/traffic.h"

namespace tessera::train {

struct StepRow {
  int64_t step = 0;    // steps done, this one included
  int64_t tokens = 0;  // seen by the run so far
  double loss = 0;     // nats a token
  double bits_per_byte = 0;
  double learning_rate = 0;
  StepReport report;
  double seconds = 0, tokens_per_s = 0;
};

class MetricsLog {
 public:
  // Opens DIR/metrics.jsonl and drops rows of steps after `step`, which will be taken again; -1 drops all.
  MetricsLog(const std::string& path, int64_t step);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  void write(const StepRow& row);
  void write(int64_t step, const EvalReport& report);
  void write(const GuardEvent& event);
  void write(int64_t step, const std::vector<AxisTraffic>& traffic);

 private:
  void write_line(const std::string& line);
  std::string path_;
  std::FILE* file_ = nullptr;
};

// The report as JSON, with the keys that `tessera eval --json` prints.
std::string to_json(const EvalReport&);
std::string to_json(const std::vector<AxisTraffic>&);

}  // namespace tessera::train
