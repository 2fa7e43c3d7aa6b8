#include "train/pipeline.h"

#include <algorithm>
#include <deque>
#include <numeric>

namespace tessera::train {

using model::Model;

static model::ModelOptions with_mesh(model::ModelOptions options, dist::Mesh* mesh) {
  options.mesh = mesh;
  return options;
}

Pipeline::Pipeline(const Model& model)
    : model_(model),
      axis_(model.mesh()->pipeline),
      dry_mesh_(model.mesh()),
      twin_(model.config(), with_mesh(model.options(), dry_mesh_.get())) {}

static Context beside(const Context& ctx, Arena& arena) {
  return {ctx.device, arena, ctx.ledger, ctx.product, ctx.dry_for};
}

// What this process sees of a micro-batch, in the arena.
static model::Batch place(Context& ctx, dist::Mesh* mesh, const MicroBatch& batch) {
  model::Batch placed;
  std::span<const int64_t> offsets = batch.offsets;
  int64_t begin = 0;
  if (!mesh->context.alone()) {
    placed.shard = std::make_shared<const model::ContextShard>(mesh->context, offsets);
    begin = placed.shard->begin(placed.shard->rank());
    offsets = placed.shard->offsets();
  }
  const auto upload = [&](const int32_t* host) {
    const View view = ctx.arena.allocate(DType::i32, {offsets.back()});
    if (host != nullptr && !ctx.dry()) copy(View(const_cast<int32_t*>(host + begin), DType::i32, view.shape()), view);
    return view;
  };
  placed.ids = upload(batch.ids);
  placed.targets = upload(batch.targets);
  placed.documents = place_documents(ctx, offsets);
  return placed;
}

// Of each chunk of this process: what the largest micro-batch leaves there, and the highest stack on the way to it.
std::vector<int64_t> Pipeline::slot_bytes(const Context& ctx, const Step& step) const {
  const int64_t processes = model_.stages().processes;
  std::vector<int64_t> bytes(static_cast<size_t>(model_.stages().chunks), 0);
  for (const MicroBatch& batch : step.batches) {
    Arena work = Arena::dry();
    Context dry{Device::dry, work, nullptr, ctx.product, ctx.back_end()};
    std::shared_ptr<Model::Flight> flight;
    for (size_t i = 0; i < bytes.size(); ++i) {
      Arena slot = Arena::dry();
      Context kept = beside(dry, slot);
      const int64_t chunk = int64_t(i) * processes + axis_.rank();
      if (i == 0) flight = twin_.start(place(kept, dry_mesh_.get(), batch));
      twin_.enter(kept, step.weights, *flight, chunk);
      twin_.forward(dry, kept, step.weights, *flight, chunk, &step.record);
      bytes[i] = std::max(bytes[i], slot.peak());
    }
  }
  return bytes;
}

// One step, from its slots on.
class Pipeline::Run {
 public:
  Run(const Pipeline& pipeline, Context& ctx, const Step& step)
      : model_(pipeline.model_), axis_(pipeline.axis_), ctx_(ctx), step_(step), flights_(step.batches.size()) {}

  void take_slots(const std::vector<int64_t>& bytes, const std::vector<int64_t>& counts) {
    Arena::Label label(ctx_.arena, "micro-batches in flight");
    for (size_t i = 0; i < bytes.size(); ++i) {
      slots_.emplace_back();
      for (int64_t n = 0; n < counts[i]; ++n) {
        slots_.back().push_back(Arena::within(ctx_.arena.allocate(DType::u8, {bytes[i]})));
      }
    }
  }

  // In a tick gradients go first: the slot that they leave may be the one that activations are received into.
  void follow(const std::vector<dist::Tick>& ticks) {
    for (const dist::Tick& tick : ticks) {
      Arena::Scope scope(ctx_.arena);
      const bool forward = tick.work && tick.work->pass == Pass::forward, backward = tick.work && !forward;
      const std::vector<View> returned = backward ? room_for_returned(*tick.work) : std::vector<View>();
      pass_gradients(tick.sends_gradients, returned);
      const std::vector<View> entered = forward ? enter(*tick.work, tick.slot) : std::vector<View>();
      pass_activations(tick.sends_activations, entered);
      if (forward) this->forward(*tick.work, tick.slot);
      if (backward) this->backward(*tick.work, returned);
    }
  }

  // Each example through all chunks and back: the most memory that its passes take, and what it sends.
  void run_examples() {
    for (int64_t m = 0; m < std::ssize(flights_); ++m) {
      std::vector<dist::Work> passes;
      for (size_t i = 0; i < slots_.size(); ++i) passes.push_back({Pass::forward, chunk_of(i), m});
      for (const dist::Work& w : passes) {
        pass_activations({}, enter(w, 0));
        forward(w, 0);
        pass_activations(w, {});
      }
      for (auto w = passes.rbegin(); w != passes.rend(); ++w) {
        Arena::Scope scope(ctx_.arena);
        const std::vector<View> returned = room_for_returned(*w);
        pass_gradients({}, returned);
        backward(*w, returned);
        if (w->chunk > 0) pass_gradients(*w, {});
      }
    }
  }

  double loss() const { return loss_; }

 private:
  struct InFlight {
    std::shared_ptr<Model::Flight> flight;
    int64_t tokens = 0;
  };
  using Maybe = std::optional<dist::Work>;

  int64_t chunk_of(size_t i) const { return int64_t(i) * axis_.size() + axis_.rank(); }
  bool is_first_here(const dist::Work& w) const { return w.chunk < axis_.size(); }
  InFlight& of(const dist::Work& w) { return flights_[static_cast<size_t>(w.micro_batch)]; }
  Arena& slot(const dist::Work& w, int64_t number) {
    return slots_[static_cast<size_t>(w.chunk / axis_.size())][static_cast<size_t>(number)];
  }
  int neighbour(int step) const { return (axis_.rank() + axis_.size() + step) % axis_.size(); }

  std::vector<View> enter(const dist::Work& w, int64_t number) {
    Arena& arena = slot(w, number);
    arena.release_to(0);
    Context kept = beside(ctx_, arena);
    if (is_first_here(w)) {
      const model::Batch placed = place(kept, model_.mesh(), step_.batches[static_cast<size_t>(w.micro_batch)]);
      of(w) = {model_.start(placed), placed.ids.elements()};
    }
    return model_.enter(kept, step_.weights, *of(w).flight, w.chunk);
  }
  void forward(const dist::Work& w, int64_t number) {
    Context kept = beside(ctx_, slot(w, number));
    model_.forward(ctx_, kept, step_.weights, *of(w).flight, w.chunk, &step_.record);
  }

  std::vector<View> room_for_returned(const dist::Work& w) {
    Arena::Label label(ctx_.arena, "gradients of the residual stream");
    std::vector<View> room;
    for (const View& stream : model_.leaving(*of(w).flight, w.chunk)) {
      room.push_back(ctx_.arena.allocate(stream.dtype(), stream.shape()));
    }
    return room;
  }
  void backward(const dist::Work& w, std::span<const View> returned) {
    const bool last = w.chunk + 1 == model_.stages().count();
    const View loss = last ? step_.losses.row_range(0, of(w).tokens) : View();
    model_.backward(ctx_, step_.weights, *of(w).flight, w.chunk, returned, step_.scale, loss, &step_.record);
    if (w.chunk == 0) of(w).flight.reset();
    if (!last || ctx_.dry()) return;
    std::vector<float> host(static_cast<size_t>(loss.elements()));
    copy(loss, View(host.data(), DType::f32, loss.shape()));
    loss_ += std::accumulate(host.begin(), host.end(), 0.0);
  }

  void pass_activations(const Maybe& made, std::span<const View> receive) {
    const std::vector<View> send = made ? model_.leaving(*of(*made).flight, made->chunk) : std::vector<View>();
    axis_.send_receive(send, neighbour(1), receive, neighbour(-1));
  }
  void pass_gradients(const Maybe& made, std::span<const View> receive) {
    const std::vector<View> send = made ? model_.returning(*of(*made).flight, made->chunk) : std::vector<View>();
    axis_.send_receive(send, neighbour(-1), receive, neighbour(1));
    if (made && is_first_here(*made)) of(*made).flight.reset();
  }

  const Model& model_;
  dist::Communicator& axis_;
  Context& ctx_;
  const Step& step_;
  std::vector<std::deque<Arena>> slots_;  // of each chunk of this process
  std::vector<InFlight> flights_;         // by micro-batch
  double loss_ = 0;
};

double Pipeline::run(Context& ctx, const Step& step) const {
  const model::Stages& stages = model_.stages();
  const int64_t count = ctx.dry() ? step.count : std::ssize(step.batches);
  const dist::PipelinePlan plan = dist::plan_pipeline({stages.processes, stages.chunks, count}, axis_.rank());
  Arena::Scope scope(ctx.arena);
  Run run(*this, ctx, step);
  run.take_slots(slot_bytes(ctx, step), plan.slots);
  if (ctx.dry()) {
    run.run_examples();
  } else {
    run.follow(plan.ticks);
  }
  return run.loss();
}

}  // namespace tessera::train
