// Common parts of the kernels of the gated delta rule: sizes, products of tiles in shared memory, and
// what all of them read of a chunk.
//
// A block has 128 threads, as 16 groups of rows and 8 groups of columns. Products are in f32 without
// tensor cores: a thread has a tile of at most 4 x 4 sums, and reads four steps of both operands at a
// time. The key dim is padded to `width`, a multiple of 32, with zeros. Tokens after the end of a
// segment are zeros too, and change nothing.
#pragma once
#include "chunks.cuh"

namespace {

constexpr int THREADS = 128, ROW_GROUPS = 16, COLUMN_GROUPS = 8;
constexpr int TOKENS = 32;  // of a chunk
constexpr int COLUMNS = 32; // of a state, or a value, that a block has at a time
constexpr int STRIDE = COLUMNS + 4; // of a tile in shared memory: rows begin in different banks
constexpr int MAX_PASSES = 4;       // width / 32
constexpr float EPS = 1e-6f;        // added to the squared length of queries and keys

__device__ __forceinline__ int row_group() { return int(threadIdx.x) / COLUMN_GROUPS; }
__device__ __forceinline__ int column_group() { return int(threadIdx.x) % COLUMN_GROUPS; }

// Numbers of heads and their dims. A launch has `launched` key heads from `first` on; `group` value
// heads share a key head. Value heads are numbered from the first one of the launch.
struct Sizes {
  int key_heads, group, dk, dv, first, launched;

  __device__ __forceinline__ int width() const { return (dk + 31) / 32 * 32; }
  __device__ __forceinline__ int stride() const { return width() + 4; }
  __device__ __forceinline__ int value_heads() const { return key_heads * group; }
  __device__ __forceinline__ int launched_heads() const { return launched * group; }
  __device__ __forceinline__ int head(int launched_head) const { return first * group + launched_head; }
  __device__ __forceinline__ size_t row(int token) const { return size_t(token) * (2 * key_heads * dk + value_heads() * dv); }
  __device__ __forceinline__ size_t query(int token, int key_head) const { return row(token) + key_head * dk; }
  __device__ __forceinline__ size_t key(int token, int key_head) const { return row(token) + (key_heads + key_head) * dk; }
  __device__ __forceinline__ size_t value(int token, int head) const { return row(token) + 2 * key_heads * dk + head * dv; }
  __device__ __forceinline__ size_t output(int token, int head) const { return (size_t(token) * value_heads() + head) * dv; }
  __device__ __forceinline__ size_t gate(int token, int head) const { return size_t(token) * value_heads() + head; }
  // In the temporary tensors of a launch.
  __device__ __forceinline__ size_t written(int token, int launched_head) const { return (size_t(token) * launched_heads() + launched_head) * dv; }
  __device__ __forceinline__ size_t tile(int chunk, int launched_head) const { return (size_t(chunk) * launched_heads() + launched_head) * 2 * TOKENS * TOKENS; }
  __device__ __forceinline__ size_t state(int chunk, int launched_head) const { return (size_t(chunk) * launched_heads() + launched_head) * dk * dv; }
};

// An operand of a product in shared memory. `load` reads steps k .. k + 3 for the N rows, or
// columns, of this thread, which are `stride` apart in Along, adjacent in Across, and STEP apart in
// Spread.
template <int N> struct Along {
  const float *at;
  int stride;
  __device__ __forceinline__ void load(int k, float (&x)[4][N]) const {
#pragma unroll
    for (int i = 0; i < N; i++) {
      float row[4];
      load_floats<4>(at + i * stride + k, row);
#pragma unroll
      for (int step = 0; step < 4; step++) x[step][i] = row[step];
    }
  }
};

struct Across {
  const float *at;
  int stride;
  __device__ __forceinline__ void load(int k, float (&x)[4][4]) const {
#pragma unroll
    for (int step = 0; step < 4; step++) load_floats<4>(at + (k + step) * stride, x[step]);
  }
};

template <int N, int STEP> struct Spread {
  const float *at;
  int stride;
  __device__ __forceinline__ void load(int k, float (&x)[4][N]) const {
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int i = 0; i < N; i++) x[step][i] = at[(k + step) * stride + i * STEP];
  }
};

// Adds the product of two operands over n steps to rows FROM .. FROM + ROWS of the sums.
template <int FROM, int ROWS, int ALL, class Left, class Right>
__device__ __forceinline__ void add_product(float (&sums)[ALL][4], const Left &left, const Right &right, int n) {
#pragma unroll 2
  for (int k = 0; k < n; k += 4) {
    float x[4][ROWS], y[4][4];
    left.load(k, x);
    right.load(k, y);
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[FROM + i][j] = fmaf(x[step][i], y[step][j], sums[FROM + i][j]);
  }
}

// Writes rows row_group() and row_group() + 16 of a tile, times a factor for each.
__device__ __forceinline__ void store_tile(float *tile, const float (&x)[2][4], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float row[4];
#pragma unroll
    for (int j = 0; j < 4; j++) row[j] = x[i][j] * factors[i];
    store_shared(tile + (row_group() + i * ROW_GROUPS) * STRIDE + 4 * column_group(), row);
  }
}

// Calls f(token, column of the tile, i, j) for the elements of this thread of a [TOKENS, COLUMNS]
// tile: tokens row_group() and row_group() + 16.
template <class F> __device__ __forceinline__ void for_tile(F f) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) f(row_group() + i * ROW_GROUPS, 4 * column_group() + j, i, j);
}

// Loads the unit queries, divided by sqrt(dk), to rows 0 .. 31 and the unit keys to rows 32 .. 63, and
// 1 / length of each. Skips the queries if KEYS.
template <bool KEYS, class T>
__device__ __forceinline__ void load_units(float *units, float *inverses, const T *qkv, const Sizes &sizes, int first, int count, int key_head) {
  float scale = 1.0f / sqrtf(float(sizes.dk));
#pragma unroll 4
  for (int row = (KEYS ? TOKENS : 0) + warp(); row < 2 * TOKENS; row += THREADS / WARP) {
    int token = row % TOKENS;
    const T *from = qkv + (row < TOKENS ? sizes.query(first + token, key_head) : sizes.key(first + token, key_head));
    float x[MAX_PASSES], squares = 0;
#pragma unroll
    for (int i = 0; i < MAX_PASSES; i++) {
      int column = lane() + i * WARP;
      x[i] = token < count && column < sizes.dk ? widen(from[column]) : 0.0f;
      squares = fmaf(x[i], x[i], squares);
    }
    float inverse = 1.0f / sqrtf(warp_sum(squares) + EPS), factor = row < TOKENS ? inverse * scale : inverse;
#pragma unroll
    for (int i = 0; i < MAX_PASSES; i++)
      if (i * WARP < sizes.width()) units[row * sizes.stride() + lane() + i * WARP] = x[i] * factor;
    if (lane() == 0) inverses[row] = inverse;
  }
}

// Decays and strengths of a chunk of a head.
struct Gates {
  double y[TOKENS];   // sum of g from the start of the chunk
  float head[TOKENS]; // decay from the start of the chunk to the token
  float tail[TOKENS]; // decay from the token to the end of the chunk
  float beta[TOKENS];

  // One warp calls it.
  __device__ __forceinline__ void fill(const float *g, const float *betas, const Sizes &sizes, int first, int count, int of_head) {
    int token = lane();
    bool valid = token < count;
    float own = valid ? g[sizes.gate(first + token, of_head)] : 0.0f;
    beta[token] = valid ? betas[sizes.gate(first + token, of_head)] : 0.0f;
    double sum = 0;
    for (int i = 0; i < TOKENS; i++) {
      float other = shuffle(own, i);
      if (i <= token) sum += double(other);
    }
    double total = shuffle(sum, TOKENS - 1);
    y[token] = sum;
    head[token] = expf(float(sum));
    tail[token] = expf(float(total - sum));
  }

  // Decay from token `from` to `to`. The difference is taken in double precision: in single
  // precision a decay over the chunk of e^-500 would leave only four digits of the decays behind it.
  __device__ __forceinline__ float decay(int from, int to) const { return expf(float(y[to] - y[from])); }
  __device__ __forceinline__ float all() const { return head[TOKENS - 1]; }
};

// Copies two [TOKENS, TOKENS] matrices of a head from global memory to two tiles.
__device__ __forceinline__ void load_tiles(float *tiles, const float *from) {
  for (int at = int(threadIdx.x) * 4; at < 2 * TOKENS * TOKENS; at += THREADS * 4) {
    float row[4];
    load_floats<4>(from + at, row);
    store_shared(tiles + at / TOKENS * STRIDE + at % TOKENS, row);
  }
}

// Loads columns from `column` on of a state [dk, dv] to [width, STRIDE], with zeros beyond it.
template <class F> __device__ __forceinline__ void load_state(float *state, const Sizes &sizes, int column, F value) {
  for (int row = warp(); row < sizes.width(); row += THREADS / WARP) {
    bool valid = row < sizes.dk && column + lane() < sizes.dv;
    state[row * STRIDE + lane()] = valid ? value(size_t(row) * sizes.dv + column + lane()) : 0.0f;
  }
}

__device__ __forceinline__ void save_state(float *to, const float *state, const Sizes &sizes, int column) {
  if (column + lane() >= sizes.dv) return;
  for (int row = warp(); row < sizes.dk; row += THREADS / WARP) to[size_t(row) * sizes.dv + column + lane()] = state[row * STRIDE + lane()];
}

// state = decay state + units^T written, over n rows of both.
__device__ __forceinline__ void advance(float *state, float decay, const float *units, const float *written, const Sizes &sizes, int n) {
  for (int row = 4 * row_group(); row < sizes.width(); row += 4 * ROW_GROUPS) {
    float sums[4][4] = {};
    add_product<0, 4>(sums, Across{units + row, sizes.stride()}, Across{written + 4 * column_group(), STRIDE}, n);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float *at = state + (row + i) * STRIDE + 4 * column_group(), old[4];
      load_floats<4>(at, old);
#pragma unroll
      for (int j = 0; j < 4; j++) old[j] = fmaf(decay, old[j], sums[i][j]);
      store_shared(at, old);
    }
  }
}

} // namespace
