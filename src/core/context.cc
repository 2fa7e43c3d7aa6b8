#include "core/context.h"

namespace tessera {

Costs& Costs::operator+=(const Costs& other) {
  gemm_flops += other.gemm_flops;
  vector_flops += other.vector_flops;
  bytes_moved += other.bytes_moved;
  saved_bytes += other.saved_bytes;
  workspace_bytes += other.workspace_bytes;
  return *this;
}

void Ledger::charge(const std::string& op, Pass pass, const Costs& costs) {
  Entry& entry = entries_[{op, pass}];
  ++entry.calls;
  entry.costs += costs;
}

void Ledger::add_seconds(const std::string& op, Pass pass, double seconds) { entries_[{op, pass}].seconds += seconds; }

Costs Ledger::total() const {
  Costs sum;
  for (const auto& [key, entry] : entries_) sum += entry.costs;
  return sum;
}

OpScope::OpScope(Context& context, const char* name, Pass pass, const Costs& costs)
    : context_(context), name_(name), pass_(pass), workspace_(context.arena), label_(context.arena, name) {
  if (context_.device == Device::cuda) gpu::begin_range(name);
  if (context_.ledger == nullptr) return;
  context_.ledger->charge(name, pass, costs);
  if (context_.device == Device::cuda) gpu::wait();
  begin_ = Clock::now();
}

OpScope::~OpScope() {
  if (context_.device == Device::cuda) {
    gpu::end_range();
    if (context_.ledger != nullptr) gpu::wait_quietly();
  }
  if (context_.ledger == nullptr || context_.dry()) return;
  context_.ledger->add_seconds(name_, pass_, std::chrono::duration<double>(Clock::now() - begin_).count());
}

}  // namespace tessera
