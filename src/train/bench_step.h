// `tessera bench step`: a full training step of a model, timed, beside this machine's own GEMM rate and the plan.
#pragma once

#include <string>
#include <vector>

#include "train/run_config.h"

namespace tessera::train {

struct StepBench {
  std::string model;
  int64_t context = 0, tokens = 0, micro_tokens = 0;  // of a sequence, of a step, of a micro-batch
  double step_s = 0;                                  // median
  double first_step_s = 0;                            // from nothing to the end of the first step, plan included
  double tokens_per_s = 0;
  double flops_per_token = 0;  // of matrix products, forward and backward; the optimizer not counted
  double achieved_flops = 0;   // a second, in such products over the whole step
  double gemm_rate = 0;        // this machine's, in the same precision
  double gemm_share = 0;
  double mfu = 0;  // share of the chip's dense peak on a GPU; on a CPU, whose peak nobody states, gemm_share
  int64_t static_bytes = 0, planned_peak_bytes = 0, peak_bytes = 0;  // of the arena
  int64_t process_peak_bytes = 0;                                    // resident, as the kernel counts
  struct Row {
    std::string op;
    double seconds = 0, share = 0;  // of a step
    double gemm_flops = 0;          // a second while in the op
  };
  std::vector<Row> by_op;  // slowest first
};

struct StepBenchOptions {
  std::string model_file;
  int64_t context = 2048, tokens = 8192;
  int64_t micro_tokens = 0;  // of a micro-batch; 0: a step is one
  int64_t steps = 3;
  Product product = Product::f32;
  Device device = Device::cpu;
  bool recompute_all = false, recompute_selective = false;
  int64_t ffn_block_tokens = 0;
  bool kda_only = false;  // every mixer is KDA: cost against length without the quadratic part
};

// Random tokens, one document a sequence. Experts are routed as they fall.
StepBench bench_step(const StepBenchOptions& options);

}  // namespace tessera::train
