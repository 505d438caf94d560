// Attention backward in bf16 on tensor cores; see crates/kernels/src/attention/mod.rs for the contract.
//
// One template gives two kernels, so that there are no sums across blocks. In
// attention_backward_keys a block owns keys of one key-value head, iterates over the queries of all
// heads of its group, and computes dk and dv. In attention_backward_queries a block owns queries of
// one head, iterates over the keys, and computes dq. Both recompute p = exp(score - lse) and ds = p
// (dp - delta), and round them to bf16 in registers as operands of the next products. The scale of
// ds is applied to the sums at the end.
//
// Tiles of the other side are double-buffered, with one barrier per tile. Only tiles at
// the ends of the rows' windows are masked. Queries past those that a block needs have
// lse = infinity, so p = 0.
//
// If the registers for two gradients allowed only 16 keys per warp, too few for the data it reads
// of the other side, SPLIT = 2 warps share 32 keys instead. Each computes half of the columns of p
// and ds of a tile, passes them to the other warp through shared memory as operands, and
// accumulates half of the columns of dk and dv. If D is 256 the warps share 16 keys, and pass p first
// and then ds, so that a block fits into 99 KiB.
//
// The kernels are bound equally by shared memory and tensor cores. They compute 7 products instead
// of the 5 of the formula, which avoids atomics.
#include "attention.cuh"

namespace {

template <int D_, int MT_, int WARPS_, int N_, bool KEYS_, int SPLIT_ = 1> struct Shape {
  static constexpr int D = D_, MT = MT_, WARPS = WARPS_, N = N_, SPLIT = SPLIT_;
  static constexpr bool KEYS = KEYS_; // whether the own rows are keys
  static constexpr int THREADS = WARPS * WARP, ROWS = WARPS / SPLIT * 16 * MT;
  static constexpr int COLUMNS = N / SPLIT; // columns of p and ds per warp
  static constexpr int C8 = D / SPLIT / 8;  // 8-column tiles of the gradients per warp
  static constexpr int TILE = N * Rows<D>::BYTES; // bytes of one of the two other operands
};

// lse in base 2 and delta of N queries, one value per thread. Reads are issued early, and the
// values are written to shared memory late.
template <int N> struct Statistics {
  float value;

  __device__ __forceinline__ void read(const float *lse, const float *delta, int first, int end) {
    int i = int(threadIdx.x), row = first + i % N;
    if (i < N) value = row < end ? lse[row] * LOG2_E : INFINITE;
    else if (i < 2 * N) value = row < end ? delta[row] : 0.0f;
  }

  __device__ __forceinline__ void keep(float *shared) const {
    if (int(threadIdx.x) < 2 * N) shared[threadIdx.x] = value;
  }
};

// Pass operands of MT row tiles and 16 columns from one warp to another.
template <int MT> __device__ __forceinline__ void store_operand(unsigned char *to, const uint32_t (&a)[MT][4]) {
#pragma unroll
  for (int m = 0; m < MT; m++) *reinterpret_cast<Bytes16 *>(to + (m * WARP + lane()) * 16) = Bytes16{a[m][0], a[m][1], a[m][2], a[m][3]};
}

template <int MT> __device__ __forceinline__ void load_operand(uint32_t (&a)[MT][4], const unsigned char *from) {
#pragma unroll
  for (int m = 0; m < MT; m++) {
    Bytes16 operand = *reinterpret_cast<const Bytes16 *>(from + (m * WARP + lane()) * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) a[m][i] = operand.words[i];
  }
}

struct Sizes {
  int num_rows, h, hkv, dh;
  float scale;
  int window;
};

// If the own rows are keys, `own0` and `own1` are k and v, and `other0` and `other1` are q and do;
// otherwise the other way round. `d0` and `d1` are the gradients of the own operands (`d1` for keys
// only).
template <class S>
__device__ void backward(const bf16 *own0, const bf16 *own1, const bf16 *other0, const bf16 *other1, const float *lse,
                         const float *delta, bf16 *d0, bf16 *d1, const int *tasks, Sizes sizes) {
  constexpr int D = S::D, MT = S::MT, N = S::N, COLUMNS = S::COLUMNS;
  DYNAMIC_SHARED(shared);
  unsigned char *own0_tile = shared, *own1_tile = own0_tile + S::ROWS * Rows<D>::BYTES;
  unsigned char *stages = own1_tile + S::ROWS * Rows<D>::BYTES;            // [2][2] tiles
  float *statistics = reinterpret_cast<float *>(stages + 4 * S::TILE); // [2][2][N]
  unsigned char *exchange = reinterpret_cast<unsigned char *>(statistics + 4 * N); // operands that warps exchange if SPLIT > 1
  int h = sizes.h, hkv = sizes.hkv, dh = sizes.dh, group = h / hkv, own_heads = S::KEYS ? hkv : h;
  Task task = task_of(tasks, int(blockIdx.x) / own_heads);
  int own_head = int(blockIdx.x) % own_heads, other_head = S::KEYS ? own_head * group : own_head / group;
  unsigned own_stride = unsigned(own_heads) * dh, other_stride = unsigned(S::KEYS ? h : hkv) * dh;
  int from = others_from<S::KEYS>(task, task.first, sizes.window), to = others_to<S::KEYS>(task, min(task.first + S::ROWS, task.end) - 1, sizes.window);
  Unmasked unmasked = Unmasked::of<S::KEYS>(task, task.first, task.first + S::ROWS - 1, to, sizes.window);
  load_rows<D, S::ROWS, S::THREADS>(own0_tile, own0 + size_t(own_head) * dh, own_stride, task.first, task.end, dh);
  load_rows<D, S::ROWS, S::THREADS>(own1_tile, own1 + size_t(own_head) * dh, own_stride, task.first, task.end, dh);

  Statistics<N> coming;
  auto fetch = [&](int head, int at, int stage) {
    unsigned char *tile = stages + stage * 2 * S::TILE;
    load_rows<D, N, S::THREADS>(tile, other0 + size_t(head) * dh, other_stride, at, task.other_end, dh);
    load_rows<D, N, S::THREADS>(tile + S::TILE, other1 + size_t(head) * dh, other_stride, at, task.other_end, dh);
    if (S::KEYS) coming.read(lse + size_t(head) * sizes.num_rows, delta + size_t(head) * sizes.num_rows, at, to);
    commit_copies();
  };
  fetch(other_head, from, 0);
  if (S::KEYS) coming.keep(statistics);

  int part = warp() % S::SPLIT, first_row = task.first + warp() / S::SPLIT * 16 * MT, g = lane() / 4, t = lane() % 4;
  const int own_place = warp() / S::SPLIT * 16 * MT * Rows<D>::BYTES, part_place = part * COLUMNS * Rows<D>::BYTES;
  float own_lse[MT][2], own_delta[MT][2]; // of own queries
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int row = first_row + m * 16 + r * 8 + g;
      bool valid = !S::KEYS && row < task.end;
      own_lse[m][r] = valid ? lse[size_t(own_head) * sizes.num_rows + row] * LOG2_E : INFINITE;
      own_delta[m][r] = valid ? delta[size_t(own_head) * sizes.num_rows + row] : 0.0f;
    }
  float sums0[MT][S::C8][4], sums1[S::KEYS ? MT : 1][S::KEYS ? S::C8 : 1][4];
  clear(sums0);
  clear(sums1);
  float log2_scale = sizes.scale * LOG2_E;
  int stage = 0, last_head = S::KEYS ? other_head + group - 1 : other_head;
  for (int head = other_head, at = from; head <= last_head;) {
    wait_copies<0>();
    __syncthreads(); // this stage is loaded, the other one is no longer in use
    int next_head = at + N < to ? head : head + 1, next_at = at + N < to ? at + N : from;
    if (next_head <= last_head) fetch(next_head, next_at, stage ^ 1);
    const unsigned char *tile0 = stages + stage * 2 * S::TILE, *tile1 = tile0 + S::TILE;
    const float *column_lse = statistics + stage * 2 * N + part * COLUMNS + 2 * t, *column_delta = column_lse + N;

    float p[MT][COLUMNS / 8][4], ds[MT][COLUMNS / 8][4];
    clear(p);
    add_scores<D, MT, COLUMNS, 4>(p, own0_tile + own_place, tile0 + part_place);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float of_column = S::KEYS ? column_lse[8 * n + i] : 0.0f;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float &score = p[m][n][2 * r + i];
            score = exp2f_fast(fmaf(score, log2_scale, -(S::KEYS ? of_column : own_lse[m][r])));
          }
      }
    if (at < unmasked.from || at + N > unmasked.to) {
      Task task = task_of(tasks, block_here() / own_heads);
      int here = lane_here(), g = here / 4, t = here % 4;
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          int row = first_row + m * 16 + r * 8 + g;
          int first = at + part * COLUMNS + 2 * t;
          int row_from = others_from<S::KEYS>(task, row, sizes.window) - first, row_to = others_to<S::KEYS>(task, row, sizes.window) - first;
#pragma unroll
          for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
              if (8 * n + i < row_from || 8 * n + i >= row_to) p[m][n][2 * r + i] = 0;
        }
    }
    clear(ds);
    add_scores<D, MT, COLUMNS, 4>(ds, own1_tile + own_place, tile1 + part_place); // dp
    if constexpr (S::KEYS && S::SPLIT == 1) add_weighted<D, MT, N>(sums1, p, tile1);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float of_column = S::KEYS ? column_delta[8 * n + i] : 0.0f;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            ds[m][n][2 * r + i] = p[m][n][2 * r + i] * (ds[m][n][2 * r + i] - (S::KEYS ? of_column : own_delta[m][r]));
      }
    if constexpr (S::SPLIT == 1) {
      add_weighted<D, MT, N>(sums0, ds, tile0);
    } else {
      static_assert(S::KEYS && S::SPLIT == 2 && Rows<D>::PERMUTED && S::C8 % 8 == 0, "half of a permuted row has a multiple of 128 bytes");
      constexpr int STEPS = COLUMNS / 16, OPERAND = MT * WARP * 16, PASSED = D > 128 ? 1 : 2; // operands at a time
      uint32_t p_own[STEPS][MT][4], ds_own[STEPS][MT][4];
      unsigned char *to = exchange + warp() * PASSED * STEPS * OPERAND, *from = exchange + (warp() ^ 1) * PASSED * STEPS * OPERAND;
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        left_operand(p_own[k], p, k);
        left_operand(ds_own[k], ds, k);
        store_operand(to + PASSED * k * OPERAND, p_own[k]);
        if (PASSED == 2) store_operand(to + (2 * k + 1) * OPERAND, ds_own[k]);
      }
      int place = left_place<D>() ^ part * S::C8 * 16;
      compute_here(place);
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        int here = part_place + k * 16 * Rows<D>::BYTES;
        add_step<D>(sums1, p_own[k], tile1 + here, place);
        add_step<D>(sums0, ds_own[k], tile0 + here, place);
      }
      // The other warp has written its operands. They stay until the __syncthreads of the next
      // tile.
      sync_warps<2>(1 + warp() / 2);
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        uint32_t a[MT][4];
        int there = (COLUMNS * Rows<D>::BYTES ^ part_place) + k * 16 * Rows<D>::BYTES;
        load_operand(a, from + PASSED * k * OPERAND);
        add_step<D>(sums1, a, tile1 + there, place);
        if (PASSED == 1) { // in the place of p, once both warps have read it
          sync_warps<2>(1 + warp() / 2);
          store_operand(to + k * OPERAND, ds_own[k]);
          sync_warps<2>(1 + warp() / 2);
          load_operand(a, from + k * OPERAND);
        } else {
          load_operand(a, from + (2 * k + 1) * OPERAND);
        }
        add_step<D>(sums0, a, tile0 + there, place);
      }
    }
    if (S::KEYS && next_head <= last_head) coming.keep(statistics + (stage ^ 1) * 2 * N);
    head = next_head;
    at = next_at;
    stage ^= 1;
  }
  float scales[MT][2], ones[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      scales[m][r] = sizes.scale;
      ones[m][r] = 1.0f;
    }
  if (S::SPLIT > 1) __syncthreads(); // both warps have finished reading their rows
  int column = part * S::C8;
  store_rows<D>(d0 + size_t(own_head) * dh, own_stride, first_row, task.end, dh, sums0, scales, own0_tile + own_place, column);
  if constexpr (S::KEYS)
    store_rows<D>(d1 + size_t(own_head) * dh, own_stride, first_row, task.end, dh, sums1, ones, own1_tile + own_place, column);
}

} // namespace

#define BACKWARD(kernel, SHAPE, BLOCKS)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(SHAPE::THREADS, BLOCKS)                                                                     \
      attention_backward_##kernel##_bf16(const bf16 *own0, const bf16 *own1, const bf16 *other0, const bf16 *other1, const float *lse, const float *delta, \
                                              bf16 *d0, bf16 *d1, const int *tasks, int num_rows, int h, int hkv, int dh, float scale, int window) { \
    backward<SHAPE>(own0, own1, other0, other1, lse, delta, d0, d1, tasks, Sizes{num_rows, h, hkv, dh, scale, window});                    \
  }                                                                                                                                        \
  EXPORT(attention_backward_##kernel##_bf16)

// Head dim, row tiles per warp, warps, other rows per tile, own rows are keys, warps that share
// rows. The number of registers limits these sizes. select.rs has the same sizes.
using Keys64 = Shape<64, 2, 4, 32, true>;
using Keys80 = Shape<80, 1, 8, 64, true>;
using Keys128 = Shape<128, 2, 8, 64, true, 2>;
using Keys128Less = Shape<128, 1, 8, 32, true>; // for GPUs with 99 KiB of shared memory per block: sm_86, sm_89, sm_120
using Keys256 = Shape<256, 1, 4, 32, true, 2>;
using Queries64 = Shape<64, 2, 4, 64, false>;
using Queries80 = Shape<80, 2, 4, 32, false>;
using Queries128 = Shape<128, 2, 4, 32, false>;
using Queries256 = Shape<256, 1, 4, 16, false>;
// For GPUs on whose multiprocessor only one block has room: twice the warps.
using Queries64Single = Shape<64, 1, 8, 64, false>;
using Queries80Single = Shape<80, 1, 8, 32, false>;
using Queries128Single = Shape<128, 1, 8, 32, false>;

BACKWARD(keys_d64, Keys64, 2)
BACKWARD(keys_d80, Keys80, 1)
BACKWARD(keys_d128, Keys128, 1)
BACKWARD(keys_d128_less, Keys128Less, 1)
BACKWARD(keys_d256, Keys256, 2)
BACKWARD(queries_d64, Queries64, 2)
BACKWARD(queries_d80, Queries80, 2)
BACKWARD(queries_d128, Queries128, 2)
BACKWARD(queries_d256, Queries256, 2)
BACKWARD(queries_d64_single, Queries64Single, 1)
BACKWARD(queries_d80_single, Queries80Single, 1)
BACKWARD(queries_d128_single, Queries128Single, 1)
