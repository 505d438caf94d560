// Emulation of CUDA kernels on the host, to test them without a GPU. Each thread of a block is a
// fiber, and blocks run one after the other.
//
// It detects: wrong indices and arithmetic; barriers that not all threads reach; a missing barrier
// or wait (warps run in random order, each as far as barriers allow; shared memory starts as NaN
// and is NaN between the start of a copy and the wait for it); accesses beyond the shared memory of
// the launch; unaligned 16-byte accesses. It does not model memory ordering, registers or speed.
// The kernels for compute capability 9.0 alone do not run this way, only their PTX does (crates/ptx).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#ifndef __x86_64__
#error "the emulation switches fibers in x86-64 assembly"
#endif

#define __global__
#ifdef __clang__
#define __device__
#else
// g++ merges functions that differ only in the ranges of values that it derived in them
// (https://gcc.gnu.org/PR113907), and has so computed wrong addresses of tiles.
#define __device__ __attribute__((no_icf))
#endif
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(n) alignas(n)
#define DYNAMIC_SHARED(name) unsigned char *name = emulation::shared_memory
#define EXPORT(kernel) static emulation::Export export_##kernel(#kernel, kernel);

namespace emulation {

struct Dim3 {
  unsigned x, y, z;
};

inline unsigned char *shared_memory; // shared memory of the current block, 128-byte aligned
constexpr size_t SHARED = 163 << 10;  // limit of an sm_80 block; select.rs checks that of the GPU

// Whether an address is in the dynamic shared memory. (`__shared__` variables are elsewhere.)
inline bool in_shared_memory(const void *at) {
  auto byte = static_cast<const unsigned char *>(at);
  return byte >= shared_memory && byte < shared_memory + SHARED;
}

struct Copy {
  void *to;
  const void *from; // null means zeros
};

struct Warp {
  int arrived = 0;
  unsigned generation = 0;
  alignas(16) unsigned char slots[2][32][64]; // two, because a lane may be one operation ahead
  alignas(16) unsigned char results[2][512];  // output of `combine`, by the last lane that arrives
};

struct Fiber {
  void *stack_pointer = nullptr;
  std::vector<unsigned char> stack;
  std::vector<std::vector<Copy>> groups; // committed groups of copies
  std::vector<Copy> open;                // copies not committed yet
  unsigned operations = 0;               // number of warp operations of this lane
  bool finished = false;
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline int current;      // index of the current fiber
inline int alive;        // number of unfinished fibers
inline int at_barrier;
inline unsigned barrier_generation;
struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};
inline Barrier named_barriers[16];
inline long named_arrivals, block_arrivals;
inline void *scheduler_pointer;
inline const char *kernel_name;
inline void (*body)(void *);
inline void *body_data;

// Saves the callee-saved registers on this stack, stores the stack pointer in *from, and continues
// at `to`.
extern "C" void trainer_emulation_switch(void **from, void *to);

// Ends the launch with an error. Its threads never continue.
[[noreturn]] void fail(const char *what);

inline void yield() { trainer_emulation_switch(&fibers[current].stack_pointer, scheduler_pointer); }

inline unsigned next_random() {
  static uint64_t state = 0x9E3779B97F4A7C15;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return unsigned(state >> 33);
}

inline void release_barrier() {
  at_barrier = 0;
  barrier_generation++;
}

inline void sync_threads() {
  unsigned generation = barrier_generation;
  block_arrivals++;
  if (++at_barrier == alive) release_barrier();
  while (generation == barrier_generation) yield();
}

template <int WARPS> inline void sync_warps(int number) {
  if (number < 1 || number > 15) fail("named barriers have the numbers 1 to 15");
  Barrier &barrier = named_barriers[number];
  unsigned generation = barrier.generation;
  named_arrivals++;
  if (++barrier.arrived == 32 * WARPS) {
    barrier.arrived = 0;
    barrier.generation++;
  }
  while (generation == barrier.generation) yield();
}

// A warp operation. Each lane passes a value. The last one to arrive calls
// `combine(values of all lanes, result)`, and then each lane returns
// `read(values of all lanes, lane, result)`.
template <class In, class Combine, class Read> inline auto combined(const In &in, Combine combine, Read read) {
  static_assert(sizeof(In) <= sizeof(Warp::slots[0][0]), "a slot is 64 bytes");
  int lane = current % 32;
  Warp &warp = warps[current / 32];
  unsigned operation = fibers[current].operations++;
  auto &slots = warp.slots[operation % 2];
  auto &result = warp.results[operation % 2];
  std::memcpy(slots[lane], &in, sizeof(In));
  auto value = [&](int of) -> const In & { return *reinterpret_cast<const In *>(slots[of]); };
  if (++warp.arrived == 32) {
    combine(value, result);
    warp.arrived = 0;
    warp.generation++;
  }
  while (warp.generation == operation) yield();
  return read(value, lane, result);
}

// A warp operation. Each lane passes a value and, once all have arrived, returns
// `read(values of all lanes, lane)`.
template <class In, class Read> inline auto collective(const In &in, Read read) {
  return combined(in, [](auto &, auto &) {}, [&](auto &all, int lane, auto &) { return read(all, lane); });
}

template <class V> inline V shuffle_xor(V value, int mask) {
  return collective(value, [mask](auto all, int lane) { return all(lane ^ mask); });
}

template <class V> inline V shuffle(V value, int from) {
  return collective(value, [from](auto all, int) { return all(from % 32); });
}

inline float half_of(uint32_t word, int high) {
  uint32_t bits = high ? word & 0xFFFF0000u : word << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Operands {
    uint32_t a[4], b[2];
  } mine;
  std::memcpy(mine.a, a, 16);
  std::memcpy(mine.b, b, 8);
  combined(
      mine,
      [](auto &all, unsigned char *result) {
        float left[16][16], right[16][8], sums[16][8] = {};
        for (int lane = 0; lane < 32; lane++) {
          const Operands &operands = all(lane);
          int g = lane / 4, t = lane % 4;
          for (int i = 0; i < 8; i++) left[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = half_of(operands.a[i / 2], i % 2);
          for (int i = 0; i < 4; i++) right[2 * t + i % 2 + i / 2 * 8][g] = half_of(operands.b[i / 2], i % 2);
        }
        for (int row = 0; row < 16; row++)
          for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) sums[row][column] += left[row][k] * right[k][column];
        std::memcpy(result, sums, sizeof(sums));
      },
      [&](auto &, int lane, const unsigned char *result) {
        auto sums = reinterpret_cast<const float(*)[8]>(result);
        for (int i = 0; i < 4; i++) c[i] += sums[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
      });
}

inline void check_aligned(const void *address) {
  if (reinterpret_cast<uintptr_t>(address) % 16) fail("unaligned 16-byte access");
}

template <bool TRANSPOSED> inline void load_four(uint32_t (&to)[4], const void *row) {
  check_aligned(row);
  combined(
      row,
      [](auto &all, unsigned char *result) {
        for (int i = 0; i < 32; i++) std::memcpy(result + 16 * i, all(i), 16);
      },
      [&](auto &, int lane, const unsigned char *result) {
        for (int i = 0; i < 4; i++) {
          uint16_t halves[2];
          for (int j = 0; j < 2; j++) {
            int r = TRANSPOSED ? 2 * (lane % 4) + j : lane / 4, c = TRANSPOSED ? lane / 4 : 2 * (lane % 4) + j;
            std::memcpy(&halves[j], result + 16 * (8 * i + r) + 2 * c, 2);
          }
          to[i] = uint32_t(halves[0]) | uint32_t(halves[1]) << 16;
        }
      });
}

inline void load_matrices(uint32_t (&to)[4], const void *row) { load_four<false>(to, row); }
inline void load_matrices_transposed(uint32_t (&to)[4], const void *row) { load_four<true>(to, row); }

inline void copy_async(void *shared, const void *global, bool valid) {
  check_aligned(shared);
  if (valid) check_aligned(global);
  std::memset(shared, 0xFF, 16); // the copy may arrive at any time, so the old contents must not be read
  fibers[current].open.push_back({shared, valid ? global : nullptr});
}

inline void commit_copies() {
  Fiber &fiber = fibers[current];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

template <int N> inline void wait_copies() {
  auto &groups = fibers[current].groups;
  while (int(groups.size()) > N) {
    for (const Copy &copy : groups.front()) {
      if (copy.from) std::memcpy(copy.to, copy.from, 16);
      else std::memset(copy.to, 0, 16);
    }
    groups.erase(groups.begin());
  }
}

using Run = void (*)(void *function, void **arguments);

struct Entry {
  void *function;
  Run run;
};

inline std::map<std::string, Entry> &entries() {
  static std::map<std::string, Entry> all;
  return all;
}

template <class... Arguments, size_t... I>
inline void apply(void (*function)(Arguments...), void **arguments, std::index_sequence<I...>) {
  function(*static_cast<std::remove_cv_t<Arguments> *>(arguments[I])...);
}

struct Export {
  template <class... Arguments> Export(const char *name, void (*function)(Arguments...)) {
    entries()[name] = {reinterpret_cast<void *>(function), [](void *pointer, void **arguments) {
                         apply(reinterpret_cast<void (*)(Arguments...)>(pointer), arguments, std::index_sequence_for<Arguments...>());
                       }};
  }
};

} // namespace emulation

inline emulation::Dim3 threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { emulation::sync_threads(); }
inline void __syncwarp() {
  emulation::collective(0, [](auto, int) { return 0; });
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float exp2f_fast(float x) { return std::exp2(x); }
template <class T> inline T __ldg(const T *from) { return *from; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
