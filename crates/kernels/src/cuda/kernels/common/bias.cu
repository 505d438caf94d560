// Column sums of output gradients, for biases; see crates/kernels/src/linear.rs for the contract.
//
// A block has 256 columns of dy [n, m] and every gridDim.y-th group of 8 rows. A lane has 8
// columns, in one or two 16-byte loads; a warp has one row of each group. The sums of the warps are
// added in their order, and `columns.cu` adds the partial sums in the order of the blocks. Bound by
// one read of dy.
#include "common.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int LANE_COLUMNS = 8;
constexpr int COLUMNS = WARP * LANE_COLUMNS;

// Adds 8 columns, starting at `first`: adjacent ones with vector loads, otherwise 32 columns apart.
template <class T> __device__ __forceinline__ void add_row(const T *row, int m, int first, bool vectors, float (&sums)[LANE_COLUMNS]) {
  if (vectors) {
#pragma unroll
    for (int part = 0; part < LANE_COLUMNS; part += VECTOR<T>) {
      float x[VECTOR<T>];
      if (first + part >= m) break;
      load_vector(row + first + part, x);
#pragma unroll
      for (int i = 0; i < VECTOR<T>; i++) sums[part + i] += x[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) {
      int column = first + i * WARP;
      if (column < m) sums[i] += widen(row[column]);
    }
  }
}

template <class T> __device__ void bias_shares(const T *dy, float *shares, int n, int m, bool vectors) {
  __shared__ float partial[WARPS][COLUMNS];
  int start = int(blockIdx.x) * COLUMNS;
  int offset = vectors ? lane() * LANE_COLUMNS : lane();
  float sums[LANE_COLUMNS] = {};
#pragma unroll 4
  for (int row = int(blockIdx.y) * WARPS + warp(); row < n; row += int(gridDim.y) * WARPS)
    add_row(dy + size_t(row) * m, m, start + offset, vectors, sums);
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

#define BIAS(T, name)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256) bias_shares_##name(const T *dy, float *shares, int n, int m, int vectors) {        \
    bias_shares(dy, shares, n, m, vectors);                                                                                            \
  }                                                                                                                                    \
  EXPORT(bias_shares_##name)

BIAS(float, f32)
BIAS(bf16, bf16)
