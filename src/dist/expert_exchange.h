// Rows of tokens to the processes that hold their experts, and the results back.
//
// A token goes once to each process that holds one or more of its experts, with all its choices; the process works on
// those that are its own, adds them up, and one row returns. So a row crosses at most as often as it has owners, and
// nothing is dropped. Sums of returned rows are taken in the order of the members.
#pragma once

#include <vector>

#include "dist/communicator.h"

namespace tessera::dist {

// Experts [begin(r), begin(r + 1)) are member r's; ranges differ by one at most.
struct ExpertRanges {
  int64_t experts, members;
  int64_t begin(int64_t member) const { return experts * member / members; }
  int64_t count(int64_t member) const { return begin(member + 1) - begin(member); }
  int64_t owner(int64_t expert) const { return ((expert + 1) * members - 1) / experts; }
};

struct Routes {
  std::vector<std::vector<int64_t>> sent;  // by destination: tokens of this process, rising
  std::vector<int64_t> received;           // rows, by source
  int64_t rows = 0;                        // received in all
};

// Of tokens that chose `indices` (T, k) i32, -1: none. On dry every member has as many tokens as this one, and receives
// `imbalance` times its even share of rows, or all there are where that is less; 0: all.
Routes plan_routes(Context&, Communicator& expert, const ExpertRanges&, const View& indices, double imbalance);

// rows (T, W) of any type -> received (Routes::rows, W), in the order of the sources.
void dispatch(Context&, Communicator& expert, const Routes&, const View& rows, const View& received);
// rows (T, W) = sums of what the destinations return, `received` (Routes::rows, W) in each; zero where a token went to
// none.
void combine(Context&, Communicator& expert, const Routes&, const View& received, const View& rows);
// In place: the number of an expert of `member` among its own; -1 for the experts of others.
void keep_own(Context&, const ExpertRanges&, int64_t member, const View& indices);

}  // namespace tessera::dist
