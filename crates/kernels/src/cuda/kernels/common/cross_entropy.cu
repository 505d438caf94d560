// Softmax cross-entropy over chunks of logits, and its gradient; see
// crates/kernels/src/linear_cross_entropy.rs for the contract.
//
// One block per row of f32 logits [rows, v]. One read gives the maximum, the sum of exponentials
// and the argmax, first per thread on its own columns. If the gradient is requested, a second read
// goes through the row from its end, which is still cached, and writes (softmax - onehot) * scale
// (times the weight of the row) over the row: f32 over the logits, bf16 into the second half of the row. There column i is at the
// position of logit (v + i) / 2 >= i, so in backward order each logit is read before it is
// overwritten, if a barrier separates the reads of a tile from its writes. Bound by memory
// bandwidth: 4 bytes per element; with a gradient 8 plus the writes, minus cache hits of the second
// read.
#include "common.cuh"

namespace {

constexpr int LOADS = 4; // loads in flight per thread
constexpr int NOWHERE = 0x7FFFFFFF;

// Loads W columns, 1 or 4. For 4 the address is 16-byte aligned.
template <int W> __device__ __forceinline__ void load(const float *from, float *to) {
  if constexpr (W == 4) load_vector(from, to);
  else to[0] = from[0];
}

struct alignas(8) Bytes8 {
  uint32_t words[2];
};

template <int W> __device__ __forceinline__ void store(float *to, const float *from) {
  if constexpr (W == 4) store_vector(to, from);
  else to[0] = from[0];
}

template <int W> __device__ __forceinline__ void store(bf16 *to, const float *from) {
  if constexpr (W == 4) *reinterpret_cast<Bytes8 *>(to) = Bytes8{pack(from[0], from[1]), pack(from[2], from[3])};
  else to[0] = narrow<bf16>(from[0]);
}

// Location of the gradient of a row.
__device__ __forceinline__ float *gradient_of(float *row, int, float) { return row; }
__device__ __forceinline__ bf16 *gradient_of(float *row, int v, bf16) { return reinterpret_cast<bf16 *>(row) + v; }

__device__ __forceinline__ int block_min(int value) {
  __shared__ int partial[WARP];
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) value = min(value, shuffle_xor(value, mask));
  __syncthreads(); // protects `partial` from the previous call
  if (lane() == 0) partial[warp()] = value;
  __syncthreads();
  value = lane() < int(blockDim.x) / WARP ? partial[lane()] : NOWHERE;
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) value = min(value, shuffle_xor(value, mask));
  return value;
}

struct Softmax {
  float max = -INFINITE, sum = 0;
  int best = NOWHERE; // the lowest column with the maximum

  template <int W> __device__ __forceinline__ void add(const float (&x)[W], int first) {
    float top = x[0];
#pragma unroll
    for (int i = 1; i < W; i++) top = fmaxf(top, x[i]);
    if (top > max) {
      sum *= __expf(max - top);
      max = top;
      best = first;
#pragma unroll
      for (int i = W - 1; i >= 0; i--)
        if (x[i] == top) best = first + i;
    }
#pragma unroll
    for (int i = 0; i < W; i++) sum += __expf(x[i] - max);
  }
};

template <int W> __device__ __forceinline__ Softmax read_row(const float *row, int v) {
  Softmax softmax;
  int step = int(blockDim.x) * W, at = int(threadIdx.x) * W;
  for (; at + (LOADS - 1) * step < v; at += LOADS * step) {
    float x[LOADS][W];
#pragma unroll
    for (int i = 0; i < LOADS; i++) load<W>(row + at + i * step, x[i]);
#pragma unroll
    for (int i = 0; i < LOADS; i++) softmax.add(x[i], at + i * step);
  }
  for (; at < v; at += step) {
    float x[W];
    load<W>(row + at, x);
    softmax.add(x, at);
  }
  return softmax;
}

template <class T, int W> __device__ __forceinline__ void write_gradient(float *row, int v, int target, float lse, float scale) {
  T *gradient = gradient_of(row, v, T());
  int step = int(blockDim.x) * W, tile = LOADS * step;
  int offset = int(threadIdx.x) * W;
  float x[LOADS][W], next[LOADS][W];
  auto read = [&](int start, float (&to)[LOADS][W]) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      int at = start + offset + i * step;
      if (at < v) load<W>(row + at, to[i]);
    }
  };
  int start = (v - 1) / tile * tile;
  read(start, x);
  for (; start >= 0; start -= tile) {
    // The writes of this tile and of later ones do not overlap the previous tile.
    if (start > 0) read(start - tile, next);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      int at = start + offset + i * step;
#pragma unroll
      for (int j = 0; j < W; j++) {
        x[i][j] = __expf(x[i][j] - lse) * scale - (at + j == target ? scale : 0.0f);
      }
      if (at < v) store<W>(gradient + at, x[i]);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++)
#pragma unroll
      for (int j = 0; j < W; j++) x[i][j] = next[i][j];
  }
}

template <class T, int W>
__device__ void cross_entropy(float *logits, const uint32_t *targets, float *nll, uint32_t *argmax, const float *weights, float scale, int v,
                              bool gradient) {
  float *row = logits + size_t(blockIdx.x) * v;
  uint32_t target = targets[blockIdx.x];
  // A target outside the vocabulary gives a NaN loss and gradient, which stops the run.
  float at_target = target < uint32_t(v) ? row[target] : INFINITE - INFINITE;
  Softmax softmax = read_row<W>(row, v);
  float max = block_max(softmax.max);
  float sum = block_sum(softmax.sum * __expf(softmax.max - max));
  float lse = max + __logf(sum);
  float loss = lse - at_target;
  if (threadIdx.x == 0) nll[blockIdx.x] = loss;
  if (argmax) {
    int best = block_min(softmax.max == max ? softmax.best : NOWHERE);
    if (threadIdx.x == 0) argmax[blockIdx.x] = best < v ? best : 0;
  }
  if (weights) scale *= weights[blockIdx.x];
  // If the loss is not finite, the gradient must not be either, because only gradients are checked
  // before an update.
  if (gradient) write_gradient<T, W>(row, v, int(target), lse, fabsf(loss) < INFINITE ? scale : NAN);
}

} // namespace

#define CROSS_ENTROPY(T, name)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(512, 2)                                                                                 \
      cross_entropy_##name(float *logits, const uint32_t *targets, float *nll, uint32_t *argmax, const float *weights, float scale, int v, int gradient, int vectors) { \
    if (vectors) cross_entropy<T, 4>(logits, targets, nll, argmax, weights, scale, v, gradient);                                       \
    else cross_entropy<T, 1>(logits, targets, nll, argmax, weights, scale, v, gradient);                                               \
  }                                                                                                                                    \
  EXPORT(cross_entropy_##name)

CROSS_ENTROPY(float, f32)
CROSS_ENTROPY(bf16, bf16)
