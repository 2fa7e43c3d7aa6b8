// Rows of the table for the maps of states and their folds.
#pragma once

#include "ops/kda/problem.h"

namespace tessera::ops::kda {

// Of the first document of each problem, one in the middle and, where there are so many, the last.
std::vector<check::Case> map_cases(const std::vector<Problem>&);
check::Case fold_case(int64_t heads, int64_t width);

}  // namespace tessera::ops::kda
