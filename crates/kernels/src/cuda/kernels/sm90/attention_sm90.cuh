// Common parts of the attention kernels for compute capability 9.0: tiles of rows of a head in shared
// memory, and products of them.
//
// The threads of a block are a producer warpgroup, which starts all copies, and consumer warpgroups,
// which compute. A consumer owns 64 rows (queries, or keys in the backward pass of keys); a warp has
// 16 of them, a lane has rows lane / 4 and lane / 4 + 8 and of eight adjacent columns 2 (lane % 4) and
// the next. Buffers of the other side form a ring. Each has a barrier that ends a phase when its rows
// have arrived, and one when all warps of all consumers have released it.
//
// Copies read whole boxes, so a tile may have rows of the next segment. Their scores are masked, and
// their results are not written.
#pragma once
#include "attention.cuh"
#include "hopper.cuh"

namespace {

// Registers of a thread, in a block with this number of consumers. A multiprocessor has 65,536.
template <int CONSUMERS> constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
template <int CONSUMERS> constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;

// Tensor maps of a tensor [rows, heads, dh]: for 64 columns with rows of 128 bytes, and for the last 16
// of 80 columns with rows of 32 bytes. Columns from `dh` on become zeros.
struct HeadMaps {
  TensorMap wide, narrow;
};

// ROWS rows of D bf16 in shared memory: a panel for each 64 columns, and a narrow one for 16 more. A
// row of a panel has 128 bytes (or 32), and its 16-byte columns are permuted by the address.
template <int D, int ROWS> struct Panels {
  static constexpr int WIDE = D / 64, NARROW = D % 64; // panels, and columns of the narrow one
  static_assert(NARROW == 0 || NARROW == 16, "the last panel has 64 or 16 columns");
  static constexpr int WIDE_BYTES = ROWS * 128, BYTES = WIDE * WIDE_BYTES + (NARROW ? ROWS * 32 : 0);
  static_assert(BYTES % 1024 == 0, "the pattern of a permutation repeats every 1,024 bytes");

  // Starts to copy rows first .. first + ROWS of a head.
  static __device__ __forceinline__ void copy(unsigned char *tile, const HeadMaps &maps, uint64_t *barrier, int head, int first) {
#pragma unroll
    for (int panel = 0; panel < WIDE; panel++) copy_box(tile + panel * WIDE_BYTES, &maps.wide, barrier, 64 * panel, head, first);
    if (NARROW) copy_box(tile + WIDE * WIDE_BYTES, &maps.narrow, barrier, 64 * WIDE, head, first);
  }

  // Columns 16 k .. 16 k + 16 of the rows from `row` (a multiple of 8) on, as an operand of a product
  // that sums over columns.
  static __device__ __forceinline__ uint64_t columns(const unsigned char *tile, int row, int k) {
    if (k >= 4 * WIDE) return matrix_at<32>(tile + WIDE * WIDE_BYTES + row * 32);
    return matrix_at<128>(tile + k / 4 * WIDE_BYTES + row * 128) + k % 4 * 2;
  }

  // Address of a 16-byte column of a row.
  static __device__ __forceinline__ unsigned char *at(unsigned char *tile, int row, int chunk) {
    if (chunk >= 8 * WIDE) return tile + WIDE * WIDE_BYTES + row * 32 + ((chunk & 1) ^ (row >> 2 & 1)) * 16;
    return tile + chunk / 8 * WIDE_BYTES + row * 128 + (chunk % 8 ^ (row & 7)) * 16;
  }
};

// Accumulators [64, D] of a warpgroup.
template <int D> struct Sums {
  static constexpr int WIDE = D / 64 * 32, NARROW = D % 64 / 2;
  float wide[WIDE], narrow[NARROW ? NARROW : 1];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < WIDE; i++) wide[i] = 0;
#pragma unroll
    for (int i = 0; i < NARROW; i++) narrow[i] = 0;
  }

  __device__ __forceinline__ void hold_all() {
    hold(wide);
    if constexpr (NARROW > 0) hold(narrow);
  }

  // The value in row lane / 4 + 8 r and column 8 n + 2 (lane % 4) + i.
  __device__ __forceinline__ float &at(int n, int r, int i) {
    int index = 4 * n + 2 * r + i;
    if (index < WIDE) return wide[index];
    return narrow[NARROW ? index - WIDE : 0];
  }

  // Multiplies the two rows of this lane.
  __device__ __forceinline__ void scale(const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < WIDE; i++) wide[i] *= factors[i / 2 % 2];
#pragma unroll
    for (int i = 0; i < NARROW; i++) narrow[i] *= factors[i / 2 % 2];
  }
};

// Starts a group of products: scores = own others^T, for own rows from `row` on and N other rows.
template <int D, int N, int ROWS>
__device__ __forceinline__ void start_scores(float (&scores)[N / 2], const unsigned char *own, int row, const unsigned char *others) {
  products_fence();
#pragma unroll
  for (int k = 0; k < D / 16; k++) multiply_shared<N>(scores, Panels<D, ROWS>::columns(own, row, k), Panels<D, N>::columns(others, 0, k), k > 0);
  products_commit();
}

// Starts a group of products: sums += weights others, for weights [64, N] as operands in registers and
// N other rows.
template <int D, int N>
__device__ __forceinline__ void start_weighted(Sums<D> &sums, const uint32_t (&weights)[N / 4], const unsigned char *others) {
  using Tile = Panels<D, N>;
  products_fence();
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    multiply_registers<64 * Tile::WIDE>(sums.wide, weights + 4 * k, matrix_at<128>(others + k * 16 * 128, Tile::WIDE_BYTES), true);
    if constexpr (Tile::NARROW > 0)
      multiply_registers<Tile::NARROW>(sums.narrow, weights + 4 * k, matrix_at<32>(others + Tile::WIDE * Tile::WIDE_BYTES + k * 16 * 32), true);
  }
  products_commit();
}

// Rounds a result [64, N] of a product to bf16, as the left operand of the next one.
template <int N> __device__ __forceinline__ void pack_operand(uint32_t (&to)[N / 4], const float (&from)[N / 2]) {
#pragma unroll
  for (int k = 0; k < N / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int first = 4 * (2 * k + i / 2) + i % 2 * 2;
      to[4 * k + i] = pack(from[first], from[first + 1]);
    }
}

// Releases a buffer. Each warp of each consumer must call it: a wait covers only the products of
// its own warp.
__device__ __forceinline__ void release(uint64_t *barrier) {
  __syncwarp();
  if (lane() == 0) barrier_arrive(barrier);
}

// Writes the rows `row` .. row + 64 of a warpgroup times a factor per row to global memory, in 16-byte
// stores. They pass through these rows of `tile`, which no product reads any more.
template <int D, int ROWS>
__device__ __forceinline__ void store_sums(bf16 *head, unsigned stride, int first, int end, int dh, Sums<D> &sums, const float (&factors)[2], unsigned char *tile,
                                           int row) {
  using Tile = Panels<D, ROWS>;
  int here = lane_here(), g = here / 4, t = here % 4;
  row += warp() % 4 * 16;
  first += row;
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<uint32_t *>(Tile::at(tile, row + g + 8 * r, n) + 4 * t) = pack(sums.at(n, r, 0) * factors[r], sums.at(n, r, 1) * factors[r]);
  __syncwarp();
  for (int i = here; i < 2 * D; i += WARP) {
    int of_row = i / (D / 8), chunk = i % (D / 8);
    if (first + of_row >= end || chunk * 8 >= dh) continue;
    bf16 *to = head + size_t(first + of_row) * stride + chunk * 8;
    *reinterpret_cast<Bytes16 *>(to) = *reinterpret_cast<const Bytes16 *>(Tile::at(tile, row + of_row, chunk));
  }
}

} // namespace
