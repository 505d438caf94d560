// Common parts of the tensor-core attention kernels: tasks, tiles in shared memory, and the two
// kinds of products.
//
// A block owns ROWS rows (queries, or keys in the backward pass of keys) of one head and iterates
// over the other side in tiles. A warp owns 16 MT of the rows. Both sides are in shared memory as
// rows of D bf16, where D is the head dim rounded up to a size that has a kernel; columns from `dh`
// on are zeros. The result of a product in registers (scores, probabilities) is rounded to bf16 and
// used as the left operand of the next one, so it does not pass through shared memory. Products are
// bound by shared memory: ldmatrix moves 512 bytes in 4 cycles and feeds 2 MT tiles of the tensor
// cores. So MT is 2 wherever the accumulators leave enough registers.
#pragma once
#include "common.cuh"

namespace {

constexpr float LOG2_E = 1.44269504088896340736f;

// The largest score of a row before its first key. It is finite, also times a scale, so that the
// difference of two is 0 for a row that attends to no key of the first tiles; infinity - infinity would
// be NaN.
constexpr float LOWEST = -1e30f;

// One task: own rows first .. min(first + ROWS, end), other rows other_first .. other_end. The
// queries are the last positions of their keys, so own row i and other row `position` are the same token.
struct Task {
  int first, end, other_first, other_end;

  __device__ __forceinline__ int position(int row) const { return row + other_end - end; }
};

// An own row has a score with each other row from others_from to others_to, without the last. A query
// attends to the last `window` of the keys up to its own position, or to all keys if `window` is 0. KEYS:
// whether the own rows are keys, and the others queries. Both ends grow with the own row.
template <bool KEYS> __device__ __forceinline__ int others_from(const Task &task, int row, int window) {
  if (window == 0) return task.other_first;
  return max(task.other_first, KEYS ? task.position(row) : task.position(row) - window + 1);
}
template <bool KEYS> __device__ __forceinline__ int others_to(const Task &task, int row, int window) {
  if (window == 0) return task.other_end;
  return min(task.other_end, KEYS ? task.position(row) + window : task.position(row) + 1);
}

// The other rows that none of the own rows `first` to `last` masks, for a block whose other rows end at
// `to`. Queries from `to` on have p = 0 without a mask.
struct Unmasked {
  int from, to;

  template <bool KEYS> static __device__ __forceinline__ Unmasked of(const Task &task, int first, int last, int to, int window) {
    Unmasked others{others_from<KEYS>(task, last, window), others_to<KEYS>(task, first, window)};
    if (KEYS && others.to == to) others.to = 0x7FFFFFFF;
    return others;
  }
};

__device__ __forceinline__ Task task_of(const int *tasks, int index) {
  const int *at = tasks + 4 * size_t(index);
  return Task{at[0], at[1], at[2], at[3]};
}

// The block index, read again instead of kept in a register: see lane_here.
__device__ __forceinline__ int block_here() {
  int here = int(blockIdx.x);
  compute_here(here);
  return here;
}

// Layout of rows of D bf16 in shared memory. The same 16-byte column of any eight adjacent rows is
// in different banks: if a row is a multiple of 128 bytes, its columns are permuted by the row
// number; otherwise the stride is an odd number of 16-byte columns.
template <int D> struct Rows {
  static constexpr bool PERMUTED = D % 64 == 0;
  static constexpr int CHUNKS = D / 8;
  static constexpr int BYTES = PERMUTED ? 2 * D : 2 * D + 16;

  static __device__ __forceinline__ int at(int row, int chunk) { return row * BYTES + (PERMUTED ? chunk ^ (row & 7) : chunk) * 16; }

  // Offset of chunk c + 2 step, given the offset of chunk c (0 or 1) of the same row.
  static __device__ __forceinline__ int step(int place, int step) { return PERMUTED ? place ^ (step * 32) : place + step * 32; }
};

// Offsets of this lane's rows for load_matrices, for a 16 x 16 left operand, and for a transposed
// right operand. For load_matrices_transposed the right operand has the offset of the left one.
template <int D> __device__ __forceinline__ int left_place() { return Rows<D>::at(lane() % 16, lane() / 16); }
template <int D> __device__ __forceinline__ int right_place() { return Rows<D>::at(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2); }

// The lane, recomputed: values derived from it for masks and epilogues must not occupy registers
// during the products.
__device__ __forceinline__ int lane_here() {
  int here = lane();
  compute_here(here);
  return here;
}

// Starts to copy rows first .. first + ROWS of one head into a tile. Rows from `end` on and columns
// from `dh` on become zeros. A thread keeps its column, so each copy needs one addition and one
// comparison.
template <int D, int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(unsigned char *tile, const bf16 *head, unsigned stride, int first, int end, int dh) {
  constexpr int LANES = D <= 64 ? 8 : 16, STEP = THREADS / LANES; // threads per row; rows at a time
  static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "each thread copies the same number of rows with the same permutation");
  int thread = thread_here(); // limits the registers of the forward kernel for D = 128
  int row = thread / LANES;
#pragma unroll
  for (int pass = 0; pass < (Rows<D>::CHUNKS + LANES - 1) / LANES; pass++) {
    int chunk = thread % LANES + pass * LANES;
    if (chunk >= Rows<D>::CHUNKS) return;
    int rows = chunk * 8 < dh ? end - first - row : 0;
    const bf16 *from = head + (size_t(unsigned(first + row)) * stride + unsigned(chunk * 8));
    unsigned char *to = tile + Rows<D>::at(row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
      copy_async(to + i * STEP * Rows<D>::BYTES, from, i * STEP < rows);
      from += size_t(STEP * stride); // may be past the end, where it is not read
      compute_here(from);
    }
  }
}

// sums += own others^T, for own [16 MT, D] and others [N, D]. UNROLL steps of 16 columns are
// interleaved; fewer steps keep fewer operands in registers.
template <int D, int MT, int N, int UNROLL>
__device__ __forceinline__ void add_scores(float (&sums)[MT][N / 8][4], const unsigned char *own, const unsigned char *others) {
  int left = left_place<D>(), right = right_place<D>();
  compute_here(left);
  compute_here(right);
#pragma unroll UNROLL
  for (int k = 0; k < D / 16; k++) {
    uint32_t a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) load_matrices(a[m], own + Rows<D>::step(left, k) + m * 16 * Rows<D>::BYTES);
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
      uint32_t b[4];
      load_matrices(b, others + Rows<D>::step(right, k) + n * 16 * Rows<D>::BYTES);
      uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma(sums[m][2 * n], a[m], low);
        mma(sums[m][2 * n + 1], a[m], high);
      }
    }
  }
}

// Packs columns 16 k .. 16 k + 16 of a product result in registers as the left operand [16 MT, 16]
// of the next product.
template <int MT, int N8>
__device__ __forceinline__ void left_operand(uint32_t (&a)[MT][4], const float (&weights)[MT][N8][4], int k) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) a[m][i] = pack(weights[m][2 * k + i / 2][i % 2 * 2], weights[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

// sums += a others, for a [16 MT, 16] and others [16, 8 C8], whose first columns are at offset
// `place` of the rows.
template <int D, int MT, int C8>
__device__ __forceinline__ void add_step(float (&sums)[MT][C8][4], const uint32_t (&a)[MT][4], const unsigned char *others, int place) {
#pragma unroll
  for (int n = 0; n < C8 / 2; n++) {
    uint32_t b[4];
    load_matrices_transposed(b, others + Rows<D>::step(place, n));
    uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
    for (int m = 0; m < MT; m++) {
      mma(sums[m][2 * n], a[m], low);
      mma(sums[m][2 * n + 1], a[m], high);
    }
  }
}

// sums += weights others, for others [N, D] and weights [16 MT, N] from a product in registers,
// which are rounded to bf16 here.
template <int D, int MT, int N>
__device__ __forceinline__ void add_weighted(float (&sums)[MT][D / 8][4], const float (&weights)[MT][N / 8][4],
                                             const unsigned char *others) {
  int place = left_place<D>();
  compute_here(place);
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
    uint32_t a[MT][4];
    left_operand(a, weights, k);
    add_step<D>(sums, a, others + k * 16 * Rows<D>::BYTES, place);
  }
}

// Writes this warp's rows [16 MT, 8 C8] times a factor per row to global memory, in 16-byte stores.
// The columns begin at chunk `column`. The rows pass through `own`, the part of a tile that no
// other warp reads any more.
template <int D, int MT, int C8>
__device__ __forceinline__ void store_rows(bf16 *head, unsigned stride, int first, int end, int dh, const float (&rows)[MT][C8][4],
                                           const float (&factors)[MT][2], unsigned char *own, int column) {
  int here = lane_here(), g = here / 4, t = here % 4;
  __syncwarp(); // all lanes have finished reading the tile
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < C8; n++) {
        uint32_t both = pack(rows[m][n][2 * r] * factors[m][r], rows[m][n][2 * r + 1] * factors[m][r]);
        *reinterpret_cast<uint32_t *>(own + Rows<D>::at(m * 16 + r * 8 + g, column + n) + 4 * t) = both;
      }
  __syncwarp();
  for (int i = here; i < 16 * MT * C8; i += WARP) {
    int row = i / C8, chunk = column + i % C8;
    if (first + row >= end || chunk * 8 >= dh) continue;
    bf16 *to = head + size_t(first + row) * stride + chunk * 8;
    *reinterpret_cast<Bytes16 *>(to) = *reinterpret_cast<const Bytes16 *>(own + Rows<D>::at(row, chunk));
  }
}

template <int A, int B> __device__ __forceinline__ void clear(float (&sums)[A][B][4]) {
#pragma unroll
  for (int a = 0; a < A; a++)
#pragma unroll
    for (int b = 0; b < B; b++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[a][b][i] = 0;
}

} // namespace
