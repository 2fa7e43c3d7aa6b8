// Runs an op's table as GoogleTest tests: one test a case and mode, failures named by shape.
#pragma once

#include <gtest/gtest.h>

#include "ops/check/check.h"

namespace tessera::check {

inline void expect_all(const std::vector<Result>& results) {
  EXPECT_FALSE(results.empty());
  for (const Result& r : results) EXPECT_TRUE(r.pass) << r.op << ": " << r.what << ": " << r.error << " > " << r.limit;
}

}  // namespace tessera::check

#define TESSERA_OP_TABLE_TESTS(Suite, table)                                                                       \
  TEST(Suite, Oracle) {                                                                                            \
    for (const auto& c : (table).cases) ::tessera::check::expect_all(::tessera::check::check_oracle(table, c));    \
  }                                                                                                                \
  TEST(Suite, Supported) {                                                                                         \
    for (const auto& c : (table).cases) ::tessera::check::expect_all(::tessera::check::check_supported(table, c)); \
  }                                                                                                                \
  TEST(Suite, Gradient) {                                                                                          \
    for (const auto& c : (table).cases) {                                                                          \
      for (const auto& r : ::tessera::check::check_gradient(table, c)) {                                           \
        EXPECT_TRUE(r.pass) << r.op << ": " << r.what << ": " << r.error << " > " << r.limit;                      \
      }                                                                                                            \
    }                                                                                                              \
  }                                                                                                                \
  TEST(Suite, More) {                                                                                              \
    if ((table).more) ::tessera::check::expect_all((table).more());                                                \
  }
