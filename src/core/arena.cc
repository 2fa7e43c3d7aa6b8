#include "core/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "core/gpu.h"

namespace tessera {

Arena Arena::dry() {
  Arena arena;
  arena.capacity_ = std::numeric_limits<int64_t>::max();
  return arena;
}

Arena Arena::within(const View& room) {
  if (room.data() == nullptr) return dry();
  Arena arena;
  arena.base_ = static_cast<std::byte*>(room.data());
  arena.capacity_ = room.bytes();
  arena.memory_ = room.memory();
  arena.owner_ = false;
  return arena;
}

Arena::Arena(int64_t capacity_bytes, Memory memory)
    : capacity_(std::max(aligned(capacity_bytes), kAlignment)), memory_(memory) {
  if (memory == Memory::gpu) {
    base_ = static_cast<std::byte*>(gpu::allocate(capacity_));
    return;
  }
  void* p = mmap(nullptr, static_cast<size_t>(capacity_), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    fail_user("cannot reserve {} bytes of memory for the run ({}); choose a smaller model, batch or sequence",
              capacity_, std::strerror(errno));
  }
  madvise(p, static_cast<size_t>(capacity_), MADV_HUGEPAGE);  // fewer TLB misses; best effort
  base_ = static_cast<std::byte*>(p);
}

Arena::Arena(Arena&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)),
      used_(std::exchange(other.used_, 0)),
      peak_(std::exchange(other.peak_, 0)),
      label_(other.label_),
      segments_(std::move(other.segments_)),
      uses_(std::move(other.uses_)),
      memory_(other.memory_),
      poison_(other.poison_),
      owner_(other.owner_) {}

Arena::~Arena() {
  if (base_ == nullptr || !owner_) return;
  if (memory_ == Memory::gpu) {
    gpu::release(base_);
  } else {
    munmap(base_, static_cast<size_t>(capacity_));
  }
}

View Arena::allocate(DType dtype, Shape shape) {
  const int64_t bytes = aligned(shape.elements() * bytes_of(dtype));
  TESSERA_CHECK(bytes <= capacity_ - used_,
                "arena of {} bytes, {} used, asked for {} more: the plan and the run differ", capacity_, used_, bytes);
  void* p = base_ == nullptr ? nullptr : base_ + used_;
  if (is_dry()) enter(bytes);
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  const bool real = dtype == DType::f32 || dtype == DType::f64 || dtype == DType::bf16;
  if (poison_ && p != nullptr && memory_ == Memory::gpu) {
    if (real) gpu::fill_bytes(p, 0xff, bytes);  // every bit set is a NaN in each of them
  } else if (poison_ && p != nullptr) {
    if (dtype == DType::f32)
      std::fill_n(static_cast<float*>(p), shape.elements(), std::numeric_limits<float>::quiet_NaN());
    if (dtype == DType::f64)
      std::fill_n(static_cast<double*>(p), shape.elements(), std::numeric_limits<double>::quiet_NaN());
  }
  return View(p, dtype, shape, memory_);
}

View Arena::allocate_zeroed(DType dtype, Shape shape) {
  const View view = allocate(dtype, shape);
  view.zero();
  return view;
}

void Arena::release_to(int64_t mark) {
  TESSERA_CHECK(mark >= 0 && mark <= used_, "release to {} with {} used: scopes closed out of order", mark, used_);
  if (is_dry()) leave(mark);
  used_ = mark;
}

void Arena::enter(int64_t bytes) {
  if (segments_.empty() || segments_.back().label != label_) segments_.push_back({used_, label_});
  Use& use = uses_[label_];
  use.now += bytes;
  use.most = std::max(use.most, use.now);
}

void Arena::leave(int64_t mark) {
  if (mark < used_ && used_ == peak_) uses_ = uses();
  for (int64_t end = used_; end > mark;) {
    const int64_t begin = std::max(segments_.back().begin, mark);
    uses_[segments_.back().label].now -= end - begin;
    if (segments_.back().begin >= mark) segments_.pop_back();
    end = begin;
  }
}

std::map<std::string, Arena::Use> Arena::uses() const {
  std::map<std::string, Use> uses = uses_;
  if (used_ < peak_) return uses;
  for (auto& [label, use] : uses) use.at_peak = use.now;
  return uses;
}

}  // namespace tessera
