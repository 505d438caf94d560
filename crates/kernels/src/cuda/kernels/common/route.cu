// Routing of a mixture of experts; see crates/kernels/src/route.rs for the contract.
//
// A warp chooses the experts of a token. Choices are sorted by expert by counting, without atomics:
// tiles of 1,024 choices are counted by expert, one block turns the counts into the first row of each
// tile and expert, and each choice finds its place among those of its tile by comparing. This takes a
// few reads of shared memory per choice and expert. Nothing here depends on the number of rows of an
// expert on the host.
#include "chunks.cuh"

namespace {

constexpr int TILE = 1024;
// Number of tokens of a block, one per warp.
constexpr int TOKENS = 4;

// An integer with the order of x. Both zeros are equal, NaN is above all numbers, and 0 is below them.
__device__ __forceinline__ uint32_t rank_of(float x) {
  if (x != x) return 0xFFFFFFFFu;
  uint32_t bits = float_to_bits(x == 0 ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ unsigned long long warp_max(unsigned long long value) {
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) {
    unsigned long long other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

// The softmax of the logits [e] of a token: exp(x - largest) / sum.
struct Softmax {
  float largest, sum;

  __device__ __forceinline__ static Softmax of(const float *logits, int e) {
    float largest = -INFINITE, sum = 0;
    for (int i = lane(); i < e; i += WARP) largest = fmaxf(largest, logits[i]);
    largest = warp_max(largest);
    for (int i = lane(); i < e; i += WARP) sum += expf(logits[i] - largest);
    return {largest, warp_sum(sum)};
  }

  __device__ __forceinline__ float probability(float logit) const { return expf(logit - largest) / sum; }
};

} // namespace

// Writes the experts [t, k] of logits [t, e] and their weights. Shared memory: TOKENS (e + 2 k) words.
extern "C" __global__ void __launch_bounds__(TOKENS * WARP) choose_experts_f32(const float *logits, float *weights, uint32_t *experts, int t, int e, int k) {
  DYNAMIC_SHARED(shared);
  int token = int(blockIdx.x) * TOKENS + warp();
  if (token >= t) return;
  uint32_t *ranks = reinterpret_cast<uint32_t *>(shared) + warp() * (e + 2 * k), *chosen = ranks + e;
  float *values = reinterpret_cast<float *>(chosen + k);
  logits += size_t(token) * e;
  // A lane accesses only its own ranks.
  for (int i = lane(); i < e; i += WARP) ranks[i] = rank_of(logits[i]);
  for (int j = 0; j < k; j++) {
    unsigned long long best = 0;
    for (int i = lane(); i < e; i += WARP) {
      unsigned long long key = (unsigned long long)ranks[i] << 32 | uint32_t(e - 1 - i); // of equal ranks, the lower expert
      best = key > best ? key : best;
    }
    int expert = e - 1 - int(uint32_t(warp_max(best)));
    if (expert % WARP == lane()) {
      ranks[expert] = 0;
      chosen[j] = uint32_t(expert);
      values[j] = logits[expert];
    }
  }
  __syncwarp();
  float sum = 0;
  for (int j = 0; j < k; j++) sum += expf(values[j] - values[0]);
  for (int j = lane(); j < k; j += WARP) {
    weights[size_t(token) * k + j] = expf(values[j] - values[0]) / sum;
    experts[size_t(token) * k + j] = chosen[j];
  }
}
EXPORT(choose_experts_f32)

// Counts the choices of each expert in each tile: counts [tiles, e].
extern "C" __global__ void __launch_bounds__(256) count_choices_f32(const uint32_t *experts, uint32_t *counts, int n, int e) {
  __shared__ uint32_t tile[TILE];
  int first = int(blockIdx.x) * TILE, count = min(TILE, n - first);
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) tile[i] = experts[first + i];
  __syncthreads();
  for (int expert = int(threadIdx.x); expert < e; expert += int(blockDim.x)) {
    uint32_t sum = 0;
#pragma unroll 8
    for (int i = 0; i < count; i++) sum += tile[i] == uint32_t(expert);
    counts[size_t(blockIdx.x) * e + expert] = sum;
  }
}
EXPORT(count_choices_f32)

// Writes offsets [e + 1], and replaces counts [tiles, e] by the first row of the choices of a tile. One
// block.
extern "C" __global__ void __launch_bounds__(TILE) start_experts_f32(uint32_t *counts, uint32_t *offsets, int tiles, int e) {
  __shared__ uint32_t sums[TILE];
  uint32_t before = 0; // choices of the experts of earlier rounds
  int own = int(threadIdx.x);
  for (int first = 0; first < e; first += TILE) {
    int expert = first + own;
    uint32_t count = 0;
    if (expert < e) {
#pragma unroll 8
      for (int tile = 0; tile < tiles; tile++) count += counts[size_t(tile) * e + expert];
    }
    sums[own] = count;
    __syncthreads();
    for (int distance = 1; distance < TILE; distance *= 2) {
      uint32_t add = own >= distance ? sums[own - distance] : 0;
      __syncthreads();
      sums[own] += add;
      __syncthreads();
    }
    uint32_t row = before + sums[own] - count;
    before += sums[TILE - 1];
    __syncthreads(); // the next round overwrites the sums
    if (expert >= e) continue;
    offsets[expert] = row;
    if (expert == e - 1) offsets[e] = row + count;
    for (int tile = 0; tile < tiles; tile++) {
      uint32_t *at = counts + size_t(tile) * e + expert;
      uint32_t here = *at;
      *at = row;
      row += here;
    }
  }
}
EXPORT(start_experts_f32)

// Writes the row of each choice to places [n], and the choice of each row to order [n].
extern "C" __global__ void __launch_bounds__(TILE)
    place_choices_f32(const uint32_t *experts, const uint32_t *starts, uint32_t *order, uint32_t *places, int n, int e) {
  __shared__ uint32_t tile[TILE];
  int first = int(blockIdx.x) * TILE, own = int(threadIdx.x);
  if (first + own < n) tile[own] = experts[first + own];
  __syncthreads();
  if (first + own >= n) return;
  uint32_t expert = tile[own], row = starts[size_t(blockIdx.x) * e + expert];
#pragma unroll 8
  for (int i = 0; i < own; i++) row += tile[i] == expert;
  places[first + own] = row;
  order[row] = uint32_t(first + own);
}
EXPORT(place_choices_f32)

// Writes the gradient of the logits [t, e]; a warp has a token.
extern "C" __global__ void __launch_bounds__(256)
    route_backward_f32(const float *weights, const uint32_t *experts, const float *d_weights, float *d_logits, int t, int e, int k) {
  size_t token = size_t(blockIdx.x) * (blockDim.x / WARP) + size_t(warp());
  if (token >= size_t(t)) return;
  weights += token * k, experts += token * k, d_weights += token * k, d_logits += token * e;
  for (int i = lane(); i < e; i += WARP) d_logits[i] = 0;
  float mean = 0;
  for (int j = 0; j < k; j++) mean = fmaf(weights[j], d_weights[j], mean);
  __syncwarp(); // another lane has written the zero
  for (int j = lane(); j < k; j += WARP) {
    if (experts[j] < uint32_t(e)) d_logits[experts[j]] = weights[j] * (d_weights[j] - mean);
  }
}
EXPORT(route_backward_f32)

namespace {

constexpr int UNDER_WAY = 4;

// Copies the token of each row; a warp has a row.
template <int E, class T> __device__ __forceinline__ void copy_rows(const T *x, const uint32_t *order, T *y, int n, int k, int d) {
  size_t row = size_t(blockIdx.x) * (blockDim.x / WARP) + size_t(warp());
  if (row >= size_t(n)) return;
  const T *from = x + size_t(order[row] / uint32_t(k)) * d;
  T *to = y + row * d;
  for (int start = lane() * E; start < d; start += UNDER_WAY * WARP * E) {
    Chunk<T, E> chunks[UNDER_WAY];
#pragma unroll
    for (int i = 0; i < UNDER_WAY; i++)
      if (start + i * WARP * E < d) chunks[i] = load_chunk<E>(from + start + i * WARP * E);
#pragma unroll
    for (int i = 0; i < UNDER_WAY; i++)
      if (start + i * WARP * E < d) store_chunk<E>(to + start + i * WARP * E, chunks[i]);
  }
}

// Adds the rows of each token to the residual, or to 0, in the order of its choices; a warp has a token.
template <int E, class T>
__device__ __forceinline__ void add_rows(const T *rows, const uint32_t *places, const T *residual, T *y, int t, int k, int d) {
  size_t token = size_t(blockIdx.x) * (blockDim.x / WARP) + size_t(warp());
  if (token >= size_t(t)) return;
  places += token * k;
  for (int at = lane() * E; at < d; at += WARP * E) {
    Chunk<T, E> base = residual ? load_chunk<E>(residual + token * d + at) : no_chunk<T, E>();
    float sums[E];
#pragma unroll
    for (int i = 0; i < E; i++) sums[i] = base.get(i);
    for (int start = 0; start < k; start += UNDER_WAY) {
      Chunk<T, E> chunks[UNDER_WAY];
#pragma unroll
      for (int j = 0; j < UNDER_WAY; j++)
        if (start + j < k) chunks[j] = load_chunk<E>(rows + size_t(places[start + j]) * d + at);
#pragma unroll
      for (int j = 0; j < UNDER_WAY; j++) {
        if (start + j >= k) continue;
#pragma unroll
        for (int i = 0; i < E; i++) sums[i] += chunks[j].get(i);
      }
    }
    store_floats<E>(y + token * d + at, sums);
  }
}

// Writes weight * silu(gate) * up for each row of gate_up [n, 2 width]; a warp has a row.
template <int E, class T>
__device__ __forceinline__ void swiglu(const T *gate_up, const float *weights, const uint32_t *order, T *y, int n, int width) {
  size_t row = size_t(blockIdx.x) * (blockDim.x / WARP) + size_t(warp());
  if (row >= size_t(n)) return;
  float weight = weights[order[row]];
  const T *gate = gate_up + row * 2 * width, *up = gate + width;
  for (int at = lane() * E; at < width; at += WARP * E) {
    Chunk<T, E> left = load_chunk<E>(gate + at), right = load_chunk<E>(up + at);
    float out[E];
#pragma unroll
    for (int i = 0; i < E; i++) out[i] = weight * (left.get(i) * sigmoid(left.get(i)) * right.get(i));
    store_floats<E>(y + row * width + at, out);
  }
}

// Replaces gate_up by its gradient, and d_activated by the output if `recompute` is 1. The gradient of the
// weight is a sum of the warp of its row.
template <int E, class T>
__device__ __forceinline__ void swiglu_backward(T *gate_up, const float *weights, const uint32_t *order, T *dy, float *d_weights, int n, int width, int recompute) {
  size_t row = size_t(blockIdx.x) * (blockDim.x / WARP) + size_t(warp());
  if (row >= size_t(n)) return;
  uint32_t choice = order[row];
  float weight = weights[choice], sum = 0;
  T *gate = gate_up + row * 2 * width, *up = gate + width;
  dy += row * width;
  for (int at = lane() * E; at < width; at += WARP * E) {
    Chunk<T, E> left = load_chunk<E>(gate + at), right = load_chunk<E>(up + at), grad = load_chunk<E>(dy + at);
    float d_gate[E], d_up[E], out[E];
#pragma unroll
    for (int i = 0; i < E; i++) {
      float g = left.get(i), s = sigmoid(g), silu = g * s, activated = silu * right.get(i), weighted = weight * grad.get(i);
      sum = fmaf(grad.get(i), activated, sum);
      d_gate[i] = weighted * right.get(i) * (s + silu * (1.0f - s));
      d_up[i] = weighted * silu;
      out[i] = weight * activated;
    }
    store_floats<E>(gate + at, d_gate);
    store_floats<E>(up + at, d_up);
    if (recompute) store_floats<E>(dy + at, out);
  }
  sum = warp_sum(sum);
  if (lane() == 0) d_weights[choice] = sum;
}

} // namespace

#define EXPERTS(T, E, name)                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 4) expert_rows_##name(const T *x, const uint32_t *order, T *y, int n, int k, int d) {         \
    copy_rows<E>(x, order, y, n, k, d);                                                                                                           \
  }                                                                                                                                               \
  EXPORT(expert_rows_##name)                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256, 4)                                                                                            \
      combine_experts_##name(const T *rows, const uint32_t *places, const T *residual, T *y, int t, int k, int d) {                               \
    add_rows<E>(rows, places, residual, y, t, k, d);                                                                                              \
  }                                                                                                                                               \
  EXPORT(combine_experts_##name)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256, 4)                                                                                            \
      expert_swiglu_##name(const T *gate_up, const float *weights, const uint32_t *order, T *y, int n, int width) {                               \
    swiglu<E>(gate_up, weights, order, y, n, width);                                                                                              \
  }                                                                                                                                               \
  EXPORT(expert_swiglu_##name)                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                                                            \
      expert_swiglu_backward_##name(T *gate_up, const float *weights, const uint32_t *order, T *dy, float *d_weights, int n, int width, int recompute) { \
    swiglu_backward<E>(gate_up, weights, order, dy, d_weights, n, width, recompute);                                                              \
  }                                                                                                                                               \
  EXPORT(expert_swiglu_backward_##name)

EXPERTS(float, 4, f32)
EXPERTS(bf16, 8, bf16)
EXPERTS(float, 1, single_f32)
EXPERTS(bf16, 1, single_bf16)

// Writes the softmax [t, e] of logits [t, e]; see crates/kernels/src/router_probabilities.rs.
extern "C" __global__ void __launch_bounds__(TOKENS * WARP) router_probabilities_f32(const float *logits, float *probabilities, int t, int e) {
  int token = int(blockIdx.x) * TOKENS + warp();
  if (token >= t) return;
  logits += size_t(token) * e;
  Softmax softmax = Softmax::of(logits, e);
  for (int i = lane(); i < e; i += WARP) probabilities[size_t(token) * e + i] = softmax.probability(logits[i]);
}
EXPORT(router_probabilities_f32)

// Adds the gradient of the sum of slopes [e] times the softmax to d_logits [t, e].
extern "C" __global__ void __launch_bounds__(TOKENS * WARP) router_probabilities_backward_f32(const float *logits, const float *slopes, float *d_logits, int t, int e) {
  int token = int(blockIdx.x) * TOKENS + warp();
  if (token >= t) return;
  logits += size_t(token) * e;
  d_logits += size_t(token) * e;
  Softmax softmax = Softmax::of(logits, e);
  float mean = 0;
  for (int i = lane(); i < e; i += WARP) mean += softmax.probability(logits[i]) * slopes[i];
  mean = warp_sum(mean);
  for (int i = lane(); i < e; i += WARP) d_logits[i] += softmax.probability(logits[i]) * (slopes[i] - mean);
}
EXPORT(router_probabilities_backward_f32)
