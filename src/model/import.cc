#include "model/import.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace tessera::model {
namespace {

using nlohmann::json;

// Reads keys of one JSON object and says which is missing or of the wrong kind.
class Reader {
 public:
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  template <class T>
  T get(const char* key) const {
    if (!has(key)) fail_user("{}: key \"{}\" is missing; it is needed to describe the model", where_, key);
    return as<T>(key);
  }
  template <class T>
  T get_or(const char* key, T fallback) const {
    return has(key) ? as<T>(key) : fallback;
  }
  // The first of several spellings that is there.
  template <class T>
  T get_any(std::initializer_list<const char*> keys) const {
    for (const char* key : keys) {
      if (has(key)) return as<T>(key);
    }
    std::string all;
    for (const char* key : keys) all += fmt::format("{}\"{}\"", all.empty() ? "" : " or ", key);
    fail_user("{}: key {} is missing; it is needed to describe the model", where_, all);
  }
  Reader child(const char* key) const { return {object_.at(key), where_ + ": " + key}; }
  const json& raw() const { return object_; }
  const std::string& where() const { return where_; }

 private:
  template <class T>
  T as(const char* key) const {
    try {
      return object_.at(key).get<T>();
    } catch (const json::exception&) {
      fail_user("{}: key \"{}\" holds {}, which is not of the kind wanted", where_, key, object_.at(key).dump());
    }
  }
  const json& object_;
  std::string where_;
};

void read_mla(const Reader& r, ModelConfig& c) {
  c.mla.heads = r.get<int64_t>("num_attention_heads");
  c.mla.q_rank = r.get_or<int64_t>("q_lora_rank", 0);
  c.mla.kv_rank = r.get<int64_t>("kv_lora_rank");
  c.mla.nope_dim = r.get<int64_t>("qk_nope_head_dim");
  c.mla.rope_dim = r.get<int64_t>("qk_rope_head_dim");
  c.mla.value_dim = r.get<int64_t>("v_head_dim");
  c.mla.output_gate = r.get_or("mla_use_output_gate", false);
  if (!r.get_or("mla_use_nope", true)) {
    fail_user("{}: \"mla_use_nope\" is false; models with rotary positions are not of this family", r.where());
  }
}

// The linear attention block as released: linear_attn_config with 1-based layer lists.
void read_released_kda(const Reader& r, ModelConfig& c) {
  c.kda.heads = r.get<int64_t>("num_heads");
  c.kda.head_dim = r.get<int64_t>("head_dim");
  c.kda.conv_width = r.get_or<int64_t>("short_conv_kernel_size", 4);
  c.kda.output_gate = r.get_or("use_full_rank_gate", false) ? OutputGate::full : OutputGate::low_rank;
  c.mla_layers = r.get<std::vector<int64_t>>("full_attn_layers");
  const auto kda_layers = r.get<std::vector<int64_t>>("kda_layers");
  if (static_cast<int64_t>(c.mla_layers.size() + kda_layers.size()) != c.layers) {
    fail_user("{}: {} KDA and {} full-attention layers do not add up to {} layers", r.where(), kda_layers.size(),
              c.mla_layers.size(), c.layers);
  }
  std::vector<int64_t> listed = c.mla_layers;  // as many as there are layers: without repetition every layer once
  listed.insert(listed.end(), kda_layers.begin(), kda_layers.end());
  std::ranges::sort(listed);
  for (const int64_t layer : listed) {
    if (layer >= 1 && layer <= c.layers) continue;
    fail_user("{}: \"kda_layers\" and \"full_attn_layers\" name layer {}; wanted layers from 1 to {}", r.where(), layer,
              c.layers);
  }
  const auto twice = std::ranges::adjacent_find(listed);
  if (twice != listed.end()) {
    fail_user(
        "{}: \"kda_layers\" and \"full_attn_layers\" name layer {} twice; wanted every layer in one of them, once",
        r.where(), *twice);
  }
}

// The flat keys of later ports: a kind for every layer.
void read_flat_kda(const Reader& r, ModelConfig& c) {
  c.kda.heads = r.get_any<int64_t>({"linear_num_heads", "linear_num_key_heads"});
  c.kda.head_dim = r.get_any<int64_t>({"linear_head_dim", "linear_key_head_dim"});
  c.kda.conv_width = r.get_or<int64_t>("linear_conv_kernel_dim", 4);
  c.kda.output_gate = r.get_or("use_full_rank_gate", false) ? OutputGate::full : OutputGate::low_rank;
  const auto kinds = r.get<std::vector<std::string>>("layer_types");
  if (static_cast<int64_t>(kinds.size()) != c.layers) {
    fail_user("{}: \"layer_types\" has {} entries for {} layers", r.where(), kinds.size(), c.layers);
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] == "full_attention") {
      c.mla_layers.push_back(static_cast<int64_t>(i) + 1);
    } else if (kinds[i] != "linear_attention") {
      fail_user("{}: layer {} is \"{}\"; wanted \"linear_attention\" or \"full_attention\"", r.where(), i + 1,
                kinds[i]);
    }
  }
}

void read_gate(const Reader& r, ModelConfig& c) {
  const bool nested = r.has("linear_attn_config") && r.raw()["linear_attn_config"].contains("gate_lower_bound");
  const Reader from = nested ? r.child("linear_attn_config") : r;
  if (from.has("gate_lower_bound")) {
    c.kda.gate = ops::kda::Gate::bounded;
    c.kda.lower_bound = from.get<double>("gate_lower_bound");
  } else {
    c.kda.gate = ops::kda::Gate::unbounded;
  }
  c.kda.gate_rank = c.kda.head_dim;  // the bottleneck has the width of a head (attention.md 1)
}

// From a kind for every layer: dense ones, then sparse ones.
int64_t count_dense_layers(const Reader& r, int64_t layers) {
  const auto kinds = r.get<std::vector<std::string>>("mlp_layer_types");
  if (static_cast<int64_t>(kinds.size()) != layers) {
    fail_user("{}: \"mlp_layer_types\" has {} entries for {} layers", r.where(), kinds.size(), layers);
  }
  int64_t dense = 0;
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] != "dense" && kinds[i] != "sparse") {
      fail_user("{}: the MLP of layer {} is \"{}\"; wanted \"dense\" or \"sparse\"", r.where(), i + 1, kinds[i]);
    }
    if (kinds[i] == "sparse") continue;
    if (dense != static_cast<int64_t>(i)) {
      fail_user(
          "{}: the MLP of layer {} is dense after a sparse one; models of this family begin with the dense layers",
          r.where(), i + 1);
    }
    ++dense;
  }
  return dense;
}

void read_ffn(const Reader& r, ModelConfig& c) {
  c.ffn.dense_hidden = r.get<int64_t>("intermediate_size");
  if (r.has("activation_situ_beta")) {
    c.ffn.activation = {ops::glu::Kind::situ, r.get<double>("activation_situ_beta"),
                        r.get_or("activation_situ_linear_beta", 0.0)};
  } else {
    c.ffn.activation.kind = ops::glu::Kind::swiglu;
  }
  if (r.has("mlp_layer_types")) {
    c.ffn.dense_layers = count_dense_layers(r, c.layers);
  } else {
    c.ffn.dense_layers = r.get_or<int64_t>("first_k_dense_replace", 0);
  }
  auto& m = c.moe;
  m.experts = r.get_any<int64_t>({"num_experts", "n_routed_experts"});
  m.top_k = r.get_any<int64_t>({"num_experts_per_token", "num_experts_per_tok"});
  m.hidden = r.get<int64_t>("moe_intermediate_size");
  m.shared = r.get_any<int64_t>({"num_shared_experts", "n_shared_experts"});
  m.scale = r.get_or("routed_scaling_factor", 1.0);
  m.renormalise = r.get_or("moe_renormalize", true);
  m.latent = r.get_or<int64_t>("routed_expert_hidden_size", 0);
  m.latent_norm = m.latent > 0 && r.get_or("latent_moe_use_norm", true);
  m.groups = r.get_or<int64_t>("num_expert_group", 1);
  m.top_groups = r.get_or<int64_t>("topk_group", 1);
  const auto score = r.get_or<std::string>("moe_router_activation_func", "sigmoid");
  if (score != "sigmoid" && score != "softmax") {
    fail_user("{}: \"moe_router_activation_func\" is \"{}\"; wanted \"sigmoid\" or \"softmax\"", r.where(), score);
  }
  m.score = score == "softmax" ? ops::router::Score::softmax : ops::router::Score::sigmoid;
}

// The ranges of a model file's keys (config.cc), in the words of config.json.
void check_ranges(const ModelConfig& c, const std::string& where) {
  const auto require = [&](const char* key, double found, double least, double most = 1e12) {
    if (found >= least && found <= most) return;
    fail_user("{}: \"{}\" is {}; wanted a number from {} to {}", where, key, found, least, most);
  };
  require("num_hidden_layers", double(c.layers), 1);
  require("hidden_size", double(c.width), 1);
  require("vocab_size", double(c.vocabulary), 2, 2147483647);
  require("model_max_length", double(c.context), 1);
  require("rms_norm_eps", c.norm_eps, 1e-300);
  for (int64_t layer : c.mla_layers) require("full_attn_layers", double(layer), 1, double(c.layers));
  require("linear attention heads", double(c.kda.heads), 1);
  require("linear attention head width", double(c.kda.head_dim), 1);
  require("linear attention convolution width", double(c.kda.conv_width), 2);
  require("gate_lower_bound", c.kda.lower_bound, -5, -1e-6);
  require("num_attention_heads", double(c.mla.heads), 1);
  require("q_lora_rank", double(c.mla.q_rank), 0);
  require("kv_lora_rank", double(c.mla.kv_rank), 1);
  require("qk_nope_head_dim", double(c.mla.nope_dim), 1);
  require("qk_rope_head_dim", double(c.mla.rope_dim), 1);
  require("v_head_dim", double(c.mla.value_dim), 1);
  require("activation_situ_beta", c.ffn.activation.gate_cap, 1e-300);
  require("activation_situ_linear_beta", c.ffn.activation.up_cap, 0);
  require("first_k_dense_replace", double(c.ffn.dense_layers), 0);
  require("intermediate_size", double(c.ffn.dense_hidden), 1);
  require("num_experts", double(c.moe.experts), 0);
  require("num_experts_per_token", double(c.moe.top_k), 1);
  require("moe_intermediate_size", double(c.moe.hidden), 1);
  require("routed_expert_hidden_size", double(c.moe.latent), 0);
  require("num_shared_experts", double(c.moe.shared), 0);
  require("routed_scaling_factor", c.moe.scale, 1e-300);
  require("num_expert_group", double(c.moe.groups), 1);
  require("topk_group", double(c.moe.top_groups), 1);
  require("attn_res_block_size", double(c.residual.attn_res_block), 0);
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

}  // namespace

ModelConfig import_hf_config(const std::string& text, const std::string& where) {
  const json document = json::parse(text, nullptr, false);
  if (!document.is_object()) fail_user("{}: not a JSON object; wanted a model's config.json", where);
  const bool wrapped = document.contains("text_config") && document["text_config"].is_object();
  const Reader r(wrapped ? document["text_config"] : document, where);
  ModelConfig c;
  c.name = Reader(document, where).get_or<std::string>("model_type", "imported");
  if (wrapped) c.tensor_prefix = "language_model.";
  c.layers = r.get<int64_t>("num_hidden_layers");
  c.width = r.get<int64_t>("hidden_size");
  c.vocabulary = r.get<int64_t>("vocab_size");
  c.context = r.has("model_max_length") ? r.get<int64_t>("model_max_length")
                                        : r.get_or<int64_t>("max_position_embeddings", c.context);
  c.norm_eps = r.get_or("rms_norm_eps", 1e-5);
  if (r.get_or("tie_word_embeddings", false)) {
    fail_user("{}: \"tie_word_embeddings\" is true; models of this family keep embedding and head apart", where);
  }
  if (r.has("linear_attn_config")) {
    read_released_kda(r.child("linear_attn_config"), c);
  } else {
    read_flat_kda(r, c);
  }
  read_gate(r, c);
  read_mla(r, c);
  read_ffn(r, c);
  c.residual.attn_res_block = r.get_or<int64_t>("attn_res_block_size", 0);
  check_ranges(c, where);
  c.check(where);
  return c;
}

std::vector<std::string> spellings(const std::string& name) {
  std::vector<std::string> all{name};
  // A dense layer's FFN and the experts' block go by one name in some files and by two in others.
  if (name.find(".block_sparse_moe.") != std::string::npos) {
    all.push_back(replaced(name, ".block_sparse_moe.", ".mlp."));
  } else if (name.find(".mlp.") != std::string::npos) {
    all.push_back(replaced(name, ".mlp.", ".block_sparse_moe."));
  }
  return all;
}

}  // namespace tessera::model
