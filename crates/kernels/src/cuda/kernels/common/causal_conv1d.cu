// Causal depthwise convolution with SiLU; see crates/kernels/src/causal_conv1d.rs for the contract.
//
// A thread has E adjacent channels of a range of tokens and keeps the window of four tokens in
// registers, so that it reads each operand once, except for three tokens next to its range. Both
// kernels are bound by memory bandwidth. `starts` holds the first token of the segment of each token.
#include "chunks.cuh"

namespace {

constexpr int TAPS = 4;

// Values of a thread's channels for the last four tokens, oldest first.
template <int E> struct Window {
  float rows[TAPS][E] = {};

  __device__ __forceinline__ void push(const float (&row)[E]) {
#pragma unroll
    for (int tap = 0; tap + 1 < TAPS; tap++)
#pragma unroll
      for (int i = 0; i < E; i++) rows[tap][i] = rows[tap + 1][i];
#pragma unroll
    for (int i = 0; i < E; i++) rows[TAPS - 1][i] = row[i];
  }
};

template <class T, int E> __device__ __forceinline__ void load(float (&row)[E], const T *from) {
  Chunk<T, E> chunk = load_chunk<E>(from);
#pragma unroll
  for (int i = 0; i < E; i++) row[i] = chunk.get(i);
}

template <class T, int E> struct Channels {
  int count, first; // all channels; the first one of this thread
  float w[TAPS][E];

  __device__ __forceinline__ Channels(const T *weights, int count) : count(count), first((int(blockIdx.y) * int(blockDim.x) + int(threadIdx.x)) * E) {
#pragma unroll
    for (int i = 0; i < E; i++)
#pragma unroll
      for (int tap = 0; tap < TAPS; tap++) w[tap][i] = valid() ? widen(weights[size_t(first + i) * TAPS + tap]) : 0.0f;
  }

  __device__ __forceinline__ bool valid() const { return first < count; }
  __device__ __forceinline__ size_t at(int token) const { return size_t(token) * count + first; }

  // The convolution at `token`, whose window is `x`. Taps before `start` count as zero: they may be
  // infinite.
  __device__ __forceinline__ float sum(const Window<E> &x, int i, int token, int start) const {
    float sum = w[TAPS - 1][i] * x.rows[TAPS - 1][i];
#pragma unroll
    for (int tap = TAPS - 2; tap >= 0; tap--)
      if (token - (TAPS - 1) + tap >= start) sum = fmaf(w[tap][i], x.rows[tap][i], sum);
    return sum;
  }

  // Loads the tokens before `token`.
  __device__ __forceinline__ void begin(Window<E> &x, const T *values, int token) const {
#pragma unroll
    for (int back = TAPS - 1; back > 0; back--) {
      float row[E] = {};
      if (token >= back) load(row, values + at(token - back));
      x.push(row);
    }
  }
};

template <class T, int E> __device__ __forceinline__ void forward(const T *x, const T *w, const int *starts, T *y, int tokens, int channels, int range) {
  Channels<T, E> own(w, channels);
  if (!own.valid()) return;
  int first = int(blockIdx.x) * range, last = min(first + range, tokens);
  Window<E> window;
  own.begin(window, x, first);
  for (int token = first; token < last; token++) {
    float row[E];
    load(row, x + own.at(token));
    window.push(row);
    int start = starts[token];
#pragma unroll
    for (int i = 0; i < E; i++) {
      float sum = own.sum(window, i, token, start);
      row[i] = sum * sigmoid(sum);
    }
    store_floats<E>(y + own.at(token), row);
  }
}

// Continues three tokens beyond the range, because the gradient of a token depends on the three after
// it. A thread writes its weight gradient to a row of the shares [ranges, channels, 4].
template <class T, int E>
__device__ __forceinline__ void backward(const T *x, const T *w, const T *dy, const int *starts, T *dx, float *shares, int tokens, int channels, int range) {
  Channels<T, E> own(w, channels);
  if (!own.valid()) return;
  int first = int(blockIdx.x) * range, last = min(first + range, tokens);
  Window<E> window, grads; // of the inputs, and gradients of the sums
  float dw[TAPS][E] = {};
  own.begin(window, x, first);
  for (int token = first; token < last + TAPS - 1; token++) {
    float row[E] = {};
    if (token < tokens) {
      load(row, x + own.at(token));
      window.push(row);
      load(row, dy + own.at(token));
      int start = starts[token];
#pragma unroll
      for (int i = 0; i < E; i++) {
        float sum = own.sum(window, i, token, start), s = sigmoid(sum);
        row[i] *= s + sum * s * (1.0f - s);
        if (token >= last) continue;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
          if (token - (TAPS - 1) + tap >= start) dw[tap][i] = fmaf(row[i], window.rows[tap][i], dw[tap][i]);
      }
    }
    grads.push(row);
    int to = token - (TAPS - 1);
    if (to < first) continue;
    int start = starts[to];
#pragma unroll
    for (int i = 0; i < E; i++) row[i] = own.w[TAPS - 1][i] * grads.rows[0][i];
#pragma unroll
    for (int after = 1; after < TAPS; after++) {
      if (to + after >= tokens || starts[to + after] != start) break;
#pragma unroll
      for (int i = 0; i < E; i++) row[i] = fmaf(own.w[TAPS - 1 - after][i], grads.rows[after][i], row[i]);
    }
    store_floats<E>(dx + own.at(to), row);
  }
  if (!shares) return;
  float *share = shares + (size_t(blockIdx.x) * channels + own.first) * TAPS;
#pragma unroll
  for (int i = 0; i < E; i++)
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) share[i * TAPS + tap] = dw[tap][i];
}

} // namespace

#define CAUSAL_CONV1D(T, E, name)                                                                                                    \
  extern "C" __global__ void __launch_bounds__(128)                                                                                  \
      causal_conv1d_##name(const T *x, const T *w, const int *starts, T *y, int tokens, int channels, int range) {                     \
    forward<T, E>(x, w, starts, y, tokens, channels, range);                                                                         \
  }                                                                                                                                  \
  EXPORT(causal_conv1d_##name)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(128)                                                                                  \
      causal_conv1d_backward_##name(const T *x, const T *w, const T *dy, const int *starts, T *dx, float *shares, int tokens, int channels, int range) { \
    backward<T, E>(x, w, dy, starts, dx, shares, tokens, channels, range);                                                           \
  }                                                                                                                                  \
  EXPORT(causal_conv1d_backward_##name)

CAUSAL_CONV1D(float, 4, f32)
CAUSAL_CONV1D(bf16, 8, bf16)
CAUSAL_CONV1D(float, 1, single_f32)
CAUSAL_CONV1D(bf16, 1, single_bf16)
