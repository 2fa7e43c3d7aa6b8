// The training loop of `tessera train`: from a run file to a run directory, resuming by itself.
//
//   DIR/run.toml        the run, resolved in full          DIR/metrics.jsonl  a row a step and an evaluation
//   DIR/model.toml      the model                          DIR/checkpoints/   newest last; any of them can be used
//   DIR/README.txt      what each of these files is        DIR/tokenizer.model  with a SentencePiece vocabulary
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ckpt/checkpoint.h"
#include "train/evaluate.h"
#include "train/guard.h"
#include "train/memory_plan.h"
#include "train/metrics.h"
#include "train/saved_model.h"
#include "train/step.h"
#include "train/traffic.h"

namespace tessera::train {

struct Progress {
  StepRow row;
  int64_t steps = 0;  // of the run
  double seconds_left = 0;
  std::optional<EvalReport> eval;  // after an evaluation
};

struct RunResult {
  bool stopped_early = false;  // by a signal
  int64_t step = 0;            // steps done
  int64_t resumed_from = -1;   // step of the checkpoint; -1: a new run
  int64_t tokens = 0;
  double seconds = 0;                // of training here, evaluations included
  EvalReport first_eval, last_eval;  // of this start
  StepReport last_step;
  MemoryPlan plan;
  int64_t peak_bytes = 0;            // of the arena, measured
  std::vector<AxisTraffic> traffic;  // of the steps here, among several processes
  std::string checkpoint;            // newest
};

class Trainer {
 public:
  // `mesh`: of the layout in the run file; null: this process alone. Among several, all of them make the same calls;
  // the first one writes the run directory and reports progress.
  explicit Trainer(RunConfig config, dist::Mesh* mesh = nullptr);
  ~Trainer();

  const model::Model& model() const { return model_; }
  MemoryPlan plan();  // of what lies before a start now
  RunResult run(const std::function<void(const Progress&)>& progress);

 private:
  struct Corpus;
  struct Storage;
  struct Position;
  Position expected_position() const;
  MemoryPlan plan_from(const Position&);
  void write_run_files() const;
  void resume_or_initialise();
  void resume(const std::string& checkpoint);
  void load_tensors(const ckpt::Reader& reader, const std::vector<model::RouterOptions>& routers_before);
  bool leads() const { return model_.mesh() == nullptr || model_.mesh()->world.rank() == 0; }
  bool asked_to_stop() const;                // any process
  int64_t over_stages(int64_t value) const;  // the sum over a pipeline
  StepRow take_step();
  EvalReport evaluate_now();
  std::string save();

  RunConfig config_;
  model::Model model_;
  std::unique_ptr<Corpus> corpus_;
  std::unique_ptr<Storage> storage_;
  Guard guard_;
  std::optional<TrafficMeter> traffic_;  // among several processes
  SavedState state_;
  int64_t resumed_from_ = -1;
};

}  // namespace tessera::train
