// Element types. The CPU back end computes in float32 (runs) or float64 (proofs); CUDA stores activations and working
// copies of matrices in bf16 and accumulates in float32.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "core/error.h"

namespace tessera {

enum class DType : uint8_t { none, f32, f64, bf16, i32, i64, u8 };

constexpr int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::none: return 0;
    case DType::u8: return 1;
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f64:
    case DType::i64: return 8;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::none: return "none";
    case DType::f32: return "f32";
    case DType::f64: return "f64";
    case DType::bf16: return "bf16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::u8: return "u8";
  }
  return "?";
}

// The type beside activations of `dtype` that holds what bf16 would spoil: statistics, routing weights, gains and gate
// constants, the recurrent state, gradients of parameters, losses.
constexpr DType exact_type(DType dtype) { return dtype == DType::bf16 ? DType::f32 : dtype; }

// bfloat16 as its bits: the upper half of a float32. Conversion to it rounds to nearest, ties to even.
struct bf16 {
  uint16_t bits;
  bf16() = default;
  explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? uint16_t((u >> 16) | 0x40u) : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

template <class T>
constexpr DType dtype_of = DType::none;
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<int64_t> = DType::i64;
template <>
inline constexpr DType dtype_of<uint8_t> = DType::u8;

// Calls f with a value of the C++ type of `dtype`: the one place where a run-time type becomes a template parameter.
template <class F>
void dispatch_real(DType dtype, F&& f) {
  if (dtype == DType::f32) return f(float{});
  if (dtype == DType::f64) return f(double{});
  throw Error(fmt::format("the CPU back end computes in f32 or f64, found {}", name_of(dtype)));
}

}  // namespace tessera
