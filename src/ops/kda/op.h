// Kimi Delta Attention: a linear attention whose state S (K x V) decays per key channel and is corrected by the delta
// rule. With g = gate(z + dt_bias) <= 0 and beta = sigmoid(beta_logit), per document and value head:
//
//   Sbar_t = diag(e^{g_t}) S_{t-1};   S_t = Sbar_t + beta_t k_t (v_t - Sbar_t^T k_t)^T;   o_t = scale S_t^T q_t
//
// computed in chunks of C tokens (WY form), so that the work is matrix products and the cost linear in T. CUDA has bf16
// activations, HV = H, K = V = 32, 64 or 128, and chunks of 64 whatever `chunk` says.
// Source: attention.md 2 (gates), 3 (chunked form), 4.2 and 5 (backward), 8.1 (packed documents); Kimi Linear report.
#pragma once

#include "core/context.h"
#include "core/documents.h"

namespace tessera::ops::kda {

enum class Gate : uint8_t {
  unbounded,  // g = -exp(A_log) softplus(z + dt_bias)                  Kimi Linear
  bounded     // g = lower_bound sigmoid(exp(A_log) (z + dt_bias))      Kimi K3; lower_bound in [-5, 0)
};

struct Dims {
  int64_t tokens, heads, value_heads, key_dim, value_dim;  // T, H, HV (a multiple of H), K, V
  int64_t chunk = 64;                                      // C: 16, 32 or 64; results agree to rounding
  Gate gate = Gate::bounded;
  double lower_bound = -5;
  bool negative_eigenvalues = false;  // beta = 2 sigmoid(.)
  double scale = 0;                   // 0: K^(-1/2)
};
// States, a_log, dt_bias and their gradients are exact_type.
struct Inputs {
  View q, k;           // (T, H, K), L2-normalised rows
  View v;              // (T, HV, V)
  View z;              // (T, HV, K): decay gate before bias and activation
  View beta_logit;     // (T, HV)
  View a_log;          // (HV); may be absent with the bounded gate: exp(A_log) = 1
  View dt_bias;        // (HV, K)
  View initial_state;  // (N, HV, V, K), V-first; absent: zeros
  Documents documents;
};
struct Outputs {
  View o;            // (T, HV, V)
  View final_state;  // (N, HV, V, K), V-first; absent: not wanted; may be initial_state's memory in inference
};
struct Saved {   // what backward needs beside the inputs; both absent on CUDA, which makes them again
  View inverse;  // (M, HV, C, C): M = (I + A)^{-1} of every chunk; M chunks in all
  View states;   // (M, HV, V, K): the state each chunk began from
};
struct OutputGrads {
  View o;            // (T, HV, V)
  View final_state;  // (N, HV, V, K); absent: zeros
};
struct Grads {
  View q, k, v, z, beta_logit;  // shapes of the inputs; overwritten
  View a_log, dt_bias;          // added to; a_log absent where the input is
  View initial_state;           // (N, HV, V, K); overwritten; absent: not wanted
};

int64_t chunk_count(const Documents&, int64_t chunk);  // sum over documents of ceil(length / C)

Costs costs(const Dims&, const Documents&, DType, Pass, Device back_end = Device::cpu);
Saved allocate_saved(Context&, const Dims&, const Documents&, DType);

void forward(Context&, const Dims&, const Inputs&, const Outputs&, Saved*);  // Saved null: inference
void backward(Context&, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&);

// Decode: every document is one token; `state` (N, HV, V, K) is read and updated in place. Token recurrence, no chunks.
void step(Context&, const Dims&, const Inputs&, const View& state, const View& o);

}  // namespace tessera::ops::kda
