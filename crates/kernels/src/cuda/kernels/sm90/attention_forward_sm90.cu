// Attention forward in bf16 for compute capability 9.0; see crates/kernels/src/attention/mod.rs for the contract
// and attention_sm90.cuh for the parts.
//
// There are as many blocks as run at once. A block computes items until none is left: 64 queries of one
// head for each consumer. It iterates over the keys with a running maximum and sum. Keys and values have
// two buffers each, and the copies of the next item start while the consumers still compute the last
// tile and write the output; see docs/dev/cuda/attention_forward.md. A consumer starts the scores of a
// tile and then the product with the values of the tile before, so that the tensor cores work during its
// softmax. The consumers take turns to start products: while one computes a softmax, the products of
// the other run. Only tiles at the ends of the rows' windows are masked.
#include "attention_sm90.cuh"

namespace {

template <int D_, int KEYS_, int CONSUMERS_> struct ForwardShape {
  static constexpr int D = D_, KEYS = KEYS_, CONSUMERS = CONSUMERS_, STAGES = 2;
  static constexpr int ROWS = 64 * CONSUMERS, THREADS = GROUP * (CONSUMERS + 1);
  // Whether the output has a tile of its own on its way to global memory. With 256 columns, shared memory
  // has no room for it: it passes through the queries, so those of the next item are copied later.
  static constexpr bool OWN_OUTPUT = D < 256;
  using Queries = Panels<D, ROWS>;
  using Keys = Panels<D, KEYS>;
};

// A task of a head.
struct Item {
  Task task;
  int head; // below 0: no item follows
};

template <class S> struct ForwardShared {
  unsigned char *q, *k, *v, *o;
  uint64_t *q_full, *q_empty, *k_full, *k_empty, *v_full, *v_empty;
  Item *items; // the present one and the next one; read again instead of kept in registers

  __device__ __forceinline__ explicit ForwardShared(unsigned char *start) {
    q = start;
    k = q + S::Queries::BYTES;
    v = k + S::STAGES * S::Keys::BYTES;
    unsigned char *end = v + S::STAGES * S::Keys::BYTES;
    o = S::OWN_OUTPUT ? end : q;
    q_full = reinterpret_cast<uint64_t *>(S::OWN_OUTPUT ? end + S::Queries::BYTES : end);
    q_empty = q_full + 1;
    k_full = q_empty + 1;
    k_empty = k_full + S::STAGES;
    v_full = k_empty + S::STAGES;
    v_empty = v_full + S::STAGES;
    items = reinterpret_cast<Item *>(v_empty + S::STAGES);
  }

  // Of one thread.
  __device__ __forceinline__ void init() const {
    barrier_init(q_full, 1);
    barrier_init(q_empty, 4 * S::CONSUMERS);
    for (int stage = 0; stage < S::STAGES; stage++) {
      barrier_init(k_full + stage, 1);
      barrier_init(v_full + stage, 1);
      barrier_init(k_empty + stage, 4 * S::CONSUMERS);
      barrier_init(v_empty + stage, 4 * S::CONSUMERS);
    }
    barriers_ready();
  }
};

// Sizes of a launch, and the range of the keys of a task.
struct Sizes {
  int num_rows, h, hkv, dh;
  float scale;
  int window;

  template <class S> __device__ __forceinline__ int first_key(const Task &task) const { return others_from<false>(task, task.first, window); }
  template <class S> __device__ __forceinline__ int keys_end(const Task &task) const {
    return others_to<false>(task, min(task.first + S::ROWS, task.end) - 1, window);
  }
};

// Of one thread. The first item has the number of the block; a ticket is the number of a later one. It is
// taken while the keys of the item before are copied, which takes longer.
template <class S>
__device__ __forceinline__ void produce(const ForwardShared<S> &shared, const HeadMaps &q, const HeadMaps &k, const HeadMaps &v, const int *tasks, unsigned *tickets,
                                        int num_items, const Sizes &sizes) {
  Ring<S::STAGES> ring;
  Ring<1> of_items;
  for (int number = int(blockIdx.x); number < num_items;) {
    Item item{task_of(tasks, number / sizes.h), number % sizes.h};
    int kv = item.head / (sizes.h / sizes.hkv), bytes = S::Keys::BYTES;
    number = int(gridDim.x + atomicAdd(tickets, 1u));
    int first_key = sizes.first_key<S>(item.task), keys_end = sizes.keys_end<S>(item.task);
    for (int at = first_key; at < keys_end; at += S::KEYS) {
      int stage = ring.stage;
      barrier_wait(shared.k_empty + stage, ring.parity ^ 1); // ends at once in the first round
      barrier_expect(shared.k_full + stage, bytes);
      S::Keys::copy(shared.k + stage * bytes, k, shared.k_full + stage, kv, at);
      if (at == first_key) {
        barrier_wait(shared.q_empty, of_items.parity ^ 1);
        shared.items[of_items.parity] = item;
        barrier_expect(shared.q_full, S::Queries::BYTES);
        S::Queries::copy(shared.q, q, shared.q_full, item.head, item.task.first);
        of_items.next();
      }
      barrier_wait(shared.v_empty + stage, ring.parity ^ 1);
      barrier_expect(shared.v_full + stage, bytes);
      S::Keys::copy(shared.v + stage * bytes, v, shared.v_full + stage, kv, at);
      ring.next();
    }
  }
  barrier_wait(shared.q_empty, of_items.parity ^ 1);
  shared.items[of_items.parity].head = -1;
  barrier_arrive(shared.q_full);
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

// Computes the output of consumer `me`: 64 rows of `o` before the division by `running.sum`. `ring` is at the
// first tile of the item; the values are one tile behind.
template <class S>
__device__ __forceinline__ void consume(const ForwardShared<S> &shared, const Item &item, int me, const Sizes &sizes, Ring<S::STAGES> &ring, Sums<S::D> &sums,
                                        RunningRows<S::KEYS> &running) {
  constexpr int D = S::D, KEYS = S::KEYS, BYTES = S::Keys::BYTES, TURN = 1; // first of the named barriers
  int at = sizes.first_key<S>(item.task), keys_end = sizes.keys_end<S>(item.task), first_row = item.task.first + 64 * me;
  Unmasked unmasked = Unmasked::of<false>(item.task, first_row, first_row + 63, keys_end, sizes.window);
  float scores[KEYS / 2], factors[2];
  uint32_t weights[KEYS / 4];
  sums.clear();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    running.max[r] = LOWEST;
    running.sum[r] = 0;
  }
  Ring<S::STAGES> values = ring;
  // The scores of a tile have arrived.
  auto softmax = [&] {
    __syncwarp();
    if (lane() == 0) {
      barrier_arrive(shared.k_empty + ring.stage);
      if (S::OWN_OUTPUT && at + KEYS >= keys_end) barrier_arrive(shared.q_empty);
    }
    ring.next();
    if (at < unmasked.from || at + KEYS > unmasked.to) {
      int row = item.task.first + 64 * me + warp() % 4 * 16 + lane_here() / 4;
      mask_keys<KEYS>(scores, -INFINITE, item.task, row, at, sizes.window);
    }
    running.softmax(scores, sizes.scale * LOG2_E, factors);
  };
  auto pass_turn = [&] { arrive_warps<8>(TURN + (me + 1) % S::CONSUMERS); };
  barrier_wait(shared.k_full + ring.stage, ring.parity);
  sync_warps<8>(TURN + me);
  start_scores<D, KEYS, S::ROWS>(scores, shared.q, 64 * me, shared.k + ring.stage * BYTES);
  pass_turn();
  products_wait<0>();
  hold(scores);
  softmax();
  pack_operand<KEYS>(weights, scores);
  for (at += KEYS; at < keys_end; at += KEYS) {
    barrier_wait(shared.k_full + ring.stage, ring.parity);
    barrier_wait(shared.v_full + values.stage, values.parity);
    sync_warps<8>(TURN + me);
    start_scores<D, KEYS, S::ROWS>(scores, shared.q, 64 * me, shared.k + ring.stage * BYTES);
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
  release(shared.v_empty + values.stage);
}

// Writes `lse` and the output of consumer `me`.
template <class S>
__device__ __forceinline__ void store(const ForwardShared<S> &shared, const Item &item, bf16 *o, float *lse, int me, const Sizes &sizes, Sums<S::D> &sums,
                                      const RunningRows<S::KEYS> &running) {
  const Task &task = item.task;
  float factors[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = running.sum[r];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    factors[r] = 1.0f / sum;
    int here = lane_here(), row = task.first + 64 * me + warp() % 4 * 16 + r * 8 + here / 4;
    if (here % 4 == 0 && row < task.end) lse[size_t(item.head) * sizes.num_rows + row] = fmaf(running.max[r], sizes.scale, logf(sum));
  }
  if (!S::OWN_OUTPUT) sync_warps<4>(8 + me); // the products of all warps have ended, which read the queries
  bf16 *head = o + size_t(item.head) * sizes.dh;
  store_sums<S::D, S::ROWS>(head, unsigned(sizes.h) * sizes.dh, task.first, task.end, sizes.dh, sums, factors, shared.o, 64 * me);
  if (!S::OWN_OUTPUT) {
    products_ready(); // the next copy follows these accesses
    release(shared.q_empty);
  }
}

template <class S>
__device__ __forceinline__ void forward(const HeadMaps &q, const HeadMaps &k, const HeadMaps &v, bf16 *o, float *lse, const int *tasks, unsigned *tickets,
                                        int num_items, const Sizes &sizes) {
  HOPPER_SHARED(memory);
  ForwardShared<S> shared(memory);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (warp() < 4) {
    fewer_registers<PRODUCER_REGISTERS<S::CONSUMERS>>();
    if (threadIdx.x == 0) produce<S>(shared, q, k, v, tasks, tickets, num_items, sizes);
    return;
  }
  more_registers<CONSUMER_REGISTERS<S::CONSUMERS>>();
  int me = shuffle(warp() / 4, 0) - 1;
  if (me + 1 == S::CONSUMERS) arrive_warps<8>(1); // the first turn
  Ring<S::STAGES> ring;
  for (int parity = 0;; parity ^= 1) {
    barrier_wait(shared.q_full, parity);
    const Item &item = shared.items[parity];
    if (item.head < 0) break;
    Sums<S::D> sums;
    RunningRows<S::KEYS> running;
    consume<S>(shared, item, me, sizes, ring, sums, running);
    store<S>(shared, item, o, lse, me, sizes, sums, running);
  }
  if (me == 0) sync_warps<8>(1); // the turn after the last one
}

} // namespace

#define FORWARD(SHAPE, name)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(SHAPE::THREADS, 1) attention_forward_sm90_##name##_bf16(                                       \
      const __grid_constant__ HeadMaps q, const __grid_constant__ HeadMaps k, const __grid_constant__ HeadMaps v, bf16 *o, float *lse, const int *tasks, \
      unsigned *tickets, int num_items, int num_rows, int h, int hkv, int dh, float scale, int window) {                                      \
    forward<SHAPE>(q, k, v, o, lse, tasks, tickets, num_items, Sizes{num_rows, h, hkv, dh, scale, window});                                   \
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
