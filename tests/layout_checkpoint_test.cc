// A checkpoint belongs to no layout: what one writes is the same bits on every other.
#include "layouts.h"

namespace tessera::test {
namespace {

using State = std::map<std::string, std::vector<std::byte>>;

State state_of(const train::GatheredState& gathered) {
  State state;
  for (const auto& [name, view] : gathered.tensors()) {
    const auto* begin = static_cast<const std::byte*>(view.data());
    state[name].assign(begin, begin + view.bytes());
  }
  return state;
}

dist::Communicator* world_of(dist::Mesh* mesh) { return mesh != nullptr ? &mesh->world : nullptr; }
bool leads(dist::Mesh* mesh) { return mesh == nullptr || mesh->world.rank() == 0; }

// After one step, with something in every tensor.
State write(const dist::Layout& layout, const Problem& problem, const std::string& root) {
  State written;
  on_layout(layout, problem, [&](train::Stepper& stepper, Context& ctx, dist::Mesh* mesh) {
    stepper.initialise(1);
    const int64_t share = problem.micro_batches / layout.data, first = mesh != nullptr ? mesh->data_index * share : 0;
    stepper.accumulate(ctx, Batches(0, first, share).all, problem.micro_batches * kMicroTokens);
    stepper.finish(ctx, 0.01, 0);
    const train::GatheredState gathered(stepper.state(), world_of(mesh));
    if (!leads(mesh)) return;
    ckpt::CheckpointState state;
    state.tensors = gathered.tensors();
    ckpt::save(root, state);
    written = state_of(gathered);
  });
  return written;
}

State read(const dist::Layout& layout, const Problem& problem, const ckpt::Reader& reader) {
  State found;
  on_layout(layout, problem, [&](train::Stepper& stepper, Context&, dist::Mesh* mesh) {
    stepper.initialise(2);
    const train::StagedState staged(stepper.state());
    ckpt::load_all(reader, staged.tensors(), mesh != nullptr);
    staged.put_back();
    const train::GatheredState gathered(stepper.state(), world_of(mesh));
    if (leads(mesh)) found = state_of(gathered);
  });
  return found;
}

TEST(LayoutCheckpoint, GoesFromAnyToAnyBitForBit) {
  const Problem problem{.min_tokens = kWaits, .other_model = true};
  for (const dist::Layout& writer : {dist::Layout{},
                                     {.data = 2, .expert = 4, .context = 2},
                                     {.tensor = 4},
                                     {.data = 2, .pipeline = 2, .pipeline_chunks = 2, .tensor = 2}}) {
    const TemporaryDirectory dir;
    const State written = write(writer, problem, dir.path());
    ASSERT_GT(written.size(), 100u);
    const ckpt::Reader reader(ckpt::newest_valid(dir.path())->path);
    for (const dist::Layout& layout : {dist::Layout{},
                                       {.data = 2},
                                       {.data = 2, .expert = 2},
                                       {.context = 3},
                                       {.data = 8, .expert = 8},
                                       {.data = 2, .expert = 2, .context = 2},
                                       {.pipeline = 4},
                                       {.pipeline = 2, .pipeline_chunks = 2},
                                       {.data = 2, .expert = 2, .pipeline = 3},
                                       {.tensor = 2},
                                       {.data = 2, .expert = 2, .tensor = 2},
                                       {.pipeline = 2, .tensor = 4},
                                       writer}) {
      EXPECT_TRUE(read(layout, problem, reader) == written) << writer.to_string() << " -> " << layout.to_string();
    }
  }
}

}  // namespace
}  // namespace tessera::test
