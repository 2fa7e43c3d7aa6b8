// The one arena of a run: parameters, gradients, optimizer state, activations and workspaces.
//
// A stack: allocations go on top and are released down to a mark. Forward leaves what backward needs on the stack and
// backward releases it in reverse, so the same sequence of calls always gives the same offsets. Run on a dry arena (no
// storage) that sequence yields the peak in advance; the real arena is then made exactly that large.
#pragma once

#include <cstdint>

#include "core/view.h"

namespace tessera {

class Arena {
 public:
  static constexpr int64_t kAlignment = 64;  // a cache line, and the widest vector register

  static Arena dry();  // offsets only, no limit
  // Host: address space now, pages when first written. GPU: taken at once, one piece.
  explicit Arena(int64_t capacity_bytes, Memory memory = Memory::host);
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&&) = delete;
  ~Arena();

  View allocate(DType dtype, Shape shape);  // contents undefined (NaN when poisoning)
  View allocate_zeroed(DType dtype, Shape shape);

  int64_t used() const { return used_; }
  int64_t peak() const { return peak_; }
  int64_t capacity() const { return capacity_; }
  Memory memory() const { return memory_; }
  bool is_dry() const { return base_ == nullptr; }
  void release_to(int64_t mark);  // frees everything allocated since used() was `mark`
  void reset_peak() { peak_ = used_; }

  // Fills every float allocation with NaN, so that reading what was never written shows. For tests and `selfcheck`.
  void set_poison(bool on) { poison_ = on; }

  static int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // Releases on leaving the block what was allocated inside it.
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), mark_(arena.used()) {}
    ~Scope() { arena_.release_to(mark_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    int64_t mark_;
  };

 private:
  Arena() = default;
  std::byte* base_ = nullptr;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
  int64_t peak_ = 0;
  Memory memory_ = Memory::host;
  bool poison_ = false;
};

}  // namespace tessera
