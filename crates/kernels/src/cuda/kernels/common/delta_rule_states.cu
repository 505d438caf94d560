// Gated delta rule: matrices of the chunks, and the iterations over the states; see
// crates/kernels/src/gated_delta_rule.rs for the contract, and crates/kernels/src/cpu/delta_rule.rs for the same algorithm.
//
// Only the states are sequential. One kernel computes the matrices of all chunks at once. In the
// kernels that iterate over the states, a block has 32 columns of the state of one head and iterates
// over the chunks of a segment: columns do not depend on each other. The state stays in shared memory.
#include "delta_rule.cuh"

namespace {

constexpr int WARPS = THREADS / WARP;

// Writes (I + A)^-1 and P of each head of a chunk. A warp inverts the matrix of one head: a lane has
// a column, and |elements| are at most 1, because each is a product of contractions.
template <class T> __device__ __forceinline__ void chunk_matrices(const T *qkv, const float *g, const float *beta, const int *chunks, float *matrices, const Sizes &sizes) {
  DYNAMIC_SHARED(shared);
  int stride = sizes.stride();
  float *units = reinterpret_cast<float *>(shared), *a = units + 2 * TOKENS * stride;
  __shared__ Gates gates[WARPS];
  __shared__ float inverses[2 * TOKENS];
  int chunk = int(blockIdx.x) / sizes.launched, launched = int(blockIdx.x) % sizes.launched, key_head = sizes.first + launched;
  int first = chunks[2 * chunk], count = chunks[2 * chunk + 1] - first;
  load_units<false>(units, inverses, qkv, sizes, first, count, key_head);
  __syncthreads();
  float products[4][4] = {}; // of queries and keys; then of keys and keys
  add_product<0, 4>(products, Along<4>{units + row_group() * stride, ROW_GROUPS * stride},
                    Along<4>{units + (TOKENS + column_group()) * stride, COLUMN_GROUPS * stride}, sizes.width());
  for (int from = 0; from < sizes.group; from += WARPS) {
    int heads = min(WARPS, sizes.group - from), own = launched * sizes.group + from + warp();
    __syncthreads();
    if (warp() < heads) gates[warp()].fill(g, beta, sizes, first, count, sizes.head(own));
    __syncthreads();
    for (int head = 0; head < heads; head++) {
      float *p = matrices + sizes.tile(chunk, launched * sizes.group + from + head) + TOKENS * TOKENS;
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          int row = row_group() + i * ROW_GROUPS, column = column_group() + j * COLUMN_GROUPS;
          float decay = column <= row ? gates[head].decay(column, row) : 0.0f;
          p[row * TOKENS + column] = products[i][j] * decay;
          a[(head * TOKENS + row) * STRIDE + column] = column < row ? gates[head].beta[row] * products[i + 2][j] * decay : 0.0f;
        }
    }
    __syncthreads();
    if (warp() < heads) {
      float *to = matrices + sizes.tile(chunk, own), x[TOKENS];
      const float *rows = a + warp() * TOKENS * STRIDE;
#pragma unroll
      for (int row = 0; row < TOKENS; row++) {
        x[row] = row == lane() ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < row; k++) x[row] = fmaf(-rows[row * STRIDE + k], x[k], x[row]);
        to[row * TOKENS + lane()] = x[row];
      }
    }
  }
}

// The block of a pass over the states: a segment, a head, and 32 columns of the state.
struct Strand {
  int segment, start, end, first_chunk, head, column;

  __device__ __forceinline__ Strand(const int *segments, const Sizes &sizes) {
    int blocks = (sizes.dv + COLUMNS - 1) / COLUMNS, rest = int(blockIdx.x) / blocks;
    column = int(blockIdx.x) % blocks * COLUMNS;
    head = rest % sizes.launched_heads();
    const int *at = segments + 4 * size_t(rest / sizes.launched_heads());
    start = at[0], end = at[1], first_chunk = at[2], segment = at[3];
  }
};

// Forward pass over the chunks. If SAVE it writes the states that enter the chunks to `saved` and
// what the tokens write to `n`, otherwise the outputs to `o`. `states`, if not null, holds the states
// that enter the segments, and receives those that leave them.
template <class T, bool SAVE>
__device__ __forceinline__ void forward(const T *qkv, const float *g, const float *beta, const float *matrices, const int *segments, float *states, T *o, float *saved,
                                        float *n, const Sizes &sizes) {
  DYNAMIC_SHARED(shared);
  constexpr int FROM = SAVE ? TOKENS : 0, ROWS = SAVE ? 2 : 4; // rows of the units that are used
  int stride = sizes.stride(), mine = 4 * column_group();
  float *units = reinterpret_cast<float *>(shared), *state = units + 2 * TOKENS * stride, *inverse = state + sizes.width() * STRIDE;
  float *p = inverse + TOKENS * STRIDE, *z = p + TOKENS * STRIDE, *written = z + TOKENS * STRIDE, *tail = written + TOKENS * STRIDE;
  __shared__ Gates gates;
  __shared__ float inverses[2 * TOKENS];
  Strand strand(segments, sizes);
  int head = sizes.head(strand.head), key_head = head / sizes.group;
  float *outer = states ? states + (size_t(strand.segment) * sizes.value_heads() + head) * sizes.dk * sizes.dv : nullptr;
  load_state(state, sizes, strand.column, [&](size_t at) { return outer ? outer[at] : 0.0f; });
  for (int first = strand.start, chunk = strand.first_chunk; first < strand.end; first += TOKENS, chunk++) {
    int count = min(TOKENS, strand.end - first);
    __syncthreads();
    float v[2][4];
    for_tile([&](int token, int column, int i, int j) {
      bool valid = token < count && strand.column + column < sizes.dv;
      v[i][j] = valid ? widen(qkv[sizes.value(first + token, head) + strand.column + column]) : 0.0f;
    });
    load_units<SAVE>(units, inverses, qkv, sizes, first, count, key_head);
    load_tiles(inverse, matrices + sizes.tile(chunk, strand.head)); // and p
    if (warp() == 0) gates.fill(g, beta, sizes, first, count, head);
    if (SAVE) save_state(saved + sizes.state(chunk, strand.head), state, sizes, strand.column);
    __syncthreads();
    float reads[ROWS][4] = {}, by_token[2], ones[2] = {1.0f, 1.0f}, tails[2];
    add_product<0, ROWS>(reads, Along<ROWS>{units + (FROM + row_group()) * stride, ROW_GROUPS * stride}, Across{state + mine, STRIDE}, sizes.width());
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int token = row_group() + i * ROW_GROUPS;
      by_token[i] = gates.beta[token], tails[i] = gates.tail[token];
#pragma unroll
      for (int j = 0; j < 4; j++) v[i][j] = fmaf(-gates.head[token], reads[ROWS - 2 + i][j], v[i][j]);
    }
    store_tile(z, v, by_token);
    __syncthreads();
    float sums[2][4] = {};
    add_product<0, 2>(sums, Along<2>{inverse + row_group() * STRIDE, ROW_GROUPS * STRIDE}, Across{z + mine, STRIDE}, TOKENS);
    if (!SAVE) store_tile(written, sums, ones);
    store_tile(tail, sums, tails);
    __syncthreads();
    if (SAVE) {
      for_tile([&](int token, int column, int i, int j) {
        if (token < count && strand.column + column < sizes.dv) n[sizes.written(first + token, strand.head) + strand.column + column] = sums[i][j];
      });
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = gates.head[row_group() + i * ROW_GROUPS] * reads[i][j];
      add_product<0, 2>(sums, Along<2>{p + row_group() * STRIDE, ROW_GROUPS * STRIDE}, Across{written + mine, STRIDE}, TOKENS);
      for_tile([&](int token, int column, int i, int j) {
        if (token < count && strand.column + column < sizes.dv) o[sizes.output(first + token, head) + strand.column + column] = narrow<T>(sums[i][j]);
      });
    }
    advance(state, gates.all(), units + TOKENS * stride, tail, sizes, TOKENS);
  }
  __syncthreads();
  if (outer) save_state(outer, state, sizes, strand.column);
}

// Backward pass over the chunks, from last to first. Writes the gradients of the states that leave
// the chunks to `saved`, and those of what the tokens write, before the triangular system, to `dr`.
template <class T>
__device__ __forceinline__ void backward(const T *qkv, const float *g, const float *beta, const float *matrices, const int *segments, const T *d_o, float *saved, float *dr,
                                         const Sizes &sizes) {
  DYNAMIC_SHARED(shared);
  int stride = sizes.stride(), mine = 4 * column_group();
  float *units = reinterpret_cast<float *>(shared), *dstate = units + 2 * TOKENS * stride, *inverse = dstate + sizes.width() * STRIDE;
  float *p = inverse + TOKENS * STRIDE, *dn = p + TOKENS * STRIDE, *grads = dn + TOKENS * STRIDE; // of outputs; then of reads by keys
  __shared__ Gates gates;
  __shared__ float inverses[2 * TOKENS];
  Strand strand(segments, sizes);
  int head = sizes.head(strand.head), key_head = head / sizes.group;
  load_state(dstate, sizes, strand.column, [](size_t) { return 0.0f; });
  int chunks = (strand.end - strand.start + TOKENS - 1) / TOKENS;
  float ones[2] = {1.0f, 1.0f};
  for (int index = chunks - 1; index >= 0; index--) {
    int first = strand.start + index * TOKENS, count = min(TOKENS, strand.end - first), chunk = strand.first_chunk + index;
    __syncthreads();
    float outputs[2][4];
    for_tile([&](int token, int column, int i, int j) {
      bool valid = token < count && strand.column + column < sizes.dv;
      outputs[i][j] = valid ? widen(d_o[sizes.output(first + token, head) + strand.column + column]) : 0.0f;
    });
    store_tile(grads, outputs, ones);
    load_units<false>(units, inverses, qkv, sizes, first, count, key_head);
    load_tiles(inverse, matrices + sizes.tile(chunk, strand.head)); // and p
    if (warp() == 0) gates.fill(g, beta, sizes, first, count, head);
    save_state(saved + sizes.state(chunk, strand.head), dstate, sizes, strand.column);
    __syncthreads();
    float sums[2][4] = {}, heads[2], reads[2];
    add_product<0, 2>(sums, Along<2>{units + (TOKENS + row_group()) * stride, ROW_GROUPS * stride}, Across{dstate + mine, STRIDE}, sizes.width());
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int token = row_group() + i * ROW_GROUPS;
      heads[i] = gates.head[token], reads[i] = -gates.head[token] * gates.beta[token];
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] *= gates.tail[token];
    }
    add_product<0, 2>(sums, Spread<2, ROW_GROUPS>{p + row_group(), STRIDE}, Across{grads + mine, STRIDE}, TOKENS);
    store_tile(dn, sums, ones);
    __syncthreads();
    float results[2][4] = {};
    add_product<0, 2>(results, Spread<2, ROW_GROUPS>{inverse + row_group(), STRIDE}, Across{dn + mine, STRIDE}, TOKENS);
    for_tile([&](int token, int column, int i, int j) {
      if (token < count && strand.column + column < sizes.dv) dr[sizes.written(first + token, strand.head) + strand.column + column] = results[i][j];
    });
    store_tile(grads, outputs, heads);
    store_tile(grads + TOKENS * STRIDE, results, reads);
    __syncthreads();
    advance(dstate, gates.all(), units, grads, sizes, 2 * TOKENS);
  }
}

} // namespace

#define DELTA_RULE_STATES(T, name)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                             \
      delta_rule_matrices_##name(const T *qkv, const float *g, const float *beta, const int *chunks, float *matrices, Sizes sizes) {  \
    chunk_matrices(qkv, g, beta, chunks, matrices, sizes);                                                                          \
  }                                                                                                                                 \
  EXPORT(delta_rule_matrices_##name)                                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                             \
      delta_rule_outputs_##name(const T *qkv, const float *g, const float *beta, const float *matrices, const int *segments, float *states, T *o, Sizes sizes) { \
    forward<T, false>(qkv, g, beta, matrices, segments, states, o, nullptr, nullptr, sizes);                                        \
  }                                                                                                                                 \
  EXPORT(delta_rule_outputs_##name)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                             \
      delta_rule_states_##name(const T *qkv, const float *g, const float *beta, const float *matrices, const int *segments, float *saved, float *n, Sizes sizes) { \
    forward<T, true>(qkv, g, beta, matrices, segments, nullptr, nullptr, saved, n, sizes);                                          \
  }                                                                                                                                 \
  EXPORT(delta_rule_states_##name)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                             \
      delta_rule_state_grads_##name(const T *qkv, const float *g, const float *beta, const float *matrices, const int *segments, const T *d_o, float *saved, float *dr, \
                                    Sizes sizes) {                                                                                  \
    backward(qkv, g, beta, matrices, segments, d_o, saved, dr, sizes);                                                              \
  }                                                                                                                                 \
  EXPORT(delta_rule_state_grads_##name)

DELTA_RULE_STATES(float, f32)
DELTA_RULE_STATES(bf16, bf16)
