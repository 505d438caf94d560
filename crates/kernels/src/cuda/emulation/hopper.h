// Emulation of the asynchronous operations of compute capability 9.0: barriers in shared memory
// (mbarrier), copies of boxes of a tensor (TMA), and products of a warpgroup (wgmma).
//
// A GPU executes these operations at any time between their start and the wait for them. Here:
//
// - The destination of a copy is NaN from the start of the copy on. The bytes arrive when the
//   scheduler decides to, in any order, and only then does the barrier count them.
// - The accumulators of a product are NaN from its start until a wait that includes it. Its operands
//   in shared memory are read at its start and again at the wait, and both must be equal: a missing
//   wait for a copy, or memory that is released too early, is an error.
// - Barriers are 64 bits in shared memory, with the arrivals and bytes of the current phase. A wait
//   for the wrong parity returns at once or never, as on a GPU.
//
// Descriptors of matrices and the permutations of TMA are decoded as the PTX manual defines them.
#pragma once
#include "emulation.h"
#include <algorithm>
#include <deque>

namespace emulation {

constexpr uint32_t SHARED_START = 1024; // CUDA itself uses the memory of a block before this address

inline uint32_t shared_address(const void *at) {
  ptrdiff_t offset = static_cast<const unsigned char *>(at) - shared_memory;
  if (offset < 0 || size_t(offset) >= SHARED) fail("an address is not in shared memory");
  return SHARED_START + uint32_t(offset);
}

inline unsigned char *shared_bytes_at(uint32_t address, size_t bytes) {
  if (address < SHARED_START || address - SHARED_START + bytes > SHARED) fail("an address is not in shared memory");
  return shared_memory + (address - SHARED_START);
}

// Permutes the 16-byte columns of rows of `width` bytes (128, 64 or 32), as copies and products do: by
// the address, so that the pattern repeats every 8 * width bytes.
inline uint32_t permuted(uint32_t address, uint32_t width) {
  uint32_t columns = width / 16;
  return columns > 1 ? address ^ (address >> 7 & (columns - 1)) << 4 : address;
}

// The state of a barrier, in its 64 bits.
struct PhaseState {
  static constexpr uint64_t MARK = 0xB52;
  uint64_t mark : 12, phase : 1, expected : 11, missing : 11;
  int64_t bytes : 29; // that are expected and have not arrived
};
static_assert(sizeof(PhaseState) == 8, "a barrier has 64 bits");

inline PhaseState barrier_state(const uint64_t *barrier) {
  PhaseState state;
  std::memcpy(&state, shared_bytes_at(shared_address(barrier), 8), 8);
  if (state.mark != PhaseState::MARK) fail("uses a barrier that is not initialised");
  return state;
}

// Stores the state, after the end of the phase if nothing is missing. Returns whether it ends.
inline bool set_barrier_state(uint64_t *barrier, PhaseState state) {
  bool ends = state.missing == 0 && state.bytes == 0;
  if (ends) {
    state.phase ^= 1;
    state.missing = state.expected;
  }
  std::memcpy(barrier, &state, 8);
  events++;
  return ends;
}

inline void barrier_init(uint64_t *barrier, int arrivals) {
  if (shared_address(barrier) % 8) fail("a barrier is not aligned to 8 bytes");
  if (arrivals < 1 || arrivals > 1024) fail("a barrier expects 1 to 1024 arrivals");
  PhaseState state{PhaseState::MARK, 0, uint64_t(arrivals), uint64_t(arrivals), 0};
  std::memcpy(barrier, &state, 8);
  phase_barriers.push_back(barrier);
}

inline void barrier_arrive(uint64_t *barrier, int bytes = 0) {
  PhaseState state = barrier_state(barrier);
  if (state.missing == 0) fail("more threads arrive at a barrier than it expects");
  state.bytes += bytes;
  state.missing--;
  // Usually the warps that have waited continue before this one.
  if (set_barrier_state(barrier, state) && next_random() % 4 > 0) yield_to_others();
}

// Arrives, and makes the phase wait for this number of bytes as well.
inline void barrier_expect(uint64_t *barrier, int bytes) { barrier_arrive(barrier, bytes); }

// Waits for the end of the current phase if it has this parity. The phase before has the other one.
inline void barrier_wait(const uint64_t *barrier, int parity) {
  while (barrier_state(barrier).phase == uint64_t(parity)) yield();
  events++;
}

// Stand-in for CUtensorMap, with three dims. tensor_map.rs writes it.
struct TensorMap {
  static constexpr uint64_t MARK = 0x7E4509A9;
  uint64_t mark, address, dims[3], strides[2], box[3], swizzle, element_bytes, unused[4];

  size_t box_bytes() const { return size_t(box[0] * box[1] * box[2] * element_bytes); }
};
static_assert(sizeof(TensorMap) == 128, "a CUtensorMap has 128 bytes");

struct BoxCopy {
  unsigned char *to;
  TensorMap map;
  uint64_t *barrier;
  int at[3];
};

inline std::vector<BoxCopy> box_copies; // that have not arrived

// Starts to copy the box at (x, y, z) of a tensor. Elements outside of the tensor become zeros.
inline void copy_box(void *to, const TensorMap *map, uint64_t *barrier, int x, int y, int z) {
  if (map->mark != TensorMap::MARK) fail("a copy has no tensor map");
  if (shared_address(to) % 128) fail("the destination of a box is not aligned to 128 bytes");
  unsigned char *start = shared_bytes_at(shared_address(to), map->box_bytes());
  for (const BoxCopy &other : box_copies)
    if (start < other.to + other.map.box_bytes() && other.to < start + map->box_bytes()) fail("two copies write the same memory");
  barrier_state(barrier);
  std::memset(start, 0xFF, map->box_bytes()); // the copy may arrive at any time
  box_copies.push_back({start, *map, barrier, {x, y, z}});
  events++;
}

inline void deliver(const BoxCopy &copy) {
  const TensorMap &map = copy.map;
  uint32_t row_bytes = uint32_t(map.box[0] * map.element_bytes), address = shared_address(copy.to);
  for (uint64_t z = 0; z < map.box[2]; z++)
    for (uint64_t y = 0; y < map.box[1]; y++, address += row_bytes)
      for (uint32_t column = 0; column < row_bytes; column += uint32_t(map.element_bytes)) {
        int64_t at[3] = {copy.at[0] + int64_t(column / map.element_bytes), copy.at[1] + int64_t(y), copy.at[2] + int64_t(z)};
        bool inside = true;
        for (int i = 0; i < 3; i++) inside = inside && at[i] >= 0 && at[i] < int64_t(map.dims[i]);
        unsigned char *to = shared_bytes_at(permuted(address + column, uint32_t(map.swizzle)), map.element_bytes);
        auto from = reinterpret_cast<const unsigned char *>(map.address);
        if (inside) std::memcpy(to, from + at[0] * map.element_bytes + at[1] * map.strides[0] + at[2] * map.strides[1], map.element_bytes);
        else std::memset(to, 0, map.element_bytes);
      }
  PhaseState state = barrier_state(copy.barrier);
  state.bytes -= int64_t(map.box_bytes());
  set_barrier_state(copy.barrier, state);
}

// Lets one of the copies arrive. Returns false if there is none.
inline bool deliver_one(unsigned random) {
  if (box_copies.empty()) return false;
  size_t index = random % box_copies.size();
  BoxCopy copy = box_copies[index];
  box_copies.erase(box_copies.begin() + ptrdiff_t(index));
  deliver(copy);
  return true;
}

// The layout of a matrix in shared memory: the fields of a 64-bit descriptor.
struct Matrix {
  uint32_t start, lead, stride, width;
  bool transposed; // elements of a column (of the dim that is not summed over) are adjacent

  Matrix(uint64_t descriptor, bool transposed) : transposed(transposed) {
    constexpr uint64_t FIELDS = 0xC000'3FFF'3FFF'3FFF;
    if (descriptor & ~FIELDS) fail("a matrix descriptor has bits outside of its fields, or a base offset");
    start = uint32_t(descriptor & 0x3FFF) << 4;
    lead = uint32_t(descriptor >> 16 & 0x3FFF) << 4;
    stride = uint32_t(descriptor >> 32 & 0x3FFF) << 4;
    constexpr uint32_t WIDTHS[4] = {16, 128, 64, 32};
    width = WIDTHS[descriptor >> 62];
  }

  // Address of eight elements: of row `outer` (of the dim that is not summed over) from column
  // `inner` on, or if transposed of column `inner` from row `outer` on.
  uint32_t at(uint32_t outer, uint32_t inner) const {
    uint32_t row = transposed ? inner : outer, chunk = (transposed ? outer : inner) / 8, columns = width / 16;
    uint32_t address = start + row % 8 * width;
    if (columns > 1) address += row / 8 * stride + chunk % columns * 16 + chunk / columns * (transposed ? lead : 0);
    else address += transposed ? row / 8 * lead + chunk * stride : row / 8 * stride + chunk * lead;
    return permuted(address & 0x3FFFF, width);
  }

  // Reads rows first .. first + rows (a multiple of 8), with 16 columns each.
  void read(uint16_t (*to)[16], uint32_t first, uint32_t rows) const {
    for (uint32_t outer = 0; outer < rows; outer += transposed ? 8 : 1)
      for (uint32_t inner = 0; inner < 16; inner += transposed ? 1 : 8) {
        uint16_t eight[8];
        std::memcpy(eight, shared_bytes_at(at(first + outer, inner), 16), 16);
        for (uint32_t i = 0; i < 8; i++) to[transposed ? outer + i : outer][transposed ? inner : inner + i] = eight[i];
      }
  }
};

// A product of a warp's 16 rows of the 64 of a warpgroup: d [16, n] (+)= a [16, 16] b [16, n]. A lane
// has the elements of d and a that it has in `mma`.
struct Product {
  float *d;
  int n;
  bool add, transposed_a, transposed_b;
  const uint32_t *registers; // of this lane, or null if `a` is in shared memory
  uint32_t values[4];        // of the registers
  uint64_t a, b;

  bool is_same(const Product &other) const {
    return std::tie(n, add, transposed_a, transposed_b, a, b) == std::tie(other.n, other.add, other.transposed_a, other.transposed_b, other.a, other.b) &&
           !registers == !other.registers;
  }
};

// The bytes of both operands that a warp reads from shared memory.
struct Operands {
  uint16_t a[16][16], b[256][16];

  Operands(const Product &product, uint32_t warp_of_group) : a(), b() {
    if (!product.registers) Matrix(product.a, product.transposed_a).read(a, 16 * warp_of_group, 16);
    Matrix(product.b, product.transposed_b).read(b, 0, uint32_t(product.n));
  }
};

// Accumulators of products that have started, and their values.
struct Accumulators {
  float *d;
  std::vector<float> values;
};

struct Queue {
  std::vector<Product> open;                // not committed yet
  std::vector<std::vector<Product>> groups; // committed
  std::vector<Accumulators> accumulators;
  std::deque<Operands> seen;  // of lane 0: the operands of all products that have started
  size_t num_started = 0;
  bool fenced = false;
};

inline std::vector<Queue> queues;                   // of each thread
inline std::vector<std::vector<Product>> sequences; // of each warpgroup, which all its threads must repeat

inline void products_fence() { queues[current].fenced = true; }

inline void start_product(const Product &product) {
  Queue &queue = queues[current];
  if (!queue.fenced) fail("a group of products must begin with a fence");
  auto &sequence = sequences[current / 128];
  if (sequence.size() == queue.num_started) sequence.push_back(product);
  if (!sequence[queue.num_started++].is_same(product)) fail("the threads of a warpgroup start different products");
  if (current % 32 == 0) queue.seen.emplace_back(product, current / 32 % 4);
  queue.open.push_back(product);
  for (const Accumulators &held : queue.accumulators)
    if (held.d == product.d && int(held.values.size()) == product.n / 2) return;
  queue.accumulators.push_back({product.d, {product.d, product.d + product.n / 2}});
  std::memset(product.d, 0xFF, product.n / 2 * sizeof(float));
}

template <int N> inline void multiply_shared(float (&d)[N / 2], uint64_t a, uint64_t b, bool add, bool transposed_a = false, bool transposed_b = false) {
  static_assert(N % 8 == 0 && N <= 256, "wgmma has 8 to 256 columns");
  start_product({d, N, add, transposed_a, transposed_b, nullptr, {}, a, b});
}

template <int N> inline void multiply_registers(float (&d)[N / 2], const uint32_t *a, uint64_t b, bool add, bool transposed_b = true) {
  static_assert(N % 8 == 0 && N <= 256, "wgmma has 8 to 256 columns");
  start_product({d, N, add, false, transposed_b, a, {a[0], a[1], a[2], a[3]}, 0, b});
}

inline void products_commit() {
  Queue &queue = queues[current];
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
  queue.fenced = false;
}

inline std::vector<float> &accumulators_of(Queue &queue, const Product &product) {
  for (Accumulators &held : queue.accumulators)
    if (held.d == product.d) return held.values;
  fail("a product has no accumulators");
}

// Executes product `index` of group 0 of each lane of a warp.
inline void execute_product(unsigned warp, size_t index) {
  Queue *lanes = &queues[32 * warp];
  const Product &product = lanes[0].groups[0][index];
  Operands operands(product, warp % 4);
  const Operands &before = lanes[0].seen.front();
  if (std::memcmp(&operands, &before, sizeof(Operands)) != 0) fail("an operand of a product changes between its start and the wait for it");
  float a[16][16], b[16][256];
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++) a[i][k] = half_of(operands.a[i][k], 0);
  for (int k = 0; k < 16; k++)
    for (int j = 0; j < product.n; j++) b[k][j] = half_of(operands.b[j][k], 0);
  for (int lane = 0; lane < 32 && product.registers; lane++) {
    const Product &own = lanes[lane].groups[0][index];
    if (std::memcmp(own.registers, own.values, 16) != 0) fail("a register operand of a product changes before the wait for it");
    for (int i = 0; i < 8; i++) a[lane / 4 + i / 2 % 2 * 8][2 * (lane % 4) + i % 2 + i / 4 * 8] = half_of(own.values[i / 2], i % 2);
  }
  static float sums[16][256];
  std::memset(sums, 0, sizeof(sums));
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < product.n; j += 8)
      for (int k = 0; k < 16; k++)
        for (int c = 0; c < 8; c++) sums[i][j + c] += a[i][k] * b[k][j + c];
  for (int lane = 0; lane < 32; lane++) {
    const Product &own = lanes[lane].groups[0][index];
    std::vector<float> &values = accumulators_of(lanes[lane], own);
    for (int i = 0; i < product.n / 2; i++) {
      float sum = sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + 2 * (lane % 4) + i % 2];
      values[size_t(i)] = own.add ? values[size_t(i)] + sum : sum;
    }
  }
  lanes[0].seen.pop_front();
}

// Gives the accumulators of this thread that no product uses any more their values.
inline void finish_accumulators() {
  Queue &queue = queues[current];
  std::erase_if(queue.accumulators, [&](const Accumulators &held) {
    auto uses = [&](const Product &product) { return product.d == held.d; };
    bool used = std::any_of(queue.open.begin(), queue.open.end(), uses);
    for (auto &group : queue.groups) used = used || std::any_of(group.begin(), group.end(), uses);
    if (!used) std::copy(held.values.begin(), held.values.end(), held.d);
    return !used;
  });
}

// Waits until at most N groups of products of this warpgroup are in flight.
template <int N> inline void products_wait() {
  combined(
      0,
      [](auto &, unsigned char *) {
        unsigned warp = unsigned(current) / 32;
        while (int(queues[32 * warp].groups.size()) > N) {
          size_t count = queues[32 * warp].groups[0].size();
          for (unsigned lane = 1; lane < 32; lane++) {
            auto &groups = queues[32 * warp + lane].groups;
            if (groups.size() != queues[32 * warp].groups.size() || groups[0].size() != count) fail("the lanes of a warp commit different groups of products");
          }
          for (size_t i = 0; i < count; i++) execute_product(warp, i);
          for (unsigned lane = 0; lane < 32; lane++) queues[32 * warp + lane].groups.erase(queues[32 * warp + lane].groups.begin());
        }
      },
      [](auto &, int, const unsigned char *) { return 0; });
  finish_accumulators();
  queues[current].fenced = false;
}

inline void begin_asynchronous(unsigned threads) {
  box_copies.clear();
  phase_barriers.clear();
  queues.assign(threads, Queue());
  sequences.assign((threads + 127) / 128, {});
}

// Checks at the end of a thread that nothing is in flight.
inline void end_asynchronous() {
  if (!queues[current].open.empty() || !queues[current].groups.empty()) fail("ends before it has waited for its products");
}

// Checks at the end of a block that nothing is in flight.
inline void check_asynchronous() {
  if (!box_copies.empty()) fail("the block ends before its copies have arrived");
  for (uint64_t *barrier : phase_barriers)
    if (barrier_state(barrier).bytes != 0) fail("a barrier expects other bytes than have arrived");
}

} // namespace emulation
