// The one arena of a run: parameters, gradients, optimizer state, activations and workspaces.
//
// A stack: allocations go on top and are released down to a mark. Forward leaves what backward needs on the stack and
// backward releases it in reverse, so the same sequence of calls always gives the same offsets. Run on a dry arena (no
// storage) that sequence yields the peak in advance; the real arena is then made exactly that large.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/view.h"

namespace tessera {

class Arena {
 public:
  static constexpr int64_t kAlignment = 64;  // a cache line, and the widest vector register

  static Arena dry();  // offsets only, no limit
  // Host: address space now, pages when first written. GPU: taken at once, one piece.
  explicit Arena(int64_t capacity_bytes, Memory memory = Memory::host);
  // A stack of its own inside an allocation of another arena, which must outlive it: what is released in another order
  // than it was taken needs several. Dry where that one is.
  static Arena within(const View& room);
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

  // What was allocated under a label, now, at the moment of the arena's peak (these add up to it), and at most.
  struct Use {
    int64_t now = 0, at_peak = 0, most = 0;
  };
  std::map<std::string, Use> uses() const;  // by label; only dry arenas keep that account

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

  // Names what is allocated in the block, for uses(); the innermost label counts.
  class Label {
   public:
    Label(Arena& arena, const char* name) : arena_(arena), outer_(arena.label_) { arena.label_ = name; }
    ~Label() { arena_.label_ = outer_; }
    Label(const Label&) = delete;
    Label& operator=(const Label&) = delete;

   private:
    Arena& arena_;
    const char* outer_;
  };

 private:
  // From `begin` to the next segment's, the last one to the end of what is used.
  struct Segment {
    int64_t begin;
    const char* label;
  };

  Arena() = default;
  void enter(int64_t bytes);
  void leave(int64_t mark);
  std::byte* base_ = nullptr;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
  int64_t peak_ = 0;
  const char* label_ = "other";
  std::vector<Segment> segments_;
  std::map<std::string, Use> uses_;
  Memory memory_ = Memory::host;
  bool poison_ = false;
  bool owner_ = true;  // of the memory
};

}  // namespace tessera
