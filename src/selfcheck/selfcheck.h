// `tessera selfcheck`: every op against its definition and finite differences, then the whole model.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/model.h"
#include "ops/check/check.h"

namespace tessera::selfcheck {

const std::vector<const check::OpTable*>& op_tables();  // every op, in the order of the forward pass

// Small models that between them use every path: "kimi-linear" (unbounded gate, low-rank output gate, plain residual,
// SwiGLU, experts at full width) and "kimi-k3" (bounded gate, full gate, query latent, gated MLA, LatentMoE with its
// norm, SiTU, block Attention Residuals), and "full-attn-res" (every sublayer a source).
std::vector<model::ModelConfig> tiny_models();

// Gradients of every parameter by central differences in float64, float32 against float64, packed = separate, cached
// decode = training forward, recompute = saved.
std::vector<check::Result> check_model(const model::ModelConfig& config);

// A small model on the GPU in bf16 against the CPU in float32: loss, every gradient, and run to run.
std::vector<check::Result> check_model_cuda(const model::ModelConfig& config);

// Everything on one device; `only` keeps the ops (or "model", or on the GPU "optimizer") of that name. `report` is
// called as each group ends.
std::vector<check::Result> run(const std::string& only, Device device,
                               const std::function<void(const std::vector<check::Result>&)>& report);

}  // namespace tessera::selfcheck
