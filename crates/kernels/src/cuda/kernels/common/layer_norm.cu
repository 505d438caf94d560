// Layer norm with bias; see crates/kernels/src/layer_norm.rs for the contract.
//
// As in rms_norm.cu, rows are held in registers, so the variance is computed about the mean without
// a second read, and all three kernels are bound by memory bandwidth. Each group of a backward
// block writes partial sums of the weight and bias gradients.
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
  EXPORT(layer_norm_backward_##name)

LAYER_NORM(float, 4, 768, f32)
LAYER_NORM(bf16, 8, 768, bf16)
LAYER_NORM(float, 1, 512, single_f32)
LAYER_NORM(bf16, 1, 512, single_bf16)
