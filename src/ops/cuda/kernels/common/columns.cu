// Column sums in a fixed order, for the gradients of norms' weights and of biases.
//
// A block of 32 warps has 32 columns: warp i adds rows i, i + 32, .., and the warps' sums are added in their order.
// A few megabytes at most: the latency of the loads bounds it, so each thread has eight of them under way.
#include "common.cuh"

// sums [d] += the column sums of shares [n, d].
extern "C" __global__ void __launch_bounds__(1024) add_columns_f32(const float *shares, float *sums, int n, int d) {
  __shared__ float partial[WARP][WARP + 1];
  int column = int(blockIdx.x) * WARP + lane();
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
  sums[column] += sum;
}
EXPORT(add_columns_f32)
