// Storage type of FP8 (e4m3): 1 sign bit, 4 exponent bits, 3 mantissa bits.
#pragma once

#include "common.cuh"

namespace {

struct e4m3 {
  uint8_t bits;
};

__device__ __forceinline__ float widen(e4m3 x) {
  uint32_t sign = uint32_t(x.bits >> 7) << 31, magnitude = x.bits & 127;
  if (magnitude == 127) return bits_to_float(sign | 0x7FC00000);
  // Multiples of 2^-9 below 2^-6; then the exponents of float are larger by 120.
  float value = magnitude < 8 ? float(magnitude) * 0.001953125f : bits_to_float((magnitude + (120u << 3)) << 20);
  return bits_to_float(sign | float_to_bits(value));
}

} // namespace
