#include "train/trainer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/log.h"
#include "core/parallel.h"
#include "data/build.h"
#include "data/loader.h"
#include "train/gathered_state.h"
#include "train/plan_run.h"
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

  // Of the documents in a batch of sequences, without reading their tokens.
  std::vector<int64_t> offsets(int64_t q_begin, int64_t count) {
    std::vector<int64_t> offsets{0};
    for (int64_t q = q_begin; q < q_begin + count; ++q) {
      for (const data::Segment& segment : plan.sequence(q)) offsets.push_back(offsets.back() + segment.length);
    }
    return offsets;
  }
};

// The arena and what lies in it for the whole run. The dry twin of the same calls is the plan.
struct Trainer::Storage {
  Arena arena;
  Context ctx;
  Stepper stepper;

  Storage(Arena made, Device device, const model::Model& model, const RunConfig& config)
      : arena(std::move(made)), ctx{device, arena, nullptr, config.train.product}, stepper(ctx, model, config) {}
};

static model::Model model_of(const RunConfig& config, dist::Mesh* mesh) {
  const model::ModelConfig c = model::load_model_config(config.model_file);
  model::ModelOptions options = config.model_options(c);
  options.mesh = mesh;
  options.expert_imbalance = config.device == Device::cuda ? config.mem.imbalance : 0;
  return model::Model(c, options);
}

Trainer::Trainer(RunConfig config, dist::Mesh* mesh)
    : config_(std::move(config)), model_(model_of(config_, mesh)), guard_(model_, config_.guard_options()) {
  if (config_.threads > 0) set_thread_count(static_cast<int>(config_.threads));
  if (!has_store(config_)) {
    fail_user("{}: no token store there; make one with `tessera data build TEXT --out DIR` and name it as data.store",
              config_.data.store);
  }
  corpus_ = std::make_unique<Corpus>(config_);
  if (mesh != nullptr) traffic_.emplace(model_);
  if (ops::router::counts_quantiles(config_.balance.method) && model_.config().moe.groups > 1) {
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

// Where training goes on.
struct Trainer::Position {
  int64_t step = 0, next_sequence = 0;
};

// By the newest manifest that is right; that its tensors are, only loading them will show.
Trainer::Position Trainer::expected_position() const {
  try {
    const auto newest = ckpt::newest_valid((fs::path(config_.dir) / "checkpoints").string());
    if (!newest) return {};
    const SavedState saved = parse_saved_state(ckpt::Reader(newest->path).manifest().state_json, newest->path);
    return {saved.step, saved.next_sequence};
  } catch (const UserError&) {
    return {};  // resuming will say what is wrong
  }
}

MemoryPlan Trainer::plan() { return plan_from(expected_position()); }

MemoryPlan Trainer::plan_from(const Position& at) {
  // Sequences that are looked at: seconds of work. A longer run goes on with batches of the same documents (memory.md).
  constexpr int64_t kAhead = 1 << 20;
  const int64_t per_step = config_.sequences_per_step(), per_batch = config_.sequences_per_micro_batch();
  const int64_t steps = std::min(config_.train.steps - at.step, kAhead / per_step + 1);
  LargestBatches training, evaluation;
  for (int64_t q = 0; q < steps * per_step; q += per_batch) {
    training.add(corpus_->offsets(at.next_sequence + q, per_batch), model_.mesh());
  }
  for (int64_t b = 0; b < corpus_->validation.count(); ++b)
    evaluation.add(corpus_->validation.batch(b).offsets, model_.mesh());
  return plan_memory(model_, config_, guard_.routers(), training, evaluation);
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

// The routers of the run that wrote a checkpoint, as its guard had left them.
static std::vector<model::RouterOptions> routers_of(const SavedState& saved, const model::Model& model,
                                                    const std::string& where) {
  Guard guard(model, parse_run_config(saved.run_toml, where + ": run").guard_options());
  guard.restore(saved.guard);
  return guard.routers();
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
  guard_.restore(saved.guard);
  storage_->stepper.set_routers(guard_.routers());
  load_tensors(reader, routers_of(saved, model_, checkpoint));
  state_.step = resumed_from_ = saved.step;
  state_.tokens = saved.tokens;
  state_.next_sequence = saved.next_sequence;
}

int64_t Trainer::over_stages(int64_t value) const {
  return model_.mesh() == nullptr ? value : model_.mesh()->pipeline.sum(value);
}

// Counts that wait for more tokens are not worth a refusal: under other balance options they start at zero.
void Trainer::load_tensors(const ckpt::Reader& reader, const std::vector<model::RouterOptions>& routers_before) {
  const Stepper& stepper = storage_->stepper;
  const std::vector<model::NamedView> counts = stepper.pending_counts();
  const auto is_count = [](const std::string& name) { return name.starts_with("balance."); };
  const bool same_options = std::ranges::equal(routers_before, stepper.routers(), {}, &model::RouterOptions::balance,
                                               &model::RouterOptions::balance);
  const bool same_names = std::ranges::count_if(reader.manifest().tensors, is_count, &ckpt::TensorRecord::name) ==
                          over_stages(std::ssize(counts));
  const bool fit_here = same_options && std::ranges::all_of(counts, [&](const auto& c) {
                          return reader.holds({c.name, c.view});
                        });
  const bool fit = same_names && over_stages(fit_here ? 0 : 1) == 0;
  std::vector<Piece> wanted = stepper.state();
  if (!fit) std::erase_if(wanted, [&](const Piece& p) { return is_count(p.name); });
  const StagedState staged(wanted);
  ckpt::load_all(reader, staged.tensors(), !fit || model_.mesh() != nullptr);
  staged.put_back();
  model::refresh_copies(stepper.weights());
  if (fit) return;
  for (const auto& [name, view] : counts) view.zero();
  log_info("{}: was counted under other balance options; the routers count from zero", reader.path());
}

std::string Trainer::save() {
  state_.guard = guard_.state();
  ckpt::CheckpointState state;
  state.step = state_.step;
  state.run_id = fs::weakly_canonical(config_.dir).filename().string();
  state.model_fingerprint = model_.config().fingerprint();
  state.tokenizer_fingerprint = corpus_->tokenizer->fingerprint();
  state.state_json = to_json(state_);
  const GatheredState gathered(storage_->stepper.state(), model_.mesh() != nullptr ? &model_.mesh()->world : nullptr);
  if (!leads()) return "";
  state.tensors = gathered.tensors();
  const std::string root = (fs::path(config_.dir) / "checkpoints").string();
  const ckpt::SaveReport report = ckpt::save(root, state, {.keep_last = config_.checkpoint.keep_last});
  for (const std::string& warning : report.warnings) log_warning("{}", warning);
  return report.path;
}

// ---- the loop ----

// Sums over the processes that see other tokens.
static void sum_over_replicas(dist::Mesh* mesh, std::span<int64_t> counts) {
  if (mesh != nullptr) mesh->replica.all_reduce(View(counts.data(), DType::i64, {std::ssize(counts)}));
}

// Processes on this one's machine, itself among them.
static int64_t neighbours(const dist::Mesh* mesh) {
  if (mesh == nullptr) return 1;
  int64_t here = 0;
  for (int r = 0; r < mesh->world.size(); ++r)
    here += mesh->world.node_of(r) == mesh->world.node_of(mesh->world.rank());
  return here;
}

bool Trainer::asked_to_stop() const {
  const bool here = StopSignals::asked();
  return model_.mesh() == nullptr ? here : model_.mesh()->world.sum(int64_t{here}) > 0;
}

StepRow Trainer::take_step() {
  const auto begin = Clock::now();
  Storage& s = *storage_;
  dist::Mesh* mesh = model_.mesh();
  const int64_t sequences = config_.sequences_per_micro_batch(), data = config_.parallel.data;
  const int64_t share = config_.micro_batches_per_step() / data, first = mesh != nullptr ? mesh->data_index * share : 0;
  if (traffic_) traffic_->begin();
  std::vector<data::Batch> batches;
  std::vector<std::vector<int64_t>> documents;
  std::array<int64_t, 3> counts{};
  auto& [loss_tokens, tokens, bytes] = counts;
  for (int64_t m = first; m < first + share; ++m) {
    batches.push_back(corpus_->loader.batch(state_.next_sequence + m * sequences, sequences));
    documents.push_back(batches.back().offsets);
    loss_tokens += batches.back().loss_tokens;
    tokens += static_cast<int64_t>(batches.back().ids.size());
    bytes += batches.back().text_bytes;
  }
  if (mesh != nullptr && mesh->context.rank() > 0) counts = {};  // the first along the context axis counts for all
  sum_over_replicas(mesh, counts);
  std::vector<MicroBatch> micro_batches;
  for (const data::Batch& b : batches) micro_batches.push_back({b.ids.data(), b.targets.data(), b.offsets});
  double loss = s.stepper.accumulate(s.ctx, micro_batches, loss_tokens);
  if (mesh != nullptr) loss = mesh->pipeline.sum(mesh->replica.sum(loss));  // the last of a pipeline has it
  StepRow row;
  row.learning_rate = config_.schedule().at(state_.step);
  row.report = s.stepper.finish(s.ctx, row.learning_rate, state_.step, &guard_);
  if (traffic_) traffic_->end(step_flows(model_, config_, s.stepper.routers(), documents), tokens);
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
  const std::string advice = config_.pipeline_advice();
  if (leads() && !advice.empty()) log_warning("{}", advice);
  const Position expected = expected_position();
  result.plan = plan_from(expected);
  require_memory(result.plan, config_, neighbours(model_.mesh()));  // before anything is written
  corpus_->loader.batch(expected.next_sequence, 1);                 // an edited store shows before anything is written
  std::optional<ckpt::WriterLock> lock;
  if (leads()) lock.emplace((fs::path(config_.dir) / "checkpoints").string());
  storage_ = std::make_unique<Storage>(Arena(result.plan.capacity, memory_of(config_.device)), config_.device, model_,
                                       config_);
  resume_or_initialise();
  if (state_.step != expected.step) result.plan = plan_from({state_.step, state_.next_sequence});
  std::optional<MetricsLog> metrics;
  if (leads()) {
    write_run_files();
    metrics.emplace((fs::path(config_.dir) / "metrics.jsonl").string(), resumed_from_);
  }
  const StopSignals signals;
  const auto begin = Clock::now();
  storage_->arena.reset_peak();

  const auto evaluate_and_report = [&](Progress& p) {
    const EvalReport report = evaluate_now();
    if (metrics) metrics->write(state_.step, report);
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
    if (leads()) progress(p);
  }
  const int64_t decay_begin = config_.schedule().decay_begin();
  int64_t saved_at = resumed_from_, steps_here = 0;
  std::string question;  // of the guard: it has nothing left to try
  while (state_.step < config_.train.steps && question.empty() && !asked_to_stop()) {
    Progress p{take_step(), config_.train.steps, 0, {}};
    ++steps_here;
    const auto events =
        guard_.act(state_.step, state_.step >= decay_begin, storage_->stepper.weights(), storage_->stepper.optimizer());
    storage_->stepper.set_routers(guard_.routers());
    if (metrics) metrics->write(p.row);
    if (leads() && !p.row.report.finite) log_warning("step {}: {}", p.row.step, p.row.report.refusal());
    for (const GuardEvent& event : events) {
      if (metrics) metrics->write(event);
      if (event.what == "stop") question = to_text(event);
      if (!leads()) continue;
      if (event.what == "alarm" || event.what == "revived" || event.what == "rung") log_warning("{}", to_text(event));
    }
    const bool last = state_.step == config_.train.steps;
    if (last || (config_.eval.every > 0 && state_.step % config_.eval.every == 0)) evaluate_and_report(p);
    p.seconds_left = seconds_since(begin) / double(steps_here) * double(config_.train.steps - state_.step);
    if (leads()) progress(p);
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
  if (result.stopped_early && !question.empty()) {
    fail_user(
        "{}; the run is stopped and saved as {}. The guard's rows of {}/metrics.jsonl say what was tried. Move the "
        "latest checkpoints away and go on from an earlier one with a lower optim.learning_rate, or go on from here "
        "with guard.escalate = false",
        question, result.checkpoint, config_.dir);
  }
  result.step = state_.step;
  result.resumed_from = resumed_from_;
  result.tokens = state_.tokens;
  result.seconds = seconds_since(begin);
  result.peak_bytes = storage_->arena.peak();
  if (traffic_) result.traffic = traffic_->report();
  if (metrics && !result.traffic.empty()) metrics->write(state_.step, result.traffic);
  return result;
}

}  // namespace tessera::train
