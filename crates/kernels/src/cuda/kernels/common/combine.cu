// y = a x + b y for operands of any dtype; see crates/kernels/src/muon.rs. A thread computes 8 elements, and
// consecutive threads access consecutive elements.
#include "adamw.cuh"

namespace {

constexpr int EACH = 8;

struct Seed {
  uint32_t seed, first; // of the parameter, and index of the first element in it
};

__device__ __forceinline__ void store(float *y, float value, bool, uint32_t, uint32_t) { *y = value; }
__device__ __forceinline__ void store(bf16 *y, float value, bool at_random, uint32_t seed, uint32_t element) {
  *y = at_random ? random_weight(value, seed, element) : narrow<bf16>(value);
}

} // namespace

#define COMBINE(X, x_name, Y, y_name)                                                                                                          \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                                        \
      combine_##x_name##_##y_name(float a, const X *x, float b, Y *y, long long n, int at_random, const __grid_constant__ Seed seed) {          \
    long long start = (long long)blockIdx.x * THREADS * EACH + threadIdx.x;                                                                     \
    for (int i = 0; i < EACH; i++) {                                                                                                           \
      long long at = start + i * THREADS;                                                                                                      \
      if (at >= n) continue;                                                                                                                  \
      float kept = b == 0 ? 0 : b * widen(y[at]); /* a value that is not finite does not stay */                                              \
      store(y + at, fmaf(a, widen(x[at]), kept), at_random != 0, seed.seed, seed.first + uint32_t(at));                                       \
    }                                                                                                                                          \
  }                                                                                                                                            \
  EXPORT(combine_##x_name##_##y_name)

COMBINE(float, f32, float, f32)
COMBINE(float, f32, bf16, bf16)
COMBINE(bf16, bf16, float, f32)
COMBINE(bf16, bf16, bf16, bf16)
