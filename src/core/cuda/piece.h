// Eight neighbouring elements of a row as they are stored: half the registers of their float32 values where T is bf16.
#pragma once

#include "core/cuda/kernel.h"

namespace tessera::cuda {

template <class T>
struct Piece {
  uint4 raw[sizeof(T) / 2] = {};

  __device__ T* elements() { return reinterpret_cast<T*>(raw); }
  __device__ const T* elements() const { return reinterpret_cast<const T*>(raw); }
  __device__ void convert(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(elements()[i]);
  }
};

// Aligned to 16 bytes; zeros where it is not present.
template <class T>
__device__ Piece<T> load_piece(const T* p, bool present) {
  Piece<T> piece;
  if (!present) return piece;
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / 2; ++i) piece.raw[i] = reinterpret_cast<const uint4*>(p)[i];
  return piece;
}
// As load8(): elements at and past `count` are 0; `whole`: the aligned form may be used where count is 8 or more.
template <class T>
__device__ Piece<T> load_piece(const T* p, int64_t count, bool whole) {
  if (whole && (count >= 8 || count <= 0)) return load_piece(p, count > 0);
  Piece<T> piece;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) piece.elements()[i] = p[i];
  }
  return piece;
}

template <class T>
__device__ void store_piece(const Piece<T>& piece, T* p, int64_t count, bool whole) {
  if (whole && count >= 8) {
#pragma unroll
    for (size_t i = 0; i < sizeof(T) / 2; ++i) reinterpret_cast<uint4*>(p)[i] = piece.raw[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) p[i] = piece.elements()[i];
  }
}

}  // namespace tessera::cuda
