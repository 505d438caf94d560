// Common parts of the kernels of the gated delta rule: sizes, operands of the tensor cores, and
// what all of them read of a chunk.
//
// A product of f32 matrices is a sum of products of bf16 matrices: each operand is split into
// parts, each of which rounds what the parts before it left. A tile of the tensor cores multiplies
// bf16 and adds in f32. The key dim is padded to `width` and the value dim to `columns`, multiples
// of 16, with zeros. Tokens after the end of a segment are zeros too, and change nothing.
#pragma once
#include "chunks.cuh"

namespace {

constexpr int MAX_WIDTH = 128;
constexpr float EPS = 1e-6f; // added to the squared length of queries and keys

// Tokens of a chunk, and numbers of parts: of the operands of the op, of intermediate results, and
// of the states that a backward pass saves. A product leaves out pairs of parts whose numbers add
// up to SUMS or more. So the relative error of a product is about 2^-16 for bf16 and 2^-24 for f32;
// a saved state of a bf16 model is rounded to bf16, as its other activations are.
template <class T> struct Precision;
template <> struct Precision<bf16> {
  static constexpr int TOKENS = 64, INPUTS = 1, SUMS = 2, SAVED = 1, STAGES = 2;
};
template <> struct Precision<float> {
  static constexpr int TOKENS = 32, INPUTS = 3, SUMS = 3, SAVED = 3, STAGES = 1;
};

// Number of elements of both matrices of a chunk and head.
template <class T> constexpr int MATRICES = 2 * Precision<T>::SUMS * Precision<T>::TOKENS * Precision<T>::TOKENS;

// What a token multiplies: reads by queries and by keys, what it writes, and its strength. Lengths
// of queries and keys and decays from or to the ends of the chunk are part of them.
struct alignas(16) Factors {
  float query, key, write, beta;
};

// Numbers of heads and their dims. A launch has `launched` key heads from `first` on; `group` value
// heads share a key head. Value heads are numbered from the first one of the launch. Kernels that
// iterate over the states have shared memory for `stages` chunks.
struct Sizes {
  int key_heads, group, dk, dv, first, launched, stages, unused;

  __device__ __forceinline__ int width() const { return (dk + 15) / 16 * 16; }
  __device__ __forceinline__ int columns() const { return (dv + 15) / 16 * 16; }
  __device__ __forceinline__ int value_heads() const { return key_heads * group; }
  __device__ __forceinline__ int launched_heads() const { return launched * group; }
  __device__ __forceinline__ int head(int launched_head) const { return first * group + launched_head; }
  __device__ __forceinline__ int row() const { return 2 * key_heads * dk + value_heads() * dv; }
  __device__ __forceinline__ size_t query(int token, int key_head) const { return size_t(token) * row() + key_head * dk; }
  __device__ __forceinline__ size_t key(int token, int key_head) const { return query(token, key_heads + key_head); }
  __device__ __forceinline__ size_t value(int token, int head) const { return query(token, 2 * key_heads) + head * dv; }
  __device__ __forceinline__ size_t output(int token, int head) const { return (size_t(token) * value_heads() + head) * dv; }
  __device__ __forceinline__ size_t gate(int token, int head) const { return size_t(token) * value_heads() + head; }

  // In the temporary tensors of a launch, whose elements are bf16. Those of a chunk and head are
  // the inverse of its triangular matrix, P and the factors of its tokens and of the whole chunk; a
  // transposed state; and transposed values of the tokens.
  __device__ __forceinline__ size_t block(int chunk, int launched_head) const { return size_t(chunk) * launched_heads() + launched_head; }
  template <class T> __device__ __forceinline__ size_t matrices(int chunk, int launched_head) const {
    return block(chunk, launched_head) * (MATRICES<T> + 8 * (Precision<T>::TOKENS + 1));
  }
  template <class T> __device__ __forceinline__ size_t state(int chunk, int launched_head) const {
    return block(chunk, launched_head) * Precision<T>::SAVED * width() * columns();
  }
  template <class T> __device__ __forceinline__ size_t written(int chunk, int launched_head) const {
    return block(chunk, launched_head) * Precision<T>::SUMS * columns() * Precision<T>::TOKENS;
  }
};

// Splits two values into parts, each a register for the tensor cores.
template <int PARTS> __device__ __forceinline__ void split(float x, float y, uint32_t (&parts)[PARTS]) {
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    parts[part] = pack(x, y);
    x -= bits_to_float(parts[part] << 16);
    y -= bits_to_float(parts[part] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ void store_word(bf16 *to, uint32_t word) { *reinterpret_cast<uint32_t *>(to) = word; }

// A matrix in shared memory as a sum of PARTS matrices. Rows begin in different banks.
template <int PARTS, int ROWS, int COLUMNS> struct Tile {
  static constexpr int STRIDE = COLUMNS + 8, PART = ROWS * STRIDE, BYTES = 2 * PARTS * PART;
  bf16 *start;

  __device__ __forceinline__ bf16 *at(int part, int row, int column) const { return start + part * PART + row * STRIDE + column; }
  // Elements (row, column) and (row, column + 1), for even columns.
  __device__ __forceinline__ void pair(int row, int column, float &x, float &y) const {
    x = y = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      uint32_t word = *reinterpret_cast<const uint32_t *>(at(part, row, column));
      x += bits_to_float(word << 16), y += bits_to_float(word & 0xFFFF0000u);
    }
  }
  __device__ __forceinline__ void set(int row, int column, float x, float y) const {
    uint32_t words[PARTS];
    split<PARTS>(x, y, words);
#pragma unroll
    for (int part = 0; part < PARTS; part++) store_word(at(part, row, column), words[part]);
  }

  // Starts to copy rows of T, which are `stride` apart. Rows from `rows` on and columns from
  // `width` on become zeros, up to the last row and up to column `padded`.
  template <int THREADS, class T> __device__ __forceinline__ void load(const T *from, int stride, int rows, int width, int padded) const {
    constexpr int PIECES = COLUMNS / 8, AT_ONCE = THREADS / PIECES;
    int thread = thread_here(), column = thread % PIECES * 8;
    if (column >= padded) return;
    bool vectors = PARTS == 1 && (reinterpret_cast<uintptr_t>(from) | uintptr_t(stride * 2) | uintptr_t(width * 2)) % 16 == 0;
    from += size_t(thread / PIECES) * stride + column;
#pragma unroll
    for (int row = thread / PIECES, pass = 0; pass < (ROWS + AT_ONCE - 1) / AT_ONCE; pass++, row += AT_ONCE, from += size_t(AT_ONCE) * stride) {
      if (ROWS % AT_ONCE && row >= ROWS) continue;
      if (vectors) {
        copy_async(at(0, row, column), from, row < rows && column < width);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        bool valid = row < rows && column + i < width, second = row < rows && column + i + 1 < width;
        set(row, column + i, valid ? widen(from[i]) : 0.0f, second ? widen(from[i + 1]) : 0.0f);
      }
    }
  }
  // Starts to copy parts of rows that are adjacent in a temporary tensor. Its parts are `part`
  // apart. TRIANGLE: without the blocks of 16 x 16 above the diagonal.
  template <int THREADS, bool TRIANGLE = false> __device__ __forceinline__ void copy(const bf16 *from, int stride, int part) const {
    constexpr int PIECES = COLUMNS / 8, AT_ONCE = THREADS / PIECES;
    int thread = thread_here(), column = thread % PIECES * 8;
    if (column >= stride) return;
    from += (thread / PIECES) * stride + column;
#pragma unroll
    for (int row = thread / PIECES, pass = 0; pass < (ROWS + AT_ONCE - 1) / AT_ONCE; pass++, row += AT_ONCE, from += AT_ONCE * stride) {
      if ((ROWS % AT_ONCE && row >= ROWS) || (TRIANGLE && column > (row | 15))) continue;
#pragma unroll
      for (int of = 0; of < PARTS; of++) copy_async(at(of, row, column), from + size_t(of) * part, true);
    }
  }
};

// The left operand [16, 16] of a product from `row` and step k on. TRANSPOSED: the tile has a row
// for each step.
template <bool TRANSPOSED, int PARTS, class From>
__device__ __forceinline__ void load_left(uint32_t (&a)[PARTS][4], const From &from, int row, int k) {
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    if (TRANSPOSED) load_matrices_transposed(a[part], from.at(part, k + lane() % 8 + lane() / 16 * 8, row + lane() / 8 % 2 * 8));
    else load_matrices(a[part], from.at(part, row + lane() % 16, k + lane() / 16 * 8));
}

// Adds a left operand times sixteen steps of a right one to sums [16, 16], for its columns from
// `column` and steps from k on. BY_STEP: the tile of the right operand has a row for each step;
// otherwise for each column.
template <int TERMS, bool BY_STEP, int LEFT, int RIGHT, int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4], const uint32_t (&a)[LEFT][4], const Tile<RIGHT, ROWS, COLUMNS> &right, int column, int k) {
#pragma unroll
  for (int part = 0; part < RIGHT; part++) {
    uint32_t b[4];
    if (BY_STEP) load_matrices_transposed(b, right.at(part, k + lane() % 16, column + lane() / 16 * 8));
    else load_matrices(b, right.at(part, column + lane() % 8 + lane() / 16 * 8, k + lane() / 8 % 2 * 8));
    uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
    for (int of = 0; of < LEFT; of++) {
      if (part + of >= TERMS) continue;
      mma(first, a[of], low);
      mma(second, a[of], high);
    }
  }
}

// Sums [16, 16] as a left operand, and the reverse.
template <int PARTS> __device__ __forceinline__ void left_of_sums(uint32_t (&a)[PARTS][4], const float (&first)[4], const float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t words[PARTS];
    const float(&x)[4] = i < 2 ? first : second;
    split<PARTS>(x[i % 2 * 2], x[i % 2 * 2 + 1], words);
#pragma unroll
    for (int part = 0; part < PARTS; part++) a[part][i] = words[part];
  }
}

template <int PARTS> __device__ __forceinline__ void sums_of_left(float (&x)[2][4], const uint32_t (&a)[PARTS][4]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) sum += bits_to_float(i % 2 ? a[part][i / 2] & 0xFFFF0000u : a[part][i / 2] << 16);
    x[i / 4][i % 4] = sum;
  }
}

// Row and column of sum `i` of tile `tile` of eight columns. Each object computes them again, so
// that addresses that are derived from them do not occupy registers during the products.
struct Place {
  int row_of_lane, column_of_lane;
  __device__ __forceinline__ Place() {
    int lane = thread_here() % WARP;
    row_of_lane = lane / 4, column_of_lane = lane % 4 * 2;
  }
  __device__ __forceinline__ int row(int i) const { return row_of_lane + i / 2 * 8; }
  __device__ __forceinline__ int column(int tile, int i) const { return tile * 8 + column_of_lane + i % 2; }
};

// The queries and keys of a chunk in shared memory.
template <class T> struct Units {
  static constexpr int TOKENS = Precision<T>::TOKENS;
  using Rows = Tile<Precision<T>::INPUTS, TOKENS, MAX_WIDTH>;
  static constexpr int BYTES = 2 * Rows::BYTES;
  Rows queries, keys;

  __device__ __forceinline__ explicit Units(unsigned char *shared) : queries{reinterpret_cast<bf16 *>(shared)}, keys{reinterpret_cast<bf16 *>(shared + Rows::BYTES)} {}

  // Copies them, and writes 1 / length of the queries, and behind them of the keys. A thread has a
  // row.
  template <int THREADS> __device__ __forceinline__ void load(const T *qkv, float *inverses, const Sizes &sizes, int first, int count, int key_head) const {
    queries.template load<THREADS>(qkv + sizes.query(first, key_head), sizes.row(), count, sizes.dk, sizes.width());
    keys.template load<THREADS>(qkv + sizes.key(first, key_head), sizes.row(), count, sizes.dk, sizes.width());
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    int row = int(threadIdx.x);
    if (row >= 2 * TOKENS) return;
    float squares[2] = {};
    for (int column = 0; column < sizes.width(); column += 2) {
      float x, y;
      (row < TOKENS ? queries : keys).pair(row % TOKENS, column, x, y);
      squares[0] = fmaf(x, x, squares[0]), squares[1] = fmaf(y, y, squares[1]);
    }
    inverses[row] = 1.0f / sqrtf(squares[0] + squares[1] + EPS);
  }
};

// Decays and factors of a chunk of a head.
template <int TOKENS> struct Gates {
  static constexpr int OF_LANE = TOKENS / WARP;
  double y[TOKENS]; // sum of g from the start of the chunk
  Factors factors[TOKENS + 1];

  // One warp calls it.
  __device__ __forceinline__ void fill(const float *g, const float *betas, const float *inverses, const Sizes &sizes, int first, int count, int head) {
    double sum = 0, sums[OF_LANE];
    float strengths[OF_LANE];
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
      int token = lane() * OF_LANE + i;
      sum += token < count ? double(g[sizes.gate(first + token, head)]) : 0;
      sums[i] = sum;
      strengths[i] = token < count ? betas[sizes.gate(first + token, head)] : 0.0f;
    }
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
      double other = shuffle(sum, max(lane() - step, 0));
      if (lane() >= step) sum += other;
    }
    double before = shuffle(sum, max(lane() - 1, 0)), all = shuffle(sum, WARP - 1);
    float scale = 1.0f / sqrtf(float(sizes.dk));
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
      int token = lane() * OF_LANE + i;
      y[token] = (lane() > 0 ? before : 0) + sums[i];
      float from_start = expf(float(y[token])), to_end = expf(float(all - y[token]));
      float key = inverses[TOKENS + token];
      factors[token] = Factors{from_start * inverses[token] * scale, from_start * key, to_end * key, strengths[i]};
    }
    if (lane() == 0) factors[TOKENS] = Factors{expf(float(all)), 0, 0, 0};
  }

  // Decay from token `from` to `to`. The difference is taken in double precision: in single
  // precision a decay over the chunk of e^-500 would leave only four digits of the decays behind
  // it.
  __device__ __forceinline__ float decay(int from, int to) const { return expf(float(y[to] - y[from])); }
};

} // namespace
