// Gated delta rule: gradients of the operands, from the states and their gradients at the ends of
// each chunk; see crates/kernels/src/gated_delta_rule.rs for the contract, and crates/kernels/src/cpu/delta_rule_backward.rs
// for the same algorithm.
//
// Chunks are independent here. A block has one chunk of a key head, and iterates over the value heads
// that share it and over their columns, so that the sums over heads have a fixed order. Gradients of
// the unit queries and keys stay in registers.
#include "delta_rule.cuh"

namespace {

// Sums over the columns of a row of the matrices of a head, for the rows of this thread.
struct RowSums {
  float queries[2] = {}; // output gradients times what queries read
  float keys[2] = {};    // gradients of the writes times what keys read
  float errors[2] = {};  // gradients of the writes times the values without what keys read
  float writes[2] = {};  // gradients of the states that leave, read by keys, times the writes
  float decays[2] = {};  // gradients of the decays to the token
  float betas[2] = {};   // gradients of beta through the triangular matrix
};

// The same sums in shared memory.
struct Rows {
  float queries[TOKENS], keys[TOKENS], errors[TOKENS], writes[TOKENS], decays[TOKENS], betas[TOKENS];
  float columns[THREADS / WARP][TOKENS]; // gradients of the decays from the token, of each warp
};

// Returns the sum over the eight threads with the same rows.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int mask = COLUMN_GROUPS / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

__device__ __forceinline__ void share_rows(Rows &rows, const RowSums &sums, float (&columns)[4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float all[6] = {row_sum(sums.queries[i]), row_sum(sums.keys[i]), row_sum(sums.errors[i]), row_sum(sums.writes[i]), row_sum(sums.decays[i]), row_sum(sums.betas[i])};
    if (column_group() > 0) continue;
    int row = row_group() + i * ROW_GROUPS;
    rows.queries[row] = all[0], rows.keys[row] = all[1], rows.errors[row] = all[2];
    rows.writes[row] = all[3], rows.decays[row] = all[4], rows.betas[row] = all[5];
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
#pragma unroll
    for (int mask = COLUMN_GROUPS; mask < WARP; mask *= 2) columns[j] += shuffle_xor(columns[j], mask);
    if (lane() < COLUMN_GROUPS) rows.columns[warp()][column_group() + j * COLUMN_GROUPS] = columns[j];
  }
}

// Writes dg and dbeta of a head. `kept` is the product of the state that enters the chunk and the
// gradient of the one that leaves it. One warp calls it.
__device__ __forceinline__ void gate_grads(const Rows &rows, const Gates &gates, double kept, float *dg, float *dbeta, const Sizes &sizes, int first, int count, int head) {
  int token = lane();
  float column = 0;
  for (int i = 0; i < THREADS / WARP; i++) column += rows.columns[i][token];
  double written = double(gates.tail[token]) * double(rows.writes[token]), all_written = warp_sum(written);
  // Gradient of the sum of g from the start of the chunk to the token.
  double dy = double(gates.head[token]) * (double(rows.queries[token]) - double(gates.beta[token]) * double(rows.keys[token]));
  dy += double(rows.decays[token]) - double(column) - written;
  if (token == TOKENS - 1) dy += double(gates.all()) * kept + all_written;
  double sum = 0;
  for (int i = TOKENS - 1; i >= 0; i--) {
    double other = shuffle(dy, i);
    if (i >= token) sum += other;
  }
  if (token >= count) return;
  dg[sizes.gate(first + token, head)] = float(sum);
  dbeta[sizes.gate(first + token, head)] = rows.errors[token] + rows.betas[token];
}

// Gradients through the matrices P and A of a head, whose own gradients are `tile` (that of A
// negated). Writes the gradients of the products of queries and keys to `grads`, and those of the
// products of keys, which are symmetric, to the rows behind them.
__device__ __forceinline__ void matrix_grads(const float (&tile)[4][4], const float (&products)[4][4], const Gates &gates, float *grads, RowSums &sums, float (&columns)[4]) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int row = row_group() + i * ROW_GROUPS, column = column_group() + j * COLUMN_GROUPS;
      float decay = column <= row ? gates.decay(column, row) : 0.0f;
      float of_queries = tile[i][j] * decay;
      grads[row * STRIDE + column] = of_queries;
      float *symmetric = grads + TOKENS * STRIDE;
      if (column == row) symmetric[row * STRIDE + row] = 0;
      if (column >= row) continue;
      float of_a = -tile[i + 2][j] * decay, of_keys = gates.beta[row] * of_a;
      sums.betas[i] = fmaf(of_a, products[i + 2][j], sums.betas[i]);
      float of_decay = fmaf(of_queries, products[i][j], of_keys * products[i + 2][j]);
      sums.decays[i] += of_decay;
      columns[j] += of_decay;
      symmetric[row * STRIDE + column] = of_keys;
      symmetric[column * STRIDE + row] = of_keys;
    }
}

template <class T> struct Operands {
  const T *qkv;
  const float *g, *beta;
  const T *d_o;
  const int *chunks;
  const float *states, *dstates, *n, *dr;
  T *dqkv;
  float *dg, *dbeta;
};

// Shared memory of a block.
struct Shared {
  float *units, *state, *dstate, *n, *grads;
  __device__ __forceinline__ Shared(unsigned char *shared, const Sizes &sizes) {
    units = reinterpret_cast<float *>(shared);
    state = units + 2 * TOKENS * sizes.stride();
    dstate = state + sizes.width() * STRIDE;
    n = dstate + sizes.width() * STRIDE;
    grads = n + TOKENS * STRIDE; // of outputs, and behind them `dr`; see also `matrix_grads`
  }
};

// One block of columns of a head: adds the gradients of its matrices to `tile`, and those of the
// units through the states to `dunits`. Writes the gradients of the values.
template <class T>
__device__ __forceinline__ void columns_of_head(const Operands<T> &operands, const Sizes &sizes, const Shared &shared, const Gates &gates, int chunk, int launched_head, int column,
                                                int first, int count, float (&tile)[4][4], float (&dunits)[MAX_PASSES][4][4], RowSums &sums, float &kept) {
  int stride = sizes.stride(), mine = 4 * column_group(), head = sizes.head(launched_head);
  size_t at = sizes.state(chunk, launched_head);
  float v[2][4];
  __syncthreads();
  load_state(shared.dstate, sizes, column, [&](size_t of) { return operands.dstates[at + of]; });
  load_state(shared.state, sizes, column, [&](size_t of) {
    float state = operands.states[at + of];
    kept = fmaf(state, operands.dstates[at + of], kept);
    return state;
  });
  for_tile([&](int token, int own, int i, int j) {
    bool valid = token < count && column + own < sizes.dv;
    size_t row = sizes.written(first + token, launched_head) + column + own;
    v[i][j] = valid ? widen(operands.qkv[sizes.value(first + token, head) + column + own]) : 0.0f;
    shared.n[token * STRIDE + own] = valid ? operands.n[row] : 0.0f;
    shared.grads[token * STRIDE + own] = valid ? widen(operands.d_o[sizes.output(first + token, head) + column + own]) : 0.0f;
    shared.grads[(TOKENS + token) * STRIDE + own] = valid ? operands.dr[row] : 0.0f;
  });
  __syncthreads();
  {
    float reads[4][4] = {}, leaving[2][4] = {};
    add_product<0, 4>(reads, Along<4>{shared.units + row_group() * stride, ROW_GROUPS * stride}, Across{shared.state + mine, STRIDE}, sizes.width());
    add_product<0, 2>(leaving, Along<2>{shared.units + (TOKENS + row_group()) * stride, ROW_GROUPS * stride}, Across{shared.dstate + mine, STRIDE}, sizes.width());
    for_tile([&](int token, int own, int i, int j) {
      float d_o = shared.grads[token * STRIDE + own], dr = shared.grads[(TOKENS + token) * STRIDE + own];
      sums.queries[i] = fmaf(d_o, reads[i][j], sums.queries[i]);
      sums.keys[i] = fmaf(dr, reads[i + 2][j], sums.keys[i]);
      sums.errors[i] = fmaf(dr, fmaf(-gates.head[token], reads[i + 2][j], v[i][j]), sums.errors[i]);
      sums.writes[i] = fmaf(leaving[i][j], shared.n[token * STRIDE + own], sums.writes[i]);
      if (token < count && column + own < sizes.dv) operands.dqkv[sizes.value(first + token, head) + column + own] = narrow<T>(gates.beta[token] * dr);
    });
  }
  add_product<0, 4>(tile, Along<4>{shared.grads + row_group() * STRIDE, ROW_GROUPS * STRIDE}, Along<4>{shared.n + column_group() * STRIDE, COLUMN_GROUPS * STRIDE}, COLUMNS);
  __syncthreads();
  for_tile([&](int token, int own, int, int) {
    shared.grads[token * STRIDE + own] *= gates.head[token];
    shared.grads[(TOKENS + token) * STRIDE + own] *= -gates.head[token] * gates.beta[token];
    shared.n[token * STRIDE + own] *= gates.tail[token];
  });
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < MAX_PASSES; pass++) {
    if (pass * 32 >= sizes.width()) break;
    int row = (pass * 32 + column_group()) * STRIDE;
    add_product<0, 4>(dunits[pass], Along<4>{shared.grads + row_group() * STRIDE, ROW_GROUPS * STRIDE}, Along<4>{shared.state + row, COLUMN_GROUPS * STRIDE}, COLUMNS);
    add_product<2, 2>(dunits[pass], Along<2>{shared.n + row_group() * STRIDE, ROW_GROUPS * STRIDE}, Along<4>{shared.dstate + row, COLUMN_GROUPS * STRIDE}, COLUMNS);
  }
}

// Writes the gradients of the queries and keys, from those of their unit vectors.
template <class T>
__device__ __forceinline__ void write_units(T *dqkv, const float (&dunits)[MAX_PASSES][4][4], const float *units, const float *inverses, const Sizes &sizes, int first, int count,
                                            int key_head) {
  float scale = 1.0f / sqrtf(float(sizes.dk));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = row_group() + i * ROW_GROUPS, token = row % TOKENS;
    float along = 0;
#pragma unroll
    for (int pass = 0; pass < MAX_PASSES; pass++) {
      if (pass * 32 >= sizes.width()) break;
#pragma unroll
      for (int j = 0; j < 4; j++) along = fmaf(units[row * sizes.stride() + pass * 32 + column_group() + j * COLUMN_GROUPS], dunits[pass][i][j], along);
    }
    // Rows of queries are unit vectors times `scale`.
    along = row_sum(along) * (row < TOKENS ? float(sizes.dk) : 1.0f);
    float factor = row < TOKENS ? inverses[row] * scale : inverses[row];
    if (token >= count) continue;
    T *to = dqkv + (row < TOKENS ? sizes.query(first + token, key_head) : sizes.key(first + token, key_head));
#pragma unroll
    for (int pass = 0; pass < MAX_PASSES; pass++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int column = pass * 32 + column_group() + j * COLUMN_GROUPS;
        if (column < sizes.dk) to[column] = narrow<T>(factor * (dunits[pass][i][j] - along * units[row * sizes.stride() + column]));
      }
    }
  }
}

template <class T> __device__ __forceinline__ void gradients(const Operands<T> &operands, const Sizes &sizes) {
  DYNAMIC_SHARED(bytes);
  __shared__ Gates gates;
  __shared__ Rows rows;
  __shared__ float inverses[2 * TOKENS];
  Shared shared(bytes, sizes);
  int stride = sizes.stride(), chunk = int(blockIdx.x) / sizes.launched, launched = int(blockIdx.x) % sizes.launched, key_head = sizes.first + launched;
  int first = operands.chunks[2 * chunk], count = operands.chunks[2 * chunk + 1] - first;
  load_units<false>(shared.units, inverses, operands.qkv, sizes, first, count, key_head);
  __syncthreads();
  const float *keys = shared.units + TOKENS * stride;
  float products[4][4] = {}, dunits[MAX_PASSES][4][4] = {};
  add_product<0, 4>(products, Along<4>{shared.units + row_group() * stride, ROW_GROUPS * stride}, Along<4>{keys + column_group() * stride, COLUMN_GROUPS * stride}, sizes.width());
  for (int launched_head = launched * sizes.group; launched_head < (launched + 1) * sizes.group; launched_head++) {
    int head = sizes.head(launched_head);
    float tile[4][4] = {}, columns[4] = {}, kept = 0;
    RowSums sums;
    __syncthreads();
    if (warp() == 0) gates.fill(operands.g, operands.beta, sizes, first, count, head);
    for (int column = 0; column < sizes.dv; column += COLUMNS)
      columns_of_head(operands, sizes, shared, gates, chunk, launched_head, column, first, count, tile, dunits, sums, kept);
    __syncthreads();
    matrix_grads(tile, products, gates, shared.grads, sums, columns);
    share_rows(rows, sums, columns);
    double all_kept = block_sum(double(kept)); // its barriers also order the writes above
    if (warp() == 0) gate_grads(rows, gates, all_kept, operands.dg, operands.dbeta, sizes, first, count, head);
#pragma unroll
    for (int pass = 0; pass < MAX_PASSES; pass++) {
      if (pass * 32 >= sizes.width()) break;
      int column = pass * 32 + column_group();
      add_product<0, 4>(dunits[pass], Along<4>{shared.grads + row_group() * STRIDE, ROW_GROUPS * STRIDE}, Spread<4, COLUMN_GROUPS>{keys + column, stride}, TOKENS);
      add_product<2, 2>(dunits[pass], Spread<2, ROW_GROUPS>{shared.grads + row_group(), STRIDE}, Spread<4, COLUMN_GROUPS>{shared.units + column, stride}, TOKENS);
    }
  }
  write_units(operands.dqkv, dunits, shared.units, inverses, sizes, first, count, key_head);
}

} // namespace

#define DELTA_RULE_GRADS(T, name)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                             \
      delta_rule_grads_##name(const T *qkv, const float *g, const float *beta, const T *d_o, const int *chunks, const float *states, const float *dstates, \
                              const float *n, const float *dr, T *dqkv, float *dg, float *dbeta, Sizes sizes) {                     \
    gradients(Operands<T>{qkv, g, beta, d_o, chunks, states, dstates, n, dr, dqkv, dg, dbeta}, sizes);                              \
  }                                                                                                                                 \
  EXPORT(delta_rule_grads_##name)

DELTA_RULE_GRADS(float, f32)
DELTA_RULE_GRADS(bf16, bf16)
