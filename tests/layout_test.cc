// The same step on any layout of processes: losses, gradients, balance and weights of one process.
#include "layouts.h"

namespace tessera::test {
namespace {

TEST(Layout, DataParallel) {
  for (const int64_t data : {1, 2, 4, 8}) expect_same_as_alone({.data = data}, Forward::same_bits);
}

TEST(Layout, ExpertParallel) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .expert = 2},
                                     {.data = 4, .expert = 2},
                                     {.data = 4, .expert = 4},
                                     {.data = 8, .expert = 8}}) {  // 12 experts: unevenly
    expect_same_as_alone(layout, Forward::to_rounding);
  }
}

// Documents cross one and several cuts, begin and end at them, and are shorter than the convolution.
TEST(Layout, ContextParallel) {
  for (const dist::Layout& layout : {dist::Layout{.context = 2}, {.context = 3}, {.context = 4}, {.context = 8}}) {
    expect_same_as_alone(layout, Forward::to_rounding);
  }
}

TEST(Layout, TensorParallel) {
  expect_same_as_alone({.tensor = 2}, Forward::to_rounding);
  expect_same_as_alone({.tensor = 2}, Forward::to_rounding, true);
  expect_same_as_alone({.tensor = 4}, Forward::to_rounding, true);
}

TEST(Layout, TensorWithOtherAxes) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .tensor = 2},
                                     {.context = 2, .tensor = 2},
                                     {.context = 3, .tensor = 2},
                                     {.data = 2, .expert = 2, .tensor = 2},
                                     {.data = 2, .expert = 4, .context = 2, .tensor = 2}}) {
    expect_same_as_alone(layout, Forward::to_rounding);
  }
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .tensor = 4}, {.expert = 2, .context = 2, .tensor = 4}}) {
    expect_same_as_alone(layout, Forward::to_rounding, true);
  }
}

TEST(Layout, AxesTogether) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .context = 2},
                                     {.expert = 2, .context = 2},
                                     {.data = 2, .expert = 4, .context = 2},
                                     {.data = 2, .expert = 2, .context = 4}}) {
    expect_same_as_alone(layout, Forward::to_rounding);
  }
}

TEST(Layout, PipelineWithOtherAxes) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .pipeline = 2},
                                     {.context = 2, .pipeline = 2},
                                     {.context = 3, .pipeline = 2, .pipeline_chunks = 2},
                                     {.data = 2, .expert = 2, .pipeline = 2},
                                     {.pipeline = 2, .tensor = 2},
                                     {.data = 2, .pipeline = 2, .pipeline_chunks = 2, .tensor = 2},
                                     {.data = 2, .expert = 4, .context = 2, .pipeline = 2}}) {
    const bool whole_sums = layout.context == 1 && layout.expert == 1 && layout.tensor == 1;
    expect_same_as_alone(layout, whole_sums ? Forward::same_bits : Forward::to_rounding);
  }
}

// Their shares differ: whole matrices lie where they are updated.
TEST(Layout, EveryProcessPlansWhatItTakes) {
  const Problem problem{.min_tokens = kWaits, .other_model = true};
  const std::vector<int64_t> offsets = offsets_of(0);
  int64_t before = std::numeric_limits<int64_t>::max();
  for (const dist::Layout& layout : {dist::Layout{}, {.tensor = 2}, {.data = 2, .tensor = 4}}) {
    int64_t activations = 0;
    dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
      dist::Mesh mesh(layout, transport);
      const train::RunConfig run = run_of(layout, problem);
      const model::Model model(config_of(problem), {.mesh = &mesh});
      train::LargestBatches batches;
      batches.add(offsets);
      const train::Guard guard(model, run.guard_options());
      const train::MemoryPlan plan = train::plan_memory(model, run, guard.routers(), batches, {});
      Arena arena(plan.capacity);
      Context ctx{Device::cpu, arena};
      train::Stepper stepper(ctx, model, run);
      stepper.initialise(1);
      stepper.accumulate(ctx, stepper.place(ctx, ids_of(0, 0, 0).data(), ids_of(0, 0, 1).data(), offsets),
                         kMicroTokens);
      stepper.finish(ctx, 0.01, 0);
      EXPECT_EQ(arena.peak(), plan.planned_peak) << layout.to_string() << ", process " << transport.rank();
      if (transport.rank() != 0) return;
      for (const train::MemoryUse& use : plan.uses) {
        if (use.what == "KDA" || use.what == "MLA" || use.what == "dense FFN") activations += use.most_bytes;
      }
    });
    EXPECT_LT(activations, before);
    before = activations;
  }
}

// One sum of the tokens' rows forward and one backward, each half to the other process and half back from it.
TEST(Layout, CutLayersSendTheirRowsTwiceWhateverIsRecomputed) {
  const std::vector<int64_t> offsets = offsets_of(0);
  for (const auto& [recompute, block_tokens] : {std::pair{kNone, 0}, {kCheap, 0}, {kFull, 0}, {kNone, 40}}) {
    dist::DryTransport transport(0, {0, 0});
    dist::Mesh mesh({.tensor = 2}, transport);
    const model::ModelConfig c = config_of({});
    const model::Model model(c,
                             {.recompute = std::vector(4, recompute), .ffn_block_tokens = block_tokens, .mesh = &mesh});
    const train::RunConfig run = run_of(mesh.layout, {.min_tokens = kWaits});
    Arena arena = Arena::dry();
    Context ctx{Device::dry, arena};
    train::Stepper stepper(ctx, model, run);
    stepper.accumulate(ctx, stepper.place(ctx, nullptr, nullptr, offsets), kMicroTokens);
    const int64_t rows = kMicroTokens * c.width * int64_t(sizeof(float)), sublayers = 2 * c.layers;
    EXPECT_EQ(mesh.tensor.traffic().bytes(), 2 * sublayers * rows);
  }
}

TEST(Layout, RepeatsBitForBit) {
  for (const dist::Layout& layout : {dist::Layout{.data = 2, .expert = 4, .context = 2},
                                     {.data = 2, .tensor = 2},
                                     {.data = 2, .pipeline = 2, .pipeline_chunks = 2}}) {
    const Result a = together(layout, {.min_tokens = kWaits});
    const Result b = together(layout, {.min_tokens = kWaits});
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.gradients, b.gradients);
    EXPECT_EQ(a.state, b.state);
    EXPECT_EQ(a.guard, b.guard);
  }
}

}  // namespace
}  // namespace tessera::test
