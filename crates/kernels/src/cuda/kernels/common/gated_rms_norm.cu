// Root-mean-square norm with an output gate; see crates/kernels/src/gated_rms_norm.rs for the contract.
//
// Like rms_norm.cu: a group of warps holds a row in registers, each operand is read once, and both
// kernels are bound by memory bandwidth.
#include "held_rows.cuh"

namespace {

template <class T, int E>
__device__ __forceinline__ void forward(const T *x, const T *z, const T *w, T *y, float *rstd, int n, int d, int warps, float eps) {
  Group group(warps);
  int row = int(blockIdx.x) * group.count + group.number;
  size_t start = size_t(row) * d;
  Held<T, E, FORWARD> held, gate, weight;
  held.load(x + start, d, group, row < n);
  gate.load(z + start, d, group, row < n);
  weight.load(w, d, group, true);
  float scale = inverse_rms(held, rstd, row, row < n, d, group, eps);
  if (row >= n) return;
  store_row<E, FORWARD>(y + start, d, group, [&](int i) {
    float g = gate.get(i);
    return weight.get(i) * rounded<T>(held.get(i) * scale) * (g * sigmoid(g));
  });
}

template <class T, int E>
__device__ __forceinline__ void backward(const T *x, const T *z, const float *rstd, const T *w, const T *dy, T *dx, T *dz, float *dw_shares, int n, int d, int warps) {
  Group group(warps);
  Held<T, E, BACKWARD> weight;
  weight.load(w, d, group, true);
  float shares[BACKWARD] = {};
  for_rows(n, group, [&](int row, bool valid, int turn) {
    size_t start = size_t(row) * d;
    Held<T, E, BACKWARD> x_row, z_row, dy_row;
    x_row.load(x + start, d, group, valid);
    z_row.load(z + start, d, group, valid);
    dy_row.load(dy + start, d, group, valid);
    float scale = valid ? rstd[row] : 0, product[1] = {0};
    float dn[BACKWARD], dgate[BACKWARD]; // gradients of the norm and of the gate
#pragma unroll
    for (int i = 0; i < BACKWARD; i++) {
      float g = z_row.get(i), s = sigmoid(g), silu = g * s, normed = x_row.get(i) * scale;
      dn[i] = dy_row.get(i) * silu;
      dgate[i] = weight.get(i) * rounded<T>(normed) * (dy_row.get(i) * (s + silu * (1.0f - s)));
      shares[i] += dn[i] * normed;
      dn[i] *= weight.get(i);
      product[0] += dn[i] * x_row.get(i);
    }
    group_sum(product, group, turn);
    float c = product[0] * scale * scale * scale / float(d);
    if (!valid) return;
    store_row<E, BACKWARD>(dx + start, d, group, [&](int i) { return dn[i] * scale - x_row.get(i) * c; });
    store_row<E, BACKWARD>(dz + start, d, group, [&](int i) { return dgate[i]; });
  });
  if (dw_shares) store_row<E, BACKWARD>(share_of(dw_shares, d, group), d, group, [&](int i) { return shares[i]; });
}

} // namespace

// `bound`: maximum number of threads of a backward block, so that registers do not spill.
#define GATED_RMS_NORM(T, E, bound, name)                                                                                          \
  extern "C" __global__ void __launch_bounds__(512)                                                                                \
      gated_rms_norm_##name(const T *x, const T *z, const T *w, T *y, float *rstd, int n, int d, int warps, float eps) {             \
    forward<T, E>(x, z, w, y, rstd, n, d, warps, eps);                                                                             \
  }                                                                                                                                \
  EXPORT(gated_rms_norm_##name)                                                                                                    \
  extern "C" __global__ void __launch_bounds__(bound) gated_rms_norm_backward_##name(                                              \
      const T *x, const T *z, const float *rstd, const T *w, const T *dy, T *dx, T *dz, float *dw_shares, int n, int d, int warps) { \
    backward<T, E>(x, z, rstd, w, dy, dx, dz, dw_shares, n, d, warps);                                                             \
  }                                                                                                                                \
  EXPORT(gated_rms_norm_backward_##name)

GATED_RMS_NORM(float, 4, 768, f32)
GATED_RMS_NORM(bf16, 8, 768, bf16)
GATED_RMS_NORM(float, 1, 512, single_f32)
GATED_RMS_NORM(bf16, 1, 512, single_bf16)
