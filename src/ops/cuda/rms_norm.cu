// Root-mean-square norm; see src/ops/rms_norm.rs for the contract.
//
// One block a row at a time. Backward blocks walk the rows in strides and keep their share of the weight's gradient in
// shared memory, each thread its own columns; `columns.cu` adds the shares up in the order of the blocks.
#include "common.cuh"

namespace {

// Calls f(column, number of columns from there) for the columns of this thread: vectors if the rows allow it.
template <class T, class F> __device__ __forceinline__ void for_columns(int d, bool vectors, F f) {
  if (vectors) {
    for (int at = int(threadIdx.x) * VECTOR<T>; at < d; at += int(blockDim.x) * VECTOR<T>) f(at, VECTOR<T>);
  } else {
    for (int at = int(threadIdx.x); at < d; at += int(blockDim.x)) f(at, 1);
  }
}

// Reads `count` columns, VECTOR<T> or one.
template <class T> __device__ __forceinline__ void load(const T *row, int at, int count, float *to) {
  if (count == 1) to[0] = widen(row[at]);
  else load_vector(row + at, to);
}

template <class T> __device__ __forceinline__ void store(T *row, int at, int count, const float *from) {
  if (count == 1) row[at] = narrow<T>(from[0]);
  else store_vector(row + at, from);
}

template <class T> __device__ void apply_row(const T *x, float rstd, const T *w, T *y, int d, bool vectors) {
  for_columns<T>(d, vectors, [&](int at, int count) {
    float a[VECTOR<T>], b[VECTOR<T>];
    load(x, at, count, a);
    load(w, at, count, b);
    for (int i = 0; i < count; i++) a[i] = b[i] * rounded<T>(a[i] * rstd);
    store(y, at, count, a);
  });
}

template <class T> __device__ void forward(const T *x, const T *w, T *y, float *rstd, int d, float eps, bool vectors) {
  size_t row = blockIdx.x;
  x += row * d;
  y += row * d;
  float squares = 0;
  for_columns<T>(d, vectors, [&](int at, int count) {
    float a[VECTOR<T>];
    load(x, at, count, a);
    for (int i = 0; i < count; i++) squares += a[i] * a[i];
  });
  float scale = rsqrtf(block_sum(squares) / float(d) + eps);
  if (threadIdx.x == 0) rstd[row] = scale;
  apply_row(x, scale, w, y, d, vectors);
}

template <class T>
__device__ void backward(const T *x, const float *rstd, const T *w, const T *dy, const T *residual, T *dx, float *dw_shares, int n, int d, bool vectors) {
  DYNAMIC_SHARED(shared);
  float *share = reinterpret_cast<float *>(shared); // [d]
  for (int at = int(threadIdx.x); at < d; at += int(blockDim.x)) share[at] = 0;
  __syncthreads();
  for (int row = int(blockIdx.x); row < n; row += int(gridDim.x)) {
    const T *x_row = x + size_t(row) * d, *dy_row = dy + size_t(row) * d;
    float scale = rstd[row], product = 0;
    for_columns<T>(d, vectors, [&](int at, int count) {
      float a[VECTOR<T>], b[VECTOR<T>], c[VECTOR<T>];
      load(x_row, at, count, a);
      load(dy_row, at, count, b);
      load(w, at, count, c);
      for (int i = 0; i < count; i++) {
        product += a[i] * b[i] * c[i];
        share[at + i] += a[i] * b[i] * scale;
      }
    });
    float c = block_sum(product) * scale * scale * scale / float(d);
    for_columns<T>(d, vectors, [&](int at, int count) {
      float a[VECTOR<T>], b[VECTOR<T>], g[VECTOR<T>], r[VECTOR<T>];
      load(x_row, at, count, a);
      load(dy_row, at, count, b);
      load(w, at, count, g);
      if (residual) load(residual + size_t(row) * d, at, count, r);
      for (int i = 0; i < count; i++) a[i] = b[i] * g[i] * scale - a[i] * c + (residual ? r[i] : 0.0f);
      store(dx + size_t(row) * d, at, count, a);
    });
  }
  if (!dw_shares) return;
  __syncthreads();
  for (int at = int(threadIdx.x); at < d; at += int(blockDim.x)) dw_shares[size_t(blockIdx.x) * d + at] = share[at];
}

} // namespace

#define RMS_NORM(T, name)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) rms_norm_##name(const T *x, const T *w, T *y, float *rstd, int d, float eps, int vectors) {  \
    forward(x, w, y, rstd, d, eps, vectors);                                                                                           \
  }                                                                                                                                    \
  EXPORT(rms_norm_##name)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) rms_norm_apply_##name(const T *x, const float *rstd, const T *w, T *y, int d, int vectors) { \
    size_t row = blockIdx.x;                                                                                                           \
    apply_row(x + row * d, rstd[row], w, y + row * d, d, vectors);                                                                     \
  }                                                                                                                                    \
  EXPORT(rms_norm_apply_##name)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256)                                                                                    \
      rms_norm_backward_##name(const T *x, const float *rstd, const T *w, const T *dy, const T *residual, T *dx, float *dw_shares, int n, int d, int vectors) { \
    backward(x, rstd, w, dy, residual, dx, dw_shares, n, d, vectors);                                                                  \
  }                                                                                                                                    \
  EXPORT(rms_norm_backward_##name)

RMS_NORM(float, f32)
RMS_NORM(bf16, bf16)
