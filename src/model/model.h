// The whole model: embedding, sublayers, head (model.cc), and its training passes (training.cc).
//
// Layers are pairs of sublayers (mixer, FFN) on a residual stream P. With a plain residual a sublayer reads P; with
// Attention Residuals it reads a softmax mix over the completed blocks and P (moe.md 5.2):
//
//   h = mix(blocks + [P]);   at a block boundary: blocks += P, P = none;   o = f(norm(h));   P = P + o
//
// Every P is kept until its backward; what a sublayer saves beyond it is dropped and made again where its layer asks.
// Feed-forward sublayers, mixes and norms treat each token alone, so they can also run over one block of tokens after
// another, each made again in backward: then only the streams and the mixers grow with the sequence.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "dist/mesh.h"
#include "model/ffn_layer.h"
#include "model/kda_layer.h"
#include "model/mla_layer.h"
#include "ops/attn_res/op.h"

namespace tessera::model {

struct Batch {
  View ids;      // (T) i32, in the memory of the device, as everything here
  View targets;  // (T) i32; -1: no loss
  Documents documents;
  std::shared_ptr<const ContextShard> shard = nullptr;  // the tokens are one process's part; null: all
};

// How the router of one MoE layer is trained. The collapse guard may change it between steps.
struct RouterOptions {
  ops::router::BalanceOptions balance;
  double z_loss = 0;  // coefficient of the mean over the step's tokens; 0: none

  bool operator==(const RouterOptions&) const = default;
};

// What a training step is told beside its batch, and what its forward passes leave beside the loss.
struct StepRecord {
  std::vector<RouterOptions> routers;           // one a MoE layer, in order
  std::vector<ops::router::Counters> counters;  // one a MoE layer, in order
  std::vector<View> max_logit;                  // one an MLA layer, (H); empty: not wanted
};
struct RecordOptions {
  RouterOptions router = {};  // of every layer at first
  ops::router::CountersWanted counters = {};
  bool max_logit = false;
};

// What a layer makes again in backward instead of keeping it; the bits are the same.
enum class Recompute : uint8_t {
  none,
  cheap,  // mixes, norms, convolutions; products, attention and KDA are kept
  full    // all but the residual stream
};

struct ModelOptions {
  std::vector<Recompute> recompute = {};  // one a layer; none where there are fewer
  int64_t ffn_block_tokens = 0;    // tokens of a block of feed-forward sublayers, which then recompute; 0: all at once
  int64_t loss_block_rows = 1024;  // rows whose logits exist at a time
  dist::Mesh* mesh = nullptr;      // the processes that train it together; null: this one alone
  double expert_imbalance = 0;     // rows that memory is planned for, over an even share of all; 0: any number
};

// Inference state of N sequences. Grows by 4 (r + d_p) bytes a token and MLA layer, by nothing a KDA layer.
struct Caches {
  std::vector<kda_layer::Cache> kda;  // one a KDA layer, in order
  std::vector<mla_layer::Cache> mla;  // one an MLA layer, in order
};

class Model {
 public:
  Model(ModelConfig config, ModelOptions options);

  const ModelConfig& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  const ParameterTable& table() const { return table_; }
  dist::Mesh* mesh() const { return options_.mesh; }
  // Of this process, all but in a pipeline:
  bool holds(int64_t layer) const { return shard_.holds(layer); }
  bool has_moe(int64_t layer) const { return config_.is_moe(layer) && holds(layer); }
  bool has_mla(int64_t layer) const { return config_.is_mla(layer) && holds(layer); }
  int64_t moe_layers() const;
  int64_t mla_layers() const;
  StepRecord allocate_record(Arena&, DType, const RecordOptions&) const;

  // loss (T) in nats, 0 where there is no target; gradients of scale * sum(loss) are added to the weights' gradients,
  // and those of scale * sum(z-losses) where the record asks for them. `record` may be null.
  void forward_backward(Context&, const Weights&, const Batch&, double scale, const View& loss, StepRecord*) const;
  // loss (T) only, in a pipeline in the process of the last chunk. `record` may be null.
  void evaluate(Context&, const Weights&, const Batch&, const View& loss, StepRecord* record) const;

  // The same pass by pass, of one chunk of the layers. A flight is a micro-batch between its passes, and must not
  // outlive the weights; what it keeps lies in the arena of `kept`, which may be that of `ctx`.
  class Flight;
  const Stages& stages() const { return shard_.stages; }
  std::shared_ptr<Flight> start(const Batch&) const;
  std::vector<int64_t> entering(int64_t chunk) const;  // streams that its process lacks, by sublayer
  // Room for the streams that its process must get from the chunk before; none for the first chunk.
  std::vector<View> enter(Context& kept, const Weights&, Flight&, int64_t chunk) const;
  void forward(Context& ctx, Context& kept, const Weights&, Flight&, int64_t chunk, StepRecord*) const;
  std::vector<View> leaving(const Flight&, int64_t chunk) const;  // streams for the next chunk, as it enters them
  // `returned`: the gradients of leaving(). Only the last chunk writes `loss`.
  void backward(Context& ctx, const Weights&, Flight&, int64_t chunk, std::span<const View> returned, double scale,
                const View& loss, StepRecord*) const;
  std::vector<View> returning(const Flight&, int64_t chunk) const;  // gradients of what enter() got

  Caches allocate_caches(Arena&, int64_t sequences, int64_t capacity, DType) const;
  // Hidden rows before the head, (T, D), continuing the caches (null: plain forward).
  void hidden(Context&, const Weights&, const View& ids, const Documents&, Caches*, const View& out) const;
  // logits (R, vocabulary) of hidden rows (R, D): only as many as asked for.
  void logits(Context&, const Weights&, const View& hidden, const View& out) const;

 private:
  struct SublayerSaved;
  using Residuals = std::vector<View>;  // P before sublayer s; the last entry is P after the last sublayer

  LayerContext layer_context(Context&, const Weights&, const Batch&) const;
  int64_t sublayers() const { return 2 * config_.layers; }
  bool is_last(int64_t chunk) const { return chunk + 1 == stages().count(); }
  bool starts_block(int64_t s) const;                            // P is closed as a block before sublayer s
  std::vector<View> sources(const Residuals&, int64_t s) const;  // what sublayer s reads: blocks, then P
  size_t moe_index(int64_t layer) const;                         // among those of this process
  const View& mix(const LayerContext&, const Residuals&, int64_t s, SublayerSaved&) const;
  void mix_backward(const LayerContext&, const Residuals&, int64_t s, const SublayerSaved&, const View& dh,
                    const Residuals& gradients) const;

  Recompute recompute_of(int64_t s) const { return options_.recompute[static_cast<size_t>(s / 2)]; }
  bool in_blocks(const LayerContext&, int64_t s) const;
  template <class F>
  void for_blocks(const LayerContext&, F&& of_block) const;  // of_block(layer context of the block, its first token)

  void read(const LayerContext&, const Residuals&, int64_t s, SublayerSaved&) const;
  void sublayer(const LayerContext&, const Residuals&, int64_t s, SublayerSaved&, bool training, StepRecord*,
                Caches*) const;
  void make_cheap(const LayerContext&, const Residuals&, int64_t s, SublayerSaved&) const;
  void sublayer_backward(const LayerContext&, const Residuals&, int64_t s, const SublayerSaved&,
                         const Residuals& gradients, double z_loss) const;
  Residuals gradients_of(Context&, const Flight&, const LayerContext&, int64_t chunk) const;
  void head(const LayerContext&, const Flight&, const Residuals& gradients, double scale, const View& loss) const;
  void inference_stream(const LayerContext&, const View& ids, StepRecord*, Caches*, const View& out) const;

  ModelConfig config_;
  ModelOptions options_;
  ModelConfig share_;  // that this process computes, of its part along the tensor axis
  Shard shard_;
  ParameterTable table_;
};

}  // namespace tessera::model
