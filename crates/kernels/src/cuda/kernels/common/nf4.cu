// Dequantisation of NF4; see crates/kernels/src/nf4.rs.
//
// A thread has 8 adjacent elements: four bytes of codes, one scale, one store of 16 bytes (two in
// f32). The kernel is bound by memory bandwidth.
#include "chunks.cuh"

namespace {

// Number of elements per thread.
constexpr int SHARE = 8;
// Number of elements with one scale, and of scales with one range.
constexpr int BLOCK = 64, SCALES = 256;

// Values of the 8-bit codes of scales, and of the 4-bit codes.
struct Tables {
  float map[256];
  float codes[16];
};

// If E is 1, addresses need no alignment.
template <int E, class T>
__device__ __forceinline__ void dequantize(const Tables &tables, const uint8_t *codes, const uint8_t *scales, const float *ranges, float offset,
                                           T *y, long long n) {
  // A table in shared memory: the lanes of a warp read different entries at once.
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = tables.codes[threadIdx.x];
  __syncthreads();
  long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * SHARE;
  if (at >= n) return;
  long long block = at / BLOCK;
  // Two roundings, as on the CPU.
  float scale = __fadd_rn(__fmul_rn(tables.map[scales[block]], ranges[block / SCALES]), offset);
  float out[SHARE];
  if (at + SHARE <= n) {
    uint32_t word = 0;
    if constexpr (E > 1) {
      word = *reinterpret_cast<const uint32_t *>(codes + at / 2);
    } else {
#pragma unroll
      for (int i = 0; i < SHARE / 2; i++) word |= uint32_t(codes[at / 2 + i]) << (8 * i);
    }
#pragma unroll
    for (int i = 0; i < SHARE; i++) out[i] = values[word >> (i % 2 ? 4 * i - 4 : 4 * i + 4) & 15] * scale;
    if constexpr (E > 1) {
      store_floats<SHARE>(y + at, out);
    } else {
#pragma unroll
      for (int i = 0; i < SHARE; i++) y[at + i] = narrow<T>(out[i]);
    }
  } else {
    for (int i = 0; at + i < n; i++) { // the end of the matrix
      uint8_t byte = codes[(at + i) / 2];
      y[at + i] = narrow<T>(values[i % 2 ? byte & 15 : byte >> 4] * scale);
    }
  }
}

} // namespace

#define NF4(T, E, name)                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256, 4)                                                                                       \
      nf4_dequantize_##name(Tables tables, const uint8_t *codes, const uint8_t *scales, const float *ranges, float offset, T *y, long long n) { \
    dequantize<E>(tables, codes, scales, ranges, offset, y, n);                                                                              \
  }                                                                                                                                          \
  EXPORT(nf4_dequantize_##name)

NF4(float, 4, f32)
NF4(bf16, 8, bf16)
NF4(float, 1, single_f32)
NF4(bf16, 1, single_bf16)
