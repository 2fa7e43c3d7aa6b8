// Who works with whom: the processes of a job as a mesh with named axes.
//
//   rank = ((p * data + d) * context + c) * tensor + t        p stage of the pipeline, d, c, t along the other axes
//
// `data * context` processes of one stage see different tokens and hold the same dense weights: the replica axis, along
// which gradients are summed and the optimizer's state is cut. The expert axis lies inside it: `expert` neighbours hold
// different experts, and processes that hold the same ones make up the expert replica axis. Neighbours along an axis
// that speaks much (tensor, then context, then expert) have neighbouring ranks, so that they share a node.
#pragma once

#include <memory>

#include "dist/communicator.h"

namespace tessera::config {
class Options;
}

namespace tessera::dist {

struct Layout {  // [parallel] of a run file
  int64_t data = 1;
  int64_t expert = 1;  // divides data * context
  int64_t context = 1;
  int64_t pipeline = 1;         // cuts a model between layers
  int64_t pipeline_chunks = 1;  // V, of each process of a pipeline: how the model is cut, not who works with whom
  int64_t tensor = 1;           // cuts heads and the hidden widths of dense and shared MLPs

  int64_t processes() const { return data * context * pipeline * tensor; }
  int64_t replicas() const { return data * context; }
  bool operator==(const Layout&) const = default;
  void bind(config::Options& options);
  void check(const std::string& where) const;  // UserError: experts that do not divide the replicas
  std::string to_string() const;               // "data 2 x context 4", or "one process"
};

class Mesh {
 public:
  // UserError where the layout is of another number of processes. `gpu` may be null; both outlive the mesh.
  Mesh(const Layout& layout, Transport& host, Transport* gpu = nullptr);

  const Layout layout;
  const int64_t data_index;  // of this process along the data axis
  Communicator world;
  Communicator replica;         // data x context of one stage: different tokens, the same dense weights
  Communicator expert;          // of one replica group: different experts
  Communicator expert_replica;  // the same experts, different tokens
  Communicator context;         // neighbouring shards of the same sequences
  Communicator pipeline;        // stages, first to last
  Communicator tensor;          // different heads, the same tokens

  std::vector<const Communicator*> axes() const;
};

// A place in a layout, for a plan: nothing is sent, and the traffic is counted.
class DryMesh {
 public:
  explicit DryMesh(const Mesh* like);  // the same place; null: none
  // Of processes that need not be there, so many neighbours on a node; 0: all on one. None in a layout of one.
  DryMesh(const Layout& layout, int rank, int64_t ranks_per_node);
  Mesh* get() const { return mesh_.get(); }

 private:
  void make(const Layout& layout, int rank, std::vector<int> node_of_rank);

  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Mesh> mesh_;
};

}  // namespace tessera::dist
