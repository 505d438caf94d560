// Rows held in registers, for the norms: a group of warps has a row, and each of its threads H columns.
//
// A block has as many groups as make eight warps, so that short rows do not leave a block with one warp. Chunks of a
// row are dealt out to the threads of its group in turn: neighbouring threads read neighbouring 16 bytes.
#pragma once

#include "chunks.cuh"

namespace {

// Columns that a thread holds: a backward pass holds more rows at once, and sums besides.
constexpr int FORWARD = 16, BACKWARD = 8;

// The place of a thread: its group has `warps` warps.
struct Group {
  int warps, threads, number, index, count;
  __device__ __forceinline__ explicit Group(int warps)
      : warps(warps), threads(warps * WARP), number(warp() / warps), index(int(threadIdx.x) - number * warps * WARP), count(int(blockDim.x) / (warps * WARP)) {}
};

// The columns of one row that a thread holds, as they are stored.
template <class T, int E, int H> struct Held {
  static constexpr int COUNT = H / E;
  Chunk<T, E> chunks[COUNT];

  // The row, or zeros where it has no column or is not `valid`.
  __device__ __forceinline__ void load(const T *row, int d, const Group &group, bool valid) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
      int at = (k * group.threads + group.index) * E;
      chunks[k] = valid && at < d ? load_chunk<E>(row + at) : no_chunk<T, E>();
    }
  }

  __device__ __forceinline__ float get(int i) const { return chunks[i / E].get(i % E); }
};

// Calls f(column, index of the first value) for each chunk of this thread.
template <int E, int H, class F> __device__ __forceinline__ void for_chunks(int d, const Group &group, F f) {
#pragma unroll
  for (int k = 0; k < H / E; k++) {
    int at = (k * group.threads + group.index) * E;
    if (at < d) f(at, k * E);
  }
}

// Writes value(i) to the columns of this thread.
template <int E, int H, class T, class F> __device__ __forceinline__ void store_row(T *row, int d, const Group &group, F value) {
  for_chunks<E, H>(d, group, [&](int at, int first) {
    float values[E];
#pragma unroll
    for (int i = 0; i < E; i++) values[i] = value(first + i);
    store_floats<E>(row + at, values);
  });
}

// Every thread gets the sums over its group, in a fixed order. All threads of the block take part; `turn` counts the
// sums of a kernel: a warp may be one ahead of the others, so they alternate between two buffers.
template <int K> __device__ __forceinline__ void group_sum(float (&sums)[K], const Group &group, int turn) {
  __shared__ float partial[2][K][WARP];
#pragma unroll
  for (int k = 0; k < K; k++) sums[k] = warp_sum(sums[k]);
  if (group.warps == 1) return;
  float(*buffer)[WARP] = partial[turn % 2];
  if (lane() == 0) {
#pragma unroll
    for (int k = 0; k < K; k++) buffer[k][warp()] = sums[k];
  }
  __syncthreads();
  int first = group.number * group.warps;
#pragma unroll
  for (int k = 0; k < K; k++) {
    float sum = 0;
    for (int i = 0; i < group.warps; i++) sum += buffer[k][first + i];
    sums[k] = sum;
  }
}

} // namespace
