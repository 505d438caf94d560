// The tiles of grouped products: products of the rows of each expert with its own matrix.
//
// The number of rows of each expert is known on the device only. So a launch has a fixed number of
// blocks, which take tile after tile, and each block finds the expert of a tile in a list in shared
// memory.
#pragma once
#include "common.cuh"

namespace {

// Rows of one expert, in a tile.
struct RowTile {
  int expert, first, end;
};

// Writes the number of tiles of ROWS rows of the experts before each of the `e` experts, and of all of them,
// to starts [e + 1]. All threads of the block call it.
template <int ROWS> __device__ __forceinline__ void count_tiles(int *starts, const uint32_t *offsets, int e) {
  if (warp() == 0) {
    int each = (e + WARP - 1) / WARP, begin = min(lane() * each, e), end = min(begin + each, e), own = 0;
    for (int i = begin; i < end; i++) own += int((offsets[i + 1] - offsets[i] + ROWS - 1) / ROWS);
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
      int other = shuffle(sum, max(lane() - distance, 0));
      if (lane() >= distance) sum += other;
    }
    int before = sum - own;
    for (int i = begin; i < end; i++) {
      starts[i] = before;
      before += int((offsets[i + 1] - offsets[i] + ROWS - 1) / ROWS);
    }
    if (lane() == WARP - 1) starts[e] = sum;
  }
  __syncthreads();
}

template <int ROWS> __device__ __forceinline__ RowTile row_tile(const int *starts, const uint32_t *offsets, int e, int tile) {
  int low = 0, high = e - 1; // the last expert that starts at or before the tile
  while (low < high) {
    int middle = (low + high + 1) / 2;
    bool before = starts[middle] <= tile;
    low = before ? middle : low;
    high = before ? high : middle - 1;
  }
  return RowTile{low, int(offsets[low]) + (tile - starts[low]) * ROWS, int(offsets[low + 1])};
}

} // namespace
