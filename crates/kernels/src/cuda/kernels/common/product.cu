// Matrix product without a library, for products that cublasLt refuses; see crates/kernels/src/cuda/gemm.rs.
//
// A block of 256 threads computes 64 x 64 results and takes 16 terms of the sums at a time. A thread
// has 4 x 4 results. Operands may have any size, stride and alignment. The order of the sums depends
// on the sizes only.
#include "common.cuh"
#include "e4m3.cuh"

namespace {

constexpr int TILE = 64, TERMS = 16, THREADS = 256, EACH = 4;

// Row-major matrices with a row stride in elements. `terms_are_rows` says that the terms of a sum are
// rows of the operand.
template <class T> struct Operand {
  const T *at;
  long long stride;
  int terms_are_rows;

  __device__ __forceinline__ float read(int index, int term) const {
    long long row = terms_are_rows ? term : index, column = terms_are_rows ? index : term;
    return widen(at[row * stride + column]);
  }
};

// Loads terms first .. first + TERMS of TILE rows or columns from `index` on, with zeros outside.
template <class T>
__device__ __forceinline__ void load(float (&tile)[TERMS][TILE + 1], const Operand<T> &operand, int index, int end, int first, int terms) {
  for (int i = int(threadIdx.x); i < TILE * TERMS; i += THREADS) {
    // Adjacent threads read adjacent elements.
    int here = operand.terms_are_rows ? i % TILE : i / TERMS, term = operand.terms_are_rows ? i / TILE : i % TERMS;
    bool valid = index + here < end && first + term < terms;
    tile[term][here] = valid ? operand.read(index + here, first + term) : 0.0f;
  }
}

template <class T, class D>
__device__ __forceinline__ void product(const Operand<T> &a, const Operand<T> &b, const D *addend, const D *bias, D *to, int m, int n, int k, float factor) {
  __shared__ float left[TERMS][TILE + 1], right[TERMS][TILE + 1];
  int tiles = (n + TILE - 1) / TILE;
  int row = int(blockIdx.x) / tiles * TILE, column = int(blockIdx.x) % tiles * TILE;
  int own_row = int(threadIdx.x) / 16, own_column = int(threadIdx.x) % 16;
  float sums[EACH][EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int j = 0; j < EACH; j++) sums[i][j] = 0;
  for (int first = 0; first < k; first += TERMS) {
    __syncthreads(); // the previous terms are no longer in use
    load(left, a, row, m, first, k);
    load(right, b, column, n, first, k);
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
      if (r >= m || c >= n) continue;
      long long at = (long long)r * n + c;
      float sum = factor * sums[i][j];
      if (addend) sum += widen(addend[at]);
      if (bias) sum += widen(bias[c]);
      to[at] = narrow<D>(sum);
    }
}

} // namespace

#define PRODUCT(T, D, name)                                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                                  \
      product_##name(const T *a, const T *b, const D *addend, const D *bias, D *to, long long a_stride, long long b_stride,              \
                     int a_terms_are_rows, int b_terms_are_rows, int m, int n, int k, float factor) {                                    \
    product(Operand<T>{a, a_stride, a_terms_are_rows}, Operand<T>{b, b_stride, b_terms_are_rows}, addend, bias, to, m, n, k, factor);    \
  }                                                                                                                                      \
  EXPORT(product_##name)

PRODUCT(float, float, f32)
PRODUCT(bf16, bf16, bf16)
PRODUCT(bf16, float, into_f32_bf16)
PRODUCT(e4m3, float, e4m3_f32)
