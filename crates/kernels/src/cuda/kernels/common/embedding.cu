// Weighted sums of rows, and gradients of tables; see crates/kernels/src/embedding.rs. (A plain lookup is
// gather_rows.)
//
// The gradient of a table adds rows of dy to the table rows given by ids, in a fixed order and
// without atomics: positions are sorted by (id, position), and runs of equal ids are summed. Tiles
// of 1,024 positions are sorted by counting; then each element finds its rank in every other tile
// by bisection. This takes about 10 reads of shared memory per position and tile: some 20 us for
// 32k tokens and 0.2 ms for the 260k taps of 65k patches, for any table size. The sums read dy once
// and access only the table rows that occur in ids. They are bound by memory bandwidth, even if
// most positions have the same id.
#include "chunks.cuh"

namespace {

// Number of positions that a block sums.
constexpr int STRETCH = 64;
constexpr int TILE = 1024;
constexpr int UNDER_WAY = 4;

// Computes y [p, d] = x (or 0) + the four weighted rows of table [n, d]; one warp per row.
template <int E, class T>
__device__ __forceinline__ void interpolate(const T *table, const uint32_t *index, const float *weight, const T *x, T *y, int n, int p, int d) {
  size_t row = size_t(blockIdx.x) * (blockDim.x / WARP) + size_t(warp());
  if (row >= size_t(p)) return;
  size_t from[4];
  float factor[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    from[j] = index[row * 4 + j];
    factor[j] = weight[row * 4 + j];
    if (from[j] >= size_t(n)) from[j] = 0, factor[j] = NAN; // the host rejects such an index; the NaN makes an error visible
  }
  for (int at = lane() * E; at < d; at += WARP * E) {
    Chunk<T, E> base = x ? load_chunk<E>(x + row * d + at) : no_chunk<T, E>(), taps[4];
#pragma unroll
    for (int j = 0; j < 4; j++) taps[j] = load_chunk<E>(table + from[j] * d + at);
    float sums[E];
#pragma unroll
    for (int i = 0; i < E; i++) {
      sums[i] = base.get(i);
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i] += factor[j] * taps[j].get(i);
    }
    store_floats<E>(y + row * d + at, sums);
  }
}

// Sums the rows of one stretch of sorted positions. The sum of a run that started in an earlier
// stretch goes to `carried`, the block's row of [stretches, d]; join_runs adds it to the table.
template <int E, class T>
__device__ __forceinline__ void add_runs(const uint32_t *keys, const uint32_t *from, const float *weight, const T *dy, float *table, float *carried, int n, int d,
                                         int num_rows, int taps) {
  __shared__ uint32_t key[STRETCH], source[STRETCH];
  __shared__ float factor[STRETCH];
  int first = int(blockIdx.x) * STRETCH, count = min(STRETCH, n - first);
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) {
    uint32_t position = from[first + i];
    key[i] = keys[first + i];
    source[i] = position / uint32_t(taps);
    factor[i] = weight ? weight[position] : 1.0f;
  }
  __syncthreads();
  int column = (int(blockIdx.y) * int(blockDim.x) + int(threadIdx.x)) * E;
  if (column >= d) return;
  bool begun = first == 0 || keys[first - 1] != key[0];
  float sums[E] = {};
  for (int start = 0; start < count; start += UNDER_WAY) {
    Chunk<T, E> rows[UNDER_WAY];
#pragma unroll
    for (int k = 0; k < UNDER_WAY; k++) {
      if (start + k < count) rows[k] = load_chunk<E>(dy + size_t(source[start + k]) * d + column);
    }
#pragma unroll
    for (int k = 0; k < UNDER_WAY; k++) {
      int at = start + k;
      if (at >= count) continue;
#pragma unroll
      for (int i = 0; i < E; i++) sums[i] += factor[at] * rows[k].get(i);
      if (at + 1 < count && key[at + 1] == key[at]) continue;
      if (!begun) {
        store_floats<E>(carried + size_t(blockIdx.x) * d + column, sums);
      } else if (key[at] < uint32_t(num_rows)) {
        float *row = table + size_t(key[at]) * d + column, old[E];
        load_floats<E>(row, old);
#pragma unroll
        for (int i = 0; i < E; i++) sums[i] += old[i];
        store_floats<E>(row, sums);
      }
#pragma unroll
      for (int i = 0; i < E; i++) sums[i] = 0;
      begun = true;
    }
  }
}

// Number of sorted `keys` [count] that are less than `key`, or at most `key` if EQUAL.
template <bool EQUAL> __device__ __forceinline__ int count_below(const uint32_t *keys, int count, uint32_t key) {
  int low = 0, high = count;
  while (low < high) {
    int middle = low + (high - low) / 2;
    bool below = EQUAL ? keys[middle] <= key : keys[middle] < key;
    low = below ? middle + 1 : low;
    high = below ? high : middle;
  }
  return low;
}

} // namespace

// Sorts each tile of ids [n] by (id, position). Writes the sorted ids and their positions.
extern "C" __global__ void __launch_bounds__(TILE) sort_tiles_f32(const uint32_t *ids, uint32_t *keys, uint32_t *from, int n) {
  __shared__ uint32_t tile[TILE];
  int first = int(blockIdx.x) * TILE, count = min(TILE, n - first), own = int(threadIdx.x);
  if (own < count) tile[own] = ids[first + own];
  __syncthreads();
  if (own >= count) return;
  uint32_t key = tile[own];
  int rank = 0;
#pragma unroll 8
  for (int i = 0; i < count; i++) rank += tile[i] < key || (tile[i] == key && i < own);
  keys[first + rank] = key;
  from[first + rank] = uint32_t(first + own);
}
EXPORT(sort_tiles_f32)

// Merges sorted tiles. The rank of an element is the sum of its ranks in all tiles.
extern "C" __global__ void __launch_bounds__(TILE)
    merge_tiles_f32(const uint32_t *tile_keys, const uint32_t *tile_from, uint32_t *keys, uint32_t *from, int n) {
  __shared__ uint32_t tile[TILE];
  int own = int(blockIdx.x) * TILE + int(threadIdx.x), place = int(threadIdx.x);
  uint32_t key = own < n ? tile_keys[own] : 0;
  for (int other = 0; other < int(gridDim.x); other++) {
    if (other == int(blockIdx.x)) continue;
    int first = other * TILE, count = min(TILE, n - first);
    __syncthreads();
    if (int(threadIdx.x) < count) tile[threadIdx.x] = tile_keys[first + int(threadIdx.x)];
    __syncthreads();
    place += other < int(blockIdx.x) ? count_below<true>(tile, count, key) : count_below<false>(tile, count, key);
  }
  if (own >= n) return;
  keys[place] = key;
  from[place] = tile_from[own];
}
EXPORT(merge_tiles_f32)

// Adds to a run the partial sums of later stretches, in their order, if it continues beyond the
// stretch where it started.
extern "C" __global__ void __launch_bounds__(256) join_runs_f32(const uint32_t *keys, const float *carried, float *table, int n, int d, int num_rows) {
  int first = int(blockIdx.x) * STRETCH, next = first + STRETCH, column = int(blockIdx.y) * int(blockDim.x) + int(threadIdx.x);
  if (next >= n || column >= d) return;
  uint32_t key = keys[next - 1];
  bool goes_on = keys[next] == key, begins_here = first == 0 || keys[first - 1] != key;
  if (!goes_on || !begins_here || key >= uint32_t(num_rows)) return;
  int last = (next + count_below<true>(keys + next, n - next, key) - 1) / STRETCH;
  float sum = 0;
#pragma unroll 8
  for (int stretch = int(blockIdx.x) + 1; stretch <= last; stretch++) sum += carried[size_t(stretch) * d + column];
  table[size_t(key) * d + column] += sum;
}
EXPORT(join_runs_f32)

#define EMBEDDING(T, E, name)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                                                            \
      interpolate_rows_##name(const T *table, const uint32_t *index, const float *weight, const T *x, T *y, int n, int p, int d) { \
    interpolate<E>(table, index, weight, x, y, n, p, d);                                                                       \
  }                                                                                                                            \
  EXPORT(interpolate_rows_##name)                                                                                              \
  extern "C" __global__ void __launch_bounds__(64)                                                                             \
      add_runs_##name(const uint32_t *keys, const uint32_t *from, const float *weight, const T *dy, float *table, float *carried, int n, int d, int num_rows, int taps) { \
    add_runs<E>(keys, from, weight, dy, table, carried, n, d, num_rows, taps);                                                 \
  }                                                                                                                            \
  EXPORT(add_runs_##name)

EMBEDDING(float, 4, f32)
EMBEDDING(bf16, 8, bf16)
EMBEDDING(float, 1, single_f32)
EMBEDDING(bf16, 1, single_bf16)
