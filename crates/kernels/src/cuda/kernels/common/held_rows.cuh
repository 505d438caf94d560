// Rows held in registers, for the norms: a group of warps has a row, and each of its threads has H
// columns.
//
// A block has enough groups for eight warps, so that short rows do not give blocks of one warp.
// Adjacent threads of a group have adjacent 16-byte chunks of the row, so that reads are coalesced.
#pragma once

#include "chunks.cuh"

namespace {

// Number of columns per thread. A backward pass has fewer, because it also holds more rows and
// sums.
constexpr int FORWARD = 16, BACKWARD = 8;

// Position of a thread. Its group has `warps` warps.
struct Group {
  int warps, threads, number, index, count;
  __device__ __forceinline__ explicit Group(int warps)
      : warps(warps), threads(warps * WARP), number(warp() / warps), index(int(threadIdx.x) - number * warps * WARP), count(int(blockDim.x) / (warps * WARP)) {}
};

// The columns of one row that a thread holds, in their storage format.
template <class T, int E, int H> struct Held {
  static constexpr int COUNT = H / E;
  Chunk<T, E> chunks[COUNT];

  // Loads the row, with zeros for columns beyond `d` or if it is not `valid`.
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

// Stores value(i) to the columns of this thread.
template <int E, int H, class T, class F> __device__ __forceinline__ void store_row(T *row, int d, const Group &group, F value) {
  for_chunks<E, H>(d, group, [&](int at, int first) {
    float values[E];
#pragma unroll
    for (int i = 0; i < E; i++) values[i] = value(first + i);
    store_floats<E>(row + at, values);
  });
}

// Calls f(row, whether it exists, turn) for each row of this group in a backward pass. All groups of
// a block do the same number of turns, because group_sum has a barrier.
template <class F> __device__ __forceinline__ void for_rows(int n, const Group &group, F f) {
  int stride = int(gridDim.x) * group.count, turn = 0;
  for (int first = int(blockIdx.x) * group.count; first < n; first += stride, turn++) {
    int row = first + group.number;
    f(row, row < n, turn);
  }
}

// The partial sums of a group for a gradient of `d` columns.
__device__ __forceinline__ float *share_of(float *shares, int d, const Group &group) {
  return shares + size_t(int(blockIdx.x) * group.count + group.number) * d;
}

// Returns the sums over the group to every thread, added in a fixed order. All threads of the block
// must call it. `turn` counts the calls in a kernel: a warp may be one call ahead of the others, so
// calls alternate between two buffers.
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

// Returns 1 / sqrt(mean of squares + eps) of a held row to every thread, and stores it. `exists` is
// whether the row does.
template <class T, int E> __device__ __forceinline__ float inverse_rms(const Held<T, E, FORWARD> &x, float *rstd, int row, bool exists, int d, const Group &group, float eps) {
  float squares[1] = {0};
#pragma unroll
  for (int i = 0; i < FORWARD; i++) squares[0] += x.get(i) * x.get(i);
  group_sum(squares, group, 0);
  float scale = rsqrtf(squares[0] / float(d) + eps);
  if (exists && group.index == 0) rstd[row] = scale;
  return scale;
}

} // namespace
