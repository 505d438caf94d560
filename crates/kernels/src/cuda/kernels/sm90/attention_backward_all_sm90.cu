// Attention backward in bf16 for compute capability 9.0 and head dims up to 128: dk, dv and dq in one
// pass, so the scores and the gradients of p are computed once; see crates/kernels/src/attention/mod.rs
// for the contract, attention_sm90.cuh for the parts, and docs/dev/cuda/attention_backward.md for the
// life of a tile.
//
// A block has 128 keys, 64 for each consumer. The scores of a tile of queries and the gradients of p are
// products [keys, queries], so p and ds are left operands of the products for dv and dk without an
// exchange. The consumers exchange ds in shared memory, and each computes some columns of dq of the tile.
//
// The blocks of a segment add to the sums of dq of a tile one after the other, in the order of their
// keys: each waits until those before it have added. So every schedule gives the same bits. A block
// waits only for blocks with smaller tickets, which run or have ended, so at least one block can
// always continue. The first block stores the sums, and the last one writes dq.
#include "attention_backward_sm90.cuh"

namespace {

template <int D_> struct BackwardShape {
  static constexpr int D = D_, OWN = 128, OTHERS = 64, STAGES = 3, THREADS = 3 * GROUP;
  static constexpr bool KEYS = true;
  using Own = Panels<D, OWN>;
  using Other = Panels<D, OTHERS>;
  using Exchange = Panels<OTHERS, OWN>; // ds: a row for each key
  static constexpr int EXCHANGES = 2 * Exchange::BYTES;
};

// `heads` heads of keys from `first_head` on, of `hkv`, are the work of this launch.
struct Sizes {
  int num_rows, h, hkv, dh;
  float scale;
  int window, first_head, heads;
};

// A tile of queries of one head, in the order of a block: the last queries first, and all heads of the
// group with the same queries. So a block goes through the tiles as the block before does, which has
// one more tile of queries if the mask is causal.
struct Tile {
  int at, head;
};

// The keys of a block, their head, and the queries from `from` on to `to` that have scores with them.
struct Work {
  Task task;
  int slot; // number of the first tile of the segment among those of all segments
  int own_head, group, from, to;

  template <class S> static __device__ __forceinline__ Work of(const int *tasks, const Sizes &sizes, int ticket) {
    Work work;
    const int *at = tasks + 4 * size_t(ticket / sizes.heads);
    work.task = Task{at[0], at[3], at[2], at[3]};
    work.slot = at[1];
    work.own_head = sizes.first_head + ticket % sizes.heads;
    work.group = sizes.h / sizes.hkv;
    work.from = others_from<true>(work.task, work.task.first, sizes.window);
    work.to = others_to<true>(work.task, min(work.task.first + S::OWN, work.task.end) - 1, sizes.window);
    return work;
  }

  __device__ __forceinline__ Tile first_tile() const { return Tile{from + (to - 1 - from) / 64 * 64, own_head * group}; }
  __device__ __forceinline__ bool has(const Tile &tile) const { return tile.at >= from; }
  __device__ __forceinline__ Tile after(const Tile &tile) const {
    if (tile.head + 1 < (own_head + 1) * group) return Tile{tile.at, tile.head + 1};
    return Tile{tile.at - 64, own_head * group};
  }

  // Number of a tile among those of the launch.
  __device__ __forceinline__ size_t number(const Tile &tile, const Sizes &sizes) const {
    return size_t(slot + (tile.at - task.other_first) / 64) * (sizes.heads * group) + (tile.head - sizes.first_head * group);
  }

  // Number of blocks that add to dq of a tile before this one.
  __device__ __forceinline__ int blocks_before(const Tile &tile, int window) const {
    int first = window == 0 ? 0 : max(0, tile.at - task.other_first - window + 1) / 128;
    return (task.first - task.other_first) / 128 - first;
  }
  // Whether no block adds to dq of a tile after this one.
  __device__ __forceinline__ bool is_last(const Tile &tile, int window) const { return task.first + 128 > (window == 0 ? task.end - 1 : tile.at); }
};

// `own0` and `own1` are k and v, and `other0` and `other1` are q and do.
template <class S> struct BackwardMemory : BackwardTiles<S> {
  // `turn`: the blocks before have added to dq, and this block has added to dq of the tile before.
  // `added`: this block has added.
  uint64_t *turn, *added;
  Work *work; // read again instead of kept in registers

  __device__ __forceinline__ explicit BackwardMemory(unsigned char *start) : BackwardTiles<S>(start) {
    turn = this->empty + S::STAGES;
    added = turn + 1;
    work = reinterpret_cast<Work *>(added + 1);
  }

  // Of one thread.
  __device__ __forceinline__ void init() const {
    this->init_barriers();
    barrier_init(turn, 2);
    barrier_init(added, 8);
    barriers_ready();
  }
};

// The value that a block has stored with add_after_all, and all that it wrote before.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void add_after_all(uint32_t *to) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory"); }
__device__ __forceinline__ void add_four(float *to, const float *values) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]) : "memory");
}

// Of the producer warp.
template <class S>
__device__ __forceinline__ void produce(const BackwardMemory<S> &memory, const Maps &maps, const float *lse, const float *delta, int num_rows) {
  const Work &work = *memory.work;
  copy_own<S>(memory, maps, work.own_head, work.task.first);
  Ring<S::STAGES> ring;
  for (Tile tile = work.first_tile(); work.has(tile); tile = work.after(tile)) fill_stage<S>(memory, ring, maps, tile.head, tile.at, work.to, lse, delta, num_rows);
}

// Of one thread: waits for the blocks before this one, a tile ahead of the consumers.
template <class S> __device__ __forceinline__ void wait_for_blocks(const BackwardMemory<S> &memory, const Sizes &sizes, const uint32_t *added) {
  const Work &work = *memory.work;
  Ring<1> ring;
  for (Tile tile = work.first_tile(); work.has(tile); tile = work.after(tile)) {
    uint32_t before = work.blocks_before(tile, sizes.window);
    const uint32_t *blocks = added + work.number(tile, sizes);
    while (before > 0 && load_acquire(blocks) < before) {
    }
    barrier_arrive(memory.turn);
    barrier_wait(memory.turn, ring.parity);
    ring.next();
  }
}

// Of one thread: lets the next block continue after the consumers of this one have added to dq of a tile.
template <class S> __device__ __forceinline__ void release_next_block(const BackwardMemory<S> &memory, const Sizes &sizes, uint32_t *added) {
  const Work &work = *memory.work;
  Ring<1> ring;
  barrier_arrive(memory.turn);
  for (Tile tile = work.first_tile(); work.has(tile); tile = work.after(tile)) {
    barrier_wait(memory.added, ring.parity);
    barrier_arrive(memory.turn);
    if (!work.is_last(tile, sizes.window)) add_after_all(added + work.number(tile, sizes));
    ring.next();
  }
}

// First of the 64 own rows of a consumer, and of those of its warp the row of a lane. The assembler
// treats the result of a shuffle as the same in all lanes, so the first needs no register of a lane.
__device__ __forceinline__ int first_row_here() { return shuffle(thread_here() / GROUP, 0) * 64 - 64; }
__device__ __forceinline__ int row_here() { return thread_here() / WARP * 16 - 64 + lane_here() / 4; }
// First column of dq of a consumer.
template <class S> __device__ __forceinline__ int column_here() { return first_row_here() * (S::D == 80 ? 64 : S::D / 2) / 64; }

// Adds columns of dq of a tile to the sums of all blocks, or writes them to `dq` if no block follows. A
// thread has the same elements of the sums in each block, so they stay in the order of its registers.
template <class S, int N>
__device__ __forceinline__ void add_queries(float (&dq)[N / 2], const Work &work, const Tile &tile, const Sizes &sizes, float *sums, bf16 *to) {
  int before = work.blocks_before(tile, sizes.window), thread = thread_here() % GROUP, column = column_here<S>();
  sums += (work.number(tile, sizes) * S::D + column) * S::OTHERS + thread * 4;
  if (work.is_last(tile, sizes.window)) {
    if (before > 0)
#pragma unroll
      for (int i = 0; i < N / 2; i += 4) {
        float4 sum = *reinterpret_cast<const float4 *>(sums + i * GROUP);
        dq[i] += sum.x;
        dq[i + 1] += sum.y;
        dq[i + 2] += sum.z;
        dq[i + 3] += sum.w;
      }
    int row = tile.at + thread / WARP * 16 + thread % WARP / 4;
    column += thread % 4 * 2;
    to += (size_t(row) * sizes.h + tile.head) * sizes.dh + column;
#pragma unroll
    for (int r = 0; r < 2; r++, to += size_t(8) * sizes.h * sizes.dh)
#pragma unroll
      for (int n = 0; n < N / 8; n++)
        if (row + 8 * r < work.to && column + 8 * n < sizes.dh)
          *reinterpret_cast<uint32_t *>(to + 8 * n) = pack(dq[4 * n + 2 * r] * sizes.scale, dq[4 * n + 2 * r + 1] * sizes.scale);
  } else if (before == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; i += 4) *reinterpret_cast<float4 *>(sums + i * GROUP) = make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; i += 4) add_four(sums + i * GROUP, dq + i);
  }
}

// p of a tile from its scores: zeros where the mask or the end of the segment hides a key.
template <class S> __device__ __forceinline__ void weigh(float (&p)[S::OTHERS / 2], const float *lse, const Work &work, const Tile &tile, const Sizes &sizes) {
  float log2_scale = sizes.scale * LOG2_E;
  int t = lane_here() % 4;
#pragma unroll
  for (int n = 0; n < S::OTHERS / 8; n++) {
    float2 of_queries = *reinterpret_cast<const float2 *>(lse + 8 * n + 2 * t);
#pragma unroll
    for (int i = 0; i < 4; i++) p[4 * n + i] = exp2f_fast(fmaf(p[4 * n + i], log2_scale, i % 2 ? -of_queries.y : -of_queries.x));
  }
  int first_key = work.task.first + first_row_here();
  Unmasked unmasked = Unmasked::of<true>(work.task, first_key, first_key + 63, work.to, sizes.window);
  if (tile.at >= unmasked.from && tile.at + S::OTHERS <= unmasked.to && first_key + 64 <= work.task.end) return;
  int first = tile.at + 2 * t;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int key = work.task.first + row_here() + 8 * r;
    int from = others_from<true>(work.task, key, sizes.window) - first, to = others_to<true>(work.task, key, sizes.window) - first;
    if (key >= work.task.end) to = from; // it would add to dq
#pragma unroll
    for (int n = 0; n < S::OTHERS / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (8 * n + i < from || 8 * n + i >= to) p[4 * n + 2 * r + i] = 0;
  }
}

// Writes ds of a consumer to the buffer that both exchange it in, and starts the products for N columns
// of dq of a tile.
template <class S, int N>
__device__ __forceinline__ void start_queries(float (&dq)[N / 2], const BackwardMemory<S> &memory, int buffer, const uint32_t (&ds)[S::OTHERS / 4]) {
  // Both consumers have ended the products of two tiles ago, which read this buffer.
  unsigned char *exchange = memory.exchanges + buffer * S::Exchange::BYTES;
  int row = row_here(), t = lane_here() % 4;
#pragma unroll
  for (int i = 0; i < S::OTHERS / 4; i++) *reinterpret_cast<uint32_t *>(S::Exchange::at(exchange, row + i % 2 * 8, i / 2) + 4 * t) = ds[i];
  products_ready();
  sync_warps<8>(1);
  constexpr int WIDTH = N == S::Own::NARROW ? 32 : 128; // bytes of the rows of the panel with these columns
  int column = column_here<S>();
  const unsigned char *right = memory.own0 + column / 64 * S::Own::WIDE_BYTES + column % 64 * 2;
  products_fence();
#pragma unroll
  for (int k = 0; k < S::OWN / 16; k++) multiply_transposed<N>(dq, matrix_at<128>(exchange + k * 16 * 128), matrix_at<WIDTH>(right + k * 16 * WIDTH), k > 0);
  products_commit();
}

// Adds up dk and dv of the 64 keys of a consumer, and adds N columns of dq of each tile to those of the
// other blocks. Meanwhile the products for dk and the scores of the next tile are in flight.
template <class S, int N>
__device__ __forceinline__ void consume(const BackwardMemory<S> &memory, const Sizes &sizes, float *sums, bf16 *dq_rows, Sums<S::D> &dk, Sums<S::D> &dv) {
  constexpr int D = S::D, OTHERS = S::OTHERS;
  const Work &work = *memory.work;
  float p[OTHERS / 2], ds[OTHERS / 2], dq[N / 2];
  uint32_t p_operand[OTHERS / 4], ds_operand[OTHERS / 4];
  dk.clear();
  dv.clear();
  dk.hold_all();
  dv.hold_all();
  barrier_wait(memory.own_full, 0);
  barrier_wait(memory.full, 0);
  Ring<S::STAGES> ring;
  Tile tile = work.first_tile();
  start_scores<D, OTHERS, S::OWN>(p, memory.own0, first_row_here(), memory.other0(0));
  products_wait<0>();
  for (int parity = 0;; parity ^= 1) {
    int stage = ring.stage;
    hold(p);
    start_scores<D, OTHERS, S::OWN>(ds, memory.own1, first_row_here(), memory.other1(stage));
    weigh<S>(p, memory.lse(stage), work, tile, sizes);
    products_wait<0>();
    hold(ds);
    pack_operand<OTHERS>(p_operand, p);
    start_weighted<D, OTHERS>(dv, p_operand, memory.other1(stage));
    int t = lane_here() % 4;
#pragma unroll
    for (int n = 0; n < OTHERS / 8; n++) {
      float2 of_queries = *reinterpret_cast<const float2 *>(memory.delta(stage) + 8 * n + 2 * t);
#pragma unroll
      for (int i = 0; i < 4; i++) ds[4 * n + i] = p[4 * n + i] * (ds[4 * n + i] - (i % 2 ? of_queries.y : of_queries.x));
    }
    pack_operand<OTHERS>(ds_operand, ds);
    start_queries<S, N>(dq, memory, parity, ds_operand);
    start_weighted<D, OTHERS>(dk, ds_operand, memory.other0(stage));
    products_wait<1>();
    hold(dq);
    dv.hold_all();
    Tile next = work.after(tile);
    bool goes_on = work.has(next);
    if (goes_on) ring.next(); // else computes the same scores again: the assembler needs products without a branch
    barrier_wait(memory.full + ring.stage, ring.parity);
    start_scores<D, OTHERS, S::OWN>(p, memory.own0, first_row_here(), memory.other0(ring.stage));
    barrier_wait(memory.turn, parity);
    add_queries<S, N>(dq, work, tile, sizes, sums, dq_rows);
    release(memory.added);
    products_wait<0>();
    dk.hold_all();
    if (!goes_on) return;
    release(memory.empty + stage);
    tile = next;
  }
}

// `counters`: the ticket, and the number of blocks that have added to dq of each tile; zeros at the start.
template <class S>
__device__ __forceinline__ void backward(const Maps &maps, const float *lse, const float *delta, bf16 *dk, bf16 *dv, bf16 *dq, float *sums, uint32_t *counters, const int *tasks,
                                         const Sizes &sizes) {
  constexpr int D = S::D, OWN = S::OWN;
  HOPPER_SHARED(shared);
  BackwardMemory<S> memory(shared);
  if (threadIdx.x == 0) {
    memory.init();
    *memory.work = Work::of<S>(tasks, sizes, int(atomicAdd(counters, 1u)));
  }
  __syncthreads();
  if (warp() < 4) {
    fewer_registers<PRODUCER_REGISTERS<2>>();
    if (warp() == 0) produce<S>(memory, maps, lse, delta, sizes.num_rows);
    if (warp() == 1 && lane() == 0) wait_for_blocks<S>(memory, sizes, counters + 1);
    if (warp() == 2 && lane() == 0) release_next_block<S>(memory, sizes, counters + 1);
    return;
  }
  more_registers<CONSUMER_REGISTERS<2>>();
  Sums<D> dk_sums, dv_sums;
  if constexpr (D == 80) {
    if (warp() < 8)
      consume<S, 64>(memory, sizes, sums, dq, dk_sums, dv_sums);
    else
      consume<S, 16>(memory, sizes, sums, dq, dk_sums, dv_sums);
  } else {
    consume<S, D / 2>(memory, sizes, sums, dq, dk_sums, dv_sums);
  }
  int row = first_row_here(), own_head = memory.work->own_head, first = memory.work->task.first, end = memory.work->task.end, dh = sizes.dh;
  sync_warps<8>(1); // the products of all warps have ended, which read the own tiles
  unsigned stride = unsigned(sizes.hkv) * dh;
  float scales[2] = {sizes.scale, sizes.scale}, ones[2] = {1.0f, 1.0f};
  store_sums<D, OWN>(dk + size_t(own_head) * dh, stride, first, end, dh, dk_sums, scales, memory.own0, row);
  store_sums<D, OWN>(dv + size_t(own_head) * dh, stride, first, end, dh, dv_sums, ones, memory.own1, row);
}

} // namespace

#define BACKWARD(D)                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(BackwardShape<D>::THREADS, 1) attention_backward_all_sm90_d##D##_bf16(                         \
      const __grid_constant__ HeadMaps k, const __grid_constant__ HeadMaps v, const __grid_constant__ HeadMaps q, const __grid_constant__ HeadMaps d_o, \
      const float *lse, const float *delta, bf16 *dk, bf16 *dv, bf16 *dq, float *sums, uint32_t *counters, const int *tasks, int num_rows, int h, int hkv, \
      int dh, float scale, int window, int first_head, int heads) {                                                                           \
    backward<BackwardShape<D>>(Maps{k, v, q, d_o}, lse, delta, dk, dv, dq, sums, counters, tasks, Sizes{num_rows, h, hkv, dh, scale, window, first_head, heads}); \
  }

// select.rs has the same sizes.
BACKWARD(64)
BACKWARD(80)
BACKWARD(128)
