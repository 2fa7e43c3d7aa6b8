// The one table of parameters: name, shape, initialisation, optimizer group and owner of every tensor of a model.
//
// Built from the model file alone. Checkpoints, the optimizer, import and export, counts and `plan model` read it;
// nothing else knows a parameter's name. Names are the published ones. Routed experts are one stacked tensor each for
// w1, w2 and w3, (E, ...), standing for E published tensors: their `name` holds "{}" where the expert's number goes.
#pragma once

#include <string>
#include <vector>

#include "core/context.h"
#include "model/config.h"
#include "model/stages.h"

namespace tessera::model {

using ParamId = int32_t;
inline constexpr ParamId kNone = -1;

enum class Group : uint8_t {
  matrix,     // Muon
  embedding,  // AdamW with weight decay: embedding, head, router
  vector,     // AdamW without: gains, gates' constants, convolutions, pseudo-queries
  buffer      // no gradient: the router's bias
};

enum class Init : uint8_t { normal, ones, zeros, a_log, dt_bias, conv };

// How the processes of the tensor axis share a parameter (tensor_shard.h).
enum class Cut : uint8_t {
  none,     // each has all of it, and the same gradient
  partial,  // each has all of it, and the gradient through its own heads: the sum is the parameter's
  rows,     // a range of the leading index each
  columns   // a range of the second of two indices each
};

struct Parameter {
  std::string name;
  Shape shape;  // of what is here
  Init init = Init::normal;
  double std = 0;  // of Init::normal
  Group group = Group::matrix;
  int64_t blocks = 1;          // matrices stacked along the first index, each orthogonalised alone (heads, experts)
  int64_t stack = 0;           // where the tensor stands for many published ones: how many of them are here, else 0
  int64_t first = 0;           // and the number of the first of them; of Cut::rows, the first row
  int64_t layer = -1;          // 0-based; -1: outside the layers
  ParamId number = 0;          // among the parameters of the whole model
  const char* component = "";  // row of `plan model`
  bool exact = false;          // kept in float32 beside bf16 activations: vectors, buffers and the router
  double active_share = 1;     // share a token uses: k / E for routed experts, 0 for the embedding (a look-up)
  Cut cut = Cut::none;         // where there are several processes along the tensor axis
  bool cut_through = false;    // one matrix, of which each of them has a part
  Shape whole;                 // of the part of a stack that is here, or of the parts of all of them
  int64_t first_column = 0;    // of Cut::columns

  int64_t elements() const { return shape.elements(); }
  std::string published_name(int64_t i) const;  // of the i-th of the stack; i is ignored where there is none
};

struct KdaParams {
  ParamId q_proj, k_proj, v_proj, q_conv, k_conv, v_conv, f_a, f_b, b_proj, a_log, dt_bias;
  ParamId g_a = kNone, g_b = kNone;  // low-rank output gate
  ParamId g_proj = kNone;            // full-rank output gate
  ParamId o_norm, o_proj;
};
struct MlaParams {
  ParamId q_proj = kNone;                              // without a query latent
  ParamId q_a = kNone, q_a_norm = kNone, q_b = kNone;  // with one
  ParamId kv_a, kv_a_norm, kv_b, g_proj = kNone, o_proj;
};
struct DenseParams {
  ParamId gate, up, down;
};
struct MoeParams {
  ParamId router, bias, w1, w2, w3;
  ParamId down = kNone, norm = kNone, up = kNone;  // latent projections and stabilising norm
  DenseParams shared{kNone, kNone, kNone};
};
struct MixParams {  // Attention Residuals; kNone with a plain residual
  ParamId query = kNone, gain = kNone;
};
struct LayerParams {
  MixParams attention_mix, ffn_mix;
  ParamId attention_norm, ffn_norm;
  KdaParams kda;  // one of these two
  MlaParams mla;
  DenseParams dense;  // one of these two
  MoeParams moe;
};

// What one process of several holds of a model.
struct Shard {
  int64_t first_expert = 0, experts = -1;  // -1: all
  Stages stages = {};                      // of a pipeline, and which of its processes this is
  int64_t process = 0;
  int64_t tensor_rank = 0, tensor_processes = 1;  // that share heads and hidden widths

  bool holds(int64_t layer) const {
    return stages.count() == 1 || stages.process_of(stages.chunk_of(layer)) == process;
  }
};

class ParameterTable {
 public:
  explicit ParameterTable(const ModelConfig& config, const Shard& shard = {});

  const std::vector<Parameter>& all() const { return parameters_; }
  const Parameter& operator[](ParamId id) const { return parameters_[static_cast<size_t>(id)]; }
  ParamId size() const { return static_cast<ParamId>(parameters_.size()); }
  const LayerParams& layer(int64_t i) const { return layers_[static_cast<size_t>(i)]; }  // of this process
  ParamId whole_size() const { return whole_size_; }                                     // of all processes together

  ParamId embedding = kNone, final_norm = kNone, head = kNone;  // kNone: in another process of a pipeline
  MixParams output_mix;

  int64_t total() const;   // trained parameters
  int64_t active() const;  // of them, used for one token

 private:
  friend class TableBuilder;
  std::vector<Parameter> parameters_;
  std::vector<LayerParams> layers_;
  ParamId whole_size_ = 0;
};

// Storage for every parameter, indexed by ParamId: the value that ops read and, when training, its gradient and the
// master value that the optimizer updates and checkpoints hold. Beside bf16 activations matrices are bf16 copies of a
// float32 master; everything else is its own master, and so is every parameter in inference.
struct Weights {
  std::vector<View> value, gradient, master;

  const View& operator[](ParamId id) const { return value[static_cast<size_t>(id)]; }
  const View& d(ParamId id) const { return gradient[static_cast<size_t>(id)]; }
};

// `activations`: the type of the activations beside them.
Weights allocate_weights(Arena&, const ParameterTable&, DType activations, bool with_gradients);
void zero_gradients(const Weights&);
// From values on the host in float32 to masters and copies in either memory.
void assign(const std::vector<View>& host, const Weights& to);
// The bf16 copies anew from their masters, where there are such: of one part of a stacked parameter, or of everything.
void refresh_copy(const Weights&, ParamId, int64_t part);
void refresh_copies(const Weights&);
void initialise(const ModelConfig&, const ParameterTable&, const Weights&, uint64_t seed);

// Every published tensor of the table, stacked experts one by one: what checkpoints hold.
struct NamedView {
  std::string name;
  View view;
};
std::vector<NamedView> published_tensors(const ParameterTable&, const std::vector<View>& views);

}  // namespace tessera::model
