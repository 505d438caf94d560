// Attention forward in bf16 on tensor cores; see crates/kernels/src/attention/mod.rs for the contract.
//
// q, o: [T, H, Dh]; k, v: [., Hkv, Dh]; lse: [H, T]. A block has 128 queries of one head in four
// warps of 32, and iterates over the keys in tiles of 64 with a running maximum and sum; half as many
// of both if D is 256, whose sums fill the registers. The blocks
// of one task for different heads are adjacent, so that the heads of a group find their keys in L2.
// The next keys are loaded during a whole tile, the values during the scores and the softmax. Only
// tiles at the ends of the rows' windows are masked. The kernel is bound by the tensor
// cores (mma.sync), closely followed by shared memory; two blocks share a multiprocessor. Where its
// shared memory has room for one block only, the queries are in eight warps of 16 instead.
#include "attention.cuh"

namespace {

// A block has WARPS warps of MT row tiles of 16 queries.
template <int MT, int WARPS> constexpr int BLOCK_ROWS = WARPS * 16 * MT;
// Keys of a tile.
template <int D> constexpr int TILE_KEYS = D > 128 ? 32 : 64;

// Running state of a row: the largest score so far, and the sum of exponentials relative to it.
template <int D, int MT> struct Running {
  static constexpr int KEYS = TILE_KEYS<D>;
  float max[MT][2], sum[MT][2]; // the sum covers the columns of this lane only

  // Replaces scores by exponentials, and rescales the accumulated output to the new maximum.
  __device__ __forceinline__ void softmax(float (&scores)[MT][KEYS / 8][4], float (&o)[MT][D / 8][4], float scale) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float most = max[m][r];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
        most = fmaxf(most, shuffle_xor(most, 1));
        most = fmaxf(most, shuffle_xor(most, 2));
        // Before the first key of a row, its exponentials are 2^-inf = 0. At that key, the factor is 0.
        float factor = exp2f_fast((max[m][r] - most) * scale), bias = most * scale, total = 0;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
          float &first = scores[m][n][2 * r], &second = scores[m][n][2 * r + 1];
          first = exp2f_fast(fmaf(first, scale, -bias));
          second = exp2f_fast(fmaf(second, scale, -bias));
          total += first + second;
        }
        max[m][r] = most;
        sum[m][r] = fmaf(sum[m][r], factor, total);
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
          o[m][n][2 * r] *= factor;
          o[m][n][2 * r + 1] *= factor;
        }
      }
  }
};

template <int D, int MT, int WARPS>
__device__ void forward(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *lse, const int *tasks, int num_rows, int h, int hkv,
                        int dh, float scale, int window) {
  DYNAMIC_SHARED(shared);
  constexpr int KEYS = TILE_KEYS<D>, ROWS = BLOCK_ROWS<MT, WARPS>, THREADS = WARPS * WARP, TILE = KEYS * Rows<D>::BYTES;
  unsigned char *q_tile = shared, *k_tiles = shared + ROWS * Rows<D>::BYTES, *v_tile = k_tiles + 2 * TILE;
  int index = int(blockIdx.x) / h;
  Task task = task_of(tasks, index);
  int head = int(blockIdx.x) % h, kv = head / (h / hkv);
  int first_key = others_from<false>(task, task.first, window), keys_end = others_to<false>(task, min(task.first + ROWS, task.end) - 1, window);
  unsigned stride = unsigned(hkv) * dh;
  int column = kv * dh;
  load_rows<D, ROWS, THREADS>(q_tile, q + size_t(head) * dh, unsigned(h) * dh, task.first, task.end, dh);
  load_rows<D, KEYS, THREADS>(k_tiles, k + column, stride, first_key, task.other_end, dh);
  commit_copies();

  unsigned char *own = q_tile + warp() * 16 * MT * Rows<D>::BYTES;
  float sums[MT][D / 8][4];
  clear(sums);
  Running<D, MT> running;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      running.max[m][r] = LOWEST;
      running.sum[m][r] = 0;
    }
  float log2_scale = scale * LOG2_E;
  int stage = 0;
  for (int at = first_key; at < keys_end; at += KEYS) {
    wait_copies<0>();
    __syncthreads(); // these keys are loaded; the previous values and keys are no longer in use
    compute_here(column);
    load_rows<D, KEYS, THREADS>(v_tile, v + column, stride, at, task.other_end, dh);
    commit_copies();
    if (at + KEYS < keys_end) load_rows<D, KEYS, THREADS>(k_tiles + (stage ^ 1) * TILE, k + column, stride, at + KEYS, task.other_end, dh);
    commit_copies();
    float scores[MT][KEYS / 8][4];
    clear(scores);
    add_scores<D, MT, KEYS, D >= 128 ? 2 : D / 16>(scores, own, k_tiles + stage * TILE);
    compute_here(index); // reads the task again: its ends must not occupy registers during the products
    Task task = task_of(tasks, index);
    Unmasked unmasked = Unmasked::of<false>(task, task.first, task.first + ROWS - 1, keys_end, window);
    if (at < unmasked.from || at + KEYS > unmasked.to) {
      int here = lane_here(), g = here / 4, t = here % 4;
      int first_row = task.first + warp() * 16 * MT;
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          int row = first_row + m * 16 + r * 8 + g;
          int from = others_from<false>(task, row, window) - at - 2 * t, to = others_to<false>(task, row, window) - at - 2 * t;
#pragma unroll
          for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
              if (8 * n + i < from || 8 * n + i >= to) scores[m][n][2 * r + i] = -INFINITE;
        }
    }
    running.softmax(scores, sums, log2_scale);
    wait_copies<1>();
    __syncthreads(); // the values are loaded
    add_weighted<D, MT, KEYS>(sums, scores, v_tile);
    stage ^= 1;
  }
  wait_copies<0>();

  task = task_of(tasks, block_here() / h);
  head = block_here() % h;
  int first_row = task.first + warp() * 16 * MT;
  float factors[MT][2];
  int here = lane_here(), g = here / 4, t = here % 4;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sum = running.sum[m][r];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      factors[m][r] = 1.0f / sum;
      int row = first_row + m * 16 + r * 8 + g;
      if (t == 0 && row < task.end) lse[size_t(head) * num_rows + row] = fmaf(running.max[m][r], scale, logf(sum));
    }
  store_rows<D>(o + size_t(head) * dh, unsigned(h) * dh, first_row, task.end, dh, sums, factors, own, 0);
}

} // namespace

#define FORWARD(D, MT, WARPS, BLOCKS, name)                                                                                                \
  extern "C" __global__ void __launch_bounds__(WARPS * WARP, BLOCKS)                                                                       \
      attention_forward_##name##_bf16(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *lse, const int *tasks, int num_rows, int h, int hkv, int dh, float scale, int window) { \
    forward<D, MT, WARPS>(q, k, v, o, lse, tasks, num_rows, h, hkv, dh, scale, window);                                                               \
  }                                                                                                                                        \
  EXPORT(attention_forward_##name##_bf16)

FORWARD(64, 2, 4, 2, d64)
FORWARD(80, 2, 4, 2, d80)
FORWARD(128, 2, 4, 2, d128)
FORWARD(256, 1, 4, 2, d256)
FORWARD(80, 1, 8, 1, d80_single)
FORWARD(128, 1, 8, 1, d128_single)
