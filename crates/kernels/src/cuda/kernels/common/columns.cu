// Column sums in a fixed order, for the gradients of norm weights and of biases.
//
// A block of 32 warps has 32 columns: warp i adds rows i, i + 32, .., and the sums of the warps are
// added in their order. The input has a few megabytes at most, so load latency is the limit, and
// each thread has eight loads in flight.
#include "common.cuh"

// Adds the column sums of shares [n, d] to sums [d].
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
