#include "core/view.h"

#include <cstring>

#include "core/gpu.h"

namespace tessera {

Shape::Shape(std::span<const int64_t> extents) : rank_(static_cast<int>(extents.size())) {
  TESSERA_CHECK(extents.size() <= kMaxRank, "shape of rank {}, at most {}", extents.size(), kMaxRank);
  for (int i = 0; i < rank_; ++i) {
    const int64_t extent = extents[static_cast<size_t>(i)];
    TESSERA_CHECK(extent >= 0, "negative extent {} at index {}", extent, i);
    extents_[static_cast<size_t>(i)] = extent;
  }
}

int64_t Shape::elements() const {
  int64_t n = 1;
  for (int64_t extent : *this) n *= extent;
  return n;
}

bool Shape::operator==(const Shape& other) const { return rank_ == other.rank_ && extents_ == other.extents_; }

std::string Shape::to_string() const {
  std::string s = "(";
  for (int i = 0; i < rank_; ++i) s += fmt::format("{}{}", i ? ", " : "", (*this)[i]);
  return s + ")";
}

View::View(void* data, DType dtype, Shape shape, Memory memory)
    : data_(data), memory_(memory), dtype_(dtype), shape_(shape) {
  row_stride_ = row_elements();
}

int64_t View::row_elements() const {
  int64_t n = 1;
  for (int i = 1; i < rank(); ++i) n *= shape_[i];
  return n;
}

View View::reshaped(Shape shape) const {
  TESSERA_CHECK(contiguous(), "reshape of a strided view {}", shape_.to_string());
  TESSERA_CHECK(shape.elements() == shape_.elements(), "reshape of {} to {}", shape_.to_string(), shape.to_string());
  return View(data_, dtype_, shape, memory_);
}

static void* offset(void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<std::byte*>(data) + elements * bytes_of(dtype);
}

View View::row_range(int64_t begin, int64_t count) const {
  TESSERA_CHECK(rank() >= 1 && begin >= 0 && count >= 0 && begin + count <= rows(), "rows [{}, {}) of {}", begin,
                begin + count, shape_.to_string());
  std::array<int64_t, Shape::kMaxRank> extents{};
  for (int i = 0; i < rank(); ++i) extents[static_cast<size_t>(i)] = shape_[i];
  extents[0] = count;
  View part(offset(data_, begin * row_stride_, dtype_), dtype_,
            Shape(std::span<const int64_t>(extents.data(), static_cast<size_t>(rank()))), memory_);
  part.row_stride_ = row_stride_;
  return part;
}

View View::column_range(int64_t begin, int64_t count) const {
  TESSERA_CHECK(rank() == 2 && begin >= 0 && count >= 0 && begin + count <= dim(1), "columns [{}, {}) of {}", begin,
                begin + count, shape_.to_string());
  View part(offset(data_, begin, dtype_), dtype_, Shape{rows(), count}, memory_);
  part.row_stride_ = row_stride_;
  return part;
}

View View::at(int64_t index) const {
  TESSERA_CHECK(rank() >= 1 && index >= 0 && index < rows(), "slice {} of {}", index, shape_.to_string());
  return View(offset(data_, index * row_stride_, dtype_), dtype_,
              Shape(std::span<const int64_t>(shape_.begin() + 1, static_cast<size_t>(rank() - 1))), memory_);
}

void View::zero() const {
  if (data_ == nullptr) return;
  const size_t row_bytes = static_cast<size_t>(row_elements() * bytes_of(dtype_));
  if (memory_ == Memory::gpu) {
    TESSERA_CHECK(contiguous(), "zero of a strided view {} on the GPU", shape_.to_string());
    return gpu::fill_bytes(data_, 0, bytes());
  }
  if (contiguous()) {
    std::memset(data_, 0, row_bytes * static_cast<size_t>(rows()));
    return;
  }
  for (int64_t r = 0; r < rows(); ++r) std::memset(offset(data_, r * row_stride_, dtype_), 0, row_bytes);
}

void copy(const View& from, const View& to) {
  TESSERA_CHECK(from.dtype() == to.dtype() && from.shape() == to.shape(), "copy of {} {} to {} {}",
                name_of(from.dtype()), from.shape().to_string(), name_of(to.dtype()), to.shape().to_string());
  if (from.data() == nullptr || to.data() == nullptr || from.bytes() == 0) return;
  const bool whole = from.contiguous() && to.contiguous();
  const int64_t element = bytes_of(from.dtype()), rows = whole ? 1 : from.rows();
  const gpu::Rows r{rows, from.bytes() / rows, from.row_stride() * element, to.row_stride() * element};
  if (from.memory() == Memory::gpu || to.memory() == Memory::gpu) {
    return gpu::copy(from.data(), from.memory(), to.data(), to.memory(), r);
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(static_cast<std::byte*>(to.data()) + i * r.to_stride,
                static_cast<const std::byte*>(from.data()) + i * r.from_stride, static_cast<size_t>(r.bytes));
  }
}

void check_strided_view(const View& view, DType dtype, const Shape& shape, const char* what) {
  TESSERA_CHECK(view.present(), "{} is absent, wanted {} {}", what, name_of(dtype), shape.to_string());
  TESSERA_CHECK(view.dtype() == dtype, "{} is {}, wanted {}", what, name_of(view.dtype()), name_of(dtype));
  TESSERA_CHECK(view.shape() == shape, "{} has shape {}, wanted {}", what, view.shape().to_string(), shape.to_string());
}

void check_view(const View& view, DType dtype, const Shape& shape, const char* what) {
  check_strided_view(view, dtype, shape, what);
  TESSERA_CHECK(view.contiguous(), "{} {} has rows {} elements apart, wanted contiguous", what, shape.to_string(),
                view.row_stride());
}

}  // namespace tessera
