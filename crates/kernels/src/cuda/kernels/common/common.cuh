// Foundation of all kernels: element types, vector loads, warp and block reductions, tensor-core
// tiles.
//
// nvcc compiles the kernels for GPUs. With EMULATION defined, the C++ compiler of the host compiles
// the same source, and emulation.h runs each thread as a fiber. So kernels use hardware features
// only through the functions below; those in sm90/ are compiled by nvcc only.
#pragma once

#ifdef EMULATION
#include "emulation.h"
#else
#include <cuda_bf16.h>
#include <stdint.h>
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define EXPORT(kernel)
#endif

namespace {

constexpr int WARP = 32;
constexpr float INFINITE = __builtin_huge_valf();

// Storage type of bf16: two bytes, converted to and from float.
struct bf16 {
  uint16_t bits;
};

__device__ __forceinline__ float bits_to_float(uint32_t bits) {
#ifdef EMULATION
  float x;
  memcpy(&x, &bits, 4);
  return x;
#else
  return __uint_as_float(bits);
#endif
}

__device__ __forceinline__ uint32_t float_to_bits(float x) {
#ifdef EMULATION
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
#else
  return __float_as_uint(x);
#endif
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }

// Rounds to the nearest bf16, ties to even; propagates NaN.
__device__ __forceinline__ uint16_t round_bits(float x) {
#ifdef EMULATION
  uint32_t bits = float_to_bits(x);
  if (x != x) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
#else
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#endif
}

template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return bf16{round_bits(x)}; }

// Rounds x to the precision of T.
template <class T> __device__ __forceinline__ float rounded(float x) { return widen(narrow<T>(x)); }

// A normalised value times its weight, or times 1 + the weight if `added` is 1. Only the first form
// rounds the normalised value before.
template <class T> __device__ __forceinline__ float scaled(float normed, float weight, int added) {
  return added ? (1 + weight) * normed : weight * rounded<T>(normed);
}

#ifndef EMULATION
// 2^x by the special function unit: error of about two units in the last place, and 0 for results
// below 2^-126.
__device__ __forceinline__ float exp2f_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
#endif

// Hides the origin of a pointer or an offset from the compiler: values derived from it are then
// computed where they are used and do not occupy registers across a loop.
template <class T> __device__ __forceinline__ void compute_here(T *&pointer) {
#ifndef EMULATION
  asm volatile("" : "+l"(pointer));
#endif
}
__device__ __forceinline__ void compute_here(int &offset) {
#ifndef EMULATION
  asm volatile("" : "+r"(offset));
#endif
}

// The index of this thread, computed again: values derived from it must not occupy registers during the
// products.
__device__ __forceinline__ int thread_here() {
  int here = int(threadIdx.x);
  compute_here(here);
  return here;
}

// Packs two values as bf16 into a register, the first in the low half: an operand of the tensor
// cores.
__device__ __forceinline__ uint32_t pack(float low, float high) {
#ifdef EMULATION
  return uint32_t(round_bits(low)) | uint32_t(round_bits(high)) << 16;
#else
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&both);
#endif
}

// Sixteen bytes, accessed at once.
struct alignas(16) Bytes16 {
  uint32_t words[4];
};

// Number of elements of T in sixteen bytes.
template <class T> constexpr int VECTOR = 16 / int(sizeof(T));

// Loads VECTOR<T> elements from a 16-byte aligned address.
template <class T> __device__ __forceinline__ void load_vector(const T *from, float *to) {
  Bytes16 raw = *reinterpret_cast<const Bytes16 *>(from);
  const T *elements = reinterpret_cast<const T *>(&raw);
#pragma unroll
  for (int i = 0; i < VECTOR<T>; i++) to[i] = widen(elements[i]);
}

// Stores VECTOR<T> elements to a 16-byte aligned address.
template <class T> __device__ __forceinline__ void store_vector(T *to, const float *from) {
  Bytes16 raw;
  T *elements = reinterpret_cast<T *>(&raw);
#pragma unroll
  for (int i = 0; i < VECTOR<T>; i++) elements[i] = narrow<T>(from[i]);
  *reinterpret_cast<Bytes16 *>(to) = raw;
}

__device__ __forceinline__ int lane() { return int(threadIdx.x) % WARP; }
__device__ __forceinline__ int warp() { return int(threadIdx.x) / WARP; }

#ifdef EMULATION
using emulation::shuffle_xor;
using emulation::shuffle;
#else
template <class V> __device__ __forceinline__ V shuffle_xor(V value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }
template <class V> __device__ __forceinline__ V shuffle(V value, int from) { return __shfl_sync(0xFFFFFFFFu, value, from); }
#endif

// Returns the sum over the warp to every lane. All 32 lanes must call it.
template <class V> __device__ __forceinline__ V warp_sum(V value) {
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) value = fmaxf(value, shuffle_xor(value, mask));
  return value;
}

// Returns the sum over the block (at most 32 whole warps) to every thread, added in a fixed order.
template <class V> __device__ __forceinline__ V block_sum(V value) {
  __shared__ V partial[WARP];
  value = warp_sum(value);
  __syncthreads(); // protects `partial` from the previous call
  if (lane() == 0) partial[warp()] = value;
  __syncthreads();
  value = lane() < int(blockDim.x) / WARP ? partial[lane()] : V(0);
  return warp_sum(value);
}

__device__ __forceinline__ float block_max(float value) {
  __shared__ float partial[WARP];
  value = warp_max(value);
  __syncthreads();
  if (lane() == 0) partial[warp()] = value;
  __syncthreads();
  value = lane() < int(blockDim.x) / WARP ? partial[lane()] : -INFINITE;
  return warp_max(value);
}

// One tile of the tensor cores: c [16, 8] += a [16, 16] b [16, 8], with bf16 operands and f32 sums.
// With g = lane / 4 and t = lane % 4: a holds (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8),
// two columns each; b holds rows 2t, 2t + 1 and 2t + 8, 2t + 9 of column g; c holds (g, 2t),
// (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#ifdef EMULATION
using emulation::mma;
using emulation::load_matrices;
using emulation::load_matrices_transposed;
using emulation::copy_async;
using emulation::commit_copies;
using emulation::wait_copies;
using emulation::sync_warps;
#else
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8 x 8 bf16 matrices from shared memory. Lanes 8i .. 8i + 7 pass the 16-byte aligned
// addresses of the rows of matrix i. Register i of a lane receives columns 2 (lane % 4) and the
// next of row lane / 4 of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void *row) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// Same for the transposed matrices: register i receives rows 2 (lane % 4) and the next of column
// lane / 4.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], const void *row) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// Starts an asynchronous copy of sixteen bytes from global to shared memory. If `valid` is false,
// it writes zeros and reads nothing.
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool valid) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// Barrier for the WARPS whole warps that use the same `barrier` (1 .. 15; __syncthreads is 0).
template <int WARPS> __device__ __forceinline__ void sync_warps(int barrier) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "n"(WARPS * WARP) : "memory");
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most N groups of copies of this thread are in flight. Other threads see the bytes
// after __syncthreads().
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory"); }
#endif

// A bijection whose every bit depends on all bits of x, as in crates/kernels/src/moments.rs.
__device__ __forceinline__ uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Index of the tensor of this block, of the `num` of a launch. Tensor i has the blocks first[i] .. first[i + 1].
template <class List> __device__ __forceinline__ int tensor_of_block(const List &list, int num) {
  int low = 0, high = num; // first[low] <= block < first[high]
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (list.first[middle] <= int(blockIdx.x)) low = middle;
    else high = middle;
  }
  return low;
}

} // namespace
