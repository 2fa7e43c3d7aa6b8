// The table of an op's test shapes, and the modes that use it.
//
// An op describes itself once (cases.cc beside it): named inputs, its definition in float64 (reference.h), and how to
// run its forward and backward on views. The modes are then the same for every op:
//   oracle     the engine in float32 (limit 1e-4) and in float64 (limit 1e-12) against the definition
//   gradient   the engine's backward in float64 against central differences of the definition (1e-6), and its
//              backward in float32 against its backward in float64 (1e-4)
//   supported  the dry run: same workspace as `costs` states, nothing touched
//   speed      time, FLOP/s and bytes/s of forward and of forward + backward (tessera bench OP)
// On a GPU the same tables are run in the types the op has there: outputs against the definition and gradients against
// the float64 backward, both on inputs rounded to the type; twice, to the same bits; and dry, for the memory.
// Outputs and workspaces are NaN before every call. GoogleTest, `tessera selfcheck` and `tessera bench` all read this.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/context.h"

namespace tessera::check {

enum class GradientRule : uint8_t {
  none,           // not differentiable: indices, offsets
  overwrite,      // backward writes it: gradients of activations
  add,            // backward adds to it, in exact_type: gradients of parameters
  add_activation  // backward adds to it, in the type of the activations, which several readers have
};

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<double> values;  // fewer than elements(): repeated, where a speed case is too large for a host to hold
  GradientRule gradient = GradientRule::overwrite;
  DType dtype = DType::none;  // none: the type under test (f32, f64 or bf16); i32 and i64 stay as they are
  bool exact = false;         // exact_type of the type under test: statistics, gains, states, routing weights
  double bf16_limit = 0;      // of the gradient, in place of the case's limit_bf16_gradient; 0: that one

  int64_t elements() const;
};

// Normal values times `scale`, from Philox keyed by (name, seed).
Tensor random_tensor(std::string name, std::vector<int64_t> shape, double scale = 1.0,
                     GradientRule gradient = GradientRule::overwrite, uint64_t seed = 0);

// The same of at most `period` values, repeated. Take a prime, or a prime number of rows: no two heads are alike then.
Tensor periodic_tensor(std::string name, std::vector<int64_t> shape, int64_t period, double scale = 1.0,
                       GradientRule gradient = GradientRule::overwrite);

// Views of one run, in the order of the tables. `d_outputs` empty: forward only (inference: nothing need be saved).
struct Run {
  Context& context;
  std::span<const View> inputs;
  std::span<const View> outputs;
  std::span<const View> d_outputs;  // gradients given, one an output
  std::span<const View> d_inputs;   // gradients wanted, one an input; absent views where GradientRule::none
};

struct Case {
  std::string name;  // the shape in words: "T 65 H 2 K 16 C 16 bounded"
  std::function<std::vector<Tensor>()> inputs;
  std::function<std::vector<Tensor>(const std::vector<Tensor>&)> reference;  // outputs, by definition, in float64
  std::function<void(const Run&)> run;                                       // the engine, on any device
  double limit_f32 = 1e-4;            // relative RMS error, float32 engine against float64
  double limit_f64 = 1e-12;           // relative RMS error, float64 engine against the definition
  double limit_bf16 = 2.5e-3;         // relative RMS error, bf16 engine against the definition on rounded inputs
  double limit_bf16_gradient = 4e-3;  // the same of gradients, against the float64 backward
  double limit_gradient = 1e-6;       // relative, float64 engine's backward against central differences
  double step = 1e-5;                 // of the central differences, relative to the tensor's RMS
};

// One row of `tessera selfcheck`. `what` says which check of which shape.
struct Result {
  std::string op, device, what;
  double error = 0, limit = 0;
  bool pass = false;
};

struct SpeedCase {
  std::string name;
  std::function<std::vector<Tensor>()> inputs;
  std::vector<std::vector<int64_t>> output_shapes;
  std::function<void(const Run&)> run;
  std::vector<size_t> exact_outputs = {};  // which of the outputs are exact_type
};

struct OpTable {
  std::string op;
  std::vector<Case> cases;
  std::vector<SpeedCase> speed = {};
  std::function<std::vector<Result>()> more =
      nullptr;  // checks that are the op's own: chunk sizes agree, packed = separate
  std::vector<DType> cuda_types = {DType::f32, DType::bf16};  // of activations, on a GPU
  std::function<bool(const Case&)> on_cuda = nullptr;         // which of `cases` are run there; null: all
  std::vector<Case> cuda_cases = {};                          // only there: shapes too large for finite differences
  std::vector<SpeedCase> cuda_speed = {};                     // only there: sizes that would take a CPU minutes
};

std::vector<Result> check_oracle(const OpTable& table, const Case& c);
std::vector<Result> check_gradient(const OpTable& table, const Case& c);
std::vector<Result> check_supported(const OpTable& table, const Case& c);
std::vector<Result> check_all(const OpTable& table);  // the three above for every case, then `more`
std::vector<Result> check_cuda(const OpTable& table, const Case& c);
std::vector<Result> check_all_cuda(const OpTable& table);

struct Speed {
  std::string op, shape;
  double forward_ms = 0, forward_backward_ms = 0;        // medians
  double forward_flops = 0, forward_backward_flops = 0;  // of matrix products
  double forward_bytes = 0, forward_backward_bytes = 0;  // moved, each operand once
  int64_t extra_bytes = 0;                               // peak of the arena beyond inputs, outputs and gradients
};
Speed measure(const OpTable& table, const SpeedCase& c, Device device = Device::cpu, int repeats = 5);

double relative_error(std::span<const double> got, std::span<const double> want);           // ||got - want|| / ||want||
Result within(const std::string& op, const std::string& what, double error, double limit);  // NaN fails

}  // namespace tessera::check
