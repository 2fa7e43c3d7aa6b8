// A run file: everything one training run is told (configs/runs/*.toml), with defaults.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "dist/job.h"
#include "dist/mesh.h"
#include "dist/pipeline_schedule.h"
#include "model/config.h"
#include "model/model.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "train/guard.h"

namespace tessera::train {

struct RunConfig {
  std::string dir = "runs/run";  // holds everything the run makes
  int64_t seed = 1;
  Device device = Device::cpu;
  int64_t threads = 0;  // 0: every core this process may use
  std::string model_file;

  struct Data {
    std::string store;       // made by `tessera data build`
    int64_t context = 1024;  // C, tokens of a sequence
  } data;

  struct Train {
    int64_t steps = 300;
    int64_t tokens_per_step = 8192;
    int64_t micro_tokens = 8192;  // tokens of one forward and backward; gradients of a step add up
    Product product = Product::f32;
    std::vector<int64_t> recompute;  // layers, counted from 1
    bool recompute_all = false;
    bool recompute_selective = false;  // in the layers that the two above leave
    int64_t ffn_block_tokens = 0;      // 0: all at once
    int64_t loss_block_rows = 1024;
  } train;

  struct Optim {
    double learning_rate = 0.01;
    optim::Shape schedule = optim::Shape::wsd;
    optim::DecayForm decay_form = optim::DecayForm::one_minus_sqrt;
    int64_t warmup_steps = 20;
    double decay_fraction = 0.3;
    double floor_ratio = 0;
    double weight_decay = 0.1;
    bool decay_idle_experts = true;
    double qk_clip = 0;  // tau; 0: off
    optim::Options rules;
  } optim;

  ops::router::BalanceOptions balance;
  dist::Layout parallel;

  struct Guard {
    bool on = true;
    int64_t window = 100;  // W, steps
    int64_t grace = 500;   // steps before anything is judged
    bool revive = true;    // re-initialise dead experts; off: only report
    bool escalate = true;  // answer the alarms of a layer; off: only report
    int64_t audit = 1000;  // steps between full records
  } guard;

  struct Eval {
    int64_t every = 50;      // steps; 0: only at the beginning and the end
    int64_t tokens = 65536;  // of held-out text
  } eval;

  struct Mem {
    double imbalance = 2;  // rows that one process's experts may be sent, over their even share
  } mem;

  struct Checkpoint {
    int64_t every = 100;  // steps; 0: only at the end and on a signal
    int64_t keep_last = 3;
  } checkpoint;

  dist::JobOptions job;

  void bind(config::Options& options);
  void check(const std::string& where) const;
  void check_pipeline(const std::string& where) const;
  void require_machine(const std::string& where) const;  // UserError: this machine cannot run it
  optim::Schedule schedule() const;
  GuardOptions guard_options() const;
  model::ModelOptions model_options(const model::ModelConfig&) const;
  int64_t sequences_per_step() const { return train.tokens_per_step / data.context; }
  int64_t sequences_per_micro_batch() const { return train.micro_tokens / data.context; }
  int64_t micro_batches_per_step() const { return train.tokens_per_step / train.micro_tokens; }  // of all processes
  dist::PipelineShape pipeline() const {
    return {parallel.pipeline, parallel.pipeline_chunks, micro_batches_per_step() / parallel.data};
  }
  // A pipeline that waits for long, and what would shorten it; empty: it does not.
  std::string pipeline_advice() const;
};

// File, then overrides (from the command line; may be empty). Whether this machine can run it is not asked. A relative
// model file is looked up from the working directory, then beside the run file.
RunConfig load_run_config(const std::string& path, const std::function<void(config::Options&)>& overrides);
std::string dump_run_config(const RunConfig&);
// As a checkpoint keeps it; whether this machine can run it is not asked. `where` names it in messages.
RunConfig parse_run_config(const std::string& toml, const std::string& where);

}  // namespace tessera::train
