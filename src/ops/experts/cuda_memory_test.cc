// What a build without a GPU can prove of the CUDA back end: that its memory suffices and is what is stated.
#include <gtest/gtest.h>

#include <algorithm>

#include "ops/experts/cases.h"
#include "ops/experts/cuda.h"

namespace tessera::ops::experts {
namespace {

constexpr glu::Activation kSitu{.kind = glu::Kind::situ};

int64_t padded(int64_t rows) { return (rows + cuda::kBlockRows - 1) / cuda::kBlockRows * cuda::kBlockRows; }

TEST(ExpertsOnCuda, RowsSufficeForEveryRouting) {
  for (int64_t slots : {0, 1, 2, 3, 127, 128, 129, 130, 255, 256, 257, 258, 1000}) {
    const int64_t capacity = cuda::row_capacity({slots, 3, 1, 1, 1, kSitu});
    int64_t most = 0;
    for (int64_t a = 0; a <= slots; ++a) {
      for (int64_t b = 0; a + b <= slots; ++b) most = std::max(most, padded(a) + padded(b) + padded(slots - a - b));
    }
    EXPECT_EQ(capacity, most) << slots;
  }
  EXPECT_EQ(cuda::row_capacity({4, 1000, 2, 1, 1, kSitu}), 8 * cuda::kBlockRows) << "a block a slot, not an expert";
}

// Arena of a training step (or of inference) of the dry run, beyond inputs and outputs, against the ledger.
TEST(ExpertsOnCuda, DryRunTakesWhatIsStated) {
  for (const Dims& d : {Dims{0, 4, 2, 16, 24, kSitu}, Dims{300, 5, 3, 16, 24, kSitu}, Dims{2000, 64, 4, 8, 8, kSitu}}) {
    for (const bool backward_too : {false, true}) {
      Arena arena = Arena::dry();
      Ledger ledger;
      Context ctx{Device::dry, arena, &ledger, Product::bf16, Device::cuda};
      const auto view = [&](DType dtype, const Shape& shape) { return arena.allocate(dtype, shape); };
      const Shape tokens{d.tokens, d.width}, selected{d.tokens, d.top_k}, up{d.experts, d.hidden, d.width},
          down{d.experts, d.width, d.hidden};
      const Inputs in{view(DType::bf16, tokens), view(DType::i32, selected), view(DType::f32, selected),
                      view(DType::bf16, up),     view(DType::bf16, up),      view(DType::bf16, down)};
      const View y = view(DType::bf16, tokens), dy = view(DType::bf16, tokens);
      const Grads grads{view(DType::bf16, tokens), view(DType::f32, selected), view(DType::f32, up),
                        view(DType::f32, up), view(DType::f32, down)};
      const int64_t base = arena.used();
      Saved saved;
      if (backward_too) saved = allocate_saved(ctx, d, DType::bf16);
      forward(ctx, d, in, {y}, backward_too ? &saved : nullptr);
      if (backward_too) backward(ctx, d, in, saved, {dy}, grads);
      int64_t workspace = 0, kept = 0;
      for (const auto& [key, entry] : ledger.entries()) {
        workspace = std::max(workspace, entry.costs.workspace_bytes);
        kept += entry.costs.saved_bytes;
      }
      EXPECT_EQ(arena.peak() - base, kept + workspace) << d.tokens << " " << backward_too;
    }
  }
}

}  // namespace
}  // namespace tessera::ops::experts
