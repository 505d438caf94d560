// Elementwise ops: swiglu, the sigmoid gate, three gelus, in-place sums and zeros; see
// crates/kernels/src/{swiglu,sigmoid_gate,gelu,rows,adamw}.rs.
//
// A thread has 8 elements in 16-byte chunks and issues all loads before it uses the first one: the
// kernels are bound by memory bandwidth. A block has 2,048 adjacent elements. Tensors may have any
// length; the last chunk is processed element by element.
#include "chunks.cuh"

namespace {

// Number of elements per thread.
constexpr int SHARE = 8;

template <class T, int COUNT> struct Pointers {
  T *at[COUNT];
};

// Computes out[..][i] = f(in[..][i]) for the elements of this thread, out of n. An output may alias
// an input.
template <int E, class T, int IN, int OUT, class F>
__device__ __forceinline__ void each(const Pointers<const T, IN> &in, const Pointers<T, OUT> &out, long long n, F f) {
  constexpr int CHUNKS = SHARE / E;
  long long first = (long long)blockIdx.x * blockDim.x * SHARE;
  Chunk<T, E> chunks[CHUNKS][IN];
#pragma unroll
  for (int k = 0; k < CHUNKS; k++) {
    long long at = first + (long long)(k * int(blockDim.x) + int(threadIdx.x)) * E;
#pragma unroll
    for (int i = 0; i < IN; i++) chunks[k][i] = at + E <= n ? load_chunk<E>(in.at[i] + at) : no_chunk<T, E>();
  }
#pragma unroll
  for (int k = 0; k < CHUNKS; k++) {
    long long at = first + (long long)(k * int(blockDim.x) + int(threadIdx.x)) * E;
    if (at + E <= n) {
      float results[OUT][E];
#pragma unroll
      for (int e = 0; e < E; e++) {
        float x[IN], y[OUT];
#pragma unroll
        for (int i = 0; i < IN; i++) x[i] = chunks[k][i].get(e);
        f(x, y);
#pragma unroll
        for (int i = 0; i < OUT; i++) results[i][e] = y[i];
      }
#pragma unroll
      for (int i = 0; i < OUT; i++) store_floats<E>(out.at[i] + at, results[i]);
    } else {
      for (; at < n; at++) { // the tail of the tensor, in one thread
        float x[IN], y[OUT];
#pragma unroll
        for (int i = 0; i < IN; i++) x[i] = widen(in.at[i][at]);
        f(x, y);
#pragma unroll
        for (int i = 0; i < OUT; i++) out.at[i][at] = narrow<T>(y[i]);
      }
    }
  }
}

__device__ __forceinline__ void swiglu(const float (&in)[2], float (&out)[1]) { out[0] = in[0] * sigmoid(in[0]) * in[1]; }

// Maps gate, up and dy to dgate, dup and, if OUT is 3, the recomputed output.
template <int OUT> __device__ __forceinline__ void swiglu_backward(const float (&in)[3], float (&out)[OUT]) {
  float s = sigmoid(in[0]), silu = in[0] * s;
  out[0] = in[2] * in[1] * (s + silu * (1.0f - s));
  out[1] = in[2] * silu;
  if constexpr (OUT > 2) out[2] = silu * in[1];
}

__device__ __forceinline__ void sigmoid_gate(const float (&in)[2], float (&out)[1]) { out[0] = in[1] * sigmoid(in[0]); }

// Maps gate, x and dy to dgate, dx and, if OUT is 3, the recomputed output.
template <int OUT> __device__ __forceinline__ void sigmoid_gate_backward(const float (&in)[3], float (&out)[OUT]) {
  float s = sigmoid(in[0]);
  out[0] = in[2] * in[1] * (s * (1.0f - s));
  out[1] = in[2] * s;
  if constexpr (OUT > 2) out[2] = in[1] * s;
}

constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691f, CUBIC = 0.044715f;

// Uses (1 + tanh u) / 2 = sigmoid(2 u).
__device__ __forceinline__ float tanh_gate(float x) { return sigmoid(TWICE_SQRT_2_OVER_PI * x * (CUBIC * x * x + 1.0f)); }

__device__ __forceinline__ void gelu_tanh(const float (&in)[1], float (&out)[1]) { out[0] = in[0] * tanh_gate(in[0]); }

// Maps x and dy to dx and, if OUT is 2, the recomputed output.
template <int OUT> __device__ __forceinline__ void gelu_tanh_backward(const float (&in)[2], float (&out)[OUT]) {
  float x = in[0], s = tanh_gate(x), slope = TWICE_SQRT_2_OVER_PI * (3.0f * CUBIC * x * x + 1.0f);
  out[0] = in[1] * (x * s * (1.0f - s) * slope + s);
  if constexpr (OUT > 1) out[1] = x * s;
}

// Standard normal distribution function, absolute error below 1e-6, and gauss = e^(-x^2/2).
__device__ __forceinline__ float normal_cdf(float x, float &gauss) {
  constexpr float P[9] = {-0.05971492f, 0.2877683f, -0.49386365f, 0.2856977f, -0.031841757f, 0.20485366f, 0.24257289f, 0.28244504f, 0.28208267f};
  gauss = __expf(-0.5f * x * x);
  float t = __fdividef(1.0f, 0.5f * (fabsf(x) * 0.70710678f) + 1.0f), p = P[0];
#pragma unroll
  for (int i = 1; i < 9; i++) p = p * t + P[i];
  float tail = 0.5f * p * t * gauss;
  return x < 0 ? tail : 1.0f - tail;
}

__device__ __forceinline__ void gelu_erf(const float (&in)[1], float (&out)[1]) {
  float gauss;
  out[0] = in[0] * normal_cdf(in[0], gauss);
}

template <int OUT> __device__ __forceinline__ void gelu_erf_backward(const float (&in)[2], float (&out)[OUT]) {
  float gauss, cdf = normal_cdf(in[0], gauss);
  out[0] = in[1] * (in[0] * 0.39894228f * gauss + cdf);
  if constexpr (OUT > 1) out[1] = in[0] * cdf;
}

constexpr float QUICK = 1.702f; // factor of x in the sigmoid approximation of gelu

__device__ __forceinline__ void gelu_quick(const float (&in)[1], float (&out)[1]) { out[0] = in[0] * sigmoid(QUICK * in[0]); }

template <int OUT> __device__ __forceinline__ void gelu_quick_backward(const float (&in)[2], float (&out)[OUT]) {
  float x = in[0], s = sigmoid(QUICK * x);
  out[0] = in[1] * (QUICK * x * s * (1.0f - s) + s);
  if constexpr (OUT > 1) out[1] = x * s;
}

__device__ __forceinline__ void sum(const float (&in)[2], float (&out)[1]) { out[0] = in[0] + in[1]; }

template <int E, class T> __device__ __forceinline__ void fill_zero(T *x, long long n) {
  long long first = (long long)blockIdx.x * blockDim.x * SHARE;
#pragma unroll
  for (int k = 0; k < SHARE / E; k++) {
    long long at = first + (long long)(k * int(blockDim.x) + int(threadIdx.x)) * E;
    if (at + E <= n) store_chunk<E>(x + at, no_chunk<T, E>());
    else {
      for (; at < n; at++) x[at] = narrow<T>(0);
    }
  }
}

} // namespace

#define ONE_TO_ONE(op, T, E, name)                                                                                      \
  extern "C" __global__ void __launch_bounds__(256, 4) op##_##name(const T *x, T *y, long long n) {                        \
    each<E>(Pointers<const T, 1>{{x}}, Pointers<T, 1>{{y}}, n, [](const auto &in, auto &out) { op(in, out); });         \
  }                                                                                                                     \
  EXPORT(op##_##name)
#define TWO_TO_ONE(op, T, E, name)                                                                                      \
  extern "C" __global__ void __launch_bounds__(256, 4) op##_##name(const T *a, const T *b, T *y, long long n) {            \
    each<E>(Pointers<const T, 2>{{a, b}}, Pointers<T, 1>{{y}}, n, [](const auto &in, auto &out) { op(in, out); });      \
  }                                                                                                                     \
  EXPORT(op##_##name)
#define GELU_BACKWARD(op, T, E, name)                                                                                  \
  extern "C" __global__ void __launch_bounds__(256, 4) op##_##name(T *x, const T *dy, long long n) {                   \
    each<E>(Pointers<const T, 2>{{x, dy}}, Pointers<T, 1>{{x}}, n, [](const auto &in, auto &out) { op(in, out); });    \
  }                                                                                                                    \
  EXPORT(op##_##name)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256, 4) op##_recompute_##name(T *x, T *dy, long long n) {                   \
    each<E>(Pointers<const T, 2>{{x, dy}}, Pointers<T, 2>{{x, dy}}, n, [](const auto &in, auto &out) { op(in, out); });\
  }                                                                                                                    \
  EXPORT(op##_recompute_##name)
// A gate and a value, or their gradients in their place.
#define GATE(op, T, E, name)                                                                                            \
  TWO_TO_ONE(op, T, E, name)                                                                                            \
  extern "C" __global__ void __launch_bounds__(256, 4) op##_backward_##name(T *gate, T *x, const T *dy, long long n) {     \
    each<E>(Pointers<const T, 3>{{gate, x, dy}}, Pointers<T, 2>{{gate, x}}, n,                                         \
            [](const auto &in, auto &out) { op##_backward(in, out); });                                                \
  }                                                                                                                    \
  EXPORT(op##_backward_##name)                                                                                         \
  extern "C" __global__ void __launch_bounds__(256, 4) op##_backward_recompute_##name(T *gate, T *x, T *dy, long long n) { \
    each<E>(Pointers<const T, 3>{{gate, x, dy}}, Pointers<T, 3>{{gate, x, dy}}, n,                                     \
            [](const auto &in, auto &out) { op##_backward(in, out); });                                                \
  }                                                                                                                    \
  EXPORT(op##_backward_recompute_##name)
#define POINTWISE(T, E, name)                                                                                          \
  GATE(swiglu, T, E, name)                                                                                             \
  GATE(sigmoid_gate, T, E, name)                                                                                       \
  ONE_TO_ONE(gelu_tanh, T, E, name)                                                                                    \
  GELU_BACKWARD(gelu_tanh_backward, T, E, name)                                                                        \
  ONE_TO_ONE(gelu_erf, T, E, name)                                                                                     \
  GELU_BACKWARD(gelu_erf_backward, T, E, name)                                                                         \
  ONE_TO_ONE(gelu_quick, T, E, name)                                                                                   \
  GELU_BACKWARD(gelu_quick_backward, T, E, name)                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 4) add_in_place_##name(T *x, const T *y, long long n) {                \
    each<E>(Pointers<const T, 2>{{x, y}}, Pointers<T, 1>{{x}}, n, [](const auto &in, auto &out) { sum(in, out); });     \
  }                                                                                                                     \
  EXPORT(add_in_place_##name)                                                                                           \
  extern "C" __global__ void __launch_bounds__(256, 4) fill_zero_##name(T *x, long long n) { fill_zero<E>(x, n); }         \
  EXPORT(fill_zero_##name)

POINTWISE(float, 4, f32)
POINTWISE(bf16, 8, bf16)
POINTWISE(float, 1, single_f32)
POINTWISE(bf16, 1, single_bf16)
