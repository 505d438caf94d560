// Gathering, copying, adding, zeroing and scaling of rows; see crates/kernels/src/{rows,layer_scale}.rs for
// the contracts.
//
// A warp handles a row, 16 bytes per lane, with four accesses in flight: all kernels are bound by
// memory bandwidth. The host rejects rows out of range. Here they leave the tensor unchanged, and a
// gathered one is NaN, which makes the error visible.
#include "chunks.cuh"

namespace {

constexpr int UNDER_WAY = 4;

// Calls f(first column of this lane) for each group of UNDER_WAY chunks of a row.
template <int E, class F> __device__ __forceinline__ void for_columns(int d, F f) {
  for (int start = lane() * E; start < d; start += UNDER_WAY * WARP * E) f(start);
}

// The row number of this warp, and the row of x [t, d] that `rows` gives for it. False if the warp
// has no row.
__device__ __forceinline__ bool named_row(const uint32_t *rows, int m, size_t &row, size_t &named) {
  row = size_t(blockIdx.x) * (blockDim.x / WARP) + size_t(warp());
  if (row >= size_t(m)) return false;
  named = rows[row];
  return true;
}

template <int E, class T> __device__ __forceinline__ void load_some(const T *row, int start, int d, Chunk<T, E> (&chunks)[UNDER_WAY]) {
#pragma unroll
  for (int k = 0; k < UNDER_WAY; k++) {
    int at = start + k * WARP * E;
    if (at < d) chunks[k] = load_chunk<E>(row + at);
  }
}

template <int E, class T> __device__ __forceinline__ void store_some(T *row, int start, int d, const Chunk<T, E> (&chunks)[UNDER_WAY]) {
#pragma unroll
  for (int k = 0; k < UNDER_WAY; k++) {
    int at = start + k * WARP * E;
    if (at < d) store_chunk<E>(row + at, chunks[k]);
  }
}

template <int E, class T> __device__ __forceinline__ void fill(T *row, int d, float value) {
  float values[E];
#pragma unroll
  for (int i = 0; i < E; i++) values[i] = value;
  for (int at = lane() * E; at < d; at += WARP * E) store_floats<E>(row + at, values);
}

template <int E, class T> __device__ __forceinline__ void gather(const T *x, const uint32_t *rows, T *y, int t, int m, int d) {
  size_t row, named;
  if (!named_row(rows, m, row, named)) return;
  if (named >= size_t(t)) return fill<E>(y + row * d, d, NAN);
  for_columns<E>(d, [&](int start) {
    Chunk<T, E> chunks[UNDER_WAY];
    load_some<E>(x + named * d, start, d, chunks);
    store_some<E>(y + row * d, start, d, chunks);
  });
}

template <int E, class T> __device__ __forceinline__ void set(T *x, const uint32_t *rows, const T *src, int t, int m, int d) {
  size_t row, named;
  if (!named_row(rows, m, row, named) || named >= size_t(t)) return;
  for_columns<E>(d, [&](int start) {
    Chunk<T, E> chunks[UNDER_WAY];
    load_some<E>(src + row * d, start, d, chunks);
    store_some<E>(x + named * d, start, d, chunks);
  });
}

template <int E, class T> __device__ __forceinline__ void add_to(T *x, const uint32_t *rows, const T *src, int t, int m, int d) {
  size_t row, named;
  if (!named_row(rows, m, row, named) || named >= size_t(t)) return;
  for_columns<E>(d, [&](int start) {
    Chunk<T, E> sums[UNDER_WAY], added[UNDER_WAY];
    load_some<E>(x + named * d, start, d, sums);
    load_some<E>(src + row * d, start, d, added);
#pragma unroll
    for (int k = 0; k < UNDER_WAY; k++) {
      if (start + k * WARP * E >= d) continue;
      float values[E];
#pragma unroll
      for (int i = 0; i < E; i++) values[i] = sums[k].get(i) + added[k].get(i);
      sums[k].set(values);
    }
    store_some<E>(x + named * d, start, d, sums);
  });
}

template <int E, class T> __device__ __forceinline__ void zero(T *x, const uint32_t *rows, int t, int m, int d) {
  size_t row, named;
  if (!named_row(rows, m, row, named) || named >= size_t(t)) return;
  fill<E>(x + named * d, d, 0);
}

// y = x + scale * f, all [m, d]; without x, y = scale * f.
template <int E, class T> __device__ __forceinline__ void scale_row(const T *f, const T *scale, const T *x, T *y, int m, int d) {
  size_t row = size_t(blockIdx.x) * (blockDim.x / WARP) + size_t(warp());
  if (row >= size_t(m)) return;
  size_t first = row * d;
#pragma unroll 4
  for (int at = lane() * E; at < d; at += WARP * E) {
    Chunk<T, E> values = load_chunk<E>(f + first + at), factors = load_chunk<E>(scale + at);
    Chunk<T, E> added = x ? load_chunk<E>(x + first + at) : no_chunk<T, E>();
    float sums[E];
#pragma unroll
    for (int i = 0; i < E; i++) sums[i] = factors.get(i) * values.get(i) + added.get(i);
    store_floats<E>(y + first + at, sums);
  }
}

} // namespace

#define ROWS(T, E, name)                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 4) gather_rows_##name(const T *x, const uint32_t *rows, T *y, int t, int m, int d) {       \
    gather<E>(x, rows, y, t, m, d);                                                                                                            \
  }                                                                                                                                            \
  EXPORT(gather_rows_##name)                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256, 4) index_copy_##name(T *x, const uint32_t *rows, const T *src, int t, int m, int d) {        \
    set<E>(x, rows, src, t, m, d);                                                                                                             \
  }                                                                                                                                            \
  EXPORT(index_copy_##name)                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256, 4) index_add_##name(T *x, const uint32_t *rows, const T *src, int t, int m, int d) {     \
    add_to<E>(x, rows, src, t, m, d);                                                                                                          \
  }                                                                                                                                            \
  EXPORT(index_add_##name)                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256, 4) zero_rows_##name(T *x, const uint32_t *rows, int t, int m, int d) {                     \
    zero<E>(x, rows, t, m, d);                                                                                                                 \
  }                                                                                                                                            \
  EXPORT(zero_rows_##name)                                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256, 4) layer_scale_##name(const T *f, const T *scale, const T *x, T *y, int m, int d) {        \
    scale_row<E>(f, scale, x, y, m, d);                                                                                                        \
  }                                                                                                                                            \
  EXPORT(layer_scale_##name)

ROWS(float, 4, f32)
ROWS(bf16, 8, bf16)
ROWS(float, 1, single_f32)
ROWS(bf16, 1, single_bf16)
