// Products of every expert with its own rows, in one launch. Two implementations: `sm90` for bf16 of sizes that the
// copy engine takes, `portable` for everything, and as its oracle.
#pragma once

#include <initializer_list>

#include "core/gpu.h"

namespace tessera::ops::experts::cuda {

// The order of rows on the GPU (Saved): whole blocks of kBlockRows of one expert, padding rows are zero.
struct Groups {
  int64_t experts, rows;  // E, R: capacity
  View offsets, counts, blocks;
};

//   transposed  c (R, N) = a (R, K) b_e^T, b (E, N, K)       each term has a c of its own
//   plain       c (R, N) = a (R, K) b_e,   b (E, K, N)       each term has a c of its own
//   plain_sum   c (R, N) = sum over terms of a b_e           the c of the first term
//   gradient    c_e (M, N) += a_e^T b_e, float32; a (R, M) and b (R, N) over the expert's rows. Experts without rows
//               add nothing.
enum class Form : uint8_t { transposed, plain, plain_sum, gradient };
struct Term {
  View a, b, c;
};
using Terms = std::initializer_list<Term>;  // one, or two of the same shapes

void multiply(GpuStream, const Groups&, Form, Terms);

namespace portable {
void multiply(GpuStream, const Groups&, Form, Terms);
}
namespace sm90 {
bool takes(const Term&);
void multiply(GpuStream, const Groups&, Form, Terms);
}  // namespace sm90

}  // namespace tessera::ops::experts::cuda
