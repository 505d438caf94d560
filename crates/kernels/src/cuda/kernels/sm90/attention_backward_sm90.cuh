// Common parts of the backward kernels of attention for compute capability 9.0: tiles in shared memory,
// and the copies of the producer.
#pragma once
#include "attention_sm90.cuh"

namespace {

// Shared memory of a block: two tiles of own rows, and stages of two tiles of other rows. If the own rows
// are keys (S::KEYS), these are k and v, the others are q and do, and each stage has lse in base 2 and
// delta of its queries. Otherwise they are the other way round, without statistics. S::EXCHANGES bytes
// are for an exchange between the consumers.
template <class S> struct BackwardTiles {
  unsigned char *own0, *own1, *stages, *exchanges;
  float *statistics;
  uint64_t *own_full, *full, *empty;

  __device__ __forceinline__ explicit BackwardTiles(unsigned char *start) {
    own0 = start;
    own1 = own0 + S::Own::BYTES;
    stages = own1 + S::Own::BYTES;
    exchanges = stages + S::STAGES * 2 * S::Other::BYTES;
    statistics = reinterpret_cast<float *>(exchanges + S::EXCHANGES);
    own_full = reinterpret_cast<uint64_t *>(statistics + (S::KEYS ? S::STAGES * 2 * S::OTHERS : 0));
    full = own_full + 1;
    empty = full + S::STAGES;
  }

  __device__ __forceinline__ unsigned char *other0(int stage) const { return stages + stage * 2 * S::Other::BYTES; }
  __device__ __forceinline__ unsigned char *other1(int stage) const { return other0(stage) + S::Other::BYTES; }
  __device__ __forceinline__ float *lse(int stage) const { return statistics + stage * 2 * S::OTHERS; }
  __device__ __forceinline__ float *delta(int stage) const { return lse(stage) + S::OTHERS; }

  // Of one thread; barriers_ready follows.
  __device__ __forceinline__ void init_barriers() const {
    barrier_init(own_full, 1);
    for (int stage = 0; stage < S::STAGES; stage++) {
      barrier_init(full + stage, S::KEYS ? 1 + WARP : 1); // the lanes of the producer warp write statistics
      barrier_init(empty + stage, 8);
    }
  }
};

struct Maps {
  const HeadMaps &own0, &own1, &other0, &other1;
};

// Starts to copy the own rows of a head. Of the producer's threads, the first copies.
template <class S> __device__ __forceinline__ void copy_own(const BackwardTiles<S> &tiles, const Maps &maps, int head, int first) {
  if (threadIdx.x != 0) return;
  barrier_expect(tiles.own_full, 2 * S::Own::BYTES);
  S::Own::copy(tiles.own0, maps.own0, tiles.own_full, head, first);
  S::Own::copy(tiles.own1, maps.own1, tiles.own_full, head, first);
}

// Waits until the stage of `ring` is empty, and fills it with the other rows of a head from `at` on. Of
// the producer warp if the own rows are keys, otherwise of one thread. `end` is a reference so that a
// value in shared memory takes no register during the wait.
template <class S>
__device__ __forceinline__ void fill_stage(const BackwardTiles<S> &tiles, Ring<S::STAGES> &ring, const Maps &maps, int head, int at, const int &end, const float *lse, const float *delta,
                                           int num_rows) {
  int stage = ring.stage;
  barrier_wait(tiles.empty + stage, ring.parity ^ 1); // ends at once in the first round
  if (threadIdx.x == 0) {
    barrier_expect(tiles.full + stage, 2 * S::Other::BYTES);
    S::Other::copy(tiles.other0(stage), maps.other0, tiles.full + stage, head, at);
    S::Other::copy(tiles.other1(stage), maps.other1, tiles.full + stage, head, at);
  }
  if constexpr (S::KEYS) {
    for (int i = lane(); i < S::OTHERS; i += WARP) {
      bool exists = at + i < end; // other queries get p = 0
      size_t row = size_t(head) * num_rows + at + i;
      tiles.lse(stage)[i] = exists ? lse[row] * LOG2_E : INFINITE;
      tiles.delta(stage)[i] = exists ? delta[row] : 0.0f;
    }
    barrier_arrive(tiles.full + stage);
  }
  ring.next();
}

} // namespace
