#include "model/parameters.h"

#include <algorithm>
#include <cmath>

#include "core/host_copy.h"
#include "core/parallel.h"
#include "core/philox.h"

namespace tessera::model {

std::string Parameter::published_name(int64_t i) const {
  if (stack == 0) return name;
  const size_t hole = name.find("{}");
  return name.substr(0, hole) + std::to_string(first + i) + name.substr(hole + 2);
}

// Adds the tensors of one layer after the other, in the order of the forward pass.
class TableBuilder {
 public:
  TableBuilder(const ModelConfig& config, const Shard& shard, ParameterTable& table)
      : c_(config), shard_(shard), t_(table) {}

  void build() {
    layer_ = -1;
    here_ = shard_.process == 0;
    t_.embedding = add("model.embed_tokens.weight", {c_.vocabulary, c_.width},
                       {.group = Group::embedding, .component = "embedding", .active_share = 0});
    for (layer_ = 0; layer_ < c_.layers; ++layer_) {
      here_ = shard_.holds(layer_);
      build_layer();
    }
    layer_ = -1;
    here_ = shard_.process == shard_.stages.processes - 1;
    if (c_.attention_residuals()) t_.output_mix = add_mix("model.output_attn_res");
    t_.final_norm = add_gain("model.norm.weight", c_.width);
    t_.head = add("lm_head.weight", {c_.vocabulary, c_.width}, {.group = Group::embedding, .component = "head"});
    t_.whole_size_ = number_;
  }

 private:
  struct Traits {
    Init init = Init::normal;
    Group group = Group::matrix;
    int64_t blocks = 1;
    int64_t stack = 0, first = 0;
    const char* component = nullptr;  // null: that of the part being built
    double active_share = 1;
    double std = 0;  // 0: the model's init_std
    bool exact = false;
    Cut cut = Cut::none;
  };

  ParamId add(const std::string& name, Shape shape, Traits traits) {
    const ParamId number = number_++;
    if (!here_) return kNone;
    Parameter p;
    p.number = number;
    p.name = c_.tensor_prefix + name;
    p.shape = shape;
    p.init = traits.init;
    p.std = traits.std > 0 ? traits.std : c_.init_std;
    p.group = traits.group;
    p.blocks = traits.blocks;
    p.stack = traits.stack;
    p.first = traits.first;
    p.layer = layer_;
    p.component = traits.component != nullptr ? traits.component : component_;
    p.active_share = traits.active_share;
    p.exact = traits.exact || traits.group == Group::vector || traits.group == Group::buffer;
    p.whole = shape;
    if (shard_.tensor_processes > 1) take_part(p, traits.cut);
    t_.parameters_.push_back(p);
    return t_.size() - 1;
  }
  // Of the whole parameter that it is, the part of this process along the tensor axis.
  void take_part(Parameter& p, Cut cut) const {
    const int64_t n = shard_.tensor_processes, rank = shard_.tensor_rank;
    p.cut = cut;
    if (cut != Cut::rows && cut != Cut::columns) return;
    const int axis = cut == Cut::rows ? 0 : 1;
    const int64_t extent = p.whole[axis] / n;
    TESSERA_CHECK(extent * n == p.whole[axis] && (p.blocks == 1 || p.blocks % n == 0), "{} {} among {}", p.name,
                  p.whole.to_string(), n);
    std::vector<int64_t> extents(p.whole.begin(), p.whole.end());
    extents[static_cast<size_t>(axis)] = extent;
    p.shape = Shape(extents);
    (cut == Cut::rows ? p.first : p.first_column) = extent * rank;
    p.cut_through = p.group == Group::matrix && p.blocks == 1;
    if (p.blocks > 1) p.blocks /= n;
  }
  std::string in_layer(const std::string& name) const { return fmt::format("model.layers.{}.{}", layer_, name); }
  ParamId matrix(const std::string& name, int64_t out, int64_t in, Cut cut, int64_t blocks = 1) {
    return add(in_layer(name), {out, in}, {.blocks = blocks, .cut = cut});
  }
  ParamId vector(const std::string& name, Shape shape, Init init, Cut cut) {
    return add(in_layer(name), shape, {.init = init, .group = Group::vector, .cut = cut});
  }
  ParamId add_gain(const std::string& name, int64_t width) {
    return add(name, {width}, {.init = Init::ones, .group = Group::vector, .component = "norms and mixes"});
  }
  MixParams add_mix(const std::string& prefix) {
    // The pseudo-query starts at zero: a uniform average of the sources (moe.md 5.5).
    return {add(prefix + "_proj.weight", {1, c_.width},
                {.init = Init::zeros, .group = Group::vector, .component = "norms and mixes"}),
            add_gain(prefix + "_norm.weight", c_.width)};
  }

  void build_layer() {
    LayerParams p{};
    if (c_.attention_residuals()) p.attention_mix = add_mix(in_layer("self_attention_res"));
    p.attention_norm = add_gain(in_layer("input_layernorm.weight"), c_.width);
    if (c_.is_mla(layer_)) {
      component_ = "MLA";
      p.mla = add_mla();
    } else {
      component_ = "KDA";
      p.kda = add_kda();
    }
    if (c_.attention_residuals()) p.ffn_mix = add_mix(in_layer("mlp_res"));
    p.ffn_norm = add_gain(in_layer("post_attention_layernorm.weight"), c_.width);
    if (c_.is_moe(layer_)) {
      p.moe = add_moe();
    } else {
      component_ = "dense FFN";
      p.dense = add_mlp("mlp.", c_.ffn.dense_hidden);
    }
    t_.layers_.push_back(p);
  }

  KdaParams add_kda() {
    const auto& k = c_.kda;
    const int64_t inner = k.heads * k.head_dim;
    KdaParams p{};
    p.q_proj = matrix("self_attn.q_proj.weight", inner, c_.width, Cut::rows, k.heads);
    p.k_proj = matrix("self_attn.k_proj.weight", inner, c_.width, Cut::rows, k.heads);
    p.v_proj = matrix("self_attn.v_proj.weight", inner, c_.width, Cut::rows, k.heads);
    p.q_conv = vector("self_attn.q_conv1d.weight", {inner, 1, k.conv_width}, Init::conv, Cut::rows);
    p.k_conv = vector("self_attn.k_conv1d.weight", {inner, 1, k.conv_width}, Init::conv, Cut::rows);
    p.v_conv = vector("self_attn.v_conv1d.weight", {inner, 1, k.conv_width}, Init::conv, Cut::rows);
    p.f_a = matrix("self_attn.f_a_proj.weight", k.gate_rank, c_.width, Cut::partial);
    p.f_b = matrix("self_attn.f_b_proj.weight", inner, k.gate_rank, Cut::rows);
    p.b_proj = matrix("self_attn.b_proj.weight", k.heads, c_.width, Cut::rows);
    p.a_log = vector("self_attn.A_log", {k.heads}, Init::a_log, Cut::rows);
    p.dt_bias = vector("self_attn.dt_bias", {inner}, Init::dt_bias, Cut::rows);
    if (k.output_gate == OutputGate::low_rank) {
      p.g_a = matrix("self_attn.g_a_proj.weight", k.gate_rank, c_.width, Cut::partial);
      p.g_b = matrix("self_attn.g_b_proj.weight", inner, k.gate_rank, Cut::rows);
    } else {
      p.g_proj = matrix("self_attn.g_proj.weight", inner, c_.width, Cut::rows);
    }
    p.o_norm = vector("self_attn.o_norm.weight", {k.head_dim}, Init::ones, Cut::partial);
    p.o_proj = matrix("self_attn.o_proj.weight", c_.width, inner, Cut::columns);
    return p;
  }

  MlaParams add_mla() {
    const auto& m = c_.mla;
    const int64_t qk = m.nope_dim + m.rope_dim;
    MlaParams p{};
    if (m.q_rank == 0) {
      p.q_proj = matrix("self_attn.q_proj.weight", m.heads * qk, c_.width, Cut::rows, m.heads);
    } else {
      p.q_a = matrix("self_attn.q_a_proj.weight", m.q_rank, c_.width, Cut::partial);
      p.q_a_norm = vector("self_attn.q_a_layernorm.weight", {m.q_rank}, Init::ones, Cut::partial);
      p.q_b = matrix("self_attn.q_b_proj.weight", m.heads * qk, m.q_rank, Cut::rows, m.heads);
    }
    p.kv_a = matrix("self_attn.kv_a_proj_with_mqa.weight", m.kv_rank + m.rope_dim, c_.width, Cut::partial);
    p.kv_a_norm = vector("self_attn.kv_a_layernorm.weight", {m.kv_rank}, Init::ones, Cut::partial);
    p.kv_b = matrix("self_attn.kv_b_proj.weight", m.heads * (m.nope_dim + m.value_dim), m.kv_rank, Cut::rows, m.heads);
    if (m.output_gate) p.g_proj = matrix("self_attn.g_proj.weight", m.heads * m.value_dim, c_.width, Cut::rows);
    p.o_proj = matrix("self_attn.o_proj.weight", c_.width, m.heads * m.value_dim, Cut::columns);
    return p;
  }

  DenseParams add_mlp(const std::string& prefix, int64_t hidden) {
    return {matrix(prefix + "gate_proj.weight", hidden, c_.width, Cut::rows),
            matrix(prefix + "up_proj.weight", hidden, c_.width, Cut::rows),
            matrix(prefix + "down_proj.weight", c_.width, hidden, Cut::columns)};
  }

  MoeParams add_moe() {
    const auto& m = c_.moe;
    const int64_t latent = c_.expert_width();
    const std::string prefix = "block_sparse_moe.";
    MoeParams p{};
    p.router = add(in_layer(prefix + "gate.weight"), {m.experts, c_.width},
                   {.group = Group::embedding,
                    .blocks = m.experts,
                    .component = "router",
                    .std = m.router_init_std,
                    .exact = true});
    p.bias = add(in_layer(prefix + "gate.e_score_correction_bias"), {m.experts},
                 {.init = Init::zeros, .group = Group::buffer, .component = "router"});
    component_ = "latent projections";
    if (m.latent > 0) p.down = matrix(prefix + "routed_expert_down_proj.weight", latent, c_.width, Cut::none);
    const int64_t here = shard_.experts < 0 ? m.experts : shard_.experts;
    const Traits routed{.blocks = here,
                        .stack = here,
                        .first = shard_.first_expert,
                        .component = "routed experts",
                        .active_share = double(m.top_k) / double(m.experts)};
    p.w1 = add(in_layer(prefix + "experts.{}.w1.weight"), {here, m.hidden, latent}, routed);
    p.w3 = add(in_layer(prefix + "experts.{}.w3.weight"), {here, m.hidden, latent}, routed);
    p.w2 = add(in_layer(prefix + "experts.{}.w2.weight"), {here, latent, m.hidden}, routed);
    if (m.latent > 0) {
      if (m.latent_norm) p.norm = vector(prefix + "routed_expert_norm.weight", {latent}, Init::ones, Cut::none);
      p.up = matrix(prefix + "routed_expert_up_proj.weight", c_.width, latent, Cut::none);
    }
    component_ = "shared experts";
    if (m.shared > 0) p.shared = add_mlp(prefix + "shared_experts.", m.shared * m.hidden);
    return p;
  }

  const ModelConfig& c_;
  const Shard& shard_;
  ParameterTable& t_;
  int64_t layer_ = -1;
  bool here_ = true;    // what is being built belongs to this process
  ParamId number_ = 0;  // of the next parameter, here or not
  const char* component_ = "";
};

ParameterTable::ParameterTable(const ModelConfig& config, const Shard& shard) {
  TableBuilder(config, shard, *this).build();
}

int64_t ParameterTable::total() const {
  int64_t n = 0;
  for (const Parameter& p : parameters_) n += p.group == Group::buffer ? 0 : p.elements();
  return n;
}

int64_t ParameterTable::active() const {
  double n = 0;
  for (const Parameter& p : parameters_) n += p.group == Group::buffer ? 0 : double(p.elements()) * p.active_share;
  return static_cast<int64_t>(std::llround(n));
}

Weights allocate_weights(Arena& arena, const ParameterTable& table, DType dtype, bool with_gradients) {
  Weights w;
  const DType exact = exact_type(dtype);
  for (const Parameter& p : table.all()) {
    const DType type = p.exact ? exact : dtype;
    Arena::Label label(arena, type == exact ? "parameters" : "working copies");
    w.value.push_back(arena.allocate(type, p.shape));
  }
  w.master = w.value;
  if (!with_gradients) return w;
  for (const Parameter& p : table.all()) {
    Arena::Label label(arena, "gradients");
    w.gradient.push_back(p.group == Group::buffer ? View() : arena.allocate_zeroed(exact, p.shape));
  }
  Arena::Label label(arena, "parameters");
  for (View& master : w.master) {
    if (master.dtype() != exact) master = arena.allocate(exact, master.shape());
  }
  return w;
}

static void round_to(const View& host, const View& to) {
  std::vector<bf16> rounded(static_cast<size_t>(host.elements()));
  const float* from = host.as<float>();
  parallel_ranges(host.elements(), 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) rounded[static_cast<size_t>(i)] = bf16(from[i]);
  });
  copy(View(rounded.data(), DType::bf16, host.shape()), to);
}

void refresh_copy(const Weights& w, ParamId id, int64_t part) {
  if (w[id].dtype() == DType::bf16)
    round_to(HostCopy(w.master[static_cast<size_t>(id)].at(part)).view(), w[id].at(part));
}

void refresh_copies(const Weights& w) {
  for (size_t id = 0; id < w.value.size(); ++id) {
    if (w.value[id].dtype() == DType::bf16) round_to(HostCopy(w.master[id]).view(), w.value[id]);
  }
}

void assign(const std::vector<View>& host, const Weights& to) {
  for (size_t id = 0; id < host.size(); ++id) {
    if (to.master[id].dtype() == DType::f32) copy(host[id], to.master[id]);
    if (to.value[id].dtype() == DType::bf16) round_to(host[id], to.value[id]);
  }
}

void zero_gradients(const Weights& w) {
  for (const View& g : w.gradient) g.zero();
}

namespace {

// The draw for element i depends on (seed, tensor, i) only, so any layout of processes initialises the same model.
double initial_value(const Parameter& p, const Philox& random, uint64_t i) {
  switch (p.init) {
    case Init::normal: return p.std * random.normal(i);
    case Init::ones: return 1;
    case Init::zeros: return 0;
    case Init::conv: return (2 * random.uniform(i) - 1) / std::sqrt(double(p.shape[2]));
    case Init::a_log: return std::log(1 + 15 * random.uniform(i));  // log U(1, 16); bounded gates start at zero instead
    case Init::dt_bias: {                                           // softplus^{-1}(dt), dt log-uniform in [1e-3, 0.1]
      const double dt = std::exp(std::log(1e-3) + random.uniform(i) * std::log(100.0));
      return dt + std::log(-std::expm1(-dt));
    }
  }
  return 0;
}

}  // namespace

// Gives expert j's logits an offset of c_j ~ N(0, skew^2): embedding column 0 becomes a constant that survives the norm
// as about sqrt(D / 2), and the router reads its offset from there. A hard start for balancing, for tests and studies.
static void skew_router(const ModelConfig& config, const ParameterTable& table, const Weights& w, uint64_t seed) {
  const double constant = config.init_std * std::sqrt(double(config.width));
  const double normed = std::sqrt(double(config.width) / 2);
  dispatch_real(w.value.front().dtype(), [&](auto real) {
    using Real = decltype(real);
    if (w.value.front().data() == nullptr) return;
    for (int64_t v = 0; table.embedding != kNone && v < config.vocabulary; ++v) {
      w[table.embedding].as<Real>()[v * config.width] = Real(constant);
    }
    for (int64_t l = config.ffn.dense_layers; l < config.layers; ++l) {
      const ParamId id = table.layer(l).moe.router;
      if (id == kNone) continue;
      const Philox random(seed, Purpose::init, static_cast<uint64_t>(table.whole_size() + l));
      Real* router = w[id].as<Real>();
      for (int64_t j = 0; j < config.moe.experts; ++j) {
        router[j * config.width] = Real(config.moe.router_init_skew * random.normal(static_cast<uint64_t>(j)) / normed);
      }
    }
  });
}

void initialise(const ModelConfig& config, const ParameterTable& table, const Weights& w, uint64_t seed) {
  for (ParamId id = 0; id < table.size(); ++id) {
    Parameter p = table[id];
    if (p.init == Init::a_log && config.kda.gate == ops::kda::Gate::bounded) p.init = Init::zeros;
    const Philox random(seed, Purpose::init, static_cast<uint64_t>(p.number));
    dispatch_real(w[id].dtype(), [&](auto real) {
      using Real = decltype(real);
      Real* value = w[id].as<Real>();
      if (value == nullptr) return;
      // What lies before it, of a stack or of the whole parameter, is in other processes.
      const int64_t row = w[id].row_elements(), whole_row = p.cut == Cut::columns ? p.whole[1] : row;
      parallel_ranges(p.elements(), 1 << 14, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t in_whole = (p.first + i / row) * whole_row + p.first_column + i % row;
          value[i] = Real(initial_value(p, random, static_cast<uint64_t>(in_whole)));
        }
      });
    });
  }
  if (config.moe.experts > 0 && config.moe.router_init_skew > 0) skew_router(config, table, w, seed);
}

std::vector<NamedView> published_tensors(const ParameterTable& table, const std::vector<View>& views) {
  std::vector<NamedView> named;
  for (ParamId id = 0; id < table.size(); ++id) {
    const Parameter& p = table[id];
    const View& view = views[static_cast<size_t>(id)];
    if (!view.present()) continue;
    if (p.stack == 0) named.push_back({p.name, view});
    for (int64_t e = 0; e < p.stack; ++e) named.push_back({p.published_name(e), view.at(e)});
  }
  return named;
}

}  // namespace tessera::model
