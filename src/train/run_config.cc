#include "train/run_config.h"

#include <filesystem>

#include "config/options.h"
#include "model/tensor_shard.h"
#include "ops/gemm/gemm.h"
#include "ops/router/cuda.h"

namespace tessera::train {

using config::above;
using config::at_least;
using config::between;

static void bind_balance(config::Options& o, ops::router::BalanceOptions& b) {
  using ops::router::Balance;
  o.add_choice("balance.method", &b.method,
               {{"quantile_centred", Balance::quantile_centred},
                {"quantile_uniform", Balance::quantile_uniform},
                {"sign", Balance::sign},
                {"none", Balance::none}},
               "how the router's bias follows the load");
  o.add("balance.bins", &b.bins, "B, histogram bins an expert; the guard may double them", at_least(8));
  o.add("balance.width", &b.width, "h of the centred bins: resolution around the current bias", above(0));
  o.add("balance.smoothing", &b.smoothing, "rho: share of the old bias that stays", between(0, 1));
  o.add("balance.sign_step", &b.sign_step, "gamma of the sign rule", above(0));
  o.add("balance.min_tokens", &b.min_tokens, "tokens an expert needs on average before the bias moves", above(0));
}

static void bind_optim(config::Options& o, RunConfig::Optim& c) {
  using optim::DecayForm;
  using optim::Shape;
  o.add("optim.learning_rate", &c.learning_rate, "peak, shared by Muon and AdamW", above(0));
  o.add_choice("optim.schedule", &c.schedule,
               {{"constant", Shape::constant}, {"cosine", Shape::cosine}, {"wsd", Shape::wsd}}, "shape of the rate");
  o.add_choice(
      "optim.decay_form", &c.decay_form,
      {{"cosine", DecayForm::cosine}, {"linear", DecayForm::linear}, {"one_minus_sqrt", DecayForm::one_minus_sqrt}},
      "last part of a wsd schedule");
  o.add("optim.warmup_steps", &c.warmup_steps, "linear warm-up", at_least(0));
  o.add("optim.decay_fraction", &c.decay_fraction, "share of the steps in the last part of wsd", between(0, 1));
  o.add("optim.floor_ratio", &c.floor_ratio, "rate at the end over the peak", between(0, 1));
  o.add("optim.weight_decay", &c.weight_decay, "decoupled, on matrices", at_least(0));
  o.add("optim.decay_idle_experts", &c.decay_idle_experts,
        "off: experts without a token in the step keep their weights from decay");
  o.add("optim.clip_norm", &c.rules.clip_norm, "largest global gradient norm; 0: off", at_least(0));
  o.add("optim.momentum", &c.rules.momentum, "Muon", between(0, 1));
  o.add("optim.nesterov", &c.rules.nesterov, "Muon");
  o.add("optim.newton_schulz_steps", &c.rules.newton_schulz_steps, "Muon", at_least(1));
  o.add("optim.beta1", &c.rules.beta1, "AdamW", between(0, 1));
  o.add("optim.beta2", &c.rules.beta2, "AdamW", between(0, 1));
  o.add("optim.epsilon", &c.rules.epsilon, "AdamW", above(0));
  o.add("optim.qk_clip", &c.qk_clip, "largest attention logit of an MLA head before its projections shrink; 0: off",
        at_least(0));
}

void RunConfig::bind(config::Options& o) {
  o.add("run.dir", &dir, "directory for everything the run makes");
  o.add("run.seed", &seed, "of initialisation and data order");
  o.add_choice("run.device", &device, {{"cpu", Device::cpu}, {"cuda", Device::cuda}}, "where the run computes");
  o.add("run.threads", &threads, "CPU threads; 0: all", at_least(0));
  o.add("model.file", &model_file, "model file (configs/models/*.toml)");

  o.add("data.store", &data.store, "token store, made by `tessera data build`");
  o.add("data.context", &data.context, "C, tokens of a sequence", at_least(2));

  o.add("train.steps", &train.steps, "optimizer steps in all", at_least(0));
  o.add("train.tokens_per_step", &train.tokens_per_step, "tokens of a step; a multiple of data.context", at_least(1));
  o.add("train.micro_tokens", &train.micro_tokens,
        "tokens of one forward and backward; divides tokens_per_step; less means less memory", at_least(1));
  o.add_choice(
      "train.product", &train.product, {{"f32", Product::f32}, {"bf16", Product::bf16}},
      "operands of projections, experts and the head; inside KDA and MLA the CPU keeps f32; sums are float32 always");
  o.add("train.recompute", &train.recompute, "layers, counted from 1, that recompute in backward instead of saving",
        at_least(1));
  o.add("train.recompute_all", &train.recompute_all, "every layer recomputes");
  o.add("train.recompute_selective", &train.recompute_selective,
        "the other layers recompute what is cheap: mixes, norms and convolutions, no product, attention or KDA");
  o.add("train.ffn_block_tokens", &train.ffn_block_tokens,
        "tokens that a feed-forward part takes at a time, recomputing in backward, so that its memory does not grow "
        "with the sequence; 0: all at once",
        at_least(0));
  o.add("train.loss_block_rows", &train.loss_block_rows, "rows whose logits exist at a time", at_least(1));

  bind_optim(o, optim);
  bind_balance(o, balance);
  parallel.bind(o);

  o.add("guard.on", &guard.on, "watch for collapsing experts");
  o.add("guard.window", &guard.window, "steps of one window of the watch", at_least(1));
  o.add("guard.grace", &guard.grace, "first steps that are not judged", at_least(0));
  o.add("guard.revive", &guard.revive, "re-initialise dead experts; off: only report them");
  o.add("guard.escalate", &guard.escalate,
        "answer each alarm of a layer in turn by centred bins, finer bins, a router z-loss, re-initialised cold "
        "experts, and at last by stopping the run; off: only report alarms");
  o.add("guard.audit", &guard.audit, "steps between full records of every expert in metrics.jsonl", at_least(1));

  o.add("eval.every", &eval.every, "steps between evaluations on held-out text; 0: only at the beginning and the end",
        at_least(0));
  o.add("eval.tokens", &eval.tokens, "held-out tokens of an evaluation", at_least(1));
  o.add("mem.imbalance", &mem.imbalance,
        "with parallel.expert: rows that one process's experts may be sent, over their even share; what memory is "
        "planned for, and on a GPU a limit",
        at_least(1));
  o.add("checkpoint.every", &checkpoint.every, "steps between checkpoints; 0: only at the end and on a signal",
        at_least(0));
  o.add("checkpoint.keep_last", &checkpoint.keep_last, "checkpoints kept", at_least(1));
  job.bind(o);
}

void RunConfig::check(const std::string& where) const {
  if (model_file.empty())
    fail_user("{}: model.file is not set; name a model file such as configs/models/nano.toml", where);
  if (data.store.empty()) fail_user("{}: data.store is not set; make one with `tessera data build` and name it", where);
  if (train.tokens_per_step % data.context != 0) {
    fail_user("{}: train.tokens_per_step is {}, not a multiple of data.context {}; try {}", where,
              train.tokens_per_step, data.context,
              std::max<int64_t>(1, train.tokens_per_step / data.context) * data.context);
  }
  if (train.micro_tokens % data.context != 0 || train.tokens_per_step % train.micro_tokens != 0) {
    fail_user(
        "{}: train.micro_tokens is {}; wanted a multiple of data.context {} that divides train.tokens_per_step {}",
        where, train.micro_tokens, data.context, train.tokens_per_step);
  }
  parallel.check(where);
  if (micro_batches_per_step() % parallel.data != 0) {
    fail_user(
        "{}: a step has {} micro-batches (train.tokens_per_step {} / train.micro_tokens {}), which parallel.data = {} "
        "processes cannot share evenly; set train.micro_tokens = {}, or another parallel.data",
        where, micro_batches_per_step(), train.tokens_per_step, train.micro_tokens, parallel.data,
        std::max<int64_t>(1, train.tokens_per_step / parallel.data / data.context) * data.context);
  }
  check_pipeline(where);
  if (parallel.expert > 1) {
    const int64_t experts = model::load_model_config(model_file).moe.experts;
    if (parallel.expert > experts) {
      fail_user("{}: parallel.expert = {} processes for the {} experts of {}; set parallel.expert = {} or less", where,
                parallel.expert, experts, model_file, std::max<int64_t>(experts, 1));
    }
    // Rows that came from other processes are kept or asked for again, for all tokens at once.
    if (train.recompute_selective || train.ffn_block_tokens > 0) {
      fail_user("{}: {} does not go together with parallel.expert = {}; use train.recompute or train.recompute_all",
                where, train.recompute_selective ? "train.recompute_selective" : "train.ffn_block_tokens",
                parallel.expert);
    }
  }
  if (parallel.tensor > 1) {
    model::check_tensor(model::load_model_config(model_file), parallel.tensor, where, model_file);
  }
  const int64_t bins = guard.on ? with_every_rung({.balance = balance}).balance.bins : balance.bins;
  if (device == Device::cuda && ops::router::counts_quantiles(balance.method) && bins > ops::router::cuda::kMaxBins) {
    fail_user(
        "{}: balance.bins is {}, of which the guard may make {}, and on a GPU there may be {}; set balance.bins = {} "
        "or "
        "less",
        where, balance.bins, bins, ops::router::cuda::kMaxBins, ops::router::cuda::kMaxBins * balance.bins / bins);
  }
  schedule().validate();
}

// Micro-batches of a step and process that a step can be cut into, all of one number of sequences.
static std::vector<int64_t> possible_micro_batches(const RunConfig& c) {
  std::vector<int64_t> counts;
  const int64_t sequences = c.sequences_per_step() / c.parallel.data;
  for (int64_t n = 1; n <= sequences; ++n) {
    if (sequences % n == 0) counts.push_back(n);
  }
  return counts;
}

void RunConfig::check_pipeline(const std::string& where) const {
  const dist::PipelineShape shape = pipeline();
  if (shape.processes == 1) {
    if (shape.chunks == 1) return;
    fail_user(
        "{}: parallel.pipeline_chunks = {} cuts the layers of a pipeline, and parallel.pipeline is 1; set "
        "parallel.pipeline_chunks = 1, or parallel.pipeline = 2 or more",
        where, shape.chunks);
  }
  const int64_t layers = model::load_model_config(model_file).layers;
  if (shape.all_chunks() > layers) {
    const int64_t fewer = layers / shape.chunks;
    const std::string way = fewer > 1 ? fmt::format("parallel.pipeline = {} or less", fewer)
                                      : fmt::format("parallel.pipeline_chunks = 1 and parallel.pipeline = {} or less",
                                                    std::min(layers, shape.processes));
    const std::string runs = shape.chunks > 1 ? fmt::format(" with {} runs of layers each", shape.chunks) : "";
    fail_user("{}: parallel.pipeline = {} processes{}, and {} has {} layers; set {}", where, shape.processes, runs,
              model_file, layers, way);
  }
  if (shape.chunks == 1 || shape.micro_batches % shape.processes == 0) return;
  int64_t nearest = 0;
  for (const int64_t n : possible_micro_batches(*this)) {
    const bool nearer = nearest == 0 || std::abs(n - shape.micro_batches) < std::abs(nearest - shape.micro_batches);
    if (n % shape.processes == 0 && nearer) nearest = n;
  }
  const std::string way =
      nearest > 0 ? fmt::format("train.micro_tokens = {} ({} micro-batches), or parallel.pipeline_chunks = 1",
                                train.tokens_per_step / parallel.data / nearest, nearest)
                  : "parallel.pipeline_chunks = 1";
  fail_user(
      "{}: with parallel.pipeline_chunks = {} the {} micro-batches of a step go through in groups of {}, one for "
      "each process of the pipeline, and that does not come out even; set {}",
      where, shape.chunks, shape.micro_batches, shape.processes, way);
}

std::string RunConfig::pipeline_advice() const {
  constexpr double kIdle = 0.25;
  dist::PipelineShape shape = pipeline();
  const double idle = shape.idle_share();
  if (idle <= kIdle) return "";
  std::string way = "more train.tokens_per_step would shorten it";
  for (const int64_t n : possible_micro_batches(*this)) {
    shape.micro_batches = n;
    if (n <= pipeline().micro_batches || (shape.chunks > 1 && n % shape.processes != 0)) continue;
    way = fmt::format("train.micro_tokens = {} makes it {:.0f} %", train.tokens_per_step / parallel.data / n,
                      100 * shape.idle_share());
    if (shape.idle_share() <= kIdle) break;
  }
  return fmt::format(
      "parallel.pipeline = {} with {} micro-batches a step: each process waits for {:.0f} % of the time; {}",
      shape.processes, pipeline().micro_batches, 100 * idle, way);
}

void RunConfig::require_machine(const std::string& where) const {
  if (train.product == Product::bf16 && !ops::cpu_has_bf16_products() && device == Device::cpu) {
    fail_user("{}: train.product is \"bf16\", and this CPU has no bf16 products; use \"f32\"", where);
  }
  if (device == Device::cuda) gpu::require();
}

optim::Schedule RunConfig::schedule() const {
  return {.peak = optim.learning_rate,
          .floor_ratio = optim.floor_ratio,
          .warmup_steps = optim.warmup_steps,
          .total_steps = train.steps,
          .shape = optim.schedule,
          .decay_fraction = optim.decay_fraction,
          .decay_form = optim.decay_form};
}

GuardOptions RunConfig::guard_options() const {
  return {.on = guard.on,
          .revive = guard.revive,
          .escalate = guard.escalate,
          .window = guard.window,
          .grace = guard.grace,
          .audit = guard.audit,
          .seed = static_cast<uint64_t>(seed),
          .router = {.balance = balance}};
}

model::ModelOptions RunConfig::model_options(const model::ModelConfig& c) const {
  model::ModelOptions options;
  using model::Recompute;
  const Recompute others = train.recompute_selective ? Recompute::cheap : Recompute::none;
  options.recompute.assign(static_cast<size_t>(c.layers), train.recompute_all ? Recompute::full : others);
  for (int64_t layer : train.recompute) {
    if (layer > c.layers) {
      fail_user("train.recompute names layer {}, the model has {}; layers count from 1", layer, c.layers);
    }
    options.recompute[static_cast<size_t>(layer - 1)] = Recompute::full;
  }
  options.ffn_block_tokens = train.ffn_block_tokens;
  options.loss_block_rows = train.loss_block_rows;
  return options;
}

RunConfig load_run_config(const std::string& path, const std::function<void(config::Options&)>& overrides) {
  RunConfig c;
  config::Options options;
  c.bind(options);
  options.load_file(path);
  if (overrides) overrides(options);
  const auto beside = std::filesystem::path(path).parent_path() / c.model_file;
  if (!c.model_file.empty() && !std::filesystem::exists(c.model_file) && std::filesystem::exists(beside)) {
    c.model_file = beside.string();
  }
  c.check(path);
  return c;
}

RunConfig parse_run_config(const std::string& toml, const std::string& where) {
  RunConfig c;
  config::Options options;
  c.bind(options);
  options.load_text(toml, where);
  return c;
}

std::string dump_run_config(const RunConfig& config) {
  RunConfig copy = config;
  config::Options options;
  copy.bind(options);
  return options.dump();
}

}  // namespace tessera::train
