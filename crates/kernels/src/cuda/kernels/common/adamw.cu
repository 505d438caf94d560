// AdamW over many tensors in a few launches; see crates/kernels/src/adamw.rs for the contract.
//
// One launch handles up to MOST tensors. The kernel arguments hold the list, so nothing is
// uploaded. A block processes one chunk of 65,536 elements and finds its tensor by bisection. All
// kernels access each element once, in 16-byte accesses of which a thread has 4 or 8 in flight.
// They are bound by memory bandwidth: 4 bytes per element for the sum of squares, 28 for the update
// (20 with moments in bf16), and 2 more for a bf16 copy of the weight. Sums are f64, in an order
// that depends on the sizes only. bf16 moments, and bf16 weights without a master, use stochastic
// rounding with the same random numbers as crates/kernels/src/moments.rs.
// The update of a parameter has the same bits in one part or several, whose elements take other paths of
// the kernel: the compiler would join products and sums in one of them only.
// nvcc: -fmad=false
#include "adamw.cuh"

namespace {

constexpr int SQUARES_BLOCK = 4096; // as in crates/kernels/src/adamw.rs

// Tensors of a launch. Tensor i has the chunks first[i] .. first[i + 1].
struct Tensors {
  static constexpr int MOST = 160;
  float *start[MOST];
  long long count[MOST];
  int first[MOST + 1];
};

// Tensors of an update, with moments of type M.
template <class M> struct Updates {
  static constexpr int MOST = 56;
  float *weight[MOST]; // f32, or null if `copy` is the only weight
  bf16 *copy[MOST];    // bf16 copy of the weight, or null if the model computes in f32
  M *exp_avg[MOST];
  M *exp_avg_sq[MOST];
  const float *grad[MOST];
  long long count[MOST];
  float keep[MOST];      // factor of the weight after decay
  float step_size[MOST]; // learning rate, with bias correction of the first moment
  uint32_t seed[MOST];   // of the random numbers for bf16 moments
  uint32_t offset[MOST]; // index of the first element in the parameter, if this is a part of one
  int first[MOST + 1];
};

static_assert(sizeof(Tensors) < 4000 && sizeof(Updates<bf16>) < 4000, "kernel arguments are limited to 4 KB");

__device__ __forceinline__ bool aligned(const void *at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

struct alignas(8) Bytes8 {
  uint32_t words[2];
};

__device__ __forceinline__ double squares_of_chunk(const float *x, int count) {
  double sum = 0;
  int whole = aligned(x) ? count / 4 * 4 : 0;
#pragma unroll 4
  for (int at = int(threadIdx.x) * 4; at < whole; at += THREADS * 4) {
    float v[4];
    load_vector(x + at, v);
#pragma unroll
    for (int i = 0; i < 4; i++) sum += double(v[i]) * double(v[i]);
  }
  for (int at = whole + int(threadIdx.x); at < count; at += THREADS) sum += double(x[at]) * double(x[at]);
  return block_sum(sum);
}

__device__ __forceinline__ void zero_chunk(float *x, int count) {
  const float zeros[4] = {};
  int whole = aligned(x) ? count / 4 * 4 : 0;
  for (int at = int(threadIdx.x) * 4; at < whole; at += THREADS * 4) store_vector(x + at, zeros);
  for (int at = whole + int(threadIdx.x); at < count; at += THREADS) x[at] = 0;
}

// A chunk of one tensor, and the seed of its random numbers. `weight` may be null, see Updates.
template <class M> struct Chunk {
  float *weight;
  bf16 *copy;
  M *exp_avg, *exp_avg_sq;
  const float *grad;
  uint32_t seed, first; // first: index of the chunk's first element in the parameter
};

__device__ __forceinline__ void load_moments(const float *from, float (&to)[4]) { load_vector(from, to); }
__device__ __forceinline__ void load_moments(const bf16 *from, float (&to)[4]) {
  Bytes8 raw = *reinterpret_cast<const Bytes8 *>(from);
#pragma unroll
  for (int i = 0; i < 4; i++) to[i] = bits_to_float(i % 2 ? raw.words[i / 2] & 0xFFFF0000u : raw.words[i / 2] << 16);
}

// Stores four values of each moment, from element `at`.
__device__ __forceinline__ void store_moments(const Chunk<float> &chunk, int at, const float (&m)[4], const float (&v)[4]) {
  store_vector(chunk.exp_avg + at, m);
  store_vector(chunk.exp_avg_sq + at, v);
}
__device__ __forceinline__ void store_moments(const Chunk<bf16> &chunk, int at, const float (&m)[4], const float (&v)[4]) {
  Bytes8 rounded[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t low = mix(chunk.seed ^ (chunk.first + at + 2 * i)), high = mix(chunk.seed ^ (chunk.first + at + 2 * i + 1));
    rounded[0].words[i] = round_at_random(m[2 * i], low & 0xFFFFu).bits | uint32_t(round_at_random(m[2 * i + 1], high & 0xFFFFu).bits) << 16;
    rounded[1].words[i] = round_at_random(v[2 * i], low >> 16).bits | uint32_t(round_at_random(v[2 * i + 1], high >> 16).bits) << 16;
  }
  *reinterpret_cast<Bytes8 *>(chunk.exp_avg + at) = rounded[0];
  *reinterpret_cast<Bytes8 *>(chunk.exp_avg_sq + at) = rounded[1];
}

// Stores one value of each moment.
__device__ __forceinline__ void store_moments(const Chunk<float> &chunk, int at, float m, float v) { chunk.exp_avg[at] = m, chunk.exp_avg_sq[at] = v; }
__device__ __forceinline__ void store_moments(const Chunk<bf16> &chunk, int at, float m, float v) {
  uint32_t random = mix(chunk.seed ^ (chunk.first + at));
  chunk.exp_avg[at] = round_at_random(m, random & 0xFFFFu);
  chunk.exp_avg_sq[at] = round_at_random(v, random >> 16);
}

// Stores four weights, from element `at`.
template <class M> __device__ __forceinline__ void store_weights(const Chunk<M> &chunk, int at, const float (&p)[4]) {
  if (!chunk.weight) {
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bits[i] = random_weight(p[i], chunk.seed, chunk.first + at + i).bits;
    *reinterpret_cast<Bytes8 *>(chunk.copy + at) = Bytes8{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
    return;
  }
  store_vector(chunk.weight + at, p);
  if (chunk.copy) *reinterpret_cast<Bytes8 *>(chunk.copy + at) = Bytes8{pack(p[0], p[1]), pack(p[2], p[3])};
}

// Updates four elements at `at`, and, if `both`, four elements at `at` + THREADS * 4.
template <class M>
__device__ __forceinline__ void update_vectors(const Chunk<M> &chunk, int at, bool both, float grad_scale, const Scalars &s, float keep, float step_size) {
  float g[2][4], p[2][4], m[2][4], v[2][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (i == 1 && !both) break;
    int from = at + i * THREADS * 4;
    load_vector(chunk.grad + from, g[i]);
    if (chunk.weight) load_vector(chunk.weight + from, p[i]);
    else load_moments(chunk.copy + from, p[i]);
    load_moments(chunk.exp_avg + from, m[i]);
    load_moments(chunk.exp_avg_sq + from, v[i]);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (i == 1 && !both) break;
    int to = at + i * THREADS * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      Element e = {p[i][j], m[i][j], v[i][j]};
      update(e, g[i][j] * grad_scale, s, keep, step_size);
      p[i][j] = e.weight, m[i][j] = e.exp_avg, v[i][j] = e.exp_avg_sq;
    }
    store_moments(chunk, to, m[i], v[i]);
    store_weights(chunk, to, p[i]);
  }
}

template <class M>
__device__ __forceinline__ void update_chunk(const Chunk<M> &chunk, int count, float grad_scale, const Scalars &s, float keep, float step_size) {
  bool vectors = aligned(chunk.weight) && aligned(chunk.exp_avg) && aligned(chunk.exp_avg_sq) && aligned(chunk.grad) &&
                 reinterpret_cast<uintptr_t>(chunk.copy) % 8 == 0;
  int whole = vectors ? count / 4 * 4 : 0;
  for (int at = int(threadIdx.x) * 4; at < whole; at += 2 * THREADS * 4)
    update_vectors(chunk, at, at + THREADS * 4 < whole, grad_scale, s, keep, step_size);
  for (int at = whole + int(threadIdx.x); at < count; at += THREADS) {
    Element e = {load_weight(chunk.weight, chunk.copy, at), widen(chunk.exp_avg[at]), widen(chunk.exp_avg_sq[at])};
    update(e, chunk.grad[at] * grad_scale, s, keep, step_size);
    store_moments(chunk, at, e.exp_avg, e.exp_avg_sq);
    store_weight(chunk.weight, chunk.copy, at, e.weight, chunk.seed, chunk.first + at);
  }
}

} // namespace

// partials [chunks]: the sum of squares of each chunk.
extern "C" __global__ void __launch_bounds__(THREADS) squares_of_chunks_f32(const __grid_constant__ Tensors tensors, int num, double *partials) {
  int tensor = tensor_of_block(tensors, num);
  long long start = (long long)(int(blockIdx.x) - tensors.first[tensor]) * CHUNK;
  int count = int(min((long long)CHUNK, tensors.count[tensor] - start));
  double sum = squares_of_chunk(tensors.start[tensor] + start, count);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}
EXPORT(squares_of_chunks_f32)

// squares [num]: the sum of squares of each tensor, one block per tensor.
extern "C" __global__ void __launch_bounds__(THREADS) squares_of_tensors_f32(const __grid_constant__ Tensors tensors, const double *partials, double *squares) {
  double sum = 0;
  for (int chunk = tensors.first[blockIdx.x] + int(threadIdx.x); chunk < tensors.first[blockIdx.x + 1]; chunk += THREADS) sum += partials[chunk];
  sum = block_sum(sum);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}
EXPORT(squares_of_tensors_f32)

// squares [blocks]: the sum of squares of each SQUARES_BLOCK elements. The order of the additions does
// not depend on the alignment of x, and zeros after the last element change nothing.
extern "C" __global__ void __launch_bounds__(THREADS) squares_of_blocks_f32(const float *x, long long len, double *squares) {
  long long start = (long long)blockIdx.x * SQUARES_BLOCK;
  int count = int(min((long long)SQUARES_BLOCK, len - start));
  x += start;
  bool vectors = aligned(x);
  double sum = 0;
#pragma unroll 4
  for (int at = int(threadIdx.x) * 4; at < count; at += THREADS * 4) {
    float v[4] = {};
    if (vectors && at + 4 <= count) load_vector(x + at, v);
    else {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (at + i < count) v[i] = x[at + i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sum += double(v[i]) * double(v[i]);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}
EXPORT(squares_of_blocks_f32)

// Writes the factor, at most 1, that limits the joint gradient norm to `max_norm`; 1 if `max_norm`
// is 0, and -1 if the norm is not finite. One block.
extern "C" __global__ void __launch_bounds__(THREADS) clip_f32(const double *squares, int num, double max_norm, float *grad_scale) {
  double sum = 0;
  for (int tensor = int(threadIdx.x); tensor < num; tensor += THREADS) sum += squares[tensor];
  double norm = sqrt(block_sum(sum));
  if (threadIdx.x > 0) return;
  double scale = 1;
  if (max_norm > 0) scale = fmin(scale, max_norm / (norm + 1e-6));
  *grad_scale = norm < double(INFINITE) ? float(scale) : -1.0f; // false for NaN
}
EXPORT(clip_f32)

namespace {

template <class M>
__device__ __forceinline__ void update_block(const Updates<M> &updates, int num, const float *grad_scale, const Scalars &s) {
  float scale = *grad_scale;
  if (scale < 0) return; // the gradients are not finite: change nothing
  int tensor = tensor_of_block(updates, num);
  long long start = (long long)(int(blockIdx.x) - updates.first[tensor]) * CHUNK;
  int count = int(min((long long)CHUNK, updates.count[tensor] - start));
  Chunk<M> chunk = {element(updates.weight[tensor], start), element(updates.copy[tensor], start), updates.exp_avg[tensor] + start,
                    updates.exp_avg_sq[tensor] + start, updates.grad[tensor] + start, updates.seed[tensor], updates.offset[tensor] + uint32_t(start)};
  update_chunk(chunk, count, scale, s, updates.keep[tensor], updates.step_size[tensor]);
}

} // namespace

#define ADAMW(M, name)                                                                                                                            \
  extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                                                        \
      adamw_##name(const __grid_constant__ Updates<M> updates, int num, const float *grad_scale, float lerp, float beta2, float one_minus_beta2,  \
                   float inverse_root_correction2, float eps) {                                                                                   \
    update_block(updates, num, grad_scale, Scalars{lerp, beta2, one_minus_beta2, inverse_root_correction2, eps});                                 \
  }                                                                                                                                               \
  EXPORT(adamw_##name)

ADAMW(float, f32)
ADAMW(bf16, bf16)

extern "C" __global__ void __launch_bounds__(THREADS) zero_tensors_f32(const __grid_constant__ Tensors tensors, int num) {
  int tensor = tensor_of_block(tensors, num);
  long long start = (long long)(int(blockIdx.x) - tensors.first[tensor]) * CHUNK;
  zero_chunk(tensors.start[tensor] + start, int(min((long long)CHUNK, tensors.count[tensor] - start)));
}
EXPORT(zero_tensors_f32)
