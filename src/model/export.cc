#include "model/export.h"

#include <nlohmann/json.hpp>

#include "model/import.h"

namespace tessera::model {
namespace {

using Json = nlohmann::ordered_json;

Json linear_attention(const ModelConfig& c) {
  Json kda = Json::array(), mla = Json::array();
  for (int64_t l = 0; l < c.layers; ++l) (c.is_mla(l) ? mla : kda).push_back(l + 1);
  Json j{{"head_dim", c.kda.head_dim},
         {"num_heads", c.kda.heads},
         {"short_conv_kernel_size", c.kda.conv_width},
         {"use_full_rank_gate", c.kda.output_gate == OutputGate::full},
         {"full_attn_layers", mla},
         {"kda_layers", kda}};
  if (c.kda.gate == ops::kda::Gate::bounded) j["gate_lower_bound"] = c.kda.lower_bound;
  return j;
}

void add_experts(const ModelConfig& c, Json& j) {
  const auto& m = c.moe;
  j["first_k_dense_replace"] = c.ffn.dense_layers;
  j["moe_layer_freq"] = 1;
  j["num_experts"] = m.experts;
  j["num_experts_per_token"] = m.top_k;
  j["num_shared_experts"] = m.shared;
  j["moe_intermediate_size"] = m.hidden;
  j["moe_renormalize"] = m.renormalise;
  j["moe_router_activation_func"] = m.score == ops::router::Score::softmax ? "softmax" : "sigmoid";
  j["routed_scaling_factor"] = m.scale;
  j["use_grouped_topk"] = true;
  j["num_expert_group"] = m.groups;
  j["topk_group"] = m.top_groups;
  if (m.latent == 0) return;
  j["routed_expert_hidden_size"] = m.latent;
  j["latent_moe_use_norm"] = m.latent_norm;
}

Json description(const ModelConfig& c, const ExportedWith& with) {
  Json j{{"architectures", {"KimiLinearForCausalLM"}},
         {"model_type", "kimi_linear"},
         {"dtype", with.weights_type},
         {"num_hidden_layers", c.layers},
         {"hidden_size", c.width},
         {"vocab_size", c.vocabulary},
         {"model_max_length", c.context},
         {"rms_norm_eps", c.norm_eps},
         {"initializer_range", c.init_std},
         {"tie_word_embeddings", false},
         {"hidden_act", "silu"},
         {"intermediate_size", c.ffn.dense_hidden},
         {"num_attention_heads", c.mla.heads},
         {"num_key_value_heads", c.mla.heads},
         {"q_lora_rank", nullptr},
         {"kv_lora_rank", c.mla.kv_rank},
         {"qk_nope_head_dim", c.mla.nope_dim},
         {"qk_rope_head_dim", c.mla.rope_dim},
         {"v_head_dim", c.mla.value_dim},
         {"mla_use_nope", true},
         {"linear_attn_config", linear_attention(c)}};
  for (const char* id : {"pad_token_id", "bos_token_id", "eos_token_id"}) j[id] = nullptr;  // not Kimi Linear's own
  if (with.end_of_document >= 0) j["eos_token_id"] = with.end_of_document;
  if (c.mla.q_rank > 0) j["q_lora_rank"] = c.mla.q_rank;
  if (c.mla.output_gate) j["mla_use_output_gate"] = true;
  if (c.ffn.activation.kind == ops::glu::Kind::situ) {
    j["activation_situ_beta"] = c.ffn.activation.gate_cap;
    j["activation_situ_linear_beta"] = c.ffn.activation.up_cap;
  }
  if (c.residual.attn_res_block > 0) j["attn_res_block_size"] = c.residual.attn_res_block;
  add_experts(c, j);
  return j;
}

}  // namespace

std::string export_hf_config(const ModelConfig& c, const ExportedWith& with, const std::string& where) {
  Json j = description(c, with);
  if (!c.tensor_prefix.empty()) j = {{"model_type", c.name}, {"text_config", j}};
  const std::string text = j.dump(2) + "\n";
  ModelConfig wanted = c;
  wanted.moe.latent_norm = c.moe.latent_norm && c.moe.latent > 0;  // there is none without a latent
  const std::string lost = first_difference(wanted, import_hf_config(text, where));
  if (!lost.empty()) {
    fail_user("{}: the published form of these models has no words for {}; a model with that cannot be exported", where,
              lost);
  }
  return text;
}

}  // namespace tessera::model
