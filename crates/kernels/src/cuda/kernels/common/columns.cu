// Column sums in a fixed order, for the gradients of norm weights and of biases; see
// crates/kernels/src/column_shares.rs.
//
// A block of 32 warps has 32 columns of a gradient: warp i adds rows i, i + 32, .., and the sums of the
// warps are added in their order. The input has a few megabytes at most, so load latency is the limit,
// and each thread has eight loads in flight.
#include "common.cuh"

namespace {

// Gradients of a launch: sums[i] receives the sums of the columns of shares[i] [rows[i], columns[i]].
struct ColumnSums {
  static constexpr int MOST = 32;
  const float *shares[MOST];
  float *sums[MOST];
  int rows[MOST];
  int columns[MOST];
  int first[MOST + 1];
};

} // namespace

extern "C" __global__ void __launch_bounds__(1024) add_columns_f32(const __grid_constant__ ColumnSums list, int num) {
  __shared__ float partial[WARP][WARP + 1];
  int at = tensor_of_block(list, num), n = list.rows[at], d = list.columns[at];
  int column = (int(blockIdx.x) - list.first[at]) * WARP + lane();
  const float *shares = list.shares[at];
  float sum = 0;
  if (column < d) {
#pragma unroll 8
    for (int row = warp(); row < n; row += WARP) sum += shares[size_t(row) * d + column];
  }
  partial[warp()][lane()] = sum;
  __syncthreads();
  if (warp() > 0 || column >= d) return;
  sum = 0;
  for (int i = 0; i < WARP; i++) sum += partial[i][lane()];
  list.sums[at][column] += sum;
}
EXPORT(add_columns_f32)
