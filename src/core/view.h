// A view: where a tensor lies, its type and its shape. Owns nothing; storage belongs to an Arena or to the caller.
//
// Row-major, last index fastest. The outermost index may step by more than the product of the inner extents
// (`row_stride`, in elements), so that a column range of a matrix is a view too; everything inside is contiguous.
// On device `dry` a view has a shape and no storage (data == nullptr). A default-constructed view is "absent".
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>

#include "core/dtype.h"

namespace tessera {

enum class Memory : uint8_t { host, gpu };

class Shape {
 public:
  static constexpr int kMaxRank = 5;
  Shape() = default;
  Shape(std::initializer_list<int64_t> extents) : Shape(std::span<const int64_t>(extents.begin(), extents.size())) {}
  explicit Shape(std::span<const int64_t> extents);

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return extents_[static_cast<size_t>(i)]; }
  int64_t elements() const;
  bool operator==(const Shape& other) const;
  std::string to_string() const;  // "(T, D)" with numbers
  const int64_t* begin() const { return extents_.data(); }
  const int64_t* end() const { return extents_.data() + rank_; }

 private:
  std::array<int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

class View {
 public:
  View() = default;
  View(void* data, DType dtype, Shape shape, Memory memory = Memory::host);

  bool present() const { return dtype_ != DType::none; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  int64_t dim(int i) const { return shape_[i]; }
  int64_t elements() const { return present() ? shape_.elements() : 0; }
  int64_t bytes() const { return elements() * bytes_of(dtype_); }

  // Seen as a matrix: rows() along the outermost index, row_elements() in each, row_stride() elements apart.
  int64_t rows() const { return rank() == 0 ? 1 : shape_[0]; }
  int64_t row_elements() const;
  int64_t row_stride() const { return row_stride_; }
  bool contiguous() const { return row_stride_ == row_elements() || rows() <= 1; }

  void* data() const { return data_; }
  Memory memory() const { return memory_; }
  template <class T>
  T* as() const {  // on the host
    return pointer<T>(Memory::host);
  }
  template <class T>
  T* gpu() const {  // for kernels
    return pointer<T>(Memory::gpu);
  }

  View reshaped(Shape shape) const;                       // same elements, contiguous views only
  View row_range(int64_t begin, int64_t count) const;     // rows [begin, begin + count) of the outermost index
  View column_range(int64_t begin, int64_t count) const;  // columns of a rank-2 view; the row stride stays
  View at(int64_t index) const;                           // one slice of the outermost index, one rank less
  void zero() const;                                      // nothing on `dry`; in the stream's order on the GPU

 private:
  template <class T>
  T* pointer(Memory wanted) const {
    TESSERA_CHECK(dtype_of<T> == dtype_, "view of {} read as {}", name_of(dtype_), name_of(dtype_of<T>));
    TESSERA_CHECK(memory_ == wanted || data_ == nullptr, "view {} lies in {} memory", shape_.to_string(),
                  memory_ == Memory::gpu ? "GPU" : "host");
    return static_cast<T*>(data_);
  }

  void* data_ = nullptr;
  Memory memory_ = Memory::host;
  DType dtype_ = DType::none;
  Shape shape_;
  int64_t row_stride_ = 0;
};

// Same type and shape, any row strides, either memory. To or from the host it returns when the bytes have arrived;
// inside the GPU it takes its turn in the stream.
void copy(const View& from, const View& to);

// Checks type and shape of an argument once, at the public function of an op. `what` names the argument.
void check_view(const View& view, DType dtype, const Shape& shape, const char* what);          // contiguous
void check_strided_view(const View& view, DType dtype, const Shape& shape, const char* what);  // any row stride

}  // namespace tessera
