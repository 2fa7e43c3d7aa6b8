// Loss on held-out text: in all, by position in the document, and how the routers spread it.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "data/validation.h"
#include "model/model.h"

namespace tessera::train {

struct EvalReport {
  struct Position {
    int64_t from, to;  // tokens from the beginning of the document: [from, to)
    double loss, ci;   // nats a token; half width of the 95 % interval, pieces of documents as samples
    int64_t tokens;
  };
  struct LayerRouting {
    int64_t layer;             // 1-based
    double max_vio, min_load;  // max and min load over the mean, less 1 and as is
    int64_t dead;              // experts without a token
  };
  struct Routing {
    double max_vio = 0;          // of the worst layer
    double sampling_floor = 0;   // sqrt(2 ln E / q): what a perfect bias would show on this many tokens
    int64_t dead_experts = 0;    // over all layers
    double min_utilisation = 0;  // of the worst expert of the worst layer: load over the mean
    std::vector<LayerRouting> layers;
  };
  double loss = 0;  // nats a token
  double bits_per_byte = 0;
  int64_t tokens = 0, bytes = 0, documents = 0;
  std::vector<Position> loss_by_position;  // buckets [0, 1), [1, 2), [2, 4), ...
  Routing routing;
};

// Runs the model forward over the batches of `set`. The arena needs room for one batch. `progress` (done, all) may be
// empty.
EvalReport evaluate(Context& ctx, const model::Model& model, const model::Weights& weights,
                    const data::ValidationSet& set, const std::function<void(int64_t, int64_t)>& progress = {});

// What evaluate() takes from the arena for a batch of these documents, taken and released on a dry context.
void evaluate_dry(Context& ctx, const model::Model& model, const model::Weights& weights,
                  std::span<const int64_t> offsets);
// Its bytes.
int64_t evaluation_bytes(const model::Model& model, std::span<const int64_t> offsets, Product product, Device device);
// The packing that takes most memory: every document is one token.
std::vector<int64_t> worst_packing(int64_t tokens);

}  // namespace tessera::train
