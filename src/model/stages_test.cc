#include "model/stages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "model/parameters.h"

namespace tessera::model {
namespace {

TEST(Stages, ShareOutEveryLayerOnceAndEvenly) {
  for (const int64_t processes : {1, 2, 3, 8}) {
    for (const int64_t chunks : {1, 2, 3}) {
      for (int64_t layers = processes * chunks; layers < 40; ++layers) {
        const Stages stages{layers, processes, chunks};
        int64_t next = 0, fewest = layers;
        for (int64_t c = 0; c < stages.count(); ++c) {
          EXPECT_EQ(stages.begin(c), next);
          next = stages.end(c);
          const int64_t here = next - stages.begin(c);
          EXPECT_GE(here, 1);
          EXPECT_LE(here, (layers + stages.count() - 1) / stages.count());
          fewest = std::min(fewest, here);
          for (int64_t l = stages.begin(c); l < next; ++l) EXPECT_EQ(stages.chunk_of(l), c);
        }
        EXPECT_EQ(next, layers);
        EXPECT_EQ(fewest, layers / stages.count());
        EXPECT_EQ(stages.end(0), (layers + stages.count() - 1) / stages.count()) << "the head is work of the last one";
      }
    }
  }
}

// Every parameter in one process, with the number that its first values are drawn by.
TEST(Stages, ShareOutTheParametersOfOneProcess) {
  ModelConfig config;
  config.layers = 7;
  config.mla_layers = {3, 6};
  const ParameterTable whole(config);
  std::vector<int> found(static_cast<size_t>(whole.size()), 0);
  for (int64_t process = 0; process < 3; ++process) {
    const ParameterTable table(config, {.stages = {config.layers, 3, 2}, .process = process});
    EXPECT_EQ(table.whole_size(), whole.size());
    EXPECT_EQ(table.embedding != kNone, process == 0);
    EXPECT_EQ(table.head != kNone, process == 2);
    for (const Parameter& p : table.all()) {
      EXPECT_EQ(p.name, whole[p.number].name);
      ++found[static_cast<size_t>(p.number)];
    }
  }
  EXPECT_EQ(found, std::vector<int>(found.size(), 1));
}

}  // namespace
}  // namespace tessera::model
