// What every op is given: the device, the arena it takes workspace from, and the ledger it charges.
//
// The plan is the program, run dry: on Device::dry an op checks its shapes, charges its costs, takes and releases the
// same workspace as in a real run, and returns. Memory plans, FLOP counts and MFU all come from that ledger.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <utility>

#include "core/arena.h"
#include "core/gpu.h"

namespace tessera {

enum class Device : uint8_t { cpu, dry, cuda };
inline Memory memory_of(Device device) { return device == Device::cuda ? Memory::gpu : Memory::host; }
enum class Pass : uint8_t { forward, backward };
enum class Product : uint8_t { f32, bf16 };  // operands of large matrix products; accumulation is float32 in both

using Flops = __int128;  // exact: attention over 10 million tokens of a large model passes 2^63

// What one call costs. `gemm_flops` counts matrix products (2 per multiply-add) and is what MFU is made of;
// `vector_flops` the rest, roughly. `bytes_moved` counts each operand once. Memory in bytes, after arena alignment.
struct Costs {
  Flops gemm_flops = 0;
  Flops vector_flops = 0;
  int64_t bytes_moved = 0;
  int64_t saved_bytes = 0;      // what forward leaves for backward, beyond inputs and outputs
  int64_t workspace_bytes = 0;  // taken from the arena during the call and given back at its end

  Costs& operator+=(const Costs& other);
};

class Ledger {
 public:
  struct Entry {
    int64_t calls = 0;
    Costs costs;
    double seconds = 0;  // wall time inside the op; 0 on dry. Ops do not nest OpScopes.
  };
  using Key = std::pair<std::string, Pass>;  // op name, pass

  void charge(const std::string& op, Pass pass, const Costs& costs);
  void add_seconds(const std::string& op, Pass pass, double seconds);
  void clear() { entries_.clear(); }
  const std::map<Key, Entry>& entries() const { return entries_; }
  Costs total() const;

 private:
  std::map<Key, Entry> entries_;
};

struct Context {
  Device device;
  Arena& arena;
  Ledger* ledger = nullptr;        // null: nothing is recorded
  Product product = Product::f32;  // run option `train.product`; on CUDA the type of the activations decides
  Device dry_for = Device::cpu;    // the back end that a dry run stands for

  bool dry() const { return device == Device::dry; }
  // cpu or cuda: whose workspace and saved tensors are taken.
  Device back_end() const { return dry() ? dry_for : device; }
  // bf16 on CUDA, float32 on the CPU (proofs in float64 make their own tensors).
  DType activations() const { return back_end() == Device::cuda ? DType::bf16 : DType::f32; }
  GpuStream stream() const { return gpu::stream(); }
};

// Opens an op: charges the ledger, and measures the time until the end of the block (on the GPU it waits for the op
// then; without a ledger nothing waits). Names the op to GPU profilers. Also frees the op's workspace.
//   OpScope op(ctx, "rms_norm", Pass::forward, costs(dims, Pass::forward));
//   if (ctx.dry()) return;
class OpScope {
 public:
  OpScope(Context& context, const char* name, Pass pass, const Costs& costs);
  ~OpScope();
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  Context& context_;
  const char* name_;
  Pass pass_;
  Arena::Scope workspace_;
  Arena::Label label_;  // the workspace is the op's
  Clock::time_point begin_;
};

}  // namespace tessera
