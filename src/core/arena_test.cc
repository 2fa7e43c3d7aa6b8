#include "core/arena.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Arena, SaysWhatLiesInItAtThePeakByLabel) {
  Arena arena = Arena::dry();
  const auto take = [&](int64_t bytes) { arena.allocate(DType::u8, {bytes}); };
  take(64);
  {
    Arena::Label layer(arena, "layer");
    Arena::Scope scope(arena);
    take(640);
    {
      Arena::Label op(arena, "op");
      Arena::Scope inner(arena);
      take(1280);
    }
    take(128);  // below the peak
  }
  const auto expect = [&](const char* label, int64_t at_peak, int64_t most) {
    const Arena::Use use = arena.uses().at(label);
    EXPECT_EQ(use.at_peak, at_peak) << label;
    EXPECT_EQ(use.most, most) << label;
  };
  expect("other", 64, 64);
  expect("layer", 640, 768);
  expect("op", 1280, 1280);
  EXPECT_EQ(arena.peak(), 64 + 640 + 1280);
  {
    Arena::Label op(arena, "op");
    Arena::Scope scope(arena);
    take(1920);
    EXPECT_EQ(arena.uses().at("op").at_peak, 1920) << "while it lies there";
  }
  expect("other", 64, 64);
  expect("layer", 0, 768);
  expect("op", 1920, 1920);
  EXPECT_EQ(arena.uses().at("op").now, 0);
}

TEST(Arena, ReleasesInTheMiddleOfALabel) {
  Arena arena = Arena::dry();
  arena.allocate(DType::u8, {64});
  const int64_t mark = arena.used();
  arena.allocate(DType::u8, {128});
  arena.release_to(mark);
  EXPECT_EQ(arena.uses().at("other").now, 64);
  EXPECT_EQ(arena.uses().at("other").at_peak, 192);
}

// Pieces of one arena that are released in another order than they were taken.
TEST(Arena, StacksInsideAnother) {
  Arena arena(4096);
  const View room = arena.allocate(DType::u8, {1024});
  {
    Arena inner = Arena::within(room);
    const View first = inner.allocate(DType::f32, {16}), second = inner.allocate(DType::f32, {16});
    EXPECT_EQ(first.data(), room.data());
    EXPECT_EQ(second.as<float>(), first.as<float>() + 16);
    EXPECT_EQ(inner.capacity(), 1024);
    EXPECT_THROW(inner.allocate(DType::u8, {1024}), Error);
    inner.release_to(0);
    EXPECT_EQ(inner.allocate(DType::u8, {1024}).data(), room.data());
  }
  *room.as<uint8_t>() = 1;  // still there
  Arena dry = Arena::dry();
  EXPECT_TRUE(Arena::within(dry.allocate(DType::u8, {64})).is_dry());
}

}  // namespace
}  // namespace tessera
