#include "ops/kda/cases.h"

#include "ops/kda/cuda_cases.h"
#include "ops/kda/map_cases.h"
#include "ops/kda/problem.h"

namespace tessera::ops::kda {
namespace {

using reference::Values;

// Small, since every value is differenced: lengths around tiles and chunks, packs, both gates and their ends.
std::vector<check::Case> small_cases() {
  constexpr Gate kBounded = Gate::bounded, kUnbounded = Gate::unbounded;
  const std::vector<Problem> problems{
      make_problem({0}, 1, 8, 8, 16),
      make_problem({1}, 2, 8, 8, 64),
      make_problem({17}, 1, 16, 16, 16),
      make_problem({31}, 2, 8, 16, 16, kUnbounded),
      make_problem({65}, 1, 16, 8, 64),
      make_problem({40}, 1, 16, 16, 32, kUnbounded),
      make_problem({0, 5, 1, 18, 0, 1}, 2, 8, 8, 16),
      changed(make_problem({20, 1}, 1, 10, 6, 64), [](Problem& p) { p.dims.value_heads = 2; }),
      changed(make_problem({33}, 1, 16, 16, 16), [](Problem& p) { p.initial_state = p.has_a_log = false; }),
      changed(make_problem({33}, 1, 16, 16, 64),
              [](Problem& p) {
                p.dims.negative_eigenvalues = true;
                p.beta_shift = 3;
                p.dims.lower_bound = -0.5;
              }),
      changed(make_problem({33}, 1, 8, 8, 32, kBounded), [](Problem& p) { p.z_shift = 4; }),     // gates near -5
      changed(make_problem({33}, 1, 8, 8, 32, kUnbounded), [](Problem& p) { p.z_shift = -6; }),  // nearly no decay
      changed(make_problem({33}, 1, 8, 8, 32, kUnbounded), [](Problem& p) { p.z_scale = 8; })};  // both in one tile
  std::vector<check::Case> cases;
  for (const Problem& p : problems) {
    check::Case c = make_case(p);
    // Gates near their bound have gradients so small that the rounding of the outputs shows in differences of 1e-5.
    if (p.z_shift > 0) c.step = 1e-4;
    cases.push_back(c);
  }
  for (const check::Case& c : map_cases(problems)) cases.push_back(c);
  for (const int64_t width : {8, 20}) cases.push_back(fold_case(3, width));
  return cases;
}

Problem pack(int64_t chunk, Gate gate) { return make_problem({65, 0, 1, 150, 17, 64, 1}, 2, 32, 32, chunk, gate); }

double recurrence_error(const Problem& p) {
  const reference::Inputs in = p.values();
  const Values d_o = output_gradient(p), d_final = state_gradient(p);
  return difference(run_values(p, in, DType::f64, d_o, d_final), run_reference(p, in, d_o, d_final));
}

double chunk_disagreement(int64_t chunk, DType dtype) {
  const Problem p = pack(chunk, Gate::bounded), whole = pack(64, Gate::bounded);
  const reference::Inputs in = p.values();
  const Values d_o = output_gradient(p), d_final = state_gradient(p);
  return difference(run_values(p, in, dtype, d_o, d_final), run_values(whole, in, dtype, d_o, d_final));
}

double packed_unequal_separate(Gate gate) {
  const Problem p = pack(64, gate);
  const reference::Inputs in = p.values();
  const Values d_o = output_gradient(p), d_final = state_gradient(p);
  const Result packed = run_values(p, in, DType::f32, d_o, d_final);
  double count = 0;
  for (int64_t n = 0; n < p.documents(); ++n) {
    const Problem one = one_document(p, n);
    const Values d_one = token_rows(p, d_o, p.offsets()[size_t(n)], p.offsets()[size_t(n) + 1]);
    const Result alone = run_values(one, one_document(p, in, n), DType::f32, d_one, document_row(p, d_final, n));
    count += unequal(one_document(p, packed, n), one_document(one, alone, 0));
  }
  return count;
}

double decode_error(Gate gate, DType dtype) {
  const Problem p = make_problem({70}, 3, 24, 40, 64, gate);
  const reference::Inputs in = p.values();
  const Result whole = run_values(p, in, dtype, output_gradient(p), {});
  const reference::Outputs steps = run_steps(p, in, dtype);
  return std::max(check::relative_error(steps.o, whole.out.o),
                  check::relative_error(steps.final_state, whole.out.final_state));
}

std::vector<check::Result> more() {
  std::vector<check::Result> results;
  const auto add = [&](const std::string& what, double error, double limit) {
    results.push_back(check::within("kda", what, error, limit));
  };
  for (const Gate gate : {Gate::bounded, Gate::unbounded}) {
    const char* name = gate == Gate::bounded ? "bounded" : "unbounded";
    add(fmt::format("chunked = token recurrence, forward and backward, float64, {}", name),
        recurrence_error(pack(64, gate)), 1e-12);
    add(fmt::format("packed = separate, bit for bit, {}", name), packed_unequal_separate(gate), 0);
    add(fmt::format("decode = forward, float64, {}", name), decode_error(gate, DType::f64), 1e-12);
    add(fmt::format("decode = forward, float32, {}", name), decode_error(gate, DType::f32), 1e-5);
  }
  for (const int64_t chunk : {16, 32}) {
    add(fmt::format("C {} = C 64, float64", chunk), chunk_disagreement(chunk, DType::f64), 1e-12);
    add(fmt::format("C {} = C 64, float32", chunk), chunk_disagreement(chunk, DType::f32), 1e-5);
  }
  return results;
}

}  // namespace

check::SpeedCase speed_case(int64_t tokens, int64_t heads, int64_t dim) {
  Problem p = make_problem({tokens}, heads, dim, dim, 64);
  p.initial_state = false;
  p.distinct_rows = 8191;  // prime
  return {.name = fmt::format("T {} H {} K {}", tokens, heads, dim),
          .inputs = [=] { return p.tensors(); },
          .output_shapes = {{tokens, heads, dim}, {1, heads, dim, dim}},
          .run = [=](const check::Run& r) { run_views(p, r); },
          .exact_outputs = {1}};
}

const check::OpTable& table() {
  static const check::OpTable t{.op = "kda",
                                .cases = small_cases(),
                                .speed = {speed_case(2048, 8, 128), speed_case(32768, 8, 128), speed_case(8192, 4, 32)},
                                .more = more,
                                .cuda_types = {DType::bf16},
                                .on_cuda = [](const check::Case&) { return false; },  // too narrow for its kernels
                                .cuda_cases = cuda_cases()};
  return t;
}

}  // namespace tessera::ops::kda
