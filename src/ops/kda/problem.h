// Problems to check the engine on: a shape, its packed documents, a kind of values; and how to run the engine on them.
// The table (cases.cc) and the tests share them.
#pragma once

#include <string>
#include <vector>

#include "ops/check/check.h"
#include "ops/kda/op.h"
#include "ops/kda/reference.h"

namespace tessera::ops::kda {

struct Problem {
  Dims dims;                     // tokens follow from `lengths`
  std::vector<int64_t> lengths;  // of the documents
  bool initial_state = true;
  bool has_a_log = true;
  double a_log = 0;    // mean of A_log
  double z_shift = 0;  // added to z: moves the gates
  double z_scale = 1;
  double beta_shift = 0;      // added to the beta logits
  int64_t distinct_rows = 0;  // of q, k, v, ..., repeated from there on: for timing; 0: all

  int64_t documents() const { return static_cast<int64_t>(lengths.size()); }
  std::vector<int64_t> offsets() const;
  std::string name() const;
  std::vector<check::Tensor> tensors() const;  // q, k, v, z, beta_logit, dt_bias; then a_log, initial_state if had
  reference::Inputs values(const std::vector<check::Tensor>&) const;
  reference::Inputs values() const { return values(tensors()); }
  std::vector<check::Tensor> outputs(const reference::Outputs&) const;  // o, final_state
};
Problem make_problem(std::vector<int64_t> lengths, int64_t heads, int64_t key_dim, int64_t value_dim, int64_t chunk,
                     Gate gate = Gate::bounded);

template <class Change>
Problem changed(Problem p, Change&& change) {
  change(p);
  return p;
}

// The engine on views in the order of tensors() and outputs(); backward when gradients are given.
void run_views(const Problem&, const check::Run&);
Inputs bind_inputs(const Problem&, std::span<const View>);  // but the documents
check::Case make_case(const Problem&);

// The engine on values; results as float64 whatever it computed in. Workspaces and outputs are poisoned.
struct Result {
  reference::Outputs out;
  reference::Grads grads;
};
Result run_values(const Problem&, const reference::Inputs&, DType, const reference::Values& d_o,
                  const reference::Values& d_final);
reference::Values output_gradient(const Problem&);  // fixed normal values of o's shape
reference::Values state_gradient(const Problem&);   // of final_state's shape

// Token by token through step(), every document at the same time; documents of one length.
reference::Outputs run_steps(const Problem&, const reference::Inputs&, DType);
Result run_reference(const Problem&, const reference::Inputs&, const reference::Values& d_o,
                     const reference::Values& d_final);

// The tokens [begin, end) of per-token values, and the rows of one document of per-document values.
reference::Values token_rows(const Problem&, const reference::Values&, int64_t begin, int64_t end);
reference::Values document_row(const Problem&, const reference::Values&, int64_t document);

// One document of a pack on its own: the problem, its inputs, its results (parameter gradients left out).
Problem one_document(const Problem&, int64_t document);
reference::Inputs one_document(const Problem&, const reference::Inputs&, int64_t document);
Result one_document(const Problem&, const Result&, int64_t document);

// Largest relative error over all outputs and gradients.
double difference(const Result& got, const Result& want);
// The number of values that differ at all.
double unequal(const Result& a, const Result& b);

}  // namespace tessera::ops::kda
