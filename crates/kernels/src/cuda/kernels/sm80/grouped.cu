// Grouped products in bf16 on tensor cores; see crates/kernels/src/grouped_linear.rs for the contract.
//
// A block of four warps computes 128 rows x 128 columns and takes 64 terms of the sums at a time, in
// three stages: while one is multiplied, the next two are copied. A warp has 64 x 64 results, so an
// operand that it reads from shared memory is used four times. Rows of operands must be 16-byte
// aligned. The order of the sums of a row does not depend on the other rows.
// Blocks take tile after tile; those of one expert are adjacent, so that its matrix stays in L2.
#include "attention.cuh"
#include "grouped.cuh"

namespace {

constexpr int ROWS = 128, COLUMNS = 128, TERMS = 64, THREADS = 128, STAGES = 3, WARP_ROWS = 64;
constexpr int OPERAND = TERMS * Rows<128>::BYTES, STAGE = 2 * OPERAND;
static_assert(OPERAND == ROWS * Rows<64>::BYTES, "an operand has the same size if its terms are rows or columns");

constexpr int TILES = WARP_ROWS / 16; // of 16 rows each
using Results = float[TILES][8][4];

// Two adjacent sums.
struct alignas(8) Pair {
  float low, high;
};

// Which dims of the operands are rows in memory: `Nt`: a [m, k], b [n, k]; `Nn`: a [m, k], b [k, n]; `Tn`:
// a [k, m], b [k, n].
enum class Form { Nt, Nn, Tn };

// An operand, from the row or column that a tile begins with, and its number of rows or columns from there.
struct Side {
  const bf16 *at;
  unsigned stride;
  int count;
};

// Starts to copy terms first .. first + TERMS, up to `end`.
template <Form FORM> __device__ __forceinline__ void load_stage(unsigned char *stage, const Side &a, const Side &b, int first, int end) {
  if constexpr (FORM == Form::Tn) load_rows<128, TERMS, THREADS>(stage, a.at, a.stride, first, end, a.count);
  else load_rows<64, ROWS, THREADS>(stage, a.at + first, a.stride, 0, a.count, end - first);
  if constexpr (FORM == Form::Nt) load_rows<64, COLUMNS, THREADS>(stage + OPERAND, b.at + first, b.stride, 0, b.count, end - first);
  else load_rows<128, TERMS, THREADS>(stage + OPERAND, b.at, b.stride, first, end, b.count);
}

// sums += the product of a stage, for the rows and columns of this warp.
template <Form FORM> __device__ __forceinline__ void multiply_stage(Results &sums, const unsigned char *stage) {
  int warp_row = warp() / 2, warp_column = warp() % 2;
  const unsigned char *rows = stage + warp_row * WARP_ROWS * Rows<64>::BYTES, *others = stage + OPERAND;
  if constexpr (FORM == Form::Nt) {
    add_scores<64, TILES, 64, 1>(sums, rows, others + warp_column * 64 * Rows<64>::BYTES);
  } else {
    int left = FORM == Form::Tn ? Rows<128>::step(right_place<128>(), TILES * warp_row) : left_place<64>();
    int right = Rows<128>::step(left_place<128>(), 4 * warp_column);
#pragma unroll 1
    for (int k = 0; k < TERMS / 16; k++) {
      uint32_t a[TILES][4];
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        if constexpr (FORM == Form::Tn) load_matrices_transposed(a[m], stage + k * 16 * Rows<128>::BYTES + Rows<128>::step(left, m));
        else load_matrices(a[m], rows + Rows<64>::step(left, k) + m * 16 * Rows<64>::BYTES);
      }
      add_step<128>(sums, a, others + k * 16 * Rows<128>::BYTES, right);
    }
  }
}

// Computes terms first .. end of a tile. Afterwards no copies are in flight and no thread reads the stages.
template <Form FORM> __device__ __forceinline__ void product(Results &sums, unsigned char *stages, const Side &a, const Side &b, int first, int end) {
  clear(sums);
  int steps = (end - first + TERMS - 1) / TERMS;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < steps) load_stage<FORM>(stages + i * STAGE, a, b, first + i * TERMS, end);
    commit_copies();
  }
  for (int i = 0; i < steps; i++) {
    wait_copies<STAGES - 2>();
    __syncthreads(); // the stage is loaded, and the one before is no longer in use
    int next = i + STAGES - 1;
    if (next < steps) load_stage<FORM>(stages + next % STAGES * STAGE, a, b, first + next * TERMS, end);
    commit_copies();
    multiply_stage<FORM>(sums, stages + i % STAGES * STAGE);
  }
  wait_copies<0>();
  __syncthreads();
}

// y [rows, n] = x [rows, k] w^T for w [e, n, k] (`Nt`), or x w for w [e, k, n] (`Nn`).
template <Form FORM>
__device__ __forceinline__ void products(const bf16 *x, const bf16 *w, const uint32_t *offsets, bf16 *y, int e, int n, int k) {
  DYNAMIC_SHARED(shared);
  int *starts = reinterpret_cast<int *>(shared + STAGES * STAGE);
  count_tiles<ROWS>(starts, offsets, e);
  int columns = (n + COLUMNS - 1) / COLUMNS, tiles = starts[e] * columns;
  for (int tile = int(blockIdx.x); tile < tiles; tile += int(gridDim.x)) {
    RowTile rows = row_tile<ROWS>(starts, offsets, e, tile / columns);
    int column = tile % columns * COLUMNS;
    const bf16 *matrix = w + size_t(rows.expert) * n * k;
    Side a{x + size_t(rows.first) * k, unsigned(k), rows.end - rows.first};
    Side b{FORM == Form::Nt ? matrix + size_t(column) * k : matrix + column, unsigned(FORM == Form::Nt ? k : n), n - column};
    Results sums;
    product<FORM>(sums, shared, a, b, 0, k);
    const float ones[TILES][2] = {{1, 1}, {1, 1}, {1, 1}, {1, 1}};
    int first = rows.first + warp() / 2 * WARP_ROWS, first_column = column + warp() % 2 * 64;
    store_rows<64>(y + first_column, unsigned(n), first, rows.end, n - first_column, sums, ones, shared + warp() * WARP_ROWS * Rows<64>::BYTES, 0);
    __syncthreads(); // the rows have left the stages
  }
}

// dw [e, m, n] += a^T b of the rows of each expert, for a [rows, m] and b [rows, n].
__device__ __forceinline__ void outer_products(const bf16 *a, const bf16 *b, const uint32_t *offsets, float *dw, int e, int m, int n) {
  DYNAMIC_SHARED(shared);
  int columns = (n + COLUMNS - 1) / COLUMNS, each = (m + ROWS - 1) / ROWS * columns;
  for (long long at = blockIdx.x; at < (long long)e * each; at += gridDim.x) {
    int expert = int(at / each), tile = int(at % each), first = int(offsets[expert]), end = int(offsets[expert + 1]);
    if (first == end) continue;
    int row = tile / columns * ROWS, column = tile % columns * COLUMNS;
    Results sums;
    product<Form::Tn>(sums, shared, Side{a + row, unsigned(m), m - row}, Side{b + column, unsigned(n), n - column}, first, end);
    int here = lane_here(), g = here / 4, first_column = column + warp() % 2 * 64 + here % 4 * 2;
    float *to = dw + size_t(expert) * m * n;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        int own_row = row + warp() / 2 * WARP_ROWS + i * 16 + r * 8 + g;
        if (own_row >= m) continue;
        // All of a row are read before one is written: otherwise each waits for the one before.
        Pair *pairs = reinterpret_cast<Pair *>(to + size_t(own_row) * n + first_column), before[8];
#pragma unroll
        for (int c = 0; c < 8; c++) before[c] = first_column + c * 8 < n ? pairs[c * 4] : Pair{0, 0};
#pragma unroll
        for (int c = 0; c < 8; c++)
          if (first_column + c * 8 < n) pairs[c * 4] = Pair{before[c].low + sums[i][c][2 * r], before[c].high + sums[i][c][2 * r + 1]};
      }
  }
}

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_of_outputs_bf16(const bf16 *x, const bf16 *w, const uint32_t *offsets, bf16 *y, int e, int n, int k) {
  products<Form::Nt>(x, w, offsets, y, e, n, k);
}
EXPORT(grouped_of_outputs_bf16)

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_of_inputs_bf16(const bf16 *x, const bf16 *w, const uint32_t *offsets, bf16 *y, int e, int n, int k) {
  products<Form::Nn>(x, w, offsets, y, e, n, k);
}
EXPORT(grouped_of_inputs_bf16)

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grouped_outer_bf16(const bf16 *a, const bf16 *b, const uint32_t *offsets, float *dw, int e, int m, int n) {
  outer_products(a, b, offsets, dw, e, m, n);
}
EXPORT(grouped_outer_bf16)
