#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "ckpt/checkpoint.h"
#include "core/log.h"
#include "core/machine.h"
#include "core/parallel.h"
#include "data/build.h"
#include "data/loader.h"
#include "train/signals.h"

namespace tessera::train {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

static double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The token store, its order, and the held-out sample.
struct Trainer::Corpus {
  data::Store train, valid;
  std::shared_ptr<const data::Tokenizer> tokenizer;
  data::Plan plan;
  data::Loader loader;
  data::ValidationSet validation;

  explicit Corpus(const RunConfig& c)
      : train((fs::path(c.data.store) / "train").string()),
        valid((fs::path(c.data.store) / "valid").string()),
        tokenizer(data::load_store_tokenizer(c.data.store)),
        plan({.sources = {{.store = &train, .name = c.data.store}},
              .context = c.data.context,
              .seed = static_cast<uint64_t>(c.seed)}),
        loader(plan),
        validation(valid,
                   {.context = c.data.context, .max_tokens = c.eval.tokens, .batch_tokens = c.train.micro_tokens}) {}
};

// The arena and what lies in it for the whole run. The dry twin of the same calls is the plan.
struct Trainer::Storage {
  Arena arena;
  Context ctx;
  Stepper stepper;

  Storage(Arena made, Device device, const model::Model& model, const RunConfig& config)
      : arena(std::move(made)), ctx{device, arena, nullptr, config.train.product}, stepper(ctx, model, config) {}
};

Trainer::Trainer(RunConfig config)
    : config_(std::move(config)),
      model_(model::load_model_config(config_.model_file),
             config_.model_options(model::load_model_config(config_.model_file))),
      guard_(model_, {config_.guard.on, config_.guard.revive, config_.guard.window, config_.guard.grace, 1000, 3,
                      static_cast<uint64_t>(config_.seed)}) {
  if (config_.threads > 0) set_thread_count(static_cast<int>(config_.threads));
  if (!fs::exists(fs::path(config_.data.store) / "train" / "meta.json")) {
    fail_user("{}: no token store there; make one with `tessera data build TEXT --out DIR` and name it as data.store",
              config_.data.store);
  }
  corpus_ = std::make_unique<Corpus>(config_);
  const bool quantile = config_.balance.method == ops::router::Balance::quantile_centred ||
                        config_.balance.method == ops::router::Balance::quantile_uniform;
  if (quantile && model_.config().moe.groups > 1) {
    fail_user(
        "{}: moe.groups is {}, and quantile balancing is not defined with expert groups; set balance.method = "
        "\"sign\" or \"none\"",
        config_.model_file, model_.config().moe.groups);
  }
  const int64_t vocabulary = corpus_->tokenizer->vocab_size();
  if (vocabulary > model_.config().vocabulary) {
    fail_user("{}: its tokenizer has {} ids, the model {} only {}; set vocabulary = {} or more in the model file",
              config_.data.store, vocabulary, config_.model_file, model_.config().vocabulary, vocabulary);
  }
  state_.model_toml = model::dump_model_config(model_.config());
  state_.run_toml = dump_run_config(config_);
  state_.plan_hash = corpus_->plan.hash();
  state_.tokenizer = corpus_->tokenizer->name() == "bytes" ? "bytes" : "tokenizer.model";
}

Trainer::~Trainer() = default;

// ---- memory ----

// One micro-batch, dry; returns the peak of the arena.
static int64_t dry_peak(const model::Model& model, const RunConfig& config, std::span<const int64_t> offsets,
                        int64_t* static_bytes) {
  Arena arena = Arena::dry();
  Context ctx{Device::dry, arena, nullptr, config.train.product, config.device};
  Stepper stepper(ctx, model, config);
  stepper.accumulate(ctx, stepper.place(ctx, nullptr, nullptr, offsets), offsets.back());
  stepper.finish(ctx, 0, 0);
  *static_bytes = stepper.static_bytes();
  return arena.peak();
}

MemoryPlan Trainer::plan_memory() {
  MemoryPlan plan;
  const int64_t sequences = config_.sequences_per_micro_batch();
  for (int64_t q = 0; q < config_.sequences_per_step(); q += sequences) {
    const data::Batch batch = corpus_->loader.batch(state_.next_sequence + q, sequences);
    plan.planned_peak = std::max(plan.planned_peak, dry_peak(model_, config_, batch.offsets, &plan.static_bytes));
  }
  // The worst packing for the chunked scan: every document is one token. Costs address space, not memory.
  std::vector<int64_t> single(static_cast<size_t>(config_.train.micro_tokens) + 1);
  std::iota(single.begin(), single.end(), int64_t{0});
  const int64_t worst = dry_peak(model_, config_, single, &plan.static_bytes);
  const int64_t evaluation =
      plan.static_bytes + evaluation_bytes(model_, config_.train.micro_tokens, config_.train.product, config_.device);
  plan.capacity = std::max(worst, evaluation);
  return plan;
}

void Trainer::require_memory(const MemoryPlan& plan) const {
  const int64_t available = inspect_machine().usable_memory_bytes();
  const double limit = 0.95 * double(available);
  if (double(plan.planned_peak) <= limit) return;
  const double gib = double(int64_t{1} << 30);
  fail_user(
      "the run needs {:.1f} GiB ({:.1f} of them parameters, gradients and optimizer state) and {:.1f} GiB are "
      "available; set train.micro_tokens = {}, or train.recompute_all = true, or choose a smaller model",
      double(plan.planned_peak) / gib, double(plan.static_bytes) / gib, double(available) / gib,
      std::max(config_.data.context, config_.train.micro_tokens / 2 / config_.data.context * config_.data.context));
}

// ---- run directory ----

void Trainer::write_run_files() const {
  const fs::path dir = config_.dir;
  write_file_atomic((dir / "run.toml").string(), state_.run_toml);
  write_file_atomic((dir / "model.toml").string(), state_.model_toml);
  if (state_.tokenizer != "bytes") {
    std::error_code error;
    fs::copy_file(fs::path(config_.data.store) / "tokenizer.model", dir / state_.tokenizer,
                  fs::copy_options::overwrite_existing, error);
    if (error) fail_user("{}: the vocabulary cannot be copied there ({})", config_.dir, error.message());
  }
  write_file_atomic(
      (dir / "README.txt").string(),
      "A run of tessera.\n"
      "  run.toml        every option of the run, resolved\n"
      "  model.toml      the model\n"
      "  metrics.jsonl   one JSON row a step (loss in nats a token, balance, time) and one an evaluation\n"
      "  checkpoints/    weights and training state; step-N/manifest.json says what is inside\n"
      "From the directory the run was started in:\n"
      "  go on training   tessera train " +
          (dir / "run.toml").string() +
          "\n"
          "  sample           tessera generate " +
          config_.dir +
          " --prompt \"...\"\n"
          "  evaluate         tessera eval " +
          config_.dir + "\n");
}

// ---- state ----

// A checkpoint that is damaged is passed over for the one before; one that is whole but of another run is the user's
// mistake, and ends the command.
void Trainer::resume_or_initialise() {
  const auto entries = ckpt::list((fs::path(config_.dir) / "checkpoints").string());
  for (auto e = entries.rbegin(); e != entries.rend(); ++e) {
    std::string problem = e->problem;
    if (problem.empty()) {
      try {
        return resume(e->path);
      } catch (const UserError& error) {
        if (ckpt::verify(e->path).pass) throw;
        problem = error.what();
      }
    }
    log_warning("checkpoint {} is skipped: {}", e->path, problem);
  }
  if (!entries.empty()) {
    fail_user("{}: holds {} checkpoints and none is valid; move them away to start over, or restore one", config_.dir,
              entries.size());
  }
  storage_->stepper.initialise(static_cast<uint64_t>(config_.seed));
}

void Trainer::resume(const std::string& checkpoint) {
  const ckpt::Reader reader(checkpoint);
  const SavedState saved = parse_saved_state(reader.manifest().state_json, checkpoint);
  const model::ModelConfig of_checkpoint = model::parse_model_config(saved.model_toml, checkpoint);
  const std::string difference = model::first_difference(of_checkpoint, model_.config());
  if (!difference.empty()) {
    fail_user("{}: was trained with another model ({} of {}); keep the model as it was, or choose another run.dir",
              checkpoint, difference, config_.model_file);
  }
  reader.require_fingerprints(model_.config().fingerprint(), corpus_->tokenizer->fingerprint());
  if (saved.plan_hash != state_.plan_hash) {
    fail_user(
        "{}: was trained on another order of data (plan {}, now {}); keep data.store, data.context and run.seed as "
        "they were, or choose another run.dir",
        checkpoint, saved.plan_hash, state_.plan_hash);
  }
  std::vector<ckpt::TensorRef> wanted;
  for (const auto& [name, view] : storage_->stepper.state()) wanted.push_back({name, view});
  ckpt::load_all(reader, wanted);
  state_.step = resumed_from_ = saved.step;
  state_.tokens = saved.tokens;
  state_.next_sequence = saved.next_sequence;
  guard_.restore(saved.guard);
}

std::string Trainer::save() {
  state_.guard = guard_.state();
  ckpt::CheckpointState state;
  state.step = state_.step;
  state.run_id = fs::weakly_canonical(config_.dir).filename().string();
  state.model_fingerprint = model_.config().fingerprint();
  state.tokenizer_fingerprint = corpus_->tokenizer->fingerprint();
  state.state_json = to_json(state_);
  for (const auto& [name, view] : storage_->stepper.state()) state.tensors.push_back({name, view});
  const std::string root = (fs::path(config_.dir) / "checkpoints").string();
  const ckpt::SaveReport report = ckpt::save(root, state, {.keep_last = config_.checkpoint.keep_last});
  for (const std::string& warning : report.warnings) log_warning("{}", warning);
  return report.path;
}

// ---- the loop ----

StepRow Trainer::take_step() {
  const auto begin = Clock::now();
  Storage& s = *storage_;
  const int64_t sequences = config_.sequences_per_micro_batch();
  std::vector<data::Batch> batches;
  int64_t loss_tokens = 0, tokens = 0, bytes = 0;
  for (int64_t q = 0; q < config_.sequences_per_step(); q += sequences) {
    batches.push_back(corpus_->loader.batch(state_.next_sequence + q, sequences));
    loss_tokens += batches.back().loss_tokens;
    tokens += static_cast<int64_t>(batches.back().ids.size());
    bytes += batches.back().text_bytes;
  }
  double loss = 0;
  for (const data::Batch& batch : batches) {
    const model::Batch placed = s.stepper.place(s.ctx, batch.ids.data(), batch.targets.data(), batch.offsets);
    loss += s.stepper.accumulate(s.ctx, placed, loss_tokens);
  }
  StepRow row;
  row.learning_rate = config_.schedule().at(state_.step);
  row.report = s.stepper.finish(s.ctx, row.learning_rate, state_.step, &guard_);
  state_.step += 1;
  state_.tokens += tokens;
  state_.next_sequence += config_.sequences_per_step();
  state_.learning_rate = row.learning_rate;
  row.step = state_.step;
  row.tokens = state_.tokens;
  row.loss = loss / double(std::max<int64_t>(loss_tokens, 1));
  row.bits_per_byte = loss / std::log(2.0) / double(std::max<int64_t>(bytes, 1));
  row.seconds = seconds_since(begin);
  row.tokens_per_s = double(tokens) / row.seconds;
  return row;
}

EvalReport Trainer::evaluate_now() {
  return evaluate(storage_->ctx, model_, storage_->stepper.weights(), corpus_->validation);
}

RunResult Trainer::run(const std::function<void(const Progress&)>& progress) {
  RunResult result;
  result.plan = plan_memory();
  require_memory(result.plan);
  const ckpt::WriterLock lock((fs::path(config_.dir) / "checkpoints").string());
  storage_ = std::make_unique<Storage>(Arena(result.plan.capacity), config_.device, model_, config_);
  resume_or_initialise();
  write_run_files();
  MetricsLog metrics((fs::path(config_.dir) / "metrics.jsonl").string(), resumed_from_);
  const StopSignals signals;
  const auto begin = Clock::now();
  storage_->arena.reset_peak();

  const auto evaluate_and_report = [&](Progress& p) {
    const EvalReport report = evaluate_now();
    metrics.write(state_.step, report);
    if (result.last_eval.tokens == 0) result.first_eval = report;
    result.last_eval = report;
    p.eval = report;
  };
  {  // where this start stands
    Progress p;
    p.row.step = state_.step;
    p.steps = config_.train.steps;
    if (resumed_from_ < 0) {
      evaluate_and_report(p);
    } else {
      result.first_eval = result.last_eval = evaluate_now();  // its row is in the log already
      p.eval = result.last_eval;
    }
    progress(p);
  }
  const int64_t decay_begin = config_.schedule().decay_begin();
  int64_t saved_at = resumed_from_, steps_here = 0;
  while (state_.step < config_.train.steps && !StopSignals::asked()) {
    Progress p{take_step(), config_.train.steps, 0, {}};
    ++steps_here;
    const auto events =
        guard_.act(state_.step, state_.step >= decay_begin, storage_->stepper.weights(), storage_->stepper.optimizer());
    metrics.write(p.row);
    for (const GuardEvent& event : events) {
      metrics.write(event);
      if (event.what == "alarm" || event.what == "revived") {
        log_warning("step {}, layer {}: {} {}", event.step, event.layer, event.what, event.detail);
      }
    }
    const bool last = state_.step == config_.train.steps;
    if (last || (config_.eval.every > 0 && state_.step % config_.eval.every == 0)) evaluate_and_report(p);
    p.seconds_left = seconds_since(begin) / double(steps_here) * double(config_.train.steps - state_.step);
    progress(p);
    if (!last && config_.checkpoint.every > 0 && state_.step % config_.checkpoint.every == 0) {
      try {
        result.checkpoint = save();
        saved_at = state_.step;
      } catch (const UserError& e) {  // a failed save alone must not end the run; the next interval tries again
        log_warning("step {}: no checkpoint: {}", state_.step, e.what());
      }
    }
    result.last_step = p.row.report;
  }
  if (saved_at != state_.step) {
    result.checkpoint = save();
  } else {
    result.checkpoint = find_checkpoint(config_.dir);
  }
  result.stopped_early = state_.step < config_.train.steps;
  result.step = state_.step;
  result.resumed_from = resumed_from_;
  result.tokens = state_.tokens;
  result.seconds = seconds_since(begin);
  result.peak_bytes = storage_->arena.peak();
  return result;
}

}  // namespace tessera::train
