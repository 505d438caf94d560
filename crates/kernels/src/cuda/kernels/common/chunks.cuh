// Accesses to several adjacent elements at once, and common parts of the row-wise kernels.
#pragma once

#include "common.cuh"

namespace {

// Type of a single memory access. The compiler may split the assignment of a struct into words
// (nvcc 13.0 does).
template <int BYTES> struct Access;
#ifndef EMULATION
template <> struct Access<16> { using Type = uint4; };
template <> struct Access<8> { using Type = uint2; };
template <> struct Access<4> { using Type = uint32_t; };
template <> struct Access<2> { using Type = uint16_t; };
#endif

// E adjacent elements in their storage format: 16 bytes, 8 bytes or one element.
template <class T, int E> struct Chunk;

template <int E> struct alignas(4 * E) Chunk<float, E> {
  float words[E];
  __device__ __forceinline__ float get(int i) const { return words[i]; }
  __device__ __forceinline__ void set(const float *from) {
#pragma unroll
    for (int i = 0; i < E; i++) words[i] = from[i];
  }
};

template <int E> struct alignas(2 * E) Chunk<bf16, E> {
  uint32_t words[E / 2];
  __device__ __forceinline__ float get(int i) const { return bits_to_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16); }
  __device__ __forceinline__ void set(const float *from) {
#pragma unroll
    for (int i = 0; i < E / 2; i++) words[i] = pack(from[2 * i], from[2 * i + 1]);
  }
};

template <> struct Chunk<bf16, 1> {
  bf16 word;
  __device__ __forceinline__ float get(int) const { return widen(word); }
  __device__ __forceinline__ void set(const float *from) { word = narrow<bf16>(from[0]); }
};

template <int E, class T> __device__ __forceinline__ Chunk<T, E> load_chunk(const T *from) {
#ifdef EMULATION
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Chunk<T, E>)) emulation::fail("unaligned read of a chunk");
  Chunk<T, E> chunk;
  memcpy(&chunk, from, sizeof(chunk));
  return chunk;
#else
  auto raw = *reinterpret_cast<const typename Access<sizeof(Chunk<T, E>)>::Type *>(from);
  Chunk<T, E> chunk;
  memcpy(&chunk, &raw, sizeof(chunk));
  return chunk;
#endif
}

// Stores to global memory only: __stwb is `st.global`, also for an address in shared memory.
template <int E, class T> __device__ __forceinline__ void store_chunk(T *to, const Chunk<T, E> &chunk) {
#ifdef EMULATION
  if (reinterpret_cast<uintptr_t>(to) % sizeof(chunk)) emulation::fail("unaligned write of a chunk");
  if (emulation::in_shared_memory(to)) emulation::fail("a store to global memory has an address in shared memory");
  memcpy(to, &chunk, sizeof(chunk));
#else
  typename Access<sizeof(Chunk<T, E>)>::Type raw;
  memcpy(&raw, &chunk, sizeof(chunk));
  __stwb(reinterpret_cast<decltype(raw) *>(to), raw);
#endif
}

// Rounds E values to T and stores them to global memory, with at most 16 bytes per access.
template <int E, class T> __device__ __forceinline__ void store_floats(T *to, const float (&from)[E]) {
  constexpr int STEP = E < VECTOR<T> ? E : VECTOR<T>;
#pragma unroll
  for (int at = 0; at < E; at += STEP) {
    Chunk<T, STEP> chunk;
    chunk.set(from + at);
    store_chunk<STEP>(to + at, chunk);
  }
}

// Loads E floats, with 16 bytes per access if E allows it.
template <int E> __device__ __forceinline__ void load_floats(const float *from, float (&to)[E]) {
  constexpr int STEP = E % 4 == 0 ? 4 : E % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int at = 0; at < E; at += STEP) {
    Chunk<float, STEP> chunk = load_chunk<STEP>(from + at);
#pragma unroll
    for (int i = 0; i < STEP; i++) to[at + i] = chunk.get(i);
  }
}

// A chunk of zeros.
template <class T, int E> __device__ __forceinline__ Chunk<T, E> no_chunk() {
  float zeros[E] = {};
  Chunk<T, E> chunk;
  chunk.set(zeros);
  return chunk;
}

// Computes 1 / (1 + e^-x) with the fast exponential; the absolute error is a few 1e-7.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

} // namespace
