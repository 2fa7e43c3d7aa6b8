// What a model costs, before it runs: counts from the table of parameters, FLOPs and memory from a dry run of the step.
#pragma once

#include <string>
#include <vector>

#include "model/model.h"

namespace tessera::model {

struct ComponentCount {
  std::string component;
  int64_t total_params = 0, active_params = 0, tensors = 0;
};

struct ModelCosts {
  int64_t total_params = 0, active_params = 0;
  std::vector<ComponentCount> by_component;
  int64_t kda_state_bytes_per_sequence = 0;  // float32 recurrent state
  int64_t conv_bytes_per_sequence = 0;       // short-convolution windows, bf16
  int64_t latent_cache_bytes_per_token = 0;  // bf16 latents of all MLA layers
  // From a dry run of one training step over a sequence of `context_tokens`:
  int64_t context_tokens = 0;
  int64_t forward_flops_per_token = 0;  // of matrix products
  int64_t step_flops_per_token = 0;     // forward + backward
  int64_t activation_bytes = 0;         // peak above weights and gradients, float32, nothing recomputed
};

// `context_tokens`: the length to dry-run; one document.
ModelCosts model_costs(const Model& model, int64_t context_tokens);

// A dry run of one forward + backward: what it charges, and the arena's peak above what was taken before.
struct DryStep {
  Ledger ledger;
  int64_t peak_bytes = 0;
};
DryStep dry_step(const Model& model, const Documents& documents, DType dtype, Product product, bool with_counters);

}  // namespace tessera::model
