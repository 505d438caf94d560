// Gated delta rule: matrices of the chunks, and the iterations over the states; see
// crates/kernels/src/gated_delta_rule.rs for the contract, crates/kernels/src/cpu/delta_rule.rs for
// the same algorithm, and docs/dev/cuda/delta_rule.md for the tiles.
//
// Only the states are sequential. One kernel computes the matrices of all chunks at once. In the
// others, a warp has 16 columns of the state of one head, transposed, in registers,
// and iterates over the chunks of a segment. Columns do not depend on each other, so the warps of a
// block share only what they read.
#include "delta_rule.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int WARP_COLUMNS = 16, BLOCK_COLUMNS = THREADS / WARP * WARP_COLUMNS; // of a state

// Heads of the matrices of a block at a time, and the stride of their transposed triangular
// matrices.
template <class T> constexpr int HEADS = THREADS / Precision<T>::TOKENS;
template <class T> constexpr int STRIDE = Precision<T>::TOKENS + 4;

// Writes P of a head and its transposed triangular matrix, for the 16 rows of this warp.
template <class T, int TILES>
__device__ __forceinline__ void write_products(const float (&products)[2][TILES][4], const Gates<Precision<T>::TOKENS> &gates, const float *inverses, float scale, float *triangle, bf16 *p) {
  using P = Precision<T>;
  Place place;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    if (tile / 2 > warp()) continue;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      int row = warp() * 16 + place.row(i);
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        int column = place.column(tile, i + j);
        float decay = column <= row ? gates.decay(column, row) * inverses[P::TOKENS + column] : 0.0f;
        x[j] = products[0][tile][i + j] * decay * inverses[row] * scale;
        float strength = column < row ? gates.factors[row].beta : 0.0f;
        triangle[column * STRIDE<T> + row] = strength * products[1][tile][i + j] * decay * inverses[P::TOKENS + row];
      }
      uint32_t words[P::SUMS];
      split<P::SUMS>(x[0], x[1], words);
#pragma unroll
      for (int part = 0; part < P::SUMS; part++) store_word(p + (part * P::TOKENS + row) * P::TOKENS + place.column(tile, i), words[part]);
    }
  }
}

// Writes (I + A)^-1 of a head. A thread has a column, and |elements| are at most 1, because each is
// a product of contractions. The blocks of 16 x 16 above the diagonal are not written.
template <class T> __device__ __forceinline__ void invert(const float *triangle, bf16 *to) {
  using P = Precision<T>;
  constexpr int TOKENS = P::TOKENS;
  int column = int(threadIdx.x) % TOKENS;
  float x[TOKENS];
#pragma unroll
  for (int row = 0; row < TOKENS; row++) x[row] = row == column ? 1.0f : 0.0f;
#pragma unroll
  for (int k = 0; k < TOKENS - 1; k++)
#pragma unroll
    for (int row = (k + 1) / 4 * 4; row < TOKENS; row += 4) {
      float y[4];
      load_floats<4>(triangle + k * STRIDE<T> + row, y);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (row + i > k) x[row + i] = fmaf(-y[i], x[k], x[row + i]);
    }
#pragma unroll
  for (int row = 0; row < TOKENS; row += 2) {
    if (column > (row | 15)) continue;
    uint32_t words[P::SUMS];
    split<P::SUMS>(x[row], x[row + 1], words);
#pragma unroll
    for (int part = 0; part < P::SUMS; part++) {
      bf16 *at = to + (part * TOKENS + row) * TOKENS + column;
      at[0] = bf16{uint16_t(words[part])}, at[TOKENS] = bf16{uint16_t(words[part] >> 16)};
    }
  }
}

// Writes the matrices and the factors of each head of a chunk.
template <class T> __device__ __forceinline__ void chunk_matrices(const T *qkv, const float *g, const float *beta, const int *chunks, bf16 *matrices, const Sizes &sizes) {
  using P = Precision<T>;
  constexpr int TOKENS = P::TOKENS, TILES = TOKENS / 8;
  DYNAMIC_SHARED(shared);
  Units<T> units(shared);
  auto triangles = reinterpret_cast<float *>(shared + Units<T>::BYTES);
  __shared__ Gates<TOKENS> gates[HEADS<T>];
  __shared__ float inverses[2 * TOKENS];
  int chunk = int(blockIdx.x) / sizes.launched, launched = int(blockIdx.x) % sizes.launched;
  int first = chunks[2 * chunk], count = chunks[2 * chunk + 1] - first;
  units.template load<THREADS>(qkv, inverses, sizes, first, count, sizes.first + launched);
  float products[2][TILES][4] = {}; // of queries and keys, and of keys and keys
  bool has_rows = warp() < TOKENS / 16;
  for (int k = 0; k < sizes.width() && has_rows; k += 16) {
    uint32_t queries[P::INPUTS][4], keys[P::INPUTS][4];
    load_left<false>(queries, units.queries, warp() * 16, k);
    load_left<false>(keys, units.keys, warp() * 16, k);
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2) {
      if (tile / 2 > warp()) continue;
      multiply<P::SUMS, false>(products[0][tile], products[0][tile + 1], queries, units.keys, tile * 8, k);
      multiply<P::SUMS, false>(products[1][tile], products[1][tile + 1], keys, units.keys, tile * 8, k);
    }
  }
  float scale = 1.0f / sqrtf(float(sizes.dk));
  for (int from = 0; from < sizes.group; from += HEADS<T>) {
    int heads = min(HEADS<T>, sizes.group - from), launched_head = launched * sizes.group + from;
    __syncthreads();
    if (warp() < heads) gates[warp()].fill(g, beta, inverses, sizes, first, count, sizes.head(launched_head + warp()));
    __syncthreads();
    for (int head = 0; head < heads; head++) {
      bf16 *to = matrices + sizes.matrices<T>(chunk, launched_head + head);
      if (has_rows) write_products<T>(products, gates[head], inverses, scale, triangles + head * TOKENS * STRIDE<T>, to + MATRICES<T> / 2);
      auto factors = reinterpret_cast<float *>(to + MATRICES<T>);
      auto from_gates = reinterpret_cast<const float *>(gates[head].factors);
      for (int at = int(threadIdx.x); at < 4 * (TOKENS + 1); at += THREADS) factors[at] = from_gates[at];
    }
    __syncthreads();
    int head = int(threadIdx.x) / TOKENS;
    if (head < heads) invert<T>(triangles + head * TOKENS * STRIDE<T>, matrices + sizes.matrices<T>(chunk, launched_head + head));
  }
}

// The block of an iteration over the states: a segment, a head, and 16 columns of the state for
// each warp. Each object computes it again, see Place.
struct Strand {
  int segment, start, end, first_chunk, head, block_column, column;

  __device__ __forceinline__ Strand(const int *segments, const Sizes &sizes) {
    int block = int(blockIdx.x);
    compute_here(block);
    int blocks = (sizes.dv + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, rest = block / blocks;
    block_column = block % blocks * BLOCK_COLUMNS;
    column = block_column + thread_here() / WARP * WARP_COLUMNS;
    head = rest % sizes.launched_heads();
    const int *at = segments + 4 * size_t(rest / sizes.launched_heads());
    start = at[0], end = at[1], first_chunk = at[2], segment = at[3];
  }
};

// What such a block has of a chunk in shared memory. Without OUTPUTS it has neither queries
// nor P.
template <class T> struct ChunkTiles {
  using P = Precision<T>;
  using Units = Tile<P::INPUTS, P::TOKENS, MAX_WIDTH>;
  using Values = Tile<P::INPUTS, P::TOKENS, BLOCK_COLUMNS>;
  using Matrix = Tile<P::SUMS, P::TOKENS, P::TOKENS>;
  static constexpr int FACTORS = 16 * (P::TOKENS + 1);
  static constexpr int KEYS = 0, VALUES = Units::BYTES, INVERSE = VALUES + Values::BYTES, FACTORS_AT = INVERSE + Matrix::BYTES;
  static constexpr int QUERIES = FACTORS_AT + FACTORS, P_AT = QUERIES + Units::BYTES, ALL = P_AT + Matrix::BYTES;
  Units keys, queries;
  Values values; // or gradients of outputs
  Matrix inverse, p;
  const Factors *factors;

  __device__ __forceinline__ ChunkTiles(unsigned char *shared)
      : keys{reinterpret_cast<bf16 *>(shared + KEYS)}, queries{reinterpret_cast<bf16 *>(shared + QUERIES)}, values{reinterpret_cast<bf16 *>(shared + VALUES)},
        inverse{reinterpret_cast<bf16 *>(shared + INVERSE)}, p{reinterpret_cast<bf16 *>(shared + P_AT)}, factors(reinterpret_cast<Factors *>(shared + FACTORS_AT)) {}

  // Starts to copy a chunk. `columns` are those of the block in the values or gradients, of which
  // `dims` exist.
  template <bool OUTPUTS>
  __device__ __forceinline__ void load(const T *qkv, const T *columns, int stride, int dims, const bf16 *matrices, const Sizes &sizes, int first, int count, int key_head) const {
    keys.template load<THREADS>(qkv + sizes.key(first, key_head), sizes.row(), count, sizes.dk, sizes.width());
    values.template load<THREADS>(columns, stride, count, dims, BLOCK_COLUMNS);
    inverse.template copy<THREADS, true>(matrices, P::TOKENS, P::TOKENS * P::TOKENS);
    auto to = reinterpret_cast<bf16 *>(const_cast<Factors *>(factors));
    for (int at = int(threadIdx.x); at <= P::TOKENS; at += THREADS) copy_async(to + 8 * at, matrices + MATRICES<T> + 8 * at, true);
    if (OUTPUTS) {
      queries.template load<THREADS>(qkv + sizes.query(first, key_head), sizes.row(), count, sizes.dk, sizes.width());
      p.template copy<THREADS, true>(matrices + MATRICES<T> / 2, P::TOKENS, P::TOKENS * P::TOKENS);
    }
    commit_copies();
  }
};

// Calls f(tiles, first token, chunk, number of tokens, whether a chunk follows) for the chunks of a
// segment, from last to first if BACK. With two stages, the copies of the next chunk are in flight
// meanwhile. `columns` are the values or the gradients of outputs of the first token and head.
template <class T, bool OUTPUTS, bool BACK, class F>
__device__ __forceinline__ void for_chunks(const T *qkv, const T *columns, int stride, const bf16 *matrices, const int *segments, const Sizes &sizes, F f) {
  constexpr int TOKENS = Precision<T>::TOKENS, BYTES = OUTPUTS ? ChunkTiles<T>::ALL : ChunkTiles<T>::QUERIES;
  DYNAMIC_SHARED(shared);
  Strand strand(segments, sizes);
  int chunks = (strand.end - strand.start + TOKENS - 1) / TOKENS, ahead = sizes.stages - 1;
  auto index = [&](int step) { return BACK ? chunks - 1 - step : step; };
  for (int step = -ahead; step < chunks; step++) {
    wait_copies<0>();
    __syncthreads();
    if (int next = step + ahead; next < chunks) {
      Strand strand(segments, sizes);
      int first = strand.start + index(next) * TOKENS, head = sizes.head(strand.head);
      const T *from = columns + (size_t(first) * stride + head * sizes.dv + strand.block_column);
      ChunkTiles<T>(shared + (next & ahead) * BYTES)
          .template load<OUTPUTS>(qkv, from, stride, sizes.dv - strand.block_column, matrices + sizes.matrices<T>(strand.first_chunk + index(next), strand.head), sizes, first,
                                  min(TOKENS, strand.end - first), head / sizes.group);
    }
    if (ahead == 0) {
      wait_copies<0>();
      __syncthreads();
    }
    if (step < 0 || strand.column >= sizes.columns()) continue;
    int first = strand.start + index(step) * TOKENS;
    f(ChunkTiles<T>(shared + (step & ahead) * BYTES), first, strand.first_chunk + index(step), min(TOKENS, strand.end - first), step + 1 < chunks);
  }
}

// Calls f(tile, i, row, column) for the elements of the transposed state of this warp. Those that
// do not exist are in `sizes.width()` and `sizes.columns()`, and are zeros.
template <class F> __device__ __forceinline__ void for_state(const Sizes &sizes, int column, F f) {
  Place place;
#pragma unroll
  for (int tile = 0; tile < MAX_WIDTH / 8; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = place.column(tile, i), of = column + place.row(i);
      if (row < sizes.dk && of < sizes.dv) f(tile, i, size_t(row) * sizes.dv + of);
    }
}

// Writes the parts of sums [16, 8 TILES] to rows of `width` elements of a temporary tensor.
template <int PARTS, int TILES> __device__ __forceinline__ void save(bf16 *to, const float (&sums)[TILES][4], int width, int part) {
  Place place;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    if (tile * 8 >= width) continue;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t words[PARTS];
      split<PARTS>(sums[tile][i], sums[tile][i + 1], words);
#pragma unroll
      for (int of = 0; of < PARTS; of++) store_word(to + (size_t(of) * part + place.row(i) * width + place.column(tile, i)), words[of]);
    }
  }
}

// Writes transposed values of the tokens, of which `columns` exist, to rows that are `stride`
// apart.
template <class T, int TILES> __device__ __forceinline__ void store_values(T *to, const float (&values)[TILES][4], int stride, int count, int columns) {
  if (columns <= 0) return; // never true; without a branch nvcc mixes stores and products, and spills
  Place place;
  int token = place.column(0, 0);
  to += size_t(token) * stride + place.row(0);
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float value[1] = {values[tile][i]};
      if (token + i % 2 < count && place.row(i) < columns) store_floats(to + (i % 2 * stride + i / 2 * 8), value);
    }
    token += 8, to += size_t(8) * stride;
    compute_here(to);
    compute_here(token);
  }
}

// state = decay state + left times rows, where the left operand is `values` times `factor(token)`.
template <class T, int TILES, class Units, class F>
__device__ __forceinline__ void advance(float (&state)[MAX_WIDTH / 8][4], const float (&values)[TILES][4], const Units &units, int width, F factor) {
  using P = Precision<T>;
  Place place;
#pragma unroll
  for (int at = 0; at < TILES; at += 2) {
    float x[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = values[at + i / 4][i % 4] * factor(place.column(at + i / 4, i % 4));
    uint32_t a[P::SUMS][4];
    left_of_sums<P::SUMS>(a, x[0], x[1]);
#pragma unroll
    for (int tile = 0; tile < MAX_WIDTH / 8; tile += 2) {
      if (tile * 8 >= width) continue;
      if constexpr (P::SUMS > 2) {
        // Tensor cores truncate their sums, which would add up over the chunks of an f32 state.
        float sums[2][4] = {};
        multiply<P::SUMS, true>(sums[0], sums[1], a, units, tile * 8, at * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) state[tile + i / 4][i % 4] += sums[i / 4][i % 4];
      } else {
        multiply<P::SUMS, true>(state[tile], state[tile + 1], a, units, tile * 8, at * 8);
      }
    }
  }
}

// Adds `values` times the rows of a lower triangular matrix (BY_STEP: times its columns).
template <class T, bool BY_STEP, int TILES>
__device__ __forceinline__ void multiply_triangle(float (&sums)[TILES][4], const float (&values)[TILES][4], const typename ChunkTiles<T>::Matrix &matrix) {
  using P = Precision<T>;
#pragma unroll
  for (int k = 0; k < TILES; k += 2) {
    uint32_t a[P::SUMS][4];
    left_of_sums<P::SUMS>(a, values[k], values[k + 1]);
#pragma unroll
    for (int tile = BY_STEP ? 0 : k; tile < (BY_STEP ? k + 2 : TILES); tile += 2) multiply<P::SUMS, BY_STEP>(sums[tile], sums[tile + 1], a, matrix, tile * 8, k * 8);
  }
}

// Adds what the keys and, with OUTPUTS, the queries of a chunk read of a state.
template <class T, bool OUTPUTS, int TILES>
__device__ __forceinline__ void read_state(float (&keys)[TILES][4], float (&queries)[TILES][4], const float (&state)[MAX_WIDTH / 8][4], const ChunkTiles<T> &tiles, int width) {
  using P = Precision<T>;
#pragma unroll
  for (int k = 0; k < MAX_WIDTH / 8; k += 2) {
    if (k * 8 >= width) continue;
    uint32_t a[P::SUMS][4];
    left_of_sums<P::SUMS>(a, state[k], state[k + 1]);
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2) {
      multiply<P::SUMS, false>(keys[tile], keys[tile + 1], a, tiles.keys, tile * 8, k * 8);
      if (OUTPUTS) multiply<P::SUMS, false>(queries[tile], queries[tile + 1], a, tiles.queries, tile * 8, k * 8);
    }
  }
}

// Multiplies a state by the decay of a chunk.
__device__ __forceinline__ void decay_state(float (&state)[MAX_WIDTH / 8][4], float decay) {
#pragma unroll
  for (int i = 0; i < MAX_WIDTH / 2; i++) state[i / 4][i % 4] *= decay;
}

// One chunk of the forward pass, for the columns of this warp. `written` receives what the tokens
// write, or `o` the outputs. The state does not advance if nothing reads it.
template <class T, bool SAVE>
__device__ __forceinline__ void forward_chunk(float (&state)[MAX_WIDTH / 8][4], const ChunkTiles<T> &tiles, const Sizes &sizes, int column, int count, bool state_is_read, T *o, bf16 *written) {
  using P = Precision<T>;
  constexpr int TILES = P::TOKENS / 8;
  float values[TILES][4] = {}, outputs[TILES][4] = {}, writes[TILES][4] = {};
  read_state<T, !SAVE>(values, outputs, state, tiles, sizes.width());
  Place place;
#pragma unroll
  for (int tile = 0; tile < TILES; tile += 2) {
    uint32_t words[P::INPUTS][4];
    float v[2][4];
    load_left<true>(words, tiles.values, warp() * WARP_COLUMNS, tile * 8);
    sums_of_left(v, words);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float &value = values[tile + i / 4][i % 4];
      const Factors &factors = tiles.factors[place.column(tile + i / 4, i % 4)];
      value = factors.beta * fmaf(-factors.key, value, v[i / 4][i % 4]);
    }
  }
  __syncwarp(); // no order needs it; without it nvcc starts the next products early, and spills
  multiply_triangle<T, false>(writes, values, tiles.inverse);
  if (SAVE) {
    save<P::SUMS>(written, writes, P::TOKENS, sizes.columns() * P::TOKENS);
  } else {
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) outputs[i / 4][i % 4] *= tiles.factors[place.column(i / 4, i % 4)].query;
    multiply_triangle<T, false>(outputs, writes, tiles.p);
    store_values(o, outputs, sizes.value_heads() * sizes.dv, count, sizes.dv - column);
  }
  if (!state_is_read) return;
  decay_state(state, tiles.factors[P::TOKENS].query);
  advance<T>(state, writes, tiles.keys, sizes.width(), [&](int token) { return tiles.factors[token].write; });
}

// Forward pass over the chunks. If SAVE it writes the states that enter the chunks to `saved` and
// what the tokens write to `written`, otherwise the outputs to `o`. `states`, if not null, holds
// the states that enter the segments, and receives those that leave them.
template <class T, bool SAVE>
__device__ __forceinline__ void forward(const T *qkv, const bf16 *matrices, const int *segments, float *states, T *o, bf16 *saved, bf16 *written, const Sizes &sizes) {
  using P = Precision<T>;
  Strand strand(segments, sizes);
  int head = sizes.head(strand.head), column = strand.column;
  float *outer = states ? states + (size_t(strand.segment) * sizes.value_heads() + head) * sizes.dk * sizes.dv : nullptr;
  float state[MAX_WIDTH / 8][4] = {};
  if (outer) for_state(sizes, column, [&](int tile, int i, size_t at) { state[tile][i] = outer[at]; });
  for_chunks<T, !SAVE, false>(qkv, qkv + sizes.value(0, 0), sizes.row(), matrices, segments, sizes, [&](const ChunkTiles<T> &tiles, int first, int chunk, int count, bool more) {
    if (SAVE) save<P::SAVED>(saved + sizes.state<T>(chunk, strand.head) + column * sizes.width(), state, sizes.width(), sizes.width() * sizes.columns());
    forward_chunk<T, SAVE>(state, tiles, sizes, column, count, outer || more, SAVE ? nullptr : o + sizes.output(first, head) + column,
                           SAVE ? written + sizes.written<T>(chunk, strand.head) + column * P::TOKENS : nullptr);
  });
  if (outer) for_state(sizes, column, [&](int tile, int i, size_t at) { outer[at] = state[tile][i]; });
}

// One chunk of the backward pass, for the columns of this warp. Writes the gradients of the values,
// and those of what the tokens write before the triangular system to `written`.
template <class T>
__device__ __forceinline__ void backward_chunk(float (&dstate)[MAX_WIDTH / 8][4], const ChunkTiles<T> &tiles, const Sizes &sizes, int column, int count, T *dvalues, bf16 *written) {
  using P = Precision<T>;
  constexpr int TILES = P::TOKENS / 8;
  float dwrites[TILES][4] = {}, results[TILES][4] = {};
  read_state<T, false>(dwrites, results, dstate, tiles, sizes.width());
  Place place;
#pragma unroll
  for (int i = 0; i < TILES * 4; i++) dwrites[i / 4][i % 4] *= tiles.factors[place.column(i / 4, i % 4)].write;
  decay_state(dstate, tiles.factors[P::TOKENS].query);
#pragma unroll
  for (int k = 0; k < TILES; k += 2) {
    uint32_t d_o[P::INPUTS][4];
    load_left<true>(d_o, tiles.values, warp() * WARP_COLUMNS, k * 8);
#pragma unroll
    for (int tile = 0; tile <= k; tile += 2) multiply<P::SUMS, true>(dwrites[tile], dwrites[tile + 1], d_o, tiles.p, tile * 8, k * 8);
    float x[2][4];
    sums_of_left(x, d_o);
#pragma unroll
    for (int i = 0; i < 8; i++) results[k + i / 4][i % 4] = x[i / 4][i % 4];
  }
  advance<T>(dstate, results, tiles.queries, sizes.width(), [&](int token) { return tiles.factors[token].query; });
#pragma unroll
  for (int i = 0; i < TILES * 4; i++) results[i / 4][i % 4] = 0;
  multiply_triangle<T, true>(results, dwrites, tiles.inverse);
  save<P::SUMS>(written, results, P::TOKENS, sizes.columns() * P::TOKENS);
#pragma unroll
  for (int i = 0; i < TILES * 4; i++) results[i / 4][i % 4] *= tiles.factors[place.column(i / 4, i % 4)].beta;
  store_values(dvalues, results, sizes.row(), count, sizes.dv - column);
  advance<T>(dstate, results, tiles.keys, sizes.width(), [&](int token) { return -tiles.factors[token].key; });
}

// Backward pass over the chunks, from last to first. Writes the gradients of the states that leave
// the chunks to `saved`, and those of the tokens as above.
template <class T>
__device__ __forceinline__ void backward(const T *qkv, const bf16 *matrices, const int *segments, const T *d_o, T *dqkv, bf16 *saved, bf16 *written, const Sizes &sizes) {
  using P = Precision<T>;
  Strand strand(segments, sizes);
  int head = sizes.head(strand.head), column = strand.column, width = sizes.width();
  float dstate[MAX_WIDTH / 8][4] = {};
  for_chunks<T, true, true>(qkv, d_o, sizes.value_heads() * sizes.dv, matrices, segments, sizes, [&](const ChunkTiles<T> &tiles, int first, int chunk, int count, bool more) {
    save<P::SAVED>(saved + sizes.state<T>(chunk, strand.head) + column * width, dstate, width, width * sizes.columns());
    backward_chunk<T>(dstate, tiles, sizes, column, count, dqkv + sizes.value(first, head) + column, written + sizes.written<T>(chunk, strand.head) + column * P::TOKENS);
  });
}

} // namespace

#define DELTA_RULE_STATES(T, name)                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                                                       \
      delta_rule_matrices_##name(const T *qkv, const float *g, const float *beta, const int *chunks, bf16 *matrices, Sizes sizes) {                              \
    chunk_matrices(qkv, g, beta, chunks, matrices, sizes);                                                                                                       \
  }                                                                                                                                                              \
  EXPORT(delta_rule_matrices_##name)                                                                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                                                       \
      delta_rule_outputs_##name(const T *qkv, const bf16 *matrices, const int *segments, float *states, T *o, Sizes sizes) {                                     \
    forward<T, false>(qkv, matrices, segments, states, o, nullptr, nullptr, sizes);                                                                              \
  }                                                                                                                                                              \
  EXPORT(delta_rule_outputs_##name)                                                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                                                       \
      delta_rule_states_##name(const T *qkv, const bf16 *matrices, const int *segments, bf16 *saved, bf16 *written, Sizes sizes) {                               \
    forward<T, true>(qkv, matrices, segments, nullptr, nullptr, saved, written, sizes);                                                                          \
  }                                                                                                                                                              \
  EXPORT(delta_rule_states_##name)                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                                                                       \
      delta_rule_state_grads_##name(const T *qkv, const bf16 *matrices, const int *segments, const T *d_o, T *dqkv, bf16 *saved, bf16 *written, Sizes sizes) {   \
    backward(qkv, matrices, segments, d_o, dqkv, saved, written, sizes);                                                                                         \
  }                                                                                                                                                              \
  EXPORT(delta_rule_state_grads_##name)

DELTA_RULE_STATES(float, f32)
DELTA_RULE_STATES(bf16, bf16)
