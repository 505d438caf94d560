// Column sums of output gradients, for biases, and of their products with the values that were scaled,
// for layer scales; see crates/kernels/src/{linear,layer_scale}.rs for the contracts.
//
// A block has 256 columns of dy [n, m] and every gridDim.y-th group of 8 rows. A lane has 8
// columns, in one or two 16-byte loads; a warp has one row of each group. The sums of the warps are
// added in their order, and `columns.cu` adds the partial sums in the order of the blocks. Bound by
// one read of dy, and of f.
#include "common.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int LANE_COLUMNS = 8;
constexpr int COLUMNS = WARP * LANE_COLUMNS;

// Adds 8 columns of a row, or of its product with the row `by`, starting at `first`: adjacent ones with
// vector loads, otherwise 32 columns apart.
template <bool PRODUCT, class T>
__device__ __forceinline__ void add_row(const T *row, const T *by, int m, int first, bool vectors, float (&sums)[LANE_COLUMNS]) {
  if (vectors) {
#pragma unroll
    for (int part = 0; part < LANE_COLUMNS; part += VECTOR<T>) {
      float x[VECTOR<T>];
      if (first + part >= m) break;
      load_vector(row + first + part, x);
      if constexpr (PRODUCT) {
        float y[VECTOR<T>];
        load_vector(by + first + part, y);
#pragma unroll
        for (int i = 0; i < VECTOR<T>; i++) x[i] *= y[i];
      }
#pragma unroll
      for (int i = 0; i < VECTOR<T>; i++) sums[part + i] += x[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
      int column = first + i * WARP;
      if (column >= m) continue;
      if constexpr (PRODUCT) sums[i] += widen(row[column]) * widen(by[column]);
      else sums[i] += widen(row[column]);
    }
  }
}

template <bool PRODUCT, class T> __device__ void shares_of(const T *dy, const T *f, float *shares, int n, int m, bool vectors) {
  __shared__ float partial[WARPS][COLUMNS];
  int start = int(blockIdx.x) * COLUMNS;
  int offset = vectors ? lane() * LANE_COLUMNS : lane();
  float sums[LANE_COLUMNS] = {};
#pragma unroll 4
  for (int row = int(blockIdx.y) * WARPS + warp(); row < n; row += int(gridDim.y) * WARPS)
    add_row<PRODUCT>(dy + size_t(row) * m, f + size_t(row) * m, m, start + offset, vectors, sums);
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; i++) partial[warp()][vectors ? offset + i : offset + i * WARP] = sums[i];
  __syncthreads();
  int column = start + int(threadIdx.x);
  if (column >= m) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += partial[w][threadIdx.x];
  shares[size_t(blockIdx.y) * m + column] = sum;
}

} // namespace

#define SHARES(T, name)                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256) bias_shares_##name(const T *dy, float *shares, int n, int m, int vectors) {                \
    shares_of<false>(dy, dy, shares, n, m, vectors);                                                                                           \
  }                                                                                                                                            \
  EXPORT(bias_shares_##name)                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) product_shares_##name(const T *dy, const T *f, float *shares, int n, int m, int vectors) { \
    shares_of<true>(dy, f, shares, n, m, vectors);                                                                                             \
  }                                                                                                                                            \
  EXPORT(product_shares_##name)

SHARES(float, f32)
SHARES(bf16, bf16)
