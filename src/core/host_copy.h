// A view's values where the host can read and write them: the view itself, or a copy of what lies on the GPU.
#pragma once

#include <vector>

#include "core/view.h"

namespace tessera {

class HostCopy {
 public:
  explicit HostCopy(const View& view) : original_(view), host_(view) {
    if (view.memory() == Memory::host || !view.present()) return;
    bytes_.resize(static_cast<size_t>(view.bytes()));
    host_ = View(bytes_.data(), view.dtype(), view.shape());
    copy(view, host_);
  }
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  const View& view() const { return host_; }
  template <class T>
  T* as() const {
    return host_.as<T>();
  }
  void put_back() const {
    if (!bytes_.empty()) copy(host_, original_);
  }

 private:
  View original_, host_;
  std::vector<std::byte> bytes_;
};

}  // namespace tessera
