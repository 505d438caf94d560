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

// Matrices of a launch.
template <class T> struct Matrices {
  static constexpr int MOST = 16;
  Tables tables;
  const uint8_t *codes[MOST];
  const uint8_t *scales[MOST];
  const float *ranges[MOST];
  T *y[MOST];
  long long count[MOST];
  float offset[MOST];
  int first[MOST + 1];
};

// If E is 1, addresses need no alignment.
template <int E, class T> __device__ __forceinline__ void dequantize(const Matrices<T> &list, int num) {
  int of = tensor_of_block(list, num), number = int(blockIdx.x) - list.first[of]; // of the block in its matrix
  const uint8_t *codes = list.codes[of], *scales = list.scales[of];
  const float *ranges = list.ranges[of];
  float offset = list.offset[of];
  T *y = list.y[of];
  long long n = list.count[of];
  // A table in shared memory: the lanes of a warp read different entries at once.
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = list.tables.codes[threadIdx.x];
  __syncthreads();
  long long at = ((long long)number * blockDim.x + threadIdx.x) * SHARE;
  if (at >= n) return;
  long long block = at / BLOCK;
  // Two roundings, as on the CPU.
  float scale = __fadd_rn(__fmul_rn(list.tables.map[scales[block]], ranges[block / SCALES]), offset);
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

#define NF4(T, E, name)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256, 4) nf4_dequantize_##name(const __grid_constant__ Matrices<T> list, int num) { \
    dequantize<E, T>(list, num);                                                                                              \
  }                                                                                                                           \
  EXPORT(nf4_dequantize_##name)

NF4(float, 4, f32)
NF4(bf16, 8, bf16)
NF4(float, 1, single_f32)
NF4(bf16, 1, single_bf16)
