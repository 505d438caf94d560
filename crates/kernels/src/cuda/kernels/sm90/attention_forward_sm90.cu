// Attention forward in bf16 for compute capability 9.0; see crates/kernels/src/attention/mod.rs for the contract
// and attention_sm90.cuh for the parts.
//
// A block has 64 queries of one head for each consumer, and iterates over the keys with a running
// maximum and sum. Keys and values have two buffers each. A consumer starts the scores of a tile and
// then the product with the values of the tile before, so that the tensor cores work during its
// softmax. The consumers take turns to start products: while one computes a softmax, the products of
// the other run. Only tiles at the ends of the rows' windows are masked.
#include "attention_sm90.cuh"

namespace {

template <int D_, int KEYS_, int CONSUMERS_> struct ForwardShape {
  static constexpr int D = D_, KEYS = KEYS_, CONSUMERS = CONSUMERS_, STAGES = 2;
  static constexpr int ROWS = 64 * CONSUMERS, THREADS = GROUP * (CONSUMERS + 1);
  using Queries = Panels<D, ROWS>;
  using Keys = Panels<D, KEYS>;
};

template <class S> struct ForwardShared {
  unsigned char *q, *k, *v;
  uint64_t *q_full, *k_full, *k_empty, *v_full, *v_empty;

  __device__ __forceinline__ explicit ForwardShared(unsigned char *start) {
    q = start;
    k = q + S::Queries::BYTES;
    v = k + S::STAGES * S::Keys::BYTES;
    q_full = reinterpret_cast<uint64_t *>(v + S::STAGES * S::Keys::BYTES);
    k_full = q_full + 1;
    k_empty = k_full + S::STAGES;
    v_full = k_empty + S::STAGES;
    v_empty = v_full + S::STAGES;
  }

  // Of one thread.
  __device__ __forceinline__ void init() const {
    barrier_init(q_full, 1);
    for (int stage = 0; stage < S::STAGES; stage++) {
      barrier_init(k_full + stage, 1);
      barrier_init(v_full + stage, 1);
      barrier_init(k_empty + stage, 4 * S::CONSUMERS);
      barrier_init(v_empty + stage, 4 * S::CONSUMERS);
    }
    barriers_ready();
  }
};

template <class S>
__device__ __forceinline__ void produce(const ForwardShared<S> &shared, const HeadMaps &q, const HeadMaps &k, const HeadMaps &v, Task task, int head, int kv,
                                        int first_key, int keys_end) {
  barrier_expect(shared.q_full, S::Queries::BYTES);
  S::Queries::copy(shared.q, q, shared.q_full, head, task.first);
  Ring<S::STAGES> ring;
  for (int at = first_key; at < keys_end; at += S::KEYS) {
    int stage = ring.stage, bytes = S::Keys::BYTES;
    barrier_wait(shared.k_empty + stage, ring.parity ^ 1); // ends at once in the first round
    barrier_expect(shared.k_full + stage, bytes);
    S::Keys::copy(shared.k + stage * bytes, k, shared.k_full + stage, kv, at);
    barrier_wait(shared.v_empty + stage, ring.parity ^ 1);
    barrier_expect(shared.v_full + stage, bytes);
    S::Keys::copy(shared.v + stage * bytes, v, shared.v_full + stage, kv, at);
    ring.next();
  }
}

// The running state of the two rows of a lane: the largest score so far, and the sum of exponentials
// relative to it, of the columns of this lane.
template <int KEYS> struct RunningRows {
  float max[2], sum[2];

  // Replaces scores by exponentials. `factors` are those of the sums so far.
  __device__ __forceinline__ void softmax(float (&scores)[KEYS / 2], float scale, float (&factors)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = max[r];
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(scores[4 * n + 2 * r], scores[4 * n + 2 * r + 1]));
      most = fmaxf(most, shuffle_xor(most, 1));
      most = fmaxf(most, shuffle_xor(most, 2));
      // Before the first key of a row, its exponentials are 2^-inf = 0. At that key, the factor is 0.
      float bias = most * scale, total = 0;
      factors[r] = exp2f_fast((max[r] - most) * scale);
      max[r] = most;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float &score = scores[4 * n + 2 * r + i];
          score = exp2f_fast(fmaf(score, scale, -bias));
          total += score;
        }
      sum[r] = fmaf(sum[r], factors[r], total);
    }
  }
};

// Masks the scores of keys that the two rows of this lane do not attend to. `row` is the first one.
template <int KEYS> __device__ __forceinline__ void mask_keys(float (&scores)[KEYS / 2], float masked, const Task &task, int row, int at, int window) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int first = at + 2 * (lane_here() % 4);
    int from = others_from<false>(task, row + 8 * r, window) - first, to = others_to<false>(task, row + 8 * r, window) - first;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (8 * n + i < from || 8 * n + i >= to) scores[4 * n + 2 * r + i] = masked;
  }
}

// Computes the output of consumer `me`: 64 rows of `o` before the division by `running.sum`.
template <class S>
__device__ __forceinline__ void consume(const ForwardShared<S> &shared, Task task, int first_key, int keys_end, int me, float scale, int window, Sums<S::D> &sums,
                                        RunningRows<S::KEYS> &running) {
  constexpr int D = S::D, KEYS = S::KEYS, BYTES = S::Keys::BYTES, TURN = 1; // first of the named barriers
  int first_row = task.first + 64 * me, row = first_row + warp() % 4 * 16 + lane() / 4;
  Unmasked unmasked = Unmasked::of<false>(task, first_row, first_row + 63, keys_end, window);
  float scores[KEYS / 2], factors[2];
  uint32_t weights[KEYS / 4];
  sums.clear();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    running.max[r] = LOWEST;
    running.sum[r] = 0;
  }
  barrier_wait(shared.q_full, 0);
  Ring<S::STAGES> keys, values; // the values are one tile behind
  int at = first_key;
  auto pass_turn = [&] {
    if (me + 1 < S::CONSUMERS) arrive_warps<8>(TURN + me + 1);
    else if (at + KEYS < keys_end) arrive_warps<8>(TURN);
  };
  auto softmax = [&] {
    release(shared.k_empty + keys.stage);
    keys.next();
    if (at < unmasked.from || at + KEYS > unmasked.to) mask_keys<KEYS>(scores, -INFINITE, task, row, at, window);
    running.softmax(scores, scale * LOG2_E, factors);
  };
  barrier_wait(shared.k_full + keys.stage, keys.parity);
  if (me > 0) sync_warps<8>(TURN + me);
  start_scores<D, KEYS, S::ROWS>(scores, shared.q, 64 * me, shared.k + keys.stage * BYTES);
  pass_turn();
  products_wait<0>();
  hold(scores);
  softmax();
  pack_operand<KEYS>(weights, scores);
  for (at += KEYS; at < keys_end; at += KEYS) {
    barrier_wait(shared.k_full + keys.stage, keys.parity);
    barrier_wait(shared.v_full + values.stage, values.parity);
    sync_warps<8>(TURN + me);
    start_scores<D, KEYS, S::ROWS>(scores, shared.q, 64 * me, shared.k + keys.stage * BYTES);
    start_weighted<D, KEYS>(sums, weights, shared.v + values.stage * BYTES);
    pass_turn();
    products_wait<1>();
    hold(scores);
    softmax();
    products_wait<0>();
    sums.hold_all();
    release(shared.v_empty + values.stage);
    values.next();
    sums.scale(factors);
    pack_operand<KEYS>(weights, scores);
  }
  barrier_wait(shared.v_full + values.stage, values.parity);
  start_weighted<D, KEYS>(sums, weights, shared.v + values.stage * BYTES);
  products_wait<0>();
  sums.hold_all();
}

template <class S>
__device__ __forceinline__ void forward(const HeadMaps &q, const HeadMaps &k, const HeadMaps &v, bf16 *o, float *lse, const int *tasks, int num_rows, int h,
                                        int hkv, int dh, float scale, int window) {
  HOPPER_SHARED(memory);
  ForwardShared<S> shared(memory);
  Task task = task_of(tasks, int(blockIdx.x) / h);
  int head = int(blockIdx.x) % h;
  int first_key = others_from<false>(task, task.first, window), keys_end = others_to<false>(task, min(task.first + S::ROWS, task.end) - 1, window);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (warp() < 4) {
    fewer_registers<PRODUCER_REGISTERS<S::CONSUMERS>>();
    if (threadIdx.x == 0) produce<S>(shared, q, k, v, task, head, head / (h / hkv), first_key, keys_end);
    return;
  }
  more_registers<CONSUMER_REGISTERS<S::CONSUMERS>>();
  int me = warp() / 4 - 1;
  Sums<S::D> sums;
  RunningRows<S::KEYS> running;
  consume<S>(shared, task, first_key, keys_end, me, scale, window, sums, running);
  float factors[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = running.sum[r];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    factors[r] = 1.0f / sum;
    int here = lane_here(), row = task.first + 64 * me + warp() % 4 * 16 + r * 8 + here / 4;
    if (here % 4 == 0 && row < task.end) lse[size_t(head) * num_rows + row] = fmaf(running.max[r], scale, logf(sum));
  }
  sync_warps<4>(8 + me); // the products of all warps have ended, which read the queries
  store_sums<S::D, S::ROWS>(o + size_t(head) * dh, unsigned(h) * dh, task.first, task.end, dh, sums, factors, shared.q, 64 * me);
}

} // namespace

#define FORWARD(SHAPE, name)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(SHAPE::THREADS, 1)                                                                             \
      attention_forward_sm90_##name##_bf16(const __grid_constant__ HeadMaps q, const __grid_constant__ HeadMaps k, const __grid_constant__ HeadMaps v, \
                                           bf16 *o, float *lse, const int *tasks, int num_rows, int h, int hkv, int dh, float scale, int window) { \
    forward<SHAPE>(q, k, v, o, lse, tasks, num_rows, h, hkv, dh, scale, window);                                                              \
  }

// Head dim, keys of a tile, consumers. select.rs has the same sizes.
using Forward64 = ForwardShape<64, 128, 3>;
using Forward80 = ForwardShape<80, 96, 3>;
using Forward128 = ForwardShape<128, 128, 2>;
using Forward256 = ForwardShape<256, 80, 2>;

FORWARD(Forward64, d64)
FORWARD(Forward80, d80)
FORWARD(Forward128, d128)
FORWARD(Forward256, d256)
