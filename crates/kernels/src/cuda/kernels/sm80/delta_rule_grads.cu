// Gated delta rule: gradients of the operands, from the states and their gradients at the ends of
// each chunk; see crates/kernels/src/gated_delta_rule.rs for the contract,
// crates/kernels/src/cpu/delta_rule_backward.rs for the same algorithm, and
// docs/dev/cuda/delta_rule.md for the tiles.
//
// Chunks are independent here. A block has one chunk of a key head, and iterates over the value
// heads that share it, so that the sums over heads have a fixed order. A warp has 16 tokens and a
// quarter of the key dims; gradients of the queries and keys stay in registers. They are those of
// the unit vectors, times the factors between a vector and its unit vector.
#include "delta_rule.cuh"

namespace {

constexpr int SLICES = 2, SLICE = MAX_WIDTH / SLICES; // of the key dims; a warp has one
constexpr int OF_MATRIX = SLICES / 2;                 // warps that share 16 rows of a matrix
constexpr int STEP = 16;                              // columns of the states at a time
template <class T> constexpr int THREADS = 2 * SLICES * Precision<T>::TOKENS;

// Sums over the columns of the states, or over the other tokens, for each token.
template <int TOKENS> struct Rows {
  // Reads by queries times output gradients; reads by keys times gradients of the writes; reads of
  // the gradients of the leaving states by keys times the writes.
  float queries[SLICES][TOKENS], keys[SLICES][TOKENS], writes[SLICES][TOKENS];
  float decays[SLICES][TOKENS], betas[SLICES][TOKENS]; // gradients through the matrices
  float errors[2 * SLICES][TOKENS];                    // gradients of the writes times the values
  float columns[TOKENS / 8][TOKENS];                   // gradients of the decays from the token
};

template <class T> struct Operands {
  const T *qkv;
  const float *g, *beta;
  const T *d_o;
  const int *chunks;
  const bf16 *states, *dstates, *n, *dr;
  T *dqkv;
  float *dg, *dbeta;
};

// What a block has in shared memory behind the queries and keys. The gradients of the matrices take
// the place of the stages.
template <class T> struct GradTiles {
  using P = Precision<T>;
  using States = Tile<P::SAVED, STEP, MAX_WIDTH>;
  using Values = Tile<P::SUMS, STEP, P::TOKENS>;
  using Outputs = Tile<P::INPUTS, P::TOKENS, STEP>;
  using Matrix = Tile<P::SUMS, P::TOKENS, P::TOKENS>;
  static constexpr int STAGE = 2 * States::BYTES + 2 * Values::BYTES + Outputs::BYTES;
  static_assert(2 * Matrix::BYTES <= P::STAGES * STAGE, "the gradients of the matrices are where the stages were");
  struct Stage {
    States state, dstate;
    Values n, dr;
    Outputs d_o;
  };
  Units<T> units;
  unsigned char *shared;

  __device__ __forceinline__ explicit GradTiles(unsigned char *from) : units(from), shared(from + Units<T>::BYTES) {}
  __device__ __forceinline__ bf16 *at(int byte) const { return reinterpret_cast<bf16 *>(shared + byte); }
  __device__ __forceinline__ Matrix grads(int of) const { return {at(of * Matrix::BYTES)}; }
  __device__ __forceinline__ Stage stage(int step) const {
    int from = step % P::STAGES * STAGE, values = from + 2 * States::BYTES;
    return {{at(from)}, {at(from + States::BYTES)}, {at(values)}, {at(values + Values::BYTES)}, {at(values + 2 * Values::BYTES)}};
  }
};

// The rows and the slice of the key dims of this warp, and its part of the matrices: P or the
// triangular one, and half of its columns.
template <class T> __device__ __forceinline__ int first_row() { return warp() % (Precision<T>::TOKENS / 16) * 16; }
template <class T> __device__ __forceinline__ int slice() { return warp() / (Precision<T>::TOKENS / 16); }
template <class T> __device__ __forceinline__ int matrix() { return slice<T>() / OF_MATRIX; }
template <class T> __device__ __forceinline__ int matrix_column() { return slice<T>() % OF_MATRIX * (Precision<T>::TOKENS / OF_MATRIX); }

// Starts to copy columns `column` .. `column + STEP` of the states and values of a head. WRITES:
// what add_writes reads; otherwise what add_reads does.
template <class T, bool WRITES>
__device__ __forceinline__ void load_stage(const GradTiles<T> &tiles, const Operands<T> &operands, const Sizes &sizes, int chunk, int launched_head, int column, int first, int count) {
  using P = Precision<T>;
  auto stage = tiles.stage(column / STEP);
  compute_here(chunk);
  compute_here(first);
  size_t state = sizes.state<T>(chunk, launched_head) + column * sizes.width();
  size_t values = sizes.written<T>(chunk, launched_head) + column * P::TOKENS;
  int of_state = sizes.width() * sizes.columns(), of_values = P::TOKENS * sizes.columns();
  stage.state.template copy<THREADS<T>>(operands.states + state, sizes.width(), of_state);
  stage.n.template copy<THREADS<T>>(operands.n + values, P::TOKENS, of_values);
  if (WRITES) {
    stage.dstate.template copy<THREADS<T>>(operands.dstates + state, sizes.width(), of_state);
  } else {
    stage.dr.template copy<THREADS<T>>(operands.dr + values, P::TOKENS, of_values);
    stage.d_o.template load<THREADS<T>>(operands.d_o + sizes.output(first, sizes.head(launched_head)) + column, sizes.value_heads() * sizes.dv, count, sizes.dv - column, STEP);
  }
  commit_copies();
}

// Adds the product of rows of this warp and a right operand. BY_COLUMN: the rows are columns of
// `left`.
template <class T, bool BY_COLUMN, int N, int PARTS, int ROWS, int COLUMNS, class Right>
__device__ __forceinline__ void add_product(float (&sums)[N][4], const Tile<PARTS, ROWS, COLUMNS> &left, const Right &right, int from, int end) {
  uint32_t a[PARTS][4];
  load_left<BY_COLUMN>(a, left, first_row<T>(), 0);
#pragma unroll
  for (int tile = 0; tile < N; tile += 2)
    if (from + tile * 8 < end) multiply<Precision<T>::SUMS, true>(sums[tile], sums[tile + 1], a, right, from + tile * 8, 0);
}

// Sums over the columns of a head: products of the states with output gradients and with gradients
// of the writes, gradients of P or of the triangular matrix, negated, and `Rows::errors`.
template <int TOKENS> struct Reads {
  float queries[SLICE / 8][4] = {}, keys[SLICE / 8][4] = {}, tile[TOKENS / 8 / OF_MATRIX][4] = {}, errors = 0;
};

template <class T> __device__ __forceinline__ void add_reads(Reads<Precision<T>::TOKENS> &sums, const typename GradTiles<T>::Stage &stage, int width) {
  int from = slice<T>() * SLICE, rows_end = first_row<T>() + 16;
  add_product<T, false>(sums.queries, stage.d_o, stage.state, from, width);
  add_product<T, true>(sums.keys, stage.dr, stage.state, from, width);
  if (matrix<T>() == 0) add_product<T, false>(sums.tile, stage.d_o, stage.n, matrix_column<T>(), rows_end);
  else add_product<T, true>(sums.tile, stage.dr, stage.n, matrix_column<T>(), rows_end);
}

// Adds the products of the gradients of the states with the writes, and with the states.
template <class T> __device__ __forceinline__ void add_writes(float (&writes)[SLICE / 8][4], float &kept, const typename GradTiles<T>::Stage &stage, int width) {
  add_product<T, true>(writes, stage.n, stage.dstate, slice<T>() * SLICE, width);
  for (int at = int(threadIdx.x); at < STEP * MAX_WIDTH / 2; at += THREADS<T>) {
    int row = at / (MAX_WIDTH / 2), column = at % (MAX_WIDTH / 2) * 2;
    if (column >= width) continue;
    float x[2], y[2];
    stage.state.pair(row, column, x[0], x[1]);
    stage.dstate.pair(row, column, y[0], y[1]);
    kept = fmaf(x[0], y[0], fmaf(x[1], y[1], kept));
  }
}

// Adds the gradients of the writes times the values. A thread has a token and some of the columns.
template <class T>
__device__ __forceinline__ void add_errors(float &errors, const typename GradTiles<T>::Stage &stage, const T *values, int stride, int count, int columns) {
  using P = Precision<T>;
  int token = int(threadIdx.x) % P::TOKENS, from = int(threadIdx.x) / P::TOKENS * (STEP / SLICES / 2);
#pragma unroll
  for (int i = 0; i < STEP / SLICES / 2; i++) {
    float dr = 0;
#pragma unroll
    for (int part = 0; part < P::SUMS; part++) dr += widen(*stage.dr.at(part, from + i, token));
    if (token < count && from + i < columns) errors = fmaf(dr, widen(values[size_t(token) * stride + from + i]), errors);
  }
}

// Returns the sum over the four lanes with the same rows.
__device__ __forceinline__ float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// Adds `sums` times `factor(token)` to the gradients of the queries or keys, and writes the
// products of `sums` with these `units`, for each slice of the key dims.
template <class T, class F>
__device__ __forceinline__ void use_states(float (&grads)[SLICE / 8][4], const float (&sums)[SLICE / 8][4], const typename Units<T>::Rows &units,
                                           float (&products)[SLICES][Precision<T>::TOKENS], int width, F factor) {
  Place place;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    int row = first_row<T>() + place.row(i);
    float of_row = factor(row), product = 0;
#pragma unroll
    for (int tile = 0; tile < SLICE / 8; tile++) {
      int column = slice<T>() * SLICE + place.column(tile, i);
      if (slice<T>() * SLICE + tile * 8 >= width) continue;
      float x[2];
      units.pair(row, column, x[0], x[1]);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        product = fmaf(x[j], sums[tile][i + j], product);
        grads[tile][i + j] = fmaf(of_row, sums[tile][i + j], grads[tile][i + j]);
      }
    }
    product = row_sum(product);
    if (lane() % 4 == 0) products[slice<T>()][row] = product;
  }
}

// Gradients through the matrix of this warp: those of the products of queries and keys (P), or of
// keys (the triangular matrix), times both lengths. Writes them to `grads`, and shares those of the
// decays.
template <class T>
__device__ __forceinline__ void use_matrices(const Reads<Precision<T>::TOKENS> &sums, const GradTiles<T> &tiles, const Gates<Precision<T>::TOKENS> &gates, const float *inverses,
                                             Rows<Precision<T>::TOKENS> &rows, const Sizes &sizes) {
  using P = Precision<T>;
  constexpr int TILES = P::TOKENS / 8 / OF_MATRIX;
  bool of_keys = matrix<T>() == 1;
  Place place;
  auto units = of_keys ? tiles.units.keys : tiles.units.queries;
  int from = matrix_column<T>();
  float products[TILES][4] = {}, decays[2] = {}, betas[2] = {};
  for (int k = 0; k < sizes.width(); k += 16) {
    uint32_t a[P::INPUTS][4];
    load_left<false>(a, units, first_row<T>(), k);
#pragma unroll
    for (int tile = 0; tile < TILES; tile += 2)
      if (from + tile * 8 <= first_row<T>()) multiply<P::SUMS, false>(products[tile], products[tile + 1], a, tiles.units.keys, from + tile * 8, k);
  }
  float scale = of_keys ? -1.0f : 1.0f / sqrtf(float(sizes.dk));
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    float columns[2] = {};
    if (from + tile / 2 * 16 <= first_row<T>()) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int row = first_row<T>() + place.row(i), column = from + place.column(tile, i);
        bool used = of_keys ? column < row : column <= row;
        float decay = used ? gates.decay(column, row) * inverses[P::TOKENS + column] : 0.0f;
        float grad = sums.tile[tile][i] * decay * scale * inverses[of_keys ? P::TOKENS + row : row];
        if (of_keys) {
          betas[i / 2] = fmaf(grad, products[tile][i], betas[i / 2]);
          grad *= gates.factors[row].beta;
        }
        float of_decay = column < row ? grad * products[tile][i] : 0.0f;
        decays[i / 2] += of_decay;
        columns[i % 2] += of_decay;
        products[tile][i] = grad;
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) tiles.grads(matrix<T>()).set(first_row<T>() + place.row(i), from + place.column(tile, i), products[tile][i], products[tile][i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int mask = 4; mask < WARP; mask *= 2) columns[i] += shuffle_xor(columns[i], mask);
      if (lane() < 4) rows.columns[matrix<T>() * (P::TOKENS / 16) + first_row<T>() / 16][from + place.column(tile, i)] = columns[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float decay = row_sum(decays[i]), beta = row_sum(betas[i]);
    int row = first_row<T>() + place.row(2 * i);
    if (lane() % 4 == 0) rows.decays[slice<T>()][row] = decay, rows.betas[slice<T>()][row] = beta;
  }
}

// Adds the products of the gradients of the matrices with the queries and keys.
template <class T> __device__ __forceinline__ void add_matrices(const GradTiles<T> &tiles, float (&dqueries)[SLICE / 8][4], float (&dkeys)[SLICE / 8][4], int width) {
  using P = Precision<T>;
  for (int k = 0; k < P::TOKENS; k += 16) {
    uint32_t of_rows[2][P::SUMS][4], of_columns[2][P::SUMS][4];
    bool lower = k <= first_row<T>(), upper = k >= first_row<T>();
#pragma unroll
    for (int of = 0; of < 2; of++) {
      if (lower) load_left<false>(of_rows[of], tiles.grads(of), first_row<T>(), k);
      if (upper) load_left<true>(of_columns[of], tiles.grads(of), first_row<T>(), k);
    }
#pragma unroll
    for (int tile = 0; tile < SLICE / 8; tile += 2) {
      int column = slice<T>() * SLICE + tile * 8;
      if (column >= width) continue;
      if (lower) {
        multiply<P::SUMS, true>(dqueries[tile], dqueries[tile + 1], of_rows[0], tiles.units.keys, column, k);
        multiply<P::SUMS, true>(dkeys[tile], dkeys[tile + 1], of_rows[1], tiles.units.keys, column, k);
      }
      if (upper) {
        multiply<P::SUMS, true>(dkeys[tile], dkeys[tile + 1], of_columns[0], tiles.units.queries, column, k);
        multiply<P::SUMS, true>(dkeys[tile], dkeys[tile + 1], of_columns[1], tiles.units.keys, column, k);
      }
    }
  }
}

// Writes dg and dbeta of a head. `kept` is the product of the state that enters the chunk and the
// gradient of the one that leaves it. One warp calls it.
template <int TOKENS>
__device__ __forceinline__ void gate_grads(const Rows<TOKENS> &rows, const Factors *factors, double kept, float *dg, float *dbeta, const Sizes &sizes, int first, int count, int head) {
  constexpr int OF_LANE = TOKENS / WARP;
  double dy[OF_LANE], all_written = 0; // gradient of the sum of g from the start of the chunk
  float errors[OF_LANE];
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    int token = lane() * OF_LANE + i;
    const Factors &of = factors[token];
    double queries = 0, keys = 0, written = 0, decays = 0;
    errors[i] = 0;
    for (int slice = 0; slice < SLICES; slice++) {
      queries += double(rows.queries[slice][token]), keys += double(rows.keys[slice][token]);
      written += double(rows.writes[slice][token]), decays += double(rows.decays[slice][token]);
      errors[i] += rows.errors[2 * slice][token] + rows.errors[2 * slice + 1][token] + rows.betas[slice][token];
    }
    for (int other = 0; other < TOKENS / 8; other++) decays -= double(rows.columns[other][token]);
    keys *= double(of.key), written *= double(of.write);
    dy[i] = double(of.query) * queries - double(of.beta) * keys + decays - written;
    all_written += written;
    errors[i] -= float(keys);
  }
  all_written = warp_sum(all_written);
  if (lane() == WARP - 1) dy[OF_LANE - 1] += double(factors[TOKENS].query) * kept + all_written;
#pragma unroll
  for (int i = OF_LANE - 2; i >= 0; i--) dy[i] += dy[i + 1];
  double after = dy[0]; // of this lane and those behind it
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    double other = shuffle(after, min(lane() + step, WARP - 1));
    if (lane() + step < WARP) after += other;
  }
  after = shuffle(after, min(lane() + 1, WARP - 1));
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    int token = lane() * OF_LANE + i;
    if (token >= count) continue;
    dg[sizes.gate(first + token, head)] = float(dy[i] + (lane() < WARP - 1 ? after : 0));
    dbeta[sizes.gate(first + token, head)] = errors[i];
  }
}

// Writes the gradients of the queries or keys, without their parts along the vectors. `along` has
// room for all slices of the key dims.
template <class T>
__device__ __forceinline__ void write_units(T *to, float (&grads)[SLICE / 8][4], const typename Units<T>::Rows &units, const float *inverses, float (&along)[SLICES][Precision<T>::TOKENS],
                                            const Sizes &sizes, int count) {
  Place place;
  use_states<T>(grads, grads, units, along, sizes.width(), [](int) { return 0.0f; });
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    int row = first_row<T>() + place.row(i);
    float factor = 0;
    for (int of = 0; of < SLICES; of++) factor += along[of][row];
    factor *= inverses[row] * inverses[row];
#pragma unroll
    for (int tile = 0; tile < SLICE / 8; tile++) {
      int column = slice<T>() * SLICE + place.column(tile, i);
      float x[2];
      if (column < sizes.dk) units.pair(row, column, x[0], x[1]);
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (row < count && column + j < sizes.dk) to[size_t(row) * sizes.row() + column + j] = narrow<T>(fmaf(-factor, x[j], grads[tile][i + j]));
    }
  }
}

// Calls f(column, stage) for all columns of the states of a head. Copies of the next ones are in
// flight meanwhile if there is more than one stage.
template <class T, bool WRITES, class F>
__device__ __forceinline__ void for_stages(const GradTiles<T> &tiles, const Operands<T> &operands, const Sizes &sizes, int chunk, int launched_head, int first, int count, F f) {
  constexpr int AHEAD = (Precision<T>::STAGES - 1) * STEP;
  for (int column = -AHEAD; column < sizes.columns(); column += STEP) {
    wait_copies<0>();
    __syncthreads();
    if (column + AHEAD < sizes.columns()) load_stage<T, WRITES>(tiles, operands, sizes, chunk, launched_head, column + AHEAD, first, count);
    if (AHEAD == 0) {
      wait_copies<0>();
      __syncthreads();
    }
    if (column >= 0) f(column, tiles.stage(column / STEP));
  }
}

template <class T> __device__ __forceinline__ void gradients(const Operands<T> &operands, const Sizes &sizes) {
  using P = Precision<T>;
  constexpr int TOKENS = P::TOKENS;
  DYNAMIC_SHARED(bytes);
  __shared__ Gates<TOKENS> gates;
  __shared__ Rows<TOKENS> rows;
  __shared__ float inverses[2 * TOKENS];
  GradTiles<T> tiles(bytes);
  int chunk = int(blockIdx.x) / sizes.launched, launched = int(blockIdx.x) % sizes.launched, key_head = sizes.first + launched;
  int first = operands.chunks[2 * chunk], count = operands.chunks[2 * chunk + 1] - first, width = sizes.width();
  tiles.units.template load<THREADS<T>>(operands.qkv, inverses, sizes, first, count, key_head);
  float dqueries[SLICE / 8][4] = {}, dkeys[SLICE / 8][4] = {};
  for (int launched_head = launched * sizes.group; launched_head < (launched + 1) * sizes.group; launched_head++) {
    int head = sizes.head(launched_head);
    __syncthreads();
    if (warp() == 0) gates.fill(operands.g, operands.beta, inverses, sizes, first, count, head);
    Reads<TOKENS> reads;
    for_stages<T, false>(tiles, operands, sizes, chunk, launched_head, first, count, [&](int column, const auto &stage) {
      add_reads<T>(reads, stage, width);
      add_errors<T>(reads.errors, stage, operands.qkv + sizes.value(first, head) + column, sizes.row(), count, sizes.dv - column);
    });
    rows.errors[threadIdx.x / TOKENS][threadIdx.x % TOKENS] = reads.errors;
    use_states<T>(dqueries, reads.queries, tiles.units.queries, rows.queries, width, [&](int token) { return gates.factors[token].query; });
    use_states<T>(dkeys, reads.keys, tiles.units.keys, rows.keys, width, [&](int token) { return -gates.factors[token].key * gates.factors[token].beta; });
    float writes[SLICE / 8][4] = {}, kept = 0;
    for_stages<T, true>(tiles, operands, sizes, chunk, launched_head, first, count, [&](int, const auto &stage) { add_writes<T>(writes, kept, stage, width); });
    use_states<T>(dkeys, writes, tiles.units.keys, rows.writes, width, [&](int token) { return gates.factors[token].write; });
    double all_kept = block_sum(double(kept)); // its barriers also order the reads and writes of tiles
    use_matrices<T>(reads, tiles, gates, inverses, rows, sizes);
    __syncthreads();
    if (warp() == 0) gate_grads(rows, gates.factors, all_kept, operands.dg, operands.dbeta, sizes, first, count, head);
    add_matrices<T>(tiles, dqueries, dkeys, width);
  }
  __syncthreads();
  write_units<T>(operands.dqkv + sizes.query(first, key_head), dqueries, tiles.units.queries, inverses, rows.queries, sizes, count);
  write_units<T>(operands.dqkv + sizes.key(first, key_head), dkeys, tiles.units.keys, inverses + TOKENS, rows.keys, sizes, count);
}

} // namespace

#define DELTA_RULE_GRADS(T, name)                                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS<T>, 1)                                                                                        \
      delta_rule_grads_##name(const T *qkv, const float *g, const float *beta, const T *d_o, const int *chunks, const bf16 *states, const bf16 *dstates,           \
                              const bf16 *n, const bf16 *dr, T *dqkv, float *dg, float *dbeta, Sizes sizes) {                                                      \
    gradients(Operands<T>{qkv, g, beta, d_o, chunks, states, dstates, n, dr, dqkv, dg, dbeta}, sizes);                                                             \
  }                                                                                                                                                                \
  EXPORT(delta_rule_grads_##name)

DELTA_RULE_GRADS(float, f32)
DELTA_RULE_GRADS(bf16, bf16)
