// Per-head RMS norm with rotary embedding of queries and keys, and rotary embedding of the vision
// encoder; see crates/kernels/src/rope.rs and crates/kernels/src/vision_rope.rs for the contracts.
//
// Two dims of a head are rotated together, so a thread has chunks of both halves of the dims. All
// four kernels are bound by memory bandwidth: each operand is read once, except that the heads of a
// token read its angles from the cache.
#include "chunks.cuh"

namespace {

// Number of heads of a token per thread. They share weights and angles.
constexpr int HEADS = 2;

// The pairs of dims of a head: `rotated` of its `half` pairs are rotated, and come first.
struct Pairs {
  int half, rotated;
  __device__ __forceinline__ int low(int pair) const { return pair < rotated ? pair : pair + rotated; }
  __device__ __forceinline__ int high(int pair) const { return pair < rotated ? pair + rotated : pair + half; }
};

// The P chunks of each half of a head that a thread holds.
template <class T, int E, int P> struct Head {
  Chunk<T, E> low[P], high[P];

  // Loads the pairs `column` + k `stride`, or zeros if there are none.
  __device__ __forceinline__ void load(const T *head, int column, int stride, const Pairs &pairs, bool valid) {
#pragma unroll
    for (int k = 0; k < P; k++) {
      int at = column + k * stride;
      low[k] = valid && at < pairs.half ? load_chunk<E>(head + pairs.low(at)) : no_chunk<T, E>();
      high[k] = valid && at < pairs.half ? load_chunk<E>(head + pairs.high(at)) : no_chunk<T, E>();
    }
  }
};

// Cosines and sines of the pairs of a thread; 1 and 0 for pairs that are not rotated.
template <int E, int P> struct Angles {
  float cos[P][E], sin[P][E];

  __device__ __forceinline__ void load(const float *cosines, const float *sines, int column, int stride, int rotated, bool valid) {
#pragma unroll
    for (int k = 0; k < P; k++) {
      int at = column + k * stride;
      if (valid && at < rotated) {
        load_floats<E>(cosines + at, cos[k]);
        load_floats<E>(sines + at, sin[k]);
      } else {
#pragma unroll
        for (int i = 0; i < E; i++) cos[k][i] = 1, sin[k][i] = 0;
      }
    }
  }
};

// Position of a thread: `lanes` threads of a warp, a power of two, share a head.
struct Place {
  int lanes, member, items_a_block, item;
  __device__ __forceinline__ explicit Place(int lanes)
      : lanes(lanes), member(lane() & (lanes - 1)), items_a_block(int(blockDim.x) / lanes), item(int(threadIdx.x) / lanes) {}

  // Sum over the lanes of a head. All lanes of the warp must call it.
  __device__ __forceinline__ float sum(float value) const {
    for (int mask = lanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
  }
};

// Without `w` the heads are only rotated: `added` is 1, and there is no `rstd`.
template <class T, int E, int P>
__device__ __forceinline__ void forward(const T *x, const T *w, const float *cosines, const float *sines, T *y, float *rstd, int tokens, int heads, int half, int rotated,
                                        int lanes, int added, float eps) {
  Place place(lanes);
  Pairs pairs{half, rotated};
  int groups = (heads + HEADS - 1) / HEADS, item = int(blockIdx.x) * place.items_a_block + place.item;
  int token = item / groups, first = (item - token * groups) * HEADS, dh = 2 * half;
  int column = place.member * E, stride = lanes * E;
  Head<T, E, P> inputs[HEADS], weight;
  Angles<E, P> angles;
#pragma unroll
  for (int h = 0; h < HEADS; h++) inputs[h].load(x + (size_t(token) * heads + first + h) * dh, column, stride, pairs, token < tokens && first + h < heads);
  weight.load(w, column, stride, pairs, w != nullptr);
  angles.load(cosines + size_t(token) * rotated, sines + size_t(token) * rotated, column, stride, rotated, token < tokens);
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < P; k++) {
#pragma unroll
      for (int i = 0; i < E; i++) {
        float a = inputs[h].low[k].get(i), b = inputs[h].high[k].get(i);
        squares += a * a + b * b;
      }
    }
    float sum = place.sum(squares), scale = w ? rsqrtf(sum / float(dh) + eps) : 1;
    if (token >= tokens || first + h >= heads) continue;
    size_t head = size_t(token) * heads + first + h;
    if (w && place.member == 0) rstd[head] = scale;
#pragma unroll
    for (int k = 0; k < P; k++) {
      int at = column + k * stride;
      if (at >= half) continue;
      float low[E], high[E];
#pragma unroll
      for (int i = 0; i < E; i++) {
        float a = scaled<T>(inputs[h].low[k].get(i) * scale, weight.low[k].get(i), added);
        float b = scaled<T>(inputs[h].high[k].get(i) * scale, weight.high[k].get(i), added);
        low[i] = a * angles.cos[k][i] - b * angles.sin[k][i];
        high[i] = b * angles.cos[k][i] + a * angles.sin[k][i];
      }
      store_floats<E>(y + head * dh + pairs.low(at), low);
      store_floats<E>(y + head * dh + pairs.high(at), high);
    }
  }
}

// Blocks iterate over the heads. A thread always has the same columns of a head, so it keeps their
// partial weight gradient in registers. A block sums those of its threads to one row [Dh], and
// `columns.cu` sums the rows of the blocks.
template <class T, int E, int P>
__device__ __forceinline__ void backward(const T *x, const float *rstd, const T *w, const float *cosines, const float *sines, const T *dy, T *dx, float *dw_shares,
                                         int tokens, int heads, int half, int rotated, int lanes, int added) {
  Place place(lanes);
  Pairs pairs{half, rotated};
  int dh = 2 * half, column = place.member * E, stride = lanes * E, items = tokens * heads;
  Head<T, E, P> weight;
  weight.load(w, column, stride, pairs, w != nullptr);
  float low_shares[P][E] = {}, high_shares[P][E] = {};
  // All lanes of a warp do the same number of iterations, because `place.sum` needs all of them.
  for (int start = int(blockIdx.x) * place.items_a_block; start < items; start += int(gridDim.x) * place.items_a_block) {
    int head = start + place.item, token = head / heads;
    bool valid = head < items;
    Head<T, E, P> input, grad;
    Angles<E, P> angles;
    input.load(x + size_t(head) * dh, column, stride, pairs, valid);
    grad.load(dy + size_t(head) * dh, column, stride, pairs, valid);
    angles.load(cosines + size_t(token) * rotated, sines + size_t(token) * rotated, column, stride, rotated, valid);
    float scale = !w ? 1 : valid ? rstd[head] : 0, product = 0;
    float low[P][E], high[P][E]; // gradient before the rotation
#pragma unroll
    for (int k = 0; k < P; k++) {
#pragma unroll
      for (int i = 0; i < E; i++) {
        float p = grad.low[k].get(i), q = grad.high[k].get(i), a = input.low[k].get(i), b = input.high[k].get(i);
        low[k][i] = p * angles.cos[k][i] + q * angles.sin[k][i];
        high[k][i] = q * angles.cos[k][i] - p * angles.sin[k][i];
        low_shares[k][i] += low[k][i] * a * scale;
        high_shares[k][i] += high[k][i] * b * scale;
        low[k][i] *= weight.low[k].get(i) + added;
        high[k][i] *= weight.high[k].get(i) + added;
        product += low[k][i] * a + high[k][i] * b;
      }
    }
    float sum = place.sum(product), c = w ? sum * scale * scale * scale / float(dh) : 0;
#pragma unroll
    for (int k = 0; k < P; k++) {
      int at = column + k * stride;
      if (!valid || at >= half) continue;
#pragma unroll
      for (int i = 0; i < E; i++) {
        low[k][i] = low[k][i] * scale - input.low[k].get(i) * c;
        high[k][i] = high[k][i] * scale - input.high[k].get(i) * c;
      }
      store_floats<E>(dx + size_t(head) * dh + pairs.low(at), low[k]);
      store_floats<E>(dx + size_t(head) * dh + pairs.high(at), high[k]);
    }
  }
  if (!dw_shares) return;
  DYNAMIC_SHARED(shared);
  float *sums = reinterpret_cast<float *>(shared); // [warps, Dh]
#pragma unroll
  for (int k = 0; k < P; k++) {
#pragma unroll
    for (int i = 0; i < E; i++) {
      for (int mask = lanes; mask < WARP; mask *= 2) { // sum over the heads of a warp
        low_shares[k][i] += shuffle_xor(low_shares[k][i], mask);
        high_shares[k][i] += shuffle_xor(high_shares[k][i], mask);
      }
      int at = column + k * stride + i;
      if (lane() < lanes && at < half) {
        sums[warp() * dh + pairs.low(at)] = low_shares[k][i];
        sums[warp() * dh + pairs.high(at)] = high_shares[k][i];
      }
    }
  }
  __syncthreads();
  for (int at = int(threadIdx.x); at < dh; at += int(blockDim.x)) {
    float sum = 0;
    for (int i = 0; i < int(blockDim.x) / WARP; i++) sum += sums[i * dh + at];
    dw_shares[size_t(blockIdx.x) * dh + at] = sum;
  }
}

// The three parts q, k and v of a fused projection, each [patches, heads, 2 half], or their
// gradients.
template <class T> struct Parts {
  T *at[3];
};

// Each thread handles a chunk of both halves of q, k and v of one head. q and k are rotated, by the
// negative angles if BACK.
template <class T, int E, bool BACK, class Load, class Store>
__device__ __forceinline__ void rotate_parts(const float *cosines, const float *sines, int patches, int heads, int half, Load load, Store store) {
  unsigned chunks = unsigned(half / E), item = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned all = item / chunks, column = (item - all * chunks) * E, patch = all / unsigned(heads), head = all - patch * unsigned(heads);
  if (patch >= unsigned(patches)) return;
  Chunk<T, E> low[3], high[3];
#pragma unroll
  for (int part = 0; part < 3; part++) {
    low[part] = load_chunk<E>(load(part, patch, head) + column);
    high[part] = load_chunk<E>(load(part, patch, head) + half + column);
  }
  float cos[E], sin[E];
  load_floats<E>(cosines + size_t(patch) * half + column, cos);
  load_floats<E>(sines + size_t(patch) * half + column, sin);
#pragma unroll
  for (int part = 0; part < 3; part++) {
    if (part < 2) {
      float a[E], b[E];
#pragma unroll
      for (int i = 0; i < E; i++) {
        float p = low[part].get(i), q = high[part].get(i), s = BACK ? -sin[i] : sin[i];
        a[i] = p * cos[i] - q * s;
        b[i] = q * cos[i] + p * s;
      }
      low[part].set(a);
      high[part].set(b);
    }
    store_chunk<E>(store(part, patch, head) + column, low[part]);
    store_chunk<E>(store(part, patch, head) + half + column, high[part]);
  }
}

template <class T, int E>
__device__ __forceinline__ void split(const T *qkv, const float *cosines, const float *sines, Parts<T> parts, int patches, int heads, int half) {
  rotate_parts<T, E, false>(
      cosines, sines, patches, heads, half, [&](int part, unsigned patch, unsigned head) { return qkv + ((size_t(patch) * 3 + part) * heads + head) * 2 * half; },
      [&](int part, unsigned patch, unsigned head) { return parts.at[part] + (size_t(patch) * heads + head) * 2 * half; });
}

template <class T, int E>
__device__ __forceinline__ void merge(Parts<const T> parts, const float *cosines, const float *sines, T *dqkv, int patches, int heads, int half) {
  rotate_parts<T, E, true>(
      cosines, sines, patches, heads, half, [&](int part, unsigned patch, unsigned head) { return parts.at[part] + (size_t(patch) * heads + head) * 2 * half; },
      [&](int part, unsigned patch, unsigned head) { return dqkv + ((size_t(patch) * 3 + part) * heads + head) * 2 * half; });
}

} // namespace

// E elements per chunk, at most P chunks of a half per thread.
#define QK_NORM_ROPE(T, E, P, name)                                                                                             \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                                          \
      qk_norm_rope_##name(const T *x, const T *w, const float *cosines, const float *sines, T *y, float *rstd, int tokens, int heads, int half, int rotated, int lanes, int added, float eps) { \
    forward<T, E, P>(x, w, cosines, sines, y, rstd, tokens, heads, half, rotated, lanes, added, eps);                                           \
  }                                                                                                                             \
  EXPORT(qk_norm_rope_##name)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                                          \
      qk_norm_rope_backward_##name(const T *x, const float *rstd, const T *w, const float *cosines, const float *sines, const T *dy, T *dx, float *dw_shares, int tokens, \
                                   int heads, int half, int rotated, int lanes, int added) {                                              \
    backward<T, E, P>(x, rstd, w, cosines, sines, dy, dx, dw_shares, tokens, heads, half, rotated, lanes, added);                     \
  }                                                                                                                             \
  EXPORT(qk_norm_rope_backward_##name)

#define VISION_ROPE(T, E, name)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(256)                                                                             \
      vision_rope_split_##name(const T *qkv, const float *cosines, const float *sines, T *q, T *k, T *v, int patches, int heads, int half) { \
    split<T, E>(qkv, cosines, sines, Parts<T>{{q, k, v}}, patches, heads, half);                                                \
  }                                                                                                                             \
  EXPORT(vision_rope_split_##name)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                                             \
      vision_rope_merge_##name(const T *dq, const T *dk, const T *dv, const float *cosines, const float *sines, T *dqkv, int patches, int heads, int half) { \
    merge<T, E>(Parts<const T>{{dq, dk, dv}}, cosines, sines, dqkv, patches, heads, half);                                      \
  }                                                                                                                             \
  EXPORT(vision_rope_merge_##name)

QK_NORM_ROPE(float, 4, 1, f32)
QK_NORM_ROPE(bf16, 8, 1, bf16)
QK_NORM_ROPE(float, 1, 4, single_f32)
QK_NORM_ROPE(bf16, 1, 4, single_bf16)
VISION_ROPE(float, 4, f32)
VISION_ROPE(bf16, 8, bf16)
VISION_ROPE(bf16, 4, half_bf16) // heads of dim 72: a half has 72 bytes
VISION_ROPE(float, 1, single_f32)
VISION_ROPE(bf16, 1, single_bf16)
