#include "model/config.h"

#include <algorithm>
#include <sstream>

#include "config/options.h"
#include "core/hash.h"

namespace tessera::model {

using config::above;
using config::at_least;
using config::between;
using config::Options;

bool ModelConfig::is_mla(int64_t layer) const { return std::ranges::count(mla_layers, layer + 1) > 0; }

void ModelConfig::bind(Options& o) {
  o.add("name", &name, "shown in reports and checkpoints");
  o.add("tensor_prefix", &tensor_prefix, "in front of every published tensor name");
  o.add("layers", &layers, "transformer layers: a token mixer and a feed-forward part each", at_least(1));
  o.add("width", &width, "D, model width", at_least(1));
  o.add("vocabulary", &vocabulary, "token ids; 272 fits the byte tokenizer", at_least(2));
  o.add("context", &context, "longest sequence the model is meant for, tokens", at_least(1));
  o.add("norm_eps", &norm_eps, "epsilon of RMSNorm", above(0));
  o.add("init_std", &init_std, "standard deviation of initial matrices", above(0));
  o.add("mla_layers", &mla_layers, "layers, counted from 1, whose mixer is MLA; the others are KDA", at_least(1));

  o.add("kda.heads", &kda.heads, "H", at_least(1));
  o.add("kda.head_dim", &kda.head_dim, "K and V, key and value width of a head", at_least(1));
  o.add("kda.conv_width", &kda.conv_width, "W of the short convolution", at_least(2));
  o.add_choice("kda.gate", &kda.gate, {{"bounded", ops::kda::Gate::bounded}, {"unbounded", ops::kda::Gate::unbounded}},
               "decay gate: bounded (Kimi K3) or unbounded (Kimi Linear); weights of one do not fit the other");
  o.add("kda.lower_bound", &kda.lower_bound, "least log-decay of a token, bounded gate", {.min = -5, .max = -1e-6});
  o.add_choice("kda.output_gate", &kda.output_gate, {{"low_rank", OutputGate::low_rank}, {"full", OutputGate::full}},
               "form of the output gate");
  o.add("kda.gate_rank", &kda.gate_rank, "rank of the decay gate, and of a low-rank output gate", at_least(1));
  o.add("kda.negative_eigenvalues", &kda.negative_eigenvalues, "beta in (0, 2) instead of (0, 1)");
  o.add("kda.chunk", &kda.chunk, "C, tokens of a chunk: 16, 32 or 64; decides speed only", between(16, 64));

  o.add("mla.heads", &mla.heads, "H", at_least(1));
  o.add("mla.q_rank", &mla.q_rank, "width of the query latent; 0: the query is projected directly", at_least(0));
  o.add("mla.kv_rank", &mla.kv_rank, "width of the key-value latent", at_least(1));
  o.add("mla.nope_dim", &mla.nope_dim, "key width of a head", at_least(1));
  o.add("mla.rope_dim", &mla.rope_dim, "key width shared by all heads; not rotated", at_least(1));
  o.add("mla.value_dim", &mla.value_dim, "value width of a head", at_least(1));
  o.add("mla.output_gate", &mla.output_gate, "sigmoid gate on the output");
  o.add("mla.latent_norm_eps", &mla.latent_norm_eps, "epsilon of the latent norms", above(0));

  o.add_choice("ffn.activation", &ffn.activation.kind,
               {{"situ", ops::glu::Kind::situ}, {"swiglu", ops::glu::Kind::swiglu}}, "of every FFN and expert");
  o.add("ffn.gate_cap", &ffn.activation.gate_cap, "SiTU: cap of the gate branch", above(0));
  o.add("ffn.up_cap", &ffn.activation.up_cap, "SiTU: cap of the up branch; 0: linear", at_least(0));
  o.add("ffn.dense_layers", &ffn.dense_layers, "first layers with a dense FFN", at_least(0));
  o.add("ffn.dense_hidden", &ffn.dense_hidden, "hidden width of a dense FFN", at_least(1));

  o.add("moe.experts", &moe.experts, "E, routed experts; 0: every FFN is dense", at_least(0));
  o.add("moe.top_k", &moe.top_k, "k, experts of a token", at_least(1));
  o.add("moe.hidden", &moe.hidden, "F, hidden width of an expert", at_least(1));
  o.add("moe.latent", &moe.latent, "L, width the routed experts work at; 0: the model width", at_least(0));
  o.add("moe.latent_norm", &moe.latent_norm, "norm on the sum of the experts, with a latent");
  o.add("moe.shared", &moe.shared, "shared experts, every token's", at_least(0));
  o.add("moe.scale", &moe.scale, "R, sum of a token's expert weights", above(0));
  o.add("moe.renormalise", &moe.renormalise, "weights of a token sum to R");
  o.add_choice("moe.score", &moe.score,
               {{"sigmoid", ops::router::Score::sigmoid}, {"softmax", ops::router::Score::softmax}}, "of the router");
  o.add("moe.groups", &moe.groups, "expert groups of older checkpoints; 1: none", at_least(1));
  o.add("moe.top_groups", &moe.top_groups, "groups a token may use", at_least(1));
  o.add("moe.router_init_std", &moe.router_init_std, "standard deviation of the initial router", above(0));
  o.add("moe.router_init_skew", &moe.router_init_skew,
        "nats, standard deviation of a per-expert offset of the initial logits: a hard start for balancing",
        at_least(0));

  o.add("residual.attn_res_block", &residual.attn_res_block,
        "layers in a block of Attention Residuals; 0: plain residual", at_least(0));
  o.add("residual.attn_res_full", &residual.attn_res_full, "every sublayer is a source of Attention Residuals");
}

void ModelConfig::check(const std::string& where) const {
  for (int64_t l : mla_layers) {
    if (l > layers) fail_user("{}: mla_layers names layer {}, the model has {}; layers count from 1", where, l, layers);
  }
  if (kda.chunk != 16 && kda.chunk != 32 && kda.chunk != 64) {
    fail_user("{}: kda.chunk is {}; choose 16, 32 or 64", where, kda.chunk);
  }
  if (moe.experts > 0 && moe.top_k > moe.experts) {
    fail_user("{}: moe.top_k is {} of moe.experts {}; a token cannot use more experts than there are", where, moe.top_k,
              moe.experts);
  }
  if (moe.top_groups > moe.groups || moe.experts % std::max<int64_t>(moe.groups, 1) != 0) {
    fail_user("{}: moe.groups {} must divide moe.experts {} and be at least moe.top_groups {}", where, moe.groups,
              moe.experts, moe.top_groups);
  }
  if (moe.experts > 0 && moe.top_k > moe.experts / moe.groups * moe.top_groups) {
    fail_user("{}: moe.top_k is {}, and {} of {} groups hold only {} experts; raise moe.top_groups", where, moe.top_k,
              moe.top_groups, moe.groups, moe.experts / moe.groups * moe.top_groups);
  }
  if (residual.attn_res_full && residual.attn_res_block > 0) {
    fail_user("{}: residual.attn_res_full and residual.attn_res_block {} exclude each other; set one", where,
              residual.attn_res_block);
  }
}

// All that decides the function computed, as text.
static std::string shape_text(ModelConfig shape) {
  const ModelConfig usual;
  shape.name = shape.tensor_prefix = "";
  shape.context = usual.context;
  shape.kda.chunk = usual.kda.chunk;
  shape.init_std = usual.init_std;
  shape.moe.router_init_std = usual.moe.router_init_std;
  shape.moe.router_init_skew = usual.moe.router_init_skew;
  return dump_model_config(shape);
}

std::string ModelConfig::fingerprint() const { return hash_hex(shape_text(*this)); }

std::string first_difference(const ModelConfig& a, const ModelConfig& b) {
  std::istringstream one(shape_text(a)), other(shape_text(b));
  std::string table, left, right;
  while (std::getline(one, left) && std::getline(other, right)) {
    if (left.starts_with("[")) table = left + " ";
    if (left != right) return fmt::format("{}{}, not {}", table, left, right);
  }
  return "";
}

ModelConfig load_model_config(const std::string& path) {
  ModelConfig c;
  Options options;
  c.bind(options);
  options.load_file(path);
  c.check(path);
  return c;
}

ModelConfig parse_model_config(const std::string& toml, const std::string& where) {
  ModelConfig c;
  Options options;
  c.bind(options);
  options.load_text(toml, where);
  c.check(where);
  return c;
}

std::string dump_model_config(const ModelConfig& config) {
  ModelConfig copy = config;
  Options options;
  copy.bind(options);
  return options.dump();
}

}  // namespace tessera::model
