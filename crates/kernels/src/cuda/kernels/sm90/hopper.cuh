// Instructions of compute capability 9.0: barriers in shared memory (mbarrier), copies of boxes of a
// tensor (TMA), and products of a warpgroup of 128 threads (wgmma). All of them are asynchronous.
// The C++ compiler of the host cannot compile them; tests execute the PTX (crates/ptx).
#pragma once
#include "common.cuh"

// The dynamic shared memory, aligned to the 1,024 bytes after which permutations of tiles repeat.
#define HOPPER_SHARED(name)                                                                                                                   \
  extern __shared__ __align__(1024) unsigned char name[];                                                                                     \
  if (shared_address(name) % 1024 != 0) __trap()

namespace {

constexpr int GROUP = 128; // threads of a warpgroup

// A CUtensorMap.
struct alignas(128) TensorMap {
  uint64_t words[16];
};

__device__ __forceinline__ uint32_t shared_address(const void *at) { return uint32_t(__cvta_generic_to_shared(at)); }

// Initialises a barrier whose phases end after this number of arrivals.
__device__ __forceinline__ void barrier_init(uint64_t *barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to copies. Threads need __syncthreads as well.
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// Makes what this thread has written to shared memory visible to products. Other threads need a barrier as
// well.
__device__ __forceinline__ void products_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and makes the phase wait for this number of bytes of copies as well.
__device__ __forceinline__ void barrier_expect(uint64_t *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Waits for the end of the current phase if it has this parity. The phase before has the other one.
__device__ __forceinline__ void barrier_wait(const uint64_t *barrier, int parity) {
  uint32_t ended;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ended)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!ended);
}

// Starts to copy the box at (x, y, z) of a tensor. Elements outside of the tensor become zeros.
__device__ __forceinline__ void copy_box(void *to, const TensorMap *map, uint64_t *barrier, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
               "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// A group of products begins with a fence and ends with a commit.
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups of products are in flight.
template <int N> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Keeps the compiler from reading accumulators before the wait that this follows.
template <int COUNT> __device__ __forceinline__ void hold(float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Changes the number of registers of the threads of a warpgroup.
template <int COUNT> __device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> __device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Arrives at a named barrier for WARPS warps without a wait.
template <int WARPS> __device__ __forceinline__ void arrive_warps(int barrier) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "n"(WARPS * WARP) : "memory");
}

// d [64, N] (+)= a [64, 16] b [N, 16]^T, with both operands in shared memory and bf16 columns adjacent.
template <int N> __device__ __forceinline__ void multiply_shared(float (&d)[N / 2], uint64_t a, uint64_t b, bool add);
// d [64, N] (+)= a [64, 16] b [16, N], with `a` in registers as in `mma` (a warp has 16 rows), and `b`
// in shared memory with the N bf16 of a row adjacent.
template <int N> __device__ __forceinline__ void multiply_registers(float (&d)[N / 2], const uint32_t *a, uint64_t b, bool add);

// d [64, N] (+)= a [16, 64]^T b [16, N], with both operands in shared memory and the bf16 of a row adjacent.
template <int N> __device__ __forceinline__ void multiply_transposed(float (&d)[N / 2], uint64_t a, uint64_t b, bool add);

// Operands of eight accumulators, and of more.
#define D8(how, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), how(d[i + 6]), how(d[i + 7])
#define D16(how, i) D8(how, i), D8(how, i + 8)
#define D24(how, i) D16(how, i), D8(how, i + 16)
#define D32(how, i) D24(how, i), D8(how, i + 24)
#define D40(how, i) D32(how, i), D8(how, i + 32)
#define D48(how, i) D40(how, i), D8(how, i + 40)
#define D64(how, i) D48(how, i), D8(how, i + 48), D8(how, i + 56)
#define D128(how, i) D64(how, i), D64(how, i + 64)
// Their places in the text of the instruction.
#define P8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define P16 P8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define P24 P16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define P32 P24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define P40 P32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define P48 P40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define P64 P48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define P128 P64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// COUNT accumulators; the places of both descriptors and of the predicate follow them. Sums that start at
// zero are results only: the assembler waits for all products before one whose sums were operands of
// other instructions.
#define MULTIPLY_SHARED(N, COUNT, A, B, ADD) MULTIPLY_BOTH(shared, "0, 0", N, COUNT, A, B, ADD)
#define MULTIPLY_TRANSPOSED(N, COUNT, A, B, ADD) MULTIPLY_BOTH(transposed, "1, 1", N, COUNT, A, B, ADD)
#define MULTIPLY_BOTH(name, TRANSPOSED, N, COUNT, A, B, ADD)                                                                              \
  template <> __device__ __forceinline__ void multiply_##name<N>(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {                   \
    if (add)                                                                                                                              \
      PRODUCT(N, COUNT, "+f", A, B, ADD, TRANSPOSED);                                                                                     \
    else                                                                                                                                  \
      PRODUCT(N, COUNT, "=f", A, B, ADD, TRANSPOSED);                                                                                     \
  }
#define PRODUCT(N, COUNT, how, A, B, ADD, TRANSPOSED)                                                                                     \
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" P##COUNT "}, " A ", " B \
               ", p, 1, 1, " TRANSPOSED ";\n}"                                                                                           \
               : D##COUNT(how, 0)                                                                                                         \
               : "l"(a), "l"(b), "r"(int(add)))
// The places of the four registers, the descriptor and the predicate follow the accumulators.
#define MULTIPLY_REGISTERS(N, COUNT, A, B, ADD)                                                                                           \
  template <> __device__ __forceinline__ void multiply_registers<N>(float (&d)[N / 2], const uint32_t *a, uint64_t b, bool add) {         \
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" P##COUNT "}, {" A "}, " B \
                 ", p, 1, 1, 1;\n}"                                                                                                       \
                 : D##COUNT("+f", 0)                                                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));                                                    \
  }

MULTIPLY_SHARED(48, 24, "%24", "%25", "%26")
MULTIPLY_SHARED(64, 32, "%32", "%33", "%34")
MULTIPLY_SHARED(80, 40, "%40", "%41", "%42")
MULTIPLY_SHARED(96, 48, "%48", "%49", "%50")
MULTIPLY_SHARED(128, 64, "%64", "%65", "%66")
MULTIPLY_TRANSPOSED(16, 8, "%8", "%9", "%10")
MULTIPLY_TRANSPOSED(32, 16, "%16", "%17", "%18")
MULTIPLY_TRANSPOSED(64, 32, "%32", "%33", "%34")
MULTIPLY_REGISTERS(16, 8, "%8, %9, %10, %11", "%12", "%13")
MULTIPLY_REGISTERS(64, 32, "%32, %33, %34, %35", "%36", "%37")
MULTIPLY_REGISTERS(128, 64, "%64, %65, %66, %67", "%68", "%69")
MULTIPLY_REGISTERS(256, 128, "%128, %129, %130, %131", "%132", "%133")

// Descriptor of a matrix in shared memory with rows of WIDTH bytes (128 or 32), in the permutation of
// copy_box. Eight rows follow each other without a gap. If the product sums over rows, `lead` is the
// distance in bytes from columns of WIDTH bytes to the next ones.
template <int WIDTH> __device__ __forceinline__ uint64_t matrix_at(const void *start, int lead = 16) {
  static_assert(WIDTH == 128 || WIDTH == 32, "these widths are in use");
  constexpr uint64_t MODE = WIDTH == 128 ? 1 : 3;
  return uint64_t((shared_address(start) & 0x3FFFF) >> 4) | uint64_t(unsigned(lead) >> 4) << 16 | uint64_t(8 * WIDTH >> 4) << 32 | MODE << 62;
}

// Stages of a ring of buffers, and the parity of the phase of their barriers.
template <int STAGES> struct Ring {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

} // namespace
