// What a model is: the fields of a model file (configs/models/*.toml), with their defaults.
//
// One family: a stack of layers, each a token mixer (KDA, or gated MLA in the listed layers) and a feed-forward part
// (dense in the first layers, then a mixture of experts), joined by a plain residual or by Attention Residuals.
// Letters of design.md 6: D width, H heads, K/V head widths, E experts, k experts a token, L latent, F hidden width.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/glu/op.h"
#include "ops/kda/op.h"
#include "ops/mla/op.h"
#include "ops/router/balance.h"

namespace tessera::config {
class Options;
}

namespace tessera::model {

enum class OutputGate : uint8_t { low_rank, full };

struct ModelConfig {
  std::string name = "unnamed";
  std::string tensor_prefix;  // "" or "language_model." in front of every published tensor name
  int64_t layers = 4;
  int64_t width = 128;  // D
  int64_t vocabulary = 272;
  int64_t context = 8192;  // longest sequence it is meant for; nothing in the model depends on it
  double norm_eps = 1e-5;
  double init_std = 0.02;           // of every matrix
  std::vector<int64_t> mla_layers;  // 1-based, as published configurations count; the others are KDA

  struct Kda {
    int64_t heads = 4;       // H = HV
    int64_t head_dim = 32;   // K = V
    int64_t conv_width = 4;  // W
    ops::kda::Gate gate = ops::kda::Gate::bounded;
    double lower_bound = -5;
    OutputGate output_gate = OutputGate::full;
    int64_t gate_rank = 32;  // of the decay gate, and of a low-rank output gate
    bool negative_eigenvalues = false;
    int64_t chunk = 64;  // C: speed only
  } kda;

  struct Mla {
    int64_t heads = 4;     // H
    int64_t q_rank = 0;    // r_q; 0: the query is projected directly
    int64_t kv_rank = 64;  // r
    int64_t nope_dim = 32, rope_dim = 16, value_dim = 32;
    bool output_gate = true;
    double latent_norm_eps = 1e-6;  // not norm_eps: attention.md 9
  } mla;

  struct Ffn {
    ops::glu::Activation activation{ops::glu::Kind::situ, 4, 25};
    int64_t dense_layers = 1;  // this many first layers have a dense FFN
    int64_t dense_hidden = 512;
  } ffn;

  struct Moe {
    int64_t experts = 16;     // E; 0: every FFN is dense
    int64_t top_k = 2;        // k
    int64_t hidden = 128;     // F
    int64_t latent = 0;       // L; 0: experts work at full width
    bool latent_norm = true;  // the stabilising norm; only with a latent
    int64_t shared = 1;       // shared experts, fused into one MLP of width shared * F
    double scale = 1;         // R
    bool renormalise = true;
    ops::router::Score score = ops::router::Score::sigmoid;
    int64_t groups = 1, top_groups = 1;
    double router_init_std = 0.02;
    double router_init_skew = 0;  // nats: standard deviation of a per-expert offset of the logits at init (tests)
  } moe;

  struct Residual {
    int64_t attn_res_block = 0;  // layers in a block of Attention Residuals; 0: plain residual
    bool attn_res_full = false;  // every sublayer is a source of its own
  } residual;

  bool is_mla(int64_t layer) const;  // layer is 0-based
  bool is_moe(int64_t layer) const { return moe.experts > 0 && layer >= ffn.dense_layers; }
  bool attention_residuals() const { return residual.attn_res_block > 0 || residual.attn_res_full; }
  int64_t sublayers_per_block() const { return residual.attn_res_full ? 1 : 2 * residual.attn_res_block; }
  int64_t expert_width() const { return moe.latent > 0 ? moe.latent : width; }

  // Registers every field: files, --set, dumps and --help all go through this.
  void bind(config::Options& options);
  void check(const std::string& where) const;  // UserError naming what contradicts what
  std::string fingerprint() const;             // of everything that decides tensor shapes and meaning; hex
};

ModelConfig load_model_config(const std::string& path);
ModelConfig parse_model_config(const std::string& toml, const std::string& where);
// The first key that makes them compute different functions: "[moe] top_k = 2, not top_k = 4"; empty: none does.
std::string first_difference(const ModelConfig& a, const ModelConfig& b);
std::string dump_model_config(const ModelConfig&);  // TOML; reading it back gives the same model

}  // namespace tessera::model
