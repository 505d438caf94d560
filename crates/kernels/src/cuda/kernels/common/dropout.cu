// Dropout with a mask from seed, row and column; see crates/kernels/src/dropout.rs.
//
// A thread has one chunk of 16 bytes, or one element if rows are not aligned. A chunk is in one row. The
// halves of a random number decide on two columns that are 16 apart.
#include "chunks.cuh"

namespace {

// x and y are [n / width, width].
template <int E, bool ADD, class T>
__device__ __forceinline__ void drop(const T *x, T *y, int width, long long n, long long seed, long long first_row, long long threshold, float scale) {
  long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * E;
  if (at >= n) return;
  long long row = at / width;
  uint32_t column = uint32_t(at - row * width), row_seed = mix(uint32_t(seed) ^ (uint32_t(first_row) + uint32_t(row)));
  Chunk<T, E> from = load_chunk<E>(x + at), old;
  if constexpr (ADD) old = load_chunk<E>(y + at);
  float result[E];
#pragma unroll
  for (int i = 0; i < E; i++) {
    uint32_t c = column + i, number = c / 32 * 16 + c % 16;
    uint32_t random = mix(row_seed ^ number) >> (c & 16) & 0xffff;
    float kept = random < uint32_t(threshold) ? 0.0f : from.get(i) * scale;
    if constexpr (ADD) result[i] = old.get(i) + kept;
    else result[i] = kept;
  }
  store_floats<E>(y + at, result);
}

} // namespace

#define DROPOUT(op, ADD, T, E, name)                                                                                          \
  extern "C" __global__ void __launch_bounds__(256) op##_##name(const T *x, T *y, int width, long long n, long long seed,     \
                                                                long long first_row, long long threshold, float scale) {      \
    drop<E, ADD>(x, y, width, n, seed, first_row, threshold, scale);                                                          \
  }                                                                                                                           \
  EXPORT(op##_##name)

DROPOUT(dropout, false, float, 4, f32)
DROPOUT(dropout, false, bf16, 8, bf16)
DROPOUT(dropout, false, float, 1, single_f32)
DROPOUT(dropout, false, bf16, 1, single_bf16)
DROPOUT(dropout_add, true, float, 4, f32)
DROPOUT(dropout_add, true, bf16, 8, bf16)
DROPOUT(dropout_add, true, float, 1, single_f32)
DROPOUT(dropout_add, true, bf16, 1, single_bf16)
