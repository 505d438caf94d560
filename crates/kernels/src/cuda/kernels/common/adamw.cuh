// What the kernels of AdamW share: see adamw.cu.
#pragma once
#include "common.cuh"

namespace {

constexpr int CHUNK = 1 << 16;
constexpr int THREADS = 256;

// Scalars of an update that are the same for all tensors.
struct Scalars {
  float lerp, beta2, one_minus_beta2, inverse_root_correction2, eps;
};

struct Element {
  float weight, exp_avg, exp_avg_sq;
};

__device__ __forceinline__ void update(Element &e, float grad, const Scalars &s, float keep, float step_size) {
  float decayed = e.weight * keep;
  e.exp_avg = fmaf(s.lerp, grad - e.exp_avg, e.exp_avg);
  e.exp_avg_sq = e.exp_avg_sq * s.beta2 + s.one_minus_beta2 * grad * grad;
  float denominator = sqrtf(e.exp_avg_sq) * s.inverse_root_correction2 + s.eps;
  e.weight = decayed - __fdividef(step_size * e.exp_avg, denominator);
}

// Stochastic rounding to one of the two neighbours of x; `random` is uniform in 16 bits. Not a number
// stays so: the sum would make a zero of 0x7FFFFFFF.
__device__ __forceinline__ bf16 round_at_random(float x, uint32_t random) {
  uint32_t bits = float_to_bits(x);
  bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return bf16{uint16_t(is_nan ? bits >> 16 | 0x40u : (bits + random) >> 16)};
}

// A weight rounded at random; `element` is its index in the parameter.
__device__ __forceinline__ bf16 random_weight(float x, uint32_t seed, uint32_t element) { return round_at_random(x, mix(mix(seed ^ element)) & 0xFFFFu); }

// The address of element `at` of a list, or null if there is none. nvcc 12.4 does not see the state space of a
// pointer that is chosen between an address and a null.
template <class T> __device__ __forceinline__ T *element(T *list, long long at) { return list + (list ? at : 0); }

// A weight in f32, which is `copy` if `weight` is null.
__device__ __forceinline__ float load_weight(const float *weight, const bf16 *copy, int at) { return weight ? weight[at] : widen(copy[at]); }

__device__ __forceinline__ void store_weight(float *weight, bf16 *copy, int at, float x, uint32_t seed, uint32_t element) {
  if (!weight) {
    copy[at] = random_weight(x, seed, element);
    return;
  }
  weight[at] = x;
  if (copy) copy[at] = narrow<bf16>(x);
}

} // namespace
