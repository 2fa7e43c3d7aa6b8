#include "ops/embedding/op.h"

#include "core/parallel.h"
#include "ops/check/gtest_table.h"
#include "ops/embedding/cases.h"

namespace tessera::ops::embedding {
namespace {

TESSERA_OP_TABLE_TESTS(Embedding, table())

// Values whose float32 sum depends on the order: equal bits mean equal order.
TEST(Embedding, GradientIsTheSameForAnyNumberOfThreads) {
  const Dims d{257, 3, 100};
  Arena arena(1 << 22);
  Context ctx{Device::cpu, arena};
  const View ids = arena.allocate(DType::i32, {d.tokens}), weight = arena.allocate_zeroed(DType::f32, {3, d.width});
  const View dy = arena.allocate(DType::f32, {d.tokens, d.width});
  for (int64_t t = 0; t < d.tokens; ++t) {
    ids.as<int32_t>()[t] = static_cast<int32_t>(t % 2);  // id 2 never comes
    for (int64_t i = 0; i < d.width; ++i) {
      dy.as<float>()[t * d.width + i] = (t % 5 == 0 ? 1e6f : 1.0f) / static_cast<float>(1 + (t * 7 + i) % 11);
    }
  }
  std::vector<float> in_order(static_cast<size_t>(3 * d.width));
  for (int64_t t = 0; t < d.tokens; ++t) {
    for (int64_t i = 0; i < d.width; ++i) {
      in_order[static_cast<size_t>((t % 2) * d.width + i)] += dy.as<float>()[t * d.width + i];
    }
  }
  const int before = thread_count();
  for (int threads : {1, 2, 3, 7}) {
    set_thread_count(threads);
    const View dweight = arena.allocate_zeroed(DType::f32, {3, d.width});
    backward(ctx, d, {ids, weight}, {dy}, {dweight});
    for (size_t i = 0; i < in_order.size(); ++i) {
      ASSERT_EQ(dweight.as<float>()[i], in_order[i]) << threads << " threads, element " << i;
    }
  }
  set_thread_count(before);
}

}  // namespace
}  // namespace tessera::ops::embedding
