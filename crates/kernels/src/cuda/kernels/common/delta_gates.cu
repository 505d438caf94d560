// Gates of the gated delta rule; see crates/kernels/src/delta_gates.rs for the contract.
//
// Few elements, one per token and head: a warp has a token, and a lane every 32nd head.
#include "common.cuh"

namespace {

__device__ __forceinline__ float exact_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Computes ln(1 + e^x) without overflow.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

template <class T>
__device__ __forceinline__ void forward(const T *a, const T *b, const float *a_log, const float *dt_bias, float *g, float *beta, long long n, int h) {
  long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= n) return;
  int head = int(at % h);
  g[at] = -expf(a_log[head]) * softplus(widen(a[at]) + dt_bias[head]);
  beta[at] = exact_sigmoid(widen(b[at]));
}

// A block has `rows` tokens, and each of its warps writes its sums over tokens to a row of the
// shares [blocks * warps, h].
template <class T>
__device__ __forceinline__ void backward(const T *a, const T *b, const float *a_log, const float *dt_bias, const float *dg, const float *dbeta, T *da, T *db,
                                         float *log_shares, float *bias_shares, int tokens, int h, int rows) {
  int warps = int(blockDim.x) / WARP, end = min((int(blockIdx.x) + 1) * rows, tokens);
  size_t share = size_t(int(blockIdx.x) * warps + warp()) * h;
  for (int head = lane(); head < h; head += WARP) {
    float rate = -expf(a_log[head]), bias = dt_bias[head], log_sum = 0, bias_sum = 0;
    for (int token = int(blockIdx.x) * rows + warp(); token < end; token += warps) {
      size_t at = size_t(token) * h + head;
      float x = widen(a[at]) + bias, by_rate = dg[at] * rate, by_a = by_rate * exact_sigmoid(x), s = exact_sigmoid(widen(b[at]));
      log_sum += by_rate * softplus(x);
      bias_sum += by_a;
      da[at] = narrow<T>(by_a);
      db[at] = narrow<T>(dbeta[at] * s * (1.0f - s));
    }
    if (log_shares) log_shares[share + head] = log_sum;
    if (bias_shares) bias_shares[share + head] = bias_sum;
  }
}

} // namespace

#define DELTA_GATES(T, name)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256)                                                                                \
      delta_gates_##name(const T *a, const T *b, const float *a_log, const float *dt_bias, float *g, float *beta, long long n, int h) { \
    forward(a, b, a_log, dt_bias, g, beta, n, h);                                                                                  \
  }                                                                                                                                \
  EXPORT(delta_gates_##name)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256)                                                                                \
      delta_gates_backward_##name(const T *a, const T *b, const float *a_log, const float *dt_bias, const float *dg, const float *dbeta, T *da, T *db, \
                                  float *log_shares, float *bias_shares, int tokens, int h, int rows) {                            \
    backward(a, b, a_log, dt_bias, dg, dbeta, da, db, log_shares, bias_shares, tokens, h, rows);                                   \
  }                                                                                                                                \
  EXPORT(delta_gates_backward_##name)

DELTA_GATES(float, f32)
DELTA_GATES(bf16, bf16)
