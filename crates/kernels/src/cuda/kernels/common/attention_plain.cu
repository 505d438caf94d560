// Attention without tensor cores, and the row products of every backward pass; see
// crates/kernels/src/attention/mod.rs for the contract.
//
// For f32, and for bf16 heads that the tensor-core kernels do not support: any head dim up to 256,
// with products in f32. The tasks are the same, with 32 own rows: a warp has four of them. A lane
// has one row of the other side in products over columns (scores), and every 32nd column in
// products over rows (o, dq, dk, dv). The kernels are bound by loads from shared memory, five per
// four multiplications. They are kept simple, because f32 serves for comparison.
#include "attention.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP, MINE = 4, ROWS = WARPS * MINE, COLUMNS = 256 / WARP;

// Row stride. It is odd, so that lanes that read the same column of different rows use different
// banks.
__device__ __forceinline__ int stride_of(int dh) { return dh | 1; }

// Loads rows first .. first + ROWS of one head, with zeros from `end` on.
template <class T> __device__ __forceinline__ void load_plain(float *tile, const T *head, size_t stride, int first, int end, int dh) {
  for (int i = int(threadIdx.x); i < ROWS * dh; i += THREADS) {
    int row = i / dh, column = i % dh;
    tile[row * stride_of(dh) + column] = first + row < end ? widen(head[size_t(first + row) * stride + column]) : 0.0f;
  }
}

// Dot products of this warp's rows with the row of this lane.
__device__ __forceinline__ void dot_rows(const float *own, const float *others, int dh, float (&products)[MINE]) {
  int stride = stride_of(dh);
  for (int i = 0; i < MINE; i++) products[i] = 0;
  own += warp() * MINE * stride;
  others += lane() * stride;
  for (int column = 0; column < dh; column++)
#pragma unroll
    for (int i = 0; i < MINE; i++) products[i] = fmaf(own[i * stride + column], others[column], products[i]);
}

// Computes sums += weights * others for the columns of this lane. The weights [MINE, 32] of this
// warp are in shared memory.
__device__ __forceinline__ void add_rows(float (&sums)[MINE][COLUMNS], const float *weights, const float *others, int dh) {
  for (int j = 0; j < WARP; j++) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      int column = c * WARP + lane();
      if (c * WARP >= dh) break;
      float other = column < dh ? others[j * stride_of(dh) + column] : 0.0f;
#pragma unroll
      for (int i = 0; i < MINE; i++) sums[i][c] = fmaf(weights[i * WARP + j], other, sums[i][c]);
    }
  }
}

template <class T>
__device__ __forceinline__ void store_plain(T *head, size_t stride, int first, int end, int dh, const float (&sums)[MINE][COLUMNS],
                                            const float (&factors)[MINE]) {
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    int row = first + warp() * MINE + i;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      int column = c * WARP + lane();
      if (row < end && column < dh) head[size_t(row) * stride + column] = narrow<T>(sums[i][c] * factors[i]);
    }
  }
}

template <class T>
__device__ void forward(const T *q, const T *k, const T *v, T *o, float *lse, const int *tasks, int num_rows, int h, int hkv, int dh,
                        float scale, int window) {
  DYNAMIC_SHARED(shared);
  float *q_tile = reinterpret_cast<float *>(shared), *k_tile = q_tile + ROWS * stride_of(dh), *v_tile = k_tile + ROWS * stride_of(dh);
  float *weights = v_tile + ROWS * stride_of(dh) + warp() * MINE * WARP;
  Task task = task_of(tasks, int(blockIdx.x) / h);
  int head = int(blockIdx.x) % h, kv = head / (h / hkv), row = task.first + warp() * MINE;
  int keys_end = others_to<false>(task, min(task.first + ROWS, task.end) - 1, window);
  size_t stride = size_t(hkv) * dh;
  load_plain(q_tile, q + size_t(head) * dh, size_t(h) * dh, task.first, task.end, dh);
  float sums[MINE][COLUMNS] = {}, most[MINE], total[MINE] = {}, factors[MINE];
  for (int i = 0; i < MINE; i++) most[i] = LOWEST;
  for (int at = others_from<false>(task, task.first, window); at < keys_end; at += ROWS) {
    __syncthreads(); // the tiles are no longer in use
    load_plain(k_tile, k + size_t(kv) * dh, stride, at, task.other_end, dh);
    load_plain(v_tile, v + size_t(kv) * dh, stride, at, task.other_end, dh);
    __syncthreads();
    float scores[MINE];
    dot_rows(q_tile, k_tile, dh, scores);
    __syncwarp(); // the weights are no longer in use
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      int key = at + lane();
      bool visible = key >= others_from<false>(task, row + i, window) && key < others_to<false>(task, row + i, window);
      float score = visible ? scores[i] * scale : -INFINITE;
      float new_most = fmaxf(most[i], warp_max(score));
      float factor = expf(most[i] - new_most), weight = expf(score - new_most);
      total[i] = fmaf(total[i], factor, weight);
      most[i] = new_most;
      weights[i * WARP + lane()] = weight;
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) sums[i][c] *= factor;
    }
    __syncwarp();
    add_rows(sums, weights, v_tile, dh);
  }
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    float sum = warp_sum(total[i]);
    factors[i] = 1.0f / sum;
    if (lane() == 0 && row + i < task.end) lse[size_t(head) * num_rows + row + i] = most[i] + logf(sum);
  }
  store_plain(o + size_t(head) * dh, size_t(h) * dh, task.first, task.end, dh, sums, factors);
}

// The operands are those of `backward` in attention_backward.cu.
template <class T, bool KEYS>
__device__ void backward(const T *own0, const T *own1, const T *other0, const T *other1, const float *lse, const float *delta, T *d0,
                         T *d1, const int *tasks, int num_rows, int h, int hkv, int dh,
                         float scale, int window) {
  DYNAMIC_SHARED(shared);
  int size = ROWS * stride_of(dh);
  float *own0_tile = reinterpret_cast<float *>(shared), *own1_tile = own0_tile + size, *other0_tile = own1_tile + size,
      *other1_tile = other0_tile + size;
  float *p = other1_tile + size + warp() * 2 * MINE * WARP, *ds = p + MINE * WARP;
  int group = h / hkv, own_heads = KEYS ? hkv : h;
  Task task = task_of(tasks, int(blockIdx.x) / own_heads);
  int own_head = int(blockIdx.x) % own_heads, first_head = KEYS ? own_head * group : own_head / group,
      last_head = KEYS ? first_head + group - 1 : first_head;
  size_t own_stride = size_t(own_heads) * dh, other_stride = size_t(KEYS ? h : hkv) * dh;
  int from = others_from<KEYS>(task, task.first, window), to = others_to<KEYS>(task, min(task.first + ROWS, task.end) - 1, window);
  load_plain(own0_tile, own0 + size_t(own_head) * dh, own_stride, task.first, task.end, dh);
  load_plain(own1_tile, own1 + size_t(own_head) * dh, own_stride, task.first, task.end, dh);
  float sums0[MINE][COLUMNS] = {}, sums1[MINE][COLUMNS] = {};
  for (int head = first_head; head <= last_head; head++)
    for (int at = from; at < to; at += ROWS) {
      __syncthreads();
      load_plain(other0_tile, other0 + size_t(head) * dh, other_stride, at, task.other_end, dh);
      load_plain(other1_tile, other1 + size_t(head) * dh, other_stride, at, task.other_end, dh);
      __syncthreads();
      float scores[MINE], dp[MINE];
      dot_rows(own0_tile, other0_tile, dh, scores);
      dot_rows(own1_tile, other1_tile, dh, dp);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        int row = task.first + warp() * MINE + i, other = at + lane(), query = KEYS ? other : row;
        bool visible = row < task.end && other >= others_from<KEYS>(task, row, window) && other < others_to<KEYS>(task, row, window);
        size_t statistic = size_t(KEYS ? head : own_head) * num_rows + query;
        float weight = visible ? expf(fmaf(scores[i], scale, -lse[statistic])) : 0.0f;
        p[i * WARP + lane()] = weight;
        ds[i * WARP + lane()] = visible ? weight * (dp[i] - delta[statistic]) : 0.0f;
      }
      __syncwarp();
      add_rows(sums0, ds, other0_tile, dh);
      if (KEYS) add_rows(sums1, p, other1_tile, dh);
    }
  float scales[MINE], ones[MINE];
  for (int i = 0; i < MINE; i++) {
    scales[i] = scale;
    ones[i] = 1.0f;
  }
  store_plain(d0 + size_t(own_head) * dh, own_stride, task.first, task.end, dh, sums0, scales);
  if (KEYS) store_plain(d1 + size_t(own_head) * dh, own_stride, task.first, task.end, dh, sums1, ones);
}

// delta [H, T] = the sums of o * do over the head dim. A block has 32 rows of one head, and half a
// warp computes a row at a time, so that the results of a block are contiguous. Blocks with the
// same rows and different heads are adjacent. Bound by memory bandwidth.
template <class T> __device__ void row_products(const T *o, const T *d_o, float *delta, int num_rows, int h, int dh, int vectors) {
  int head = int(blockIdx.x) % h, first = int(blockIdx.x) / h * ROWS;
  int step = vectors ? VECTOR<T> : 1;
#pragma unroll
  for (int i = 0; i < ROWS / (2 * WARPS); i++) {
    int row = first + warp() * (ROWS / WARPS) + i * 2 + lane() / 16;
    float sum = 0;
    if (row < num_rows) {
      const T *x = o + (size_t(row) * h + head) * dh, *y = d_o + (size_t(row) * h + head) * dh;
      for (int at = lane() % 16 * step; at < dh; at += 16 * step) {
        float a[VECTOR<T>], b[VECTOR<T>];
        if (vectors) {
          load_vector(x + at, a);
          load_vector(y + at, b);
#pragma unroll
          for (int j = 0; j < VECTOR<T>; j++) sum = fmaf(a[j], b[j], sum);
        } else {
          sum = fmaf(widen(x[at]), widen(y[at]), sum);
        }
      }
    }
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (lane() % 16 == 0 && row < num_rows) delta[size_t(head) * num_rows + row] = sum;
  }
}

} // namespace

#define ATTENTION(T, name)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                                     \
      attention_forward_plain_##name(const T *q, const T *k, const T *v, T *o, float *lse, const int *tasks, int num_rows, int h, int hkv, int dh, float scale, int window) { \
    forward(q, k, v, o, lse, tasks, num_rows, h, hkv, dh, scale, window);                                                                   \
  }                                                                                                                                         \
  EXPORT(attention_forward_plain_##name)                                                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                                     \
      attention_backward_keys_plain_##name(const T *own0, const T *own1, const T *other0, const T *other1, const float *lse, const float *delta, T *d0, T *d1, \
                                           const int *tasks, int num_rows, int h, int hkv, int dh, float scale, int window) {               \
    backward<T, true>(own0, own1, other0, other1, lse, delta, d0, d1, tasks, num_rows, h, hkv, dh, scale, window);                          \
  }                                                                                                                                         \
  EXPORT(attention_backward_keys_plain_##name)                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                                     \
      attention_backward_queries_plain_##name(const T *own0, const T *own1, const T *other0, const T *other1, const float *lse, const float *delta, T *d0, T *d1, \
                                              const int *tasks, int num_rows, int h, int hkv, int dh, float scale, int window) {            \
    backward<T, false>(own0, own1, other0, other1, lse, delta, d0, d1, tasks, num_rows, h, hkv, dh, scale, window);                         \
  }                                                                                                                                         \
  EXPORT(attention_backward_queries_plain_##name)                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                                                     \
      attention_row_products_##name(const T *o, const T *d_o, float *delta, int num_rows, int h, int dh, int vectors) {                     \
    row_products(o, d_o, delta, num_rows, h, dh, vectors);                                                                                  \
  }                                                                                                                                         \
  EXPORT(attention_row_products_##name)

ATTENTION(float, f32)
ATTENTION(bf16, bf16)
