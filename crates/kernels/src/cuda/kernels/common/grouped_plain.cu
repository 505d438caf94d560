// Grouped products in f32, and of bf16 operands of any size and alignment; see crates/kernels/src/grouped_linear.rs.
//
// A block of 256 threads computes 64 x 64 results and takes 16 terms of the sums at a time. A thread
// has 4 x 4 results. The order of the sums of a row does not depend on the other rows.
#include "grouped.cuh"

namespace {

constexpr int TILE = 64, TERMS = 16, THREADS = 256, EACH = 4;

// A row-major matrix. `terms_are_rows` says that the terms of a sum are rows of it.
template <class T> struct Operand {
  const T *at;
  int stride, terms_are_rows;

  __device__ __forceinline__ float read(int index, int term) const {
    int row = terms_are_rows ? term : index, column = terms_are_rows ? index : term;
    return widen(at[size_t(row) * stride + column]);
  }
};

using Block = float[TERMS][TILE + 1];

// Loads terms first .. first + TERMS of TILE rows or columns from `index` on, with zeros outside.
template <class T> __device__ __forceinline__ void load(Block &tile, const Operand<T> &operand, int index, int end, int first, int terms) {
  for (int i = int(threadIdx.x); i < TILE * TERMS; i += THREADS) {
    // Adjacent threads read adjacent elements.
    int here = operand.terms_are_rows ? i % TILE : i / TERMS, term = operand.terms_are_rows ? i / TILE : i % TERMS;
    bool valid = index + here < end && first + term < terms;
    tile[term][here] = valid ? operand.read(index + here, first + term) : 0.0f;
  }
}

// Calls store(row, column, sum) for the results of this thread in rows row .. row_end and columns
// column .. column_end of a b.
template <class T, class F>
__device__ __forceinline__ void product(const Operand<T> &a, const Operand<T> &b, int row, int row_end, int column, int column_end, int first_term,
                                        int terms, F store) {
  __shared__ Block left, right;
  int own_row = int(threadIdx.x) / 16, own_column = int(threadIdx.x) % 16;
  float sums[EACH][EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int j = 0; j < EACH; j++) sums[i][j] = 0;
  for (int first = first_term; first < terms; first += TERMS) {
    __syncthreads(); // the previous terms are no longer in use
    load(left, a, row, row_end, first, terms);
    load(right, b, column, column_end, first, terms);
    __syncthreads();
    for (int term = 0; term < TERMS; term++) {
      float x[EACH], y[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        x[i] = left[term][own_row + 16 * i];
        y[i] = right[term][own_column + 16 * i];
      }
#pragma unroll
      for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      int r = row + own_row + 16 * i, c = column + own_column + 16 * j;
      if (r < row_end && c < column_end) store(r, c, sums[i][j]);
    }
}

// y [rows, n] = x [rows, k] w^T for w [e, n, k], or x w for w [e, k, n] (`inputs_are_rows`).
template <class T>
__device__ __forceinline__ void products(const T *x, const T *w, const uint32_t *offsets, T *y, int e, int n, int k, int inputs_are_rows) {
  DYNAMIC_SHARED(shared);
  int *starts = reinterpret_cast<int *>(shared);
  count_tiles<TILE>(starts, offsets, e);
  int columns = (n + TILE - 1) / TILE, tiles = starts[e] * columns;
  for (int tile = int(blockIdx.x); tile < tiles; tile += int(gridDim.x)) {
    RowTile rows = row_tile<TILE>(starts, offsets, e, tile / columns);
    Operand<T> a{x, k, 0}, b{w + size_t(rows.expert) * n * k, inputs_are_rows ? n : k, inputs_are_rows};
    product(a, b, rows.first, rows.end, tile % columns * TILE, n, 0, k, [&](int row, int column, float sum) {
      y[size_t(row) * n + column] = narrow<T>(sum);
    });
  }
}

// dw [e, m, n] += a^T b of the rows of each expert, for a [rows, m] and b [rows, n].
template <class T> __device__ __forceinline__ void outer_products(const T *a, const T *b, const uint32_t *offsets, float *dw, int e, int m, int n) {
  int columns = (n + TILE - 1) / TILE, each = (m + TILE - 1) / TILE * columns;
  for (long long at = blockIdx.x; at < (long long)e * each; at += gridDim.x) {
    int expert = int(at / each), tile = int(at % each), first = int(offsets[expert]), end = int(offsets[expert + 1]);
    if (first == end) continue;
    float *to = dw + size_t(expert) * m * n;
    product(Operand<T>{a, m, 1}, Operand<T>{b, n, 1}, tile / columns * TILE, m, tile % columns * TILE, n, first, end,
            [&](int row, int column, float sum) { to[size_t(row) * n + column] += sum; });
  }
}

} // namespace

#define GROUPED(T, name)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                                   \
      grouped_plain_##name(const T *x, const T *w, const uint32_t *offsets, T *y, int e, int n, int k, int inputs_are_rows) {             \
    products(x, w, offsets, y, e, n, k, inputs_are_rows);                                                                                 \
  }                                                                                                                                       \
  EXPORT(grouped_plain_##name)                                                                                                            \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                                   \
      grouped_outer_plain_##name(const T *a, const T *b, const uint32_t *offsets, float *dw, int e, int m, int n) {                       \
    outer_products(a, b, offsets, dw, e, m, n);                                                                                           \
  }                                                                                                                                       \
  EXPORT(grouped_outer_plain_##name)

GROUPED(float, f32)
GROUPED(bf16, bf16)
