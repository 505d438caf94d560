// Rounding of matrices to FP8 (e4m3) with a power of two as scale for each row or column, and the
// scaling of products; see crates/kernels/src/e4m3.rs.
//
// Integer arithmetic rounds, not the instruction of Hopper: so the codes are those of the CPU on every
// GPU, and infinity becomes NaN. All kernels are bound by memory bandwidth.
#include "chunks.cuh"
#include "e4m3.cuh"

namespace {

constexpr int THREADS = 256;
// Number of rows with one maximum of a column, as in crates/kernels/src/e4m3_linear.rs.
constexpr int SHARE = 64;
// Rows and columns of a block that transposes.
constexpr int TILE = 64;

constexpr uint32_t MAGNITUDE = 0x7FFFFFFF, INFINITE_BITS = 0x7F800000;

// The absolute value of x, or 0 if it is not finite.
__device__ __forceinline__ float finite_magnitude(float x) {
  uint32_t bits = float_to_bits(x) & MAGNITUDE;
  return bits_to_float(bits < INFINITE_BITS ? bits : 0);
}

// Exponent of the scale of a row with this largest finite absolute value: that of the smallest power of
// two for which the value, divided by it, is at most 448 = 1.75 * 2^8.
__device__ __forceinline__ int exponent(float largest) {
  uint32_t bits = float_to_bits(largest);
  int power = int(bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000);
  return power < -117 ? -117 : power > 119 ? 119 : power;
}

__device__ __forceinline__ float power(int exponent) { return bits_to_float(uint32_t(exponent + 127) << 23); }

// The code of the e4m3 value next to x, of two equally near ones that with an even code.
__device__ __forceinline__ uint8_t code(float x) {
  uint32_t bits = float_to_bits(x) & MAGNITUDE, sign = float_to_bits(x) >> 31 << 7;
  if (bits >= INFINITE_BITS) return uint8_t(sign | 127);
  uint32_t found;
  if (bits < 121u << 23) { // below 2^-6: multiples of 2^-9, by which floats from 2^14 to 2^15 differ
    found = float_to_bits(bits_to_float(bits) + 24576.0f) - float_to_bits(24576.0f);
  } else {
    found = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120u << 3);
    found = found < 126 ? found : 126;
  }
  return uint8_t(sign | found);
}

// A block rounds a row of x [n, k] to codes [rows, columns] and writes its scale. Rows and columns
// beyond those of x are zeros. With E above 1, the rows of x are aligned to 16 bytes and k is
// `columns`.
template <int E, class T>
__device__ __forceinline__ void round_rows(const T *x, uint8_t *codes, float *scales, int n, int k, int columns) {
  int row = int(blockIdx.x);
  codes += (long long)row * columns;
  if (row >= n) {
    for (int at = int(threadIdx.x); at < columns; at += THREADS) codes[at] = 0;
    if (threadIdx.x == 0) scales[row] = 0;
    return;
  }
  x += (long long)row * k;
  float largest = 0;
  for (int at = int(threadIdx.x) * E; at < k; at += THREADS * E) {
    Chunk<T, E> chunk = load_chunk<E>(x + at);
#pragma unroll
    for (int i = 0; i < E; i++) largest = fmaxf(largest, finite_magnitude(chunk.get(i)));
  }
  int scale = exponent(block_max(largest));
  float inverse = power(-scale);
  if (threadIdx.x == 0) scales[row] = power(scale);
  for (int at = int(threadIdx.x) * E; at < k; at += THREADS * E) {
    Chunk<T, E> chunk = load_chunk<E>(x + at);
    if constexpr (E == 1) {
      codes[at] = code(chunk.get(0) * inverse);
    } else {
#pragma unroll
      for (int word = 0; word < E / 4; word++) {
        uint32_t four = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) four |= uint32_t(code(chunk.get(4 * word + i) * inverse)) << (8 * i);
        *reinterpret_cast<uint32_t *>(codes + at + 4 * word) = four;
      }
    }
  }
  for (int at = k + int(threadIdx.x); at < columns; at += THREADS) codes[at] = 0;
}

// Writes the largest finite absolute values of each column in SHARE rows of x [n, k] to maxima
// [shares, k]. A thread has a column.
template <class T> __device__ __forceinline__ void column_maxima(const T *x, float *maxima, int n, int k) {
  int column = int(blockIdx.x) * THREADS + int(threadIdx.x), first = int(blockIdx.y) * SHARE;
  if (column >= k) return;
  int end = first + SHARE < n ? first + SHARE : n;
  float largest = 0;
#pragma unroll 8
  for (int row = first; row < end; row++) largest = fmaxf(largest, finite_magnitude(widen(x[(long long)row * k + column])));
  maxima[(long long)blockIdx.y * k + column] = largest;
}

// Writes the codes of the columns of x [n, k] as rows of codes [rows, columns]: those beyond k and
// n are zeros. `columns` is a multiple of 4. A block has TILE columns and TILE rows of x.
template <class T>
__device__ __forceinline__ void round_columns(const T *x, const float *scales, uint8_t *codes, int n, int k, int rows, int columns) {
  // The codes of a column of x, with a pitch that is an odd number of words.
  __shared__ uint32_t words[TILE][TILE / 4 + 1];
  uint8_t *tile = reinterpret_cast<uint8_t *>(words);
  constexpr int PITCH = TILE + 4;
  int first_row = int(blockIdx.y) * TILE, first_column = int(blockIdx.x) * TILE;
  int column = int(threadIdx.x) % TILE, from = first_column + column;
  float scale = from < k ? scales[from] : 0;
  // The inverse of a power of two, from its exponent.
  float inverse = from < k ? bits_to_float((254u << 23) - float_to_bits(scale)) : 0;
  for (int row = int(threadIdx.x) / TILE; row < TILE; row += THREADS / TILE) {
    bool valid = from < k && first_row + row < n;
    tile[column * PITCH + row] = valid ? code(widen(x[(long long)(first_row + row) * k + from]) * inverse) : 0;
  }
  __syncthreads();
  int word = int(threadIdx.x) % (TILE / 4), to = first_row + 4 * word;
  for (int own = int(threadIdx.x) / (TILE / 4); own < TILE; own += THREADS / (TILE / 4)) {
    if (first_column + own >= rows || to >= columns) continue;
    *reinterpret_cast<uint32_t *>(codes + (long long)(first_column + own) * columns + to) = words[own][word];
  }
}

// Writes sums [n, columns] times the scales of rows and columns, plus bias and addend, to y [n, m].
// `addend` may be y.
template <int E, class T>
__device__ __forceinline__ void scale_products(const float *sums, const float *row_scales, const float *column_scales, const T *bias,
                                               const T *addend, T *y, int m, int columns) {
  int column = (int(blockIdx.x) * THREADS + int(threadIdx.x)) * E, row = int(blockIdx.y);
  if (column >= m) return;
  long long at = (long long)row * m + column;
  float factor = row_scales[row], sum[E], scales[E];
  load_floats<E>(sums + (long long)row * columns + column, sum);
  load_floats<E>(column_scales + column, scales);
#pragma unroll
  for (int i = 0; i < E; i++) sum[i] = sum[i] * factor * scales[i];
  if (bias) {
    Chunk<T, E> chunk = load_chunk<E>(bias + column);
#pragma unroll
    for (int i = 0; i < E; i++) sum[i] += chunk.get(i);
  }
  if (addend) {
    Chunk<T, E> chunk = load_chunk<E>(addend + at);
#pragma unroll
    for (int i = 0; i < E; i++) sum[i] += chunk.get(i);
  }
  store_floats<E>(y + at, sum);
}

} // namespace

#define E4M3(T, E, name)                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                                       \
      e4m3_rows_##name(const T *x, uint8_t *codes, float *scales, int n, int k, int columns) {                                                \
    round_rows<E>(x, codes, scales, n, k, columns);                                                                                           \
  }                                                                                                                                           \
  EXPORT(e4m3_rows_##name)                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                                       \
      e4m3_scale_##name(const float *sums, const float *row_scales, const float *column_scales, const T *bias, const T *addend, T *y, int m,  \
                        int columns) {                                                                                                        \
    scale_products<E>(sums, row_scales, column_scales, bias, addend, y, m, columns);                                                          \
  }                                                                                                                                           \
  EXPORT(e4m3_scale_##name)

E4M3(float, 4, f32)
E4M3(bf16, 8, bf16)
E4M3(float, 1, single_f32)
E4M3(bf16, 1, single_bf16)

#define E4M3_COLUMNS(T, name)                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(THREADS) e4m3_column_maxima_##name(const T *x, float *maxima, int n, int k) {                  \
    column_maxima(x, maxima, n, k);                                                                                                           \
  }                                                                                                                                           \
  EXPORT(e4m3_column_maxima_##name)                                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                                       \
      e4m3_columns_##name(const T *x, const float *scales, uint8_t *codes, int n, int k, int rows, int columns) {                             \
    round_columns(x, scales, codes, n, k, rows, columns);                                                                                     \
  }                                                                                                                                           \
  EXPORT(e4m3_columns_##name)

E4M3_COLUMNS(float, f32)
E4M3_COLUMNS(bf16, bf16)

// Writes the scales of columns whose maxima are [shares, k]. A thread has a column. Columns from k on
// have the scale 0.
extern "C" __global__ void __launch_bounds__(THREADS) e4m3_scales_f32(const float *maxima, float *scales, int shares, int k, int columns) {
  int column = int(blockIdx.x) * THREADS + int(threadIdx.x);
  if (column >= columns) return;
  float largest = 0;
  if (column < k) {
#pragma unroll 8
    for (int share = 0; share < shares; share++) largest = fmaxf(largest, maxima[(long long)share * k + column]);
  }
  scales[column] = column < k ? power(exponent(largest)) : 0;
}
EXPORT(e4m3_scales_f32)
