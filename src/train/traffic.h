// Bytes that a training step moves between processes: by formula, from the model, the layout and the documents alone,
// and as a run counts them.
//
// n processes of an axis, V bytes that each of them holds (infrastructure.md 3.1; every exchange here is direct, so
// that each process sends what a ring would send, in one step):
//
//   gradients to the owners of their parameters     (n - 1) / n V     V = 4 B a parameter
//   new values from the owners                      (n - 1) / n V     and 2 B more for the bf16 copies of a GPU
//   sums of the routers' counts                   2 (n - 1) / n V
//   a token's row to the processes of its experts   X a layer         X = sum over others of 1 - C(E - E_r, k) / C(E,
//   k) KDA, where a document crosses a cut             (n - 1) H K (K + V) 4 B each way, whatever the length;
//   convolutions MLA                                             the latents of a document's earlier tokens, and their
//   gradients rows out of layers whose heads are cut        2 (n - 1) / n V     V = T D elements, forward and backward;
//   and once a step the parts of matrices to who updates them  3 (n - 1) / n V   gradients, values, and values back
//   between runs of layers of a pipeline            T D elements for each stream that enters one, and back
//
// X is what evenly random choices of k of E experts give. A run counts the rows it really sends: its bytes are held
// against the formula twice, with X and with those rows, so that an error of the formula cannot pass for imbalance.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "model/model.h"
#include "train/run_config.h"

namespace tessera::train {

// What one process sends along one axis of the mesh in a step, for one purpose.
struct Flow {
  std::string axis, what;
  double inside = 0, across = 0;                    // bytes, within the node and to other nodes
  double messages_inside = 0, messages_across = 0;  // that carry them
  double rows = 0;                                  // of tokens to their experts

  double bytes() const { return inside + across; }
};

// `micro_batches`: offsets of the documents of each, as Stepper::place takes them. The model has a mesh.
std::vector<Flow> step_flows(const model::Model&, const RunConfig&, const std::vector<model::RouterOptions>& routers,
                             std::span<const std::vector<int64_t>> micro_batches);

// Of all processes together, a step on average.
struct AxisTraffic {
  std::string axis;
  double inside = 0, across = 0;                      // bytes, counted
  double formula_inside = 0, formula_across = 0;      // with balanced routing
  double formula_at_rows = 0;                         // both levels, with the rows that were sent
  double rows_per_token = 0, balanced_per_token = 0;  // to other processes, in one MoE layer; 0 on other axes

  double bytes() const { return inside + across; }
  double formula() const { return formula_inside + formula_across; }
};

// Counts what this process sends from one call of begin() to the next of end().
class TrafficMeter {
 public:
  explicit TrafficMeter(const model::Model& model) : model_(model) {}

  void begin();
  void end(const std::vector<Flow>& formula, int64_t tokens);  // of the step, of all processes
  std::vector<AxisTraffic> report() const;                     // every process calls it; axes that moved anything

 private:
  const model::Model& model_;
  std::vector<dist::Traffic> before_, counted_;  // by axis, in the order of Mesh::axes()
  std::vector<Flow> formula_;                    // summed over the steps, one an axis
  int64_t steps_ = 0, tokens_ = 0;
};

}  // namespace tessera::train
