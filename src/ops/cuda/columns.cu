// Column sums in a fixed order, for the gradients of norms' weights and of biases.
#include "common.cuh"

// sums [d] += the rows of shares [n, d], first to last.
extern "C" __global__ void __launch_bounds__(256) add_columns_f32(const float *shares, float *sums, int n, int d) {
  int column = int(blockIdx.x) * int(blockDim.x) + int(threadIdx.x);
  if (column >= d) return;
  float sum = 0;
  for (int row = 0; row < n; row++) sum += shares[size_t(row) * d + column];
  sums[column] += sum;
}
EXPORT(add_columns_f32)
