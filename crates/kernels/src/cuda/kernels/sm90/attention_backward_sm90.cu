// Attention backward in bf16 for compute capability 9.0 and head dims above 128; see
// crates/kernels/src/attention/mod.rs for the contract, attention_sm90.cuh for the parts, and
// sm80/attention_backward.cu for the two passes: one for dk and dv, and one for dq, with sums in registers
// and without atomics. attention_backward_all_sm90.cu has the kernels for other head dims.
//
// In attention_backward_keys_sm90 a block has 64 keys. The scores of a tile of queries and the gradients
// of p are products [keys, queries], so p and ds are left operands of the products for dv and dk without
// an exchange between warps. The sums of both gradients do not fit into the registers of a consumer: one
// computes dv and the other dk, and both compute p. The producer warp also loads lse and delta of the
// queries.
//
// In attention_backward_queries_sm90 a block has 128 queries, 64 for each consumer.
#include "attention_backward_sm90.cuh"

namespace {

template <int D_, int OWN_, int OTHERS_, int STAGES_, bool KEYS_> struct BackwardShape {
  static constexpr int D = D_, OWN = OWN_, OTHERS = OTHERS_, STAGES = STAGES_, THREADS = 3 * GROUP;
  static constexpr bool KEYS = KEYS_; // whether the own rows are keys, which both consumers have
  static constexpr int EXCHANGES = 0;
  using Own = Panels<D, OWN>;
  using Other = Panels<D, OTHERS>;
};

struct Sizes {
  int num_rows, h, hkv, dh;
  float scale;
  int window;
};

// The range of a block: its rows, its heads and the other rows that it iterates over.
struct Range {
  Task task;
  int own_head, first_head, last_head, from, to;

  template <class S> static __device__ __forceinline__ Range of(const int *tasks, const Sizes &sizes) {
    int own_heads = S::KEYS ? sizes.hkv : sizes.h, group = sizes.h / sizes.hkv;
    Range range;
    range.task = task_of(tasks, int(blockIdx.x) / own_heads);
    range.own_head = int(blockIdx.x) % own_heads;
    range.first_head = S::KEYS ? range.own_head * group : range.own_head / group;
    range.last_head = S::KEYS ? range.first_head + group - 1 : range.first_head;
    const Task &task = range.task;
    range.from = others_from<S::KEYS>(task, task.first, sizes.window);
    range.to = others_to<S::KEYS>(task, min(task.first + S::OWN, task.end) - 1, sizes.window);
    return range;
  }
};

// Of the producer warp if the own rows are keys, otherwise of one thread.
template <class S>
__device__ __forceinline__ void produce(const BackwardTiles<S> &memory, const Maps &maps, const Range &range, const float *lse, const float *delta, int num_rows) {
  copy_own(memory, maps, range.own_head, range.task.first);
  Ring<S::STAGES> ring;
  for (int head = range.first_head; head <= range.last_head; head++)
    for (int at = range.from; at < range.to; at += S::OTHERS) fill_stage(memory, ring, maps, head, at, range.to, lse, delta, num_rows);
}

// Adds up dk (if DK) or dv of the keys.
template <class S, bool DK> __device__ __forceinline__ void consume_keys(const BackwardTiles<S> &memory, const Range &range, const Sizes &sizes, Sums<S::D> &sums) {
  constexpr int D = S::D, N = S::OTHERS;
  float p[N / 2], ds[N / 2], log2_scale = sizes.scale * LOG2_E;
  uint32_t operand[N / 4];
  int t = lane() % 4, first_key = range.task.first, key = first_key + warp() % 4 * 16 + lane() / 4;
  Unmasked unmasked = Unmasked::of<true>(range.task, first_key, first_key + 63, range.to, sizes.window);
  sums.clear();
  barrier_wait(memory.own_full, 0);
  Ring<S::STAGES> ring;
  for (int head = range.first_head; head <= range.last_head; head++)
    for (int at = range.from; at < range.to; at += N) {
      int stage = ring.stage;
      barrier_wait(memory.full + stage, ring.parity);
      start_scores<D, N, S::OWN>(p, memory.own0, 0, memory.other0(stage));
      if (DK) start_scores<D, N, S::OWN>(ds, memory.own1, 0, memory.other1(stage));
      products_wait<DK ? 1 : 0>();
      hold(p);
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float of_query = memory.lse(stage)[8 * n + 2 * t + i];
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float &score = p[4 * n + 2 * r + i];
            score = exp2f_fast(fmaf(score, log2_scale, -of_query));
          }
        }
      if (at < unmasked.from || at + N > unmasked.to) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          int first = at + 2 * t;
          int from = others_from<true>(range.task, key + 8 * r, sizes.window) - first, to = others_to<true>(range.task, key + 8 * r, sizes.window) - first;
#pragma unroll
          for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
              if (8 * n + i < from || 8 * n + i >= to) p[4 * n + 2 * r + i] = 0;
        }
      }
      if (DK) {
        products_wait<0>();
        hold(ds);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float of_query = memory.delta(stage)[8 * n + 2 * t + i];
#pragma unroll
            for (int r = 0; r < 2; r++) ds[4 * n + 2 * r + i] = p[4 * n + 2 * r + i] * (ds[4 * n + 2 * r + i] - of_query);
          }
      }
      pack_operand<N>(operand, DK ? ds : p);
      start_weighted<D, N>(sums, operand, DK ? memory.other0(stage) : memory.other1(stage));
      products_wait<0>();
      sums.hold_all();
      release(memory.empty + stage);
      ring.next();
    }
}

// Adds up dq of 64 queries, from row `row` of the own tiles on.
template <class S>
__device__ __forceinline__ void consume_queries(const BackwardTiles<S> &memory, const Range &range, const Sizes &sizes, int row, const float *lse,
                                                const float *delta, Sums<S::D> &dq) {
  constexpr int D = S::D, N = S::OTHERS;
  float p[N / 2], ds[N / 2], own_lse[2], own_delta[2], log2_scale = sizes.scale * LOG2_E;
  uint32_t ds_operand[N / 4];
  int first_row = range.task.first + row, query = first_row + warp() % 4 * 16 + lane() / 4;
  Unmasked unmasked = Unmasked::of<false>(range.task, first_row, first_row + 63, range.to, sizes.window);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    bool exists = query + 8 * r < range.task.end; // other queries get p = 0
    size_t at = size_t(range.own_head) * sizes.num_rows + query + 8 * r;
    own_lse[r] = exists ? lse[at] * LOG2_E : INFINITE;
    own_delta[r] = exists ? delta[at] : 0.0f;
  }
  dq.clear();
  barrier_wait(memory.own_full, 0);
  Ring<S::STAGES> ring;
  for (int at = range.from; at < range.to; at += N) {
    int stage = ring.stage;
    barrier_wait(memory.full + stage, ring.parity);
    start_scores<D, N, S::OWN>(p, memory.own0, row, memory.other0(stage));
    start_scores<D, N, S::OWN>(ds, memory.own1, row, memory.other1(stage));
    products_wait<1>();
    hold(p);
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = exp2f_fast(fmaf(p[i], log2_scale, -own_lse[i / 2 % 2]));
    if (at < unmasked.from || at + N > unmasked.to) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        int first = at + 2 * (lane_here() % 4);
        int from = others_from<false>(range.task, query + 8 * r, sizes.window) - first, to = others_to<false>(range.task, query + 8 * r, sizes.window) - first;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (8 * n + i < from || 8 * n + i >= to) p[4 * n + 2 * r + i] = 0;
      }
    }
    products_wait<0>();
    hold(ds);
#pragma unroll
    for (int i = 0; i < N / 2; i++) ds[i] = p[i] * (ds[i] - own_delta[i / 2 % 2]);
    pack_operand<N>(ds_operand, ds);
    start_weighted<D, N>(dq, ds_operand, memory.other0(stage));
    products_wait<0>();
    dq.hold_all();
    release(memory.empty + stage);
    ring.next();
  }
}

// `d0` and `d1` are the gradients of the own operands (`d1` for keys
// only).
template <class S>
__device__ __forceinline__ void backward(const Maps &maps, const float *lse, const float *delta, bf16 *d0, bf16 *d1, const int *tasks, const Sizes &sizes) {
  constexpr int D = S::D, OWN = S::OWN;
  HOPPER_SHARED(shared);
  BackwardTiles<S> memory(shared);
  Range range = Range::of<S>(tasks, sizes);
  if (threadIdx.x == 0) {
    memory.init_barriers();
    barriers_ready();
  }
  __syncthreads();
  if (warp() < 4) {
    fewer_registers<PRODUCER_REGISTERS<2>>();
    if (int(threadIdx.x) < (S::KEYS ? WARP : 1)) produce<S>(memory, maps, range, lse, delta, sizes.num_rows);
    return;
  }
  more_registers<CONSUMER_REGISTERS<2>>();
  int me = warp() / 4 - 1, row = S::KEYS ? 0 : 64 * me, first = range.task.first, end = range.task.end, dh = sizes.dh;
  unsigned stride = unsigned(S::KEYS ? sizes.hkv : sizes.h) * dh;
  d0 += size_t(range.own_head) * dh;
  d1 += size_t(range.own_head) * dh;
  float scales[2] = {sizes.scale, sizes.scale}, ones[2] = {1.0f, 1.0f};
  Sums<D> sums;
  // The barriers: the products of all warps have ended, which read the own tiles.
  if constexpr (!S::KEYS) {
    consume_queries<S>(memory, range, sizes, row, lse, delta, sums);
    sync_warps<4>(1 + me);
    store_sums<D, OWN>(d0, stride, first, end, dh, sums, scales, memory.own0, row);
  } else if (me == 0) {
    consume_keys<S, true>(memory, range, sizes, sums);
    sync_warps<8>(1);
    store_sums<D, OWN>(d0, stride, first, end, dh, sums, scales, memory.own0, row);
  } else {
    consume_keys<S, false>(memory, range, sizes, sums);
    sync_warps<8>(1);
    store_sums<D, OWN>(d1, stride, first, end, dh, sums, ones, memory.own1, row);
  }
}

} // namespace

#define BACKWARD(kernel, SHAPE, name)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(SHAPE::THREADS, 1) attention_backward_##kernel##_sm90_##name##_bf16(                           \
      const __grid_constant__ HeadMaps own0, const __grid_constant__ HeadMaps own1, const __grid_constant__ HeadMaps other0,                  \
      const __grid_constant__ HeadMaps other1, const float *lse, const float *delta, bf16 *d0, bf16 *d1, const int *tasks, int num_rows, int h, int hkv, \
      int dh, float scale, int window) {                                                                                                      \
    backward<SHAPE>(Maps{own0, own1, other0, other1}, lse, delta, d0, d1, tasks, Sizes{num_rows, h, hkv, dh, scale, window});                 \
  }

// Head dim, own rows, other rows of a tile, stages, own rows are keys. select.rs has the same sizes.
using Keys256 = BackwardShape<256, 64, 64, 2, true>;
using Queries256 = BackwardShape<256, 128, 48, 2, false>;

BACKWARD(keys, Keys256, d256)
BACKWARD(queries, Queries256, d256)
