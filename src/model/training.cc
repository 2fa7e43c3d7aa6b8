// The training passes: forward beside backward, by chunks of the layers.
#include "model/flight.h"
#include "ops/cross_entropy/op.h"
#include "ops/elementwise/op.h"
#include "ops/embedding/op.h"

namespace tessera::model {

void Model::forward_backward(Context& ctx, const Weights& w, const Batch& batch, double scale, const View& loss,
                             StepRecord* record) const {
  TESSERA_CHECK(stages().count() == 1, "a model cut into {} chunks is trained chunk by chunk", stages().count());
  Arena::Scope step(ctx.arena);
  const std::shared_ptr<Flight> flight = start(batch);
  forward(ctx, ctx, w, *flight, 0, record);
  backward(ctx, w, *flight, 0, {}, scale, loss, record);
}

std::shared_ptr<Model::Flight> Model::start(const Batch& batch) const {
  const auto flight = std::make_shared<Flight>();
  const size_t streams = static_cast<size_t>(sublayers()) + 1;
  flight->batch = batch;
  flight->streams.resize(streams);
  flight->gradients.resize(streams);
  flight->saved.resize(streams);
  return flight;
}

// ---- between chunks ----

std::vector<int64_t> Model::entering(int64_t chunk) const {
  if (chunk == 0) return {};
  const int64_t begin = 2 * stages().begin(chunk), before = chunk - stages().processes;
  const int64_t known = before >= 0 ? 2 * stages().end(before) : -1;  // blocks up to here are in the process already
  std::vector<int64_t> streams;
  for (int64_t b = 0; config_.attention_residuals() && b < begin; b += config_.sublayers_per_block()) {
    if (b > known) streams.push_back(b);
  }
  streams.push_back(begin);
  return streams;
}

std::vector<View> Model::enter(Context& kept, const Weights& w, Flight& flight, int64_t chunk) const {
  const LayerContext lc = layer_context(kept, w, flight.batch);
  const Shape row{lc.tokens, config_.width};
  std::vector<View> room;
  for (const int64_t s : entering(chunk)) {
    const size_t i = static_cast<size_t>(s);
    Arena::Label label(kept.arena, "residual stream");
    room.push_back(flight.streams[i] = lc.allocate(row));
    Arena::Label of_gradients(kept.arena, "gradients of the residual stream");
    flight.gradients[i] = kept.arena.allocate_zeroed(lc.dtype, row);
  }
  return room;
}

static std::vector<View> views_of(const std::vector<View>& all, const std::vector<int64_t>& streams) {
  std::vector<View> views;
  for (const int64_t s : streams) views.push_back(all[static_cast<size_t>(s)]);
  return views;
}

std::vector<View> Model::leaving(const Flight& flight, int64_t chunk) const {
  return is_last(chunk) ? std::vector<View>() : views_of(flight.streams, entering(chunk + 1));
}

std::vector<View> Model::returning(const Flight& flight, int64_t chunk) const {
  return views_of(flight.gradients, entering(chunk));
}

// ---- one chunk ----

void Model::forward(Context& ctx, Context& kept, const Weights& w, Flight& flight, int64_t chunk,
                    StepRecord* record) const {
  const LayerContext lc = layer_context(ctx, w, flight.batch), keeps = layer_context(kept, w, flight.batch);
  const int64_t begin = 2 * stages().begin(chunk), end = 2 * stages().end(chunk);
  const bool read_again =
      chunk + stages().processes < stages().count();  // its blocks, by a later chunk in this process
  const Shape row{lc.tokens, config_.width};
  Arena::Label label(kept.arena, "residual stream");
  Residuals& streams = flight.streams;
  if (begin == 0) {
    streams[0] = keeps.allocate(row);
    ops::embedding::forward(ctx, {lc.tokens, config_.vocabulary, config_.width},
                            {flight.batch.ids, w[table_.embedding]}, {streams[0]});
  }
  // A block that was open when it came here goes on in the buffer that it came with.
  View open = starts_block(begin) ? View() : flight.gradients[static_cast<size_t>(begin)];
  for (int64_t s = begin; s <= end && read_again; ++s) {
    View& gradient = flight.gradients[static_cast<size_t>(s)];
    Arena::Label of_gradients(kept.arena, "gradients of the residual stream");
    if (!starts_block(s) || gradient.present()) continue;
    gradient = open.present() ? open : kept.arena.allocate_zeroed(lc.dtype, row);
    open = View();
  }
  for (int64_t s = begin; s < end; ++s) {
    const size_t i = static_cast<size_t>(s);
    streams[i + 1] = keeps.allocate(row);
    SublayerSaved& saved = flight.saved[i];
    const bool drops_all = in_blocks(lc, s) || recompute_of(s) == Recompute::full;
    const LayerContext& works = drops_all ? lc : keeps;
    const int64_t mark = works.ctx.arena.used();
    sublayer(works, streams, s, saved, true, record, nullptr);
    if (drops_all) {
      works.ctx.arena.release_to(mark);
    } else if (recompute_of(s) == Recompute::cheap) {
      works.ctx.arena.release_to(saved.cheap);
    }
  }
}

// Where the chunk's backward pass adds to. Inside a block, up to its closed sum, gradients run through one buffer;
// later sublayers add to that of a closed block directly.
Model::Residuals Model::gradients_of(Context& ctx, const Flight& flight, const LayerContext& lc, int64_t chunk) const {
  const int64_t begin = 2 * stages().begin(chunk), end = 2 * stages().end(chunk);
  Arena::Label label(ctx.arena, "gradients of the residual stream");
  Residuals gradients = flight.gradients;
  for (int64_t s = begin; s <= end; ++s) {
    const size_t i = static_cast<size_t>(s);
    if (s > begin && !starts_block(s - 1)) {
      gradients[i] = gradients[i - 1];
      continue;
    }
    int64_t closed = s;
    while (closed < end && !starts_block(closed)) ++closed;
    if (!gradients[i].present()) gradients[i] = gradients[static_cast<size_t>(closed)];
    if (!gradients[i].present()) gradients[i] = ctx.arena.allocate_zeroed(lc.dtype, {lc.tokens, config_.width});
  }
  return gradients;
}

void Model::head(const LayerContext& lc, const Flight& flight, const Residuals& gradients, double scale,
                 const View& loss) const {
  Context& ctx = lc.ctx;
  const Weights& w = lc.weights;
  const Shape row{lc.tokens, config_.width};
  Arena::Scope scope(ctx.arena);
  Arena::Label label(ctx.arena, "loss");
  SublayerSaved end;
  const View& h = mix(lc, flight.streams, sublayers(), end);
  end.x = lc.allocate(row);
  end.norm = ops::rms_norm::allocate_saved(ctx, norm_dims(lc), lc.dtype);
  ops::rms_norm::forward(ctx, norm_dims(lc), {h, w[table_.final_norm]}, {end.x}, &end.norm);
  const View dx = lc.allocate(row);
  ops::cross_entropy::forward_backward(ctx, {lc.tokens, config_.width, config_.vocabulary, options_.loss_block_rows},
                                       {end.x, w[table_.head], flight.batch.targets}, scale, {loss},
                                       {dx, w.d(table_.head)});
  ops::rms_norm::backward(ctx, norm_dims(lc), {h, w[table_.final_norm]}, end.norm, {dx}, {dx, w.d(table_.final_norm)});
  mix_backward(lc, flight.streams, sublayers(), end, dx, gradients);
}

void Model::backward(Context& ctx, const Weights& w, Flight& flight, int64_t chunk, std::span<const View> returned,
                     double scale, const View& loss, StepRecord* record) const {
  const LayerContext lc = layer_context(ctx, w, flight.batch);
  const int64_t begin = 2 * stages().begin(chunk), end = 2 * stages().end(chunk);
  const Residuals& streams = flight.streams;
  Arena::Scope step(ctx.arena);
  const Residuals gradients = gradients_of(ctx, flight, lc, chunk);
  if (is_last(chunk)) {
    head(lc, flight, gradients, scale, loss);
  } else {
    const std::vector<View> to = views_of(gradients, entering(chunk + 1));
    TESSERA_CHECK(returned.size() == to.size(), "gradients of {} streams, wanted {}", returned.size(), to.size());
    for (size_t i = 0; i < to.size(); ++i) ops::elementwise::add_to(ctx, returned[i], to[i]);
  }
  LayerContext again = lc;  // forward once more: nobody reads streams[s + 1] after the backward of sublayer s + 1
  again.output_wanted = false;
  for (int64_t s = end - 1; s >= begin; --s) {
    Arena::Scope recomputed(ctx.arena);
    SublayerSaved& of_s = flight.saved[static_cast<size_t>(s)];
    const int64_t layer = layer_of(s);
    const bool has_router = record != nullptr && !is_mixer(s) && config_.is_moe(layer);
    const double z_loss = has_router ? scale * record->routers[moe_index(layer)].z_loss : 0;
    if (in_blocks(lc, s)) {
      for_blocks(again, [&](const LayerContext& block, int64_t first) {
        const Residuals rows = rows_of(streams, first, block.tokens);
        SublayerSaved of_block;
        sublayer(block, rows, s, of_block, true, nullptr, nullptr);
        sublayer_backward(block, rows, s, of_block, rows_of(gradients, first, block.tokens), z_loss);
      });
      continue;
    }
    if (recompute_of(s) == Recompute::full) {
      sublayer(again, streams, s, of_s, true, nullptr, nullptr);
    } else if (recompute_of(s) == Recompute::cheap) {
      make_cheap(lc, streams, s, of_s);
    }
    sublayer_backward(lc, streams, s, of_s, gradients, z_loss);
  }
  if (begin == 0) {
    ops::embedding::backward(ctx, {lc.tokens, config_.vocabulary, config_.width},
                             {flight.batch.ids, w[table_.embedding]}, {gradients.front()}, {w.d(table_.embedding)});
  }
}

}  // namespace tessera::model
