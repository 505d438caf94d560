// Layer norm with bias; see crates/kernels/src/layer_norm.rs for the contract.
//
// As in rms_norm.cu, rows are held in registers, so the variance is computed about the mean without
// a second read, and the kernels are bound by memory bandwidth. Each group of a backward
// block writes partial sums of the weight and bias gradients. The `wide` kernels are for rows that
// the registers of a block cannot hold: they read a row again from the cache.
#include "held_rows.cuh"

namespace {

template <class T, int E>
__device__ __forceinline__ void apply_row(const Held<T, E, FORWARD> &x, float mean, float rstd, const T *w, const T *b, T *y, int d, const Group &group) {
  Held<T, E, FORWARD> weight, bias;
  weight.load(w, d, group, true);
  bias.load(b, d, group, true);
  store_row<E, FORWARD>(y, d, group, [&](int i) { return (x.get(i) - mean) * rstd * weight.get(i) + bias.get(i); });
}

template <class T, int E>
__device__ __forceinline__ void forward(const T *x, const T *w, const T *b, T *y, float *stats, int n, int d, int warps, float eps) {
  Group group(warps);
  int row = int(blockIdx.x) * group.count + group.number;
  Held<T, E, FORWARD> held;
  held.load(x + size_t(row) * d, d, group, row < n);
  float sum[1] = {0}, squares[1] = {0};
#pragma unroll
  for (int i = 0; i < FORWARD; i++) sum[0] += held.get(i);
  group_sum(sum, group, 0);
  float mean = sum[0] / float(d);
  for_chunks<E, FORWARD>(d, group, [&](int, int first) {
#pragma unroll
    for (int i = 0; i < E; i++) {
      float off = held.get(first + i) - mean;
      squares[0] += off * off;
    }
  });
  group_sum(squares, group, 1);
  if (row >= n) return;
  float rstd = rsqrtf(squares[0] / float(d) + eps);
  if (group.index == 0) {
    stats[2 * size_t(row)] = mean;
    stats[2 * size_t(row) + 1] = rstd;
  }
  apply_row<T, E>(held, mean, rstd, w, b, y + size_t(row) * d, d, group);
}

template <class T, int E>
__device__ __forceinline__ void apply(const T *x, const float *stats, const T *w, const T *b, T *y, int n, int d, int warps) {
  Group group(warps);
  int row = int(blockIdx.x) * group.count + group.number;
  if (row >= n) return;
  Held<T, E, FORWARD> held;
  held.load(x + size_t(row) * d, d, group, true);
  apply_row<T, E>(held, stats[2 * size_t(row)], stats[2 * size_t(row) + 1], w, b, y + size_t(row) * d, d, group);
}

// With g = w dy and h the normalized row: dx = rstd (g - mean(g) - h mean(g h)).
template <class T, int E>
__device__ __forceinline__ void backward(const T *x, const float *stats, const T *w, const T *dy, const T *residual, T *dx, float *dw_shares, float *db_shares, int n,
                                         int d, int warps) {
  Group group(warps);
  Held<T, E, BACKWARD> weight;
  weight.load(w, d, group, true);
  float dw[BACKWARD] = {}, db[BACKWARD] = {};
  for_rows(n, group, [&](int row, bool valid, int turn) {
    size_t start = size_t(row) * d;
    Held<T, E, BACKWARD> x_row, dy_row, kept;
    x_row.load(x + start, d, group, valid);
    dy_row.load(dy + start, d, group, valid);
    kept.load(residual + start, d, group, valid && residual);
    float mean = valid ? stats[2 * size_t(row)] : 0, rstd = valid ? stats[2 * size_t(row) + 1] : 0;
    float sums[2] = {0, 0}; // of g and of g h
#pragma unroll
    for (int i = 0; i < BACKWARD; i++) {
      // Columns beyond the row have dy = 0, so they add nothing.
      float h = (x_row.get(i) - mean) * rstd, g = dy_row.get(i) * weight.get(i);
      sums[0] += g;
      sums[1] += g * h;
      dw[i] += dy_row.get(i) * h;
      db[i] += dy_row.get(i);
    }
    group_sum(sums, group, turn);
    float g_mean = sums[0] / float(d), gh_mean = sums[1] / float(d);
    if (valid) {
      store_row<E, BACKWARD>(dx + start, d, group, [&](int i) {
        float h = (x_row.get(i) - mean) * rstd;
        return rstd * (dy_row.get(i) * weight.get(i) - g_mean - h * gh_mean) + kept.get(i);
      });
    }
  });
  if (dw_shares) store_row<E, BACKWARD>(share_of(dw_shares, d, group), d, group, [&](int i) { return dw[i]; });
  if (db_shares) store_row<E, BACKWARD>(share_of(db_shares, d, group), d, group, [&](int i) { return db[i]; });
}

// Calls f(column) for the first column of each chunk of this thread in a row of any width.
template <int E, class F> __device__ __forceinline__ void for_wide(int d, const Group &group, F f) {
  for (int at = group.index * E; at < d; at += group.threads * E) f(at);
}

template <class T, int E> __device__ __forceinline__ void apply_wide(const T *x, float mean, float rstd, const T *w, const T *b, T *y, int d, const Group &group) {
  for_wide<E>(d, group, [&](int at) {
    Chunk<T, E> row = load_chunk<E>(x + at), weight = load_chunk<E>(w + at), bias = load_chunk<E>(b + at);
    float values[E];
#pragma unroll
    for (int i = 0; i < E; i++) values[i] = (row.get(i) - mean) * rstd * weight.get(i) + bias.get(i);
    store_floats<E>(y + at, values);
  });
}

template <class T, int E> __device__ __forceinline__ void forward_wide(const T *x, const T *w, const T *b, T *y, float *stats, int d, int warps, float eps) {
  Group group(warps);
  size_t row = blockIdx.x, start = row * d;
  float sum[1] = {0}, squares[1] = {0};
  for_wide<E>(d, group, [&](int at) {
    Chunk<T, E> values = load_chunk<E>(x + start + at);
#pragma unroll
    for (int i = 0; i < E; i++) sum[0] += values.get(i);
  });
  group_sum(sum, group, 0);
  float mean = sum[0] / float(d);
  for_wide<E>(d, group, [&](int at) {
    Chunk<T, E> values = load_chunk<E>(x + start + at);
#pragma unroll
    for (int i = 0; i < E; i++) squares[0] += (values.get(i) - mean) * (values.get(i) - mean);
  });
  group_sum(squares, group, 1);
  float rstd = rsqrtf(squares[0] / float(d) + eps);
  if (group.index == 0) {
    stats[2 * row] = mean;
    stats[2 * row + 1] = rstd;
  }
  apply_wide<T, E>(x + start, mean, rstd, w, b, y + start, d, group);
}

// A block adds the products of its rows to its own partial sums in memory.
template <class T, int E>
__device__ __forceinline__ void backward_wide(const T *x, const float *stats, const T *w, const T *dy, const T *residual, T *dx, float *dw_shares, float *db_shares, int n,
                                              int d, int warps) {
  Group group(warps);
  float *dw = dw_shares ? share_of(dw_shares, d, group) : nullptr, *db = db_shares ? share_of(db_shares, d, group) : nullptr;
  for_rows(n, group, [&](int row, bool, int turn) {
    size_t start = size_t(row) * d;
    float mean = stats[2 * size_t(row)], rstd = stats[2 * size_t(row) + 1];
    float sums[2] = {0, 0}; // of g and of g h
    for_wide<E>(d, group, [&](int at) {
      Chunk<T, E> x_row = load_chunk<E>(x + start + at), dy_row = load_chunk<E>(dy + start + at), weight = load_chunk<E>(w + at);
#pragma unroll
      for (int i = 0; i < E; i++) {
        float h = (x_row.get(i) - mean) * rstd, g = dy_row.get(i) * weight.get(i);
        sums[0] += g;
        sums[1] += g * h;
        if (dw) dw[at + i] = (turn ? dw[at + i] : 0) + dy_row.get(i) * h;
        if (db) db[at + i] = (turn ? db[at + i] : 0) + dy_row.get(i);
      }
    });
    group_sum(sums, group, turn);
    float g_mean = sums[0] / float(d), gh_mean = sums[1] / float(d);
    for_wide<E>(d, group, [&](int at) {
      Chunk<T, E> x_row = load_chunk<E>(x + start + at), dy_row = load_chunk<E>(dy + start + at), weight = load_chunk<E>(w + at);
      Chunk<T, E> kept = residual ? load_chunk<E>(residual + start + at) : no_chunk<T, E>();
      float values[E];
#pragma unroll
      for (int i = 0; i < E; i++) {
        float h = (x_row.get(i) - mean) * rstd;
        values[i] = rstd * (dy_row.get(i) * weight.get(i) - g_mean - h * gh_mean) + kept.get(i);
      }
      store_floats<E>(dx + start + at, values);
    });
  });
}

} // namespace

// `bound`: maximum number of threads of a backward block that avoids register spills.
#define LAYER_NORM(T, E, bound, name)                                                                                                           \
  extern "C" __global__ void __launch_bounds__(512)                                                                                      \
      layer_norm_##name(const T *x, const T *w, const T *b, T *y, float *stats, int n, int d, int warps, float eps) {                    \
    forward<T, E>(x, w, b, y, stats, n, d, warps, eps);                                                                                  \
  }                                                                                                                                      \
  EXPORT(layer_norm_##name)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(512)                                                                                      \
      layer_norm_apply_##name(const T *x, const float *stats, const T *w, const T *b, T *y, int n, int d, int warps) {                   \
    apply<T, E>(x, stats, w, b, y, n, d, warps);                                                                                         \
  }                                                                                                                                      \
  EXPORT(layer_norm_apply_##name)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(bound)                                                                                      \
      layer_norm_backward_##name(const T *x, const float *stats, const T *w, const T *dy, const T *residual, T *dx, float *dw_shares, float *db_shares, int n, \
                                 int d, int warps) {                                                                                     \
    backward<T, E>(x, stats, w, dy, residual, dx, dw_shares, db_shares, n, d, warps);                                                    \
  }                                                                                                                                      \
  EXPORT(layer_norm_backward_##name)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(512)                                                                                      \
      layer_norm_wide_##name(const T *x, const T *w, const T *b, T *y, float *stats, int, int d, int warps, float eps) {                 \
    forward_wide<T, E>(x, w, b, y, stats, d, warps, eps);                                                                                \
  }                                                                                                                                      \
  EXPORT(layer_norm_wide_##name)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(512)                                                                                      \
      layer_norm_apply_wide_##name(const T *x, const float *stats, const T *w, const T *b, T *y, int, int d, int warps) {                \
    size_t row = blockIdx.x, start = row * d;                                                                                            \
    apply_wide<T, E>(x + start, stats[2 * row], stats[2 * row + 1], w, b, y + start, d, Group(warps));                                   \
  }                                                                                                                                      \
  EXPORT(layer_norm_apply_wide_##name)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                                                      \
      layer_norm_backward_wide_##name(const T *x, const float *stats, const T *w, const T *dy, const T *residual, T *dx, float *dw_shares, float *db_shares, int n, \
                                      int d, int warps) {                                                                                \
    backward_wide<T, E>(x, stats, w, dy, residual, dx, dw_shares, db_shares, n, d, warps);                                               \
  }                                                                                                                                      \
  EXPORT(layer_norm_backward_wide_##name)

LAYER_NORM(float, 4, 768, f32)
LAYER_NORM(bf16, 8, 768, bf16)
LAYER_NORM(float, 1, 512, single_f32)
LAYER_NORM(bf16, 1, 512, single_bf16)
