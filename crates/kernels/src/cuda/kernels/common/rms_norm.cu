// Root-mean-square norm; see crates/kernels/src/rms_norm.rs for the contract.
//
// A group of warps holds a row in registers (held_rows.cuh), so each operand is read once and all
// three kernels are bound by memory bandwidth. A backward block iterates over rows, and each group
// keeps its partial weight gradient in registers; `columns.cu` adds the partial sums in the order
// of the groups.
#include "held_rows.cuh"

namespace {

template <class T, int E>
__device__ __forceinline__ void apply_row(const Held<T, E, FORWARD> &x, float rstd, const T *w, T *y, int d, const Group &group, int added) {
  Held<T, E, FORWARD> weight;
  weight.load(w, d, group, true);
  store_row<E, FORWARD>(y, d, group, [&](int i) { return scaled<T>(x.get(i) * rstd, weight.get(i), added); });
}

template <class T, int E> __device__ __forceinline__ void forward(const T *x, const T *w, T *y, float *rstd, int n, int d, int warps, int added, float eps) {
  Group group(warps);
  int row = int(blockIdx.x) * group.count + group.number;
  Held<T, E, FORWARD> held;
  held.load(x + size_t(row) * d, d, group, row < n);
  float scale = inverse_rms(held, rstd, row, row < n, d, group, eps);
  if (row >= n) return;
  apply_row<T, E>(held, scale, w, y + size_t(row) * d, d, group, added);
}

template <class T, int E> __device__ __forceinline__ void apply(const T *x, const float *rstd, const T *w, T *y, int n, int d, int warps, int added) {
  Group group(warps);
  int row = int(blockIdx.x) * group.count + group.number;
  if (row >= n) return;
  Held<T, E, FORWARD> held;
  held.load(x + size_t(row) * d, d, group, true);
  apply_row<T, E>(held, rstd[row], w, y + size_t(row) * d, d, group, added);
}

template <class T, int E>
__device__ __forceinline__ void backward(const T *x, const float *rstd, const T *w, const T *dy, const T *residual, T *dx, float *dw_shares, int n, int d, int warps, int added) {
  Group group(warps);
  Held<T, E, BACKWARD> weight;
  weight.load(w, d, group, true);
  float shares[BACKWARD] = {};
  for_rows(n, group, [&](int row, bool valid, int turn) {
    size_t start = size_t(row) * d;
    Held<T, E, BACKWARD> x_row, dy_row, kept;
    x_row.load(x + start, d, group, valid);
    dy_row.load(dy + start, d, group, valid);
    kept.load(residual + start, d, group, valid && residual);
    float scale = valid ? rstd[row] : 0, product[1] = {0};
#pragma unroll
    for (int i = 0; i < BACKWARD; i++) {
      float both = x_row.get(i) * dy_row.get(i);
      product[0] += both * (weight.get(i) + added);
      shares[i] += both * scale;
    }
    group_sum(product, group, turn);
    float c = product[0] * scale * scale * scale / float(d);
    if (valid) {
      store_row<E, BACKWARD>(dx + start, d, group, [&](int i) { return dy_row.get(i) * (weight.get(i) + added) * scale - x_row.get(i) * c + kept.get(i); });
    }
  });
  if (dw_shares) store_row<E, BACKWARD>(share_of(dw_shares, d, group), d, group, [&](int i) { return shares[i]; });
}

} // namespace

// `bound`: maximum number of threads of a backward block, so that registers do not spill and 1,024
// threads fit on a multiprocessor.
#define RMS_NORM(T, E, bound, name)                                                                                                               \
  extern "C" __global__ void __launch_bounds__(512) rms_norm_##name(const T *x, const T *w, T *y, float *rstd, int n, int d, int warps, int added, float eps) { \
    forward<T, E>(x, w, y, rstd, n, d, warps, added, eps);                                                                                        \
  }                                                                                                                                        \
  EXPORT(rms_norm_##name)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(512) rms_norm_apply_##name(const T *x, const float *rstd, const T *w, T *y, int n, int d, int warps, int added) { \
    apply<T, E>(x, rstd, w, y, n, d, warps, added);                                                                                               \
  }                                                                                                                                        \
  EXPORT(rms_norm_apply_##name)                                                                                                            \
  extern "C" __global__ void __launch_bounds__(bound) rms_norm_backward_##name(                                                              \
      const T *x, const float *rstd, const T *w, const T *dy, const T *residual, T *dx, float *dw_shares, int n, int d, int warps, int added) { \
    backward<T, E>(x, rstd, w, dy, residual, dx, dw_shares, n, d, warps, added);                                                                  \
  }                                                                                                                                        \
  EXPORT(rms_norm_backward_##name)

RMS_NORM(float, 4, 1024, f32)
RMS_NORM(bf16, 8, 1024, bf16)
RMS_NORM(float, 1, 512, single_f32)
RMS_NORM(bf16, 1, 512, single_bf16)
