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
// States, a_log, dt_bias and their gradients are exact_type. Where states are of all documents, (N, HV, V, K) V-first,
// one may be given instead, (1, HV, V, K): the initial one of the first document, the final one of the last, as where a
// pack is cut over ranks; the others are then zeros, or not wanted.
struct Inputs {
  View q, k;           // (T, H, K), L2-normalised rows
  View v;              // (T, HV, V)
  View z;              // (T, HV, K): decay gate before bias and activation
  View beta_logit;     // (T, HV)
  View a_log;          // (HV); may be absent with the bounded gate: exp(A_log) = 1
  View dt_bias;        // (HV, K)
  View initial_state;  // (N or 1, HV, V, K); absent: zeros
  Documents documents;
};
struct Outputs {
  View o;            // (T, HV, V)
  View final_state;  // (N or 1, HV, V, K); absent: not wanted; may be initial_state's memory in inference, both N
};
struct Saved {   // what backward needs beside the inputs; both absent on CUDA, which makes them again
  View inverse;  // (M, HV, C, C): M = (I + A)^{-1} of every chunk; M chunks in all
  View states;   // (M, HV, V, K): the state each chunk began from
};
struct OutputGrads {
  View o;            // (T, HV, V)
  View final_state;  // (N or 1, HV, V, K); absent: zeros
};
struct Grads {
  View q, k, v, z, beta_logit;  // shapes of the inputs; overwritten
  View a_log, dt_bias;          // added to; a_log absent where the input is
  View initial_state;           // (N or 1, HV, V, K); overwritten; absent: not wanted
};

int64_t chunk_count(const Documents&, int64_t chunk);  // sum over documents of ceil(length / C)

Costs costs(const Dims&, const Documents&, DType, Pass, Device back_end = Device::cpu);
Saved allocate_saved(Context&, const Dims&, const Documents&, DType);

void forward(Context&, const Dims&, const Inputs&, const Outputs&, Saved*);  // Saved null: inference
void backward(Context&, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&);

// A document that is cut over several ranks, its parts in order (attention.md 8.2). What a part does to the state is
// one affine map, whatever the state: on V-first states, S the one before the part and S1 the one after it,
//
//   S1 = S T + X        dS = dS1 T^T + dX        X, dX: the results of S = 0 and of dS1 = 0
//
// so ranks exchange maps (docs/kda.md), and each folds those of the parts before its own (dS: after) into the state it
// begins from.
struct StateMap {
  View transition;  // (HV, K, K), row r, column c: what channel c after the part has of channel r before it
  View offset;      // (HV, V, K): X or dX
};
// Of one document; the initial state is not looked at. `transition` absent: not wanted, as for a document's first part.
void state_map(Context&, const Dims&, const Inputs&, int64_t document, const StateMap&);
// dX of one document, whose part of d_o alone is read; T is that of state_map.
void state_gradient_map(Context&, const Dims&, const Inputs&, const Saved&, const View& d_o, int64_t document,
                        const View& offset);
Costs map_costs(const Dims&, const Documents&, int64_t document, bool transition, DType, Pass,
                Device back_end = Device::cpu);
// `state` (HV, V, K), in place: S <- S T + X and dS <- dS T^T + dX; without a transition S <- X.
void fold(Context&, const StateMap&, const View& state);
void fold_gradient(Context&, const StateMap&, const View& d_state);

// Decode: every document is one token; `state` (N, HV, V, K) is read and updated in place. Token recurrence, no chunks.
void step(Context&, const Dims&, const Inputs&, const View& state, const View& o);

}  // namespace tessera::ops::kda
