// Kernels for the tests of the emulation (tests/hopper.rs): single operations, and a small pipeline
// with planted errors.
#include "../kernels/sm90/attention_sm90.cuh"

namespace {

// Copies a box to shared memory, and all bytes of that to `out`.
void copy_probe(const TensorMap map, unsigned *out, int words, int x, int y, int z) {
  DYNAMIC_SHARED(shared);
  uint64_t *barrier = reinterpret_cast<uint64_t *>(shared + 4 * words);
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_expect(barrier, int(map.box_bytes()));
    copy_box(shared, &map, barrier, x, y, z);
  }
  __syncthreads();
  barrier_wait(barrier, 0);
  for (int i = int(threadIdx.x); i < words; i += int(blockDim.x)) out[i] = reinterpret_cast<const unsigned *>(shared)[i];
}

// out [64, 64] = a b for operands in the shared memory `image`, with these descriptors, to which the
// address of the image is added. If `from_registers` is 1, `a` comes from 64 rows of 16 at its start.
void product_probe(const unsigned *image, int words, long long a, long long b, int transposed_a, int transposed_b, int from_registers, float *out) {
  DYNAMIC_SHARED(shared);
  for (int i = int(threadIdx.x); i < words; i += int(blockDim.x)) reinterpret_cast<unsigned *>(shared)[i] = image[i];
  __syncthreads();
  uint64_t start = shared_address(shared) >> 4;
  float sums[32];
  int row = warp() * 16 + lane() / 4, column = 2 * (lane() % 4);
  uint32_t registers[4];
  for (int i = 0; i < 4; i++) std::memcpy(&registers[i], shared + ((row + i % 2 * 8) * 16 + column + i / 2 * 8) * 2, 4);
  products_fence();
  if (from_registers) multiply_registers<64>(sums, registers, uint64_t(b) + start, false, transposed_b);
  else multiply_shared<64>(sums, uint64_t(a) + start, uint64_t(b) + start, false, transposed_a, transposed_b);
  products_commit();
  products_wait<0>();
  for (int i = 0; i < 32; i++) out[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + column + i % 2] = sums[i];
}

enum Planted {
  NONE,
  STRIDE_OF_DESCRIPTOR,
  LEAD_OF_DESCRIPTOR,
  PERMUTATION_OF_DESCRIPTOR,
  ROWS_OF_DESCRIPTOR,
  PARITY_OF_FULL,
  PARITY_OF_EMPTY,
  NO_WAIT_FOR_FULL,
  NO_WAIT_FOR_EMPTY,
  NO_WAIT_FOR_SCORES,
  NO_WAIT_FOR_SUMS,
  RELEASE_BEFORE_WAIT,
  RELEASE_BY_ONE_WARP,
  RELEASE_TWICE,
  TOO_FEW_BYTES,
  NO_BYTES,
  NO_FENCE,
  NO_COMMIT,
  OPERAND_CHANGES,
  NO_INIT,
};

// out [64, 128] = the sum over tiles of 64 rows of `others` of (own others^T) others, with the scores
// rounded to bf16. One producer and one consumer warpgroup, and two buffers, as in attention.
void pipeline_probe(const HeadMaps own, const HeadMaps others, int tiles, int planted, float *out) {
  constexpr int D = 128, N = 64, STAGES = 2, BYTES = Panels<D, N>::BYTES;
  DYNAMIC_SHARED(shared);
  unsigned char *own_tile = shared, *stages = own_tile + BYTES;
  uint64_t *ready = reinterpret_cast<uint64_t *>(stages + STAGES * BYTES), *full = ready + 1, *empty = full + STAGES;
  auto is = [planted](int error) { return planted == error; };
  if (threadIdx.x == 0) {
    barrier_init(ready, 1);
    for (int i = 0; i < STAGES && !is(NO_INIT); i++) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, is(RELEASE_BY_ONE_WARP) ? 1 : 4);
    }
    barriers_ready();
  }
  __syncthreads();
  Ring<STAGES> ring;
  if (warp() < 4) {
    if (threadIdx.x != 0) return;
    barrier_expect(ready, BYTES);
    Panels<D, N>::copy(own_tile, own, ready, 0, 0);
    for (int tile = 0; tile < tiles; tile++) {
      if (!is(NO_WAIT_FOR_EMPTY)) barrier_wait(empty + ring.stage, ring.parity ^ (is(PARITY_OF_EMPTY) ? 0 : 1));
      barrier_expect(full + ring.stage, is(TOO_FEW_BYTES) ? BYTES / 2 : is(NO_BYTES) ? 0 : BYTES);
      Panels<D, N>::copy(stages + ring.stage * BYTES, others, full + ring.stage, 0, tile * N);
      ring.next();
    }
    return;
  }
  Sums<D> sums;
  float scores[N / 2];
  uint32_t weights[N / 4];
  sums.clear();
  barrier_wait(ready, 0);
  for (int tile = 0; tile < tiles; tile++) {
    const unsigned char *rows = stages + ring.stage * BYTES;
    if (!is(NO_WAIT_FOR_FULL)) barrier_wait(full + ring.stage, ring.parity ^ (is(PARITY_OF_FULL) ? 1 : 0));
    if (!is(NO_FENCE)) products_fence();
    for (int k = 0; k < D / 16; k++) {
      uint64_t b = Panels<D, N>::columns(rows, 0, k);
      if (is(STRIDE_OF_DESCRIPTOR)) b ^= uint64_t(1024 >> 4 ^ 512 >> 4) << 32;
      if (is(PERMUTATION_OF_DESCRIPTOR)) b ^= uint64_t(1 ^ 2) << 62; // 64 bytes
      multiply_shared<N>(scores, Panels<D, N>::columns(own_tile, 0, k), b, k > 0);
    }
    if (!is(NO_COMMIT)) products_commit();
    if (!is(NO_WAIT_FOR_SCORES)) products_wait<0>();
    hold(scores);
    pack_operand<N>(weights, scores);
    products_fence();
    for (int k = 0; k < N / 16; k++) {
      int lead = Panels<D, N>::WIDE_BYTES >> (is(LEAD_OF_DESCRIPTOR) ? 1 : 0), row_bytes = is(ROWS_OF_DESCRIPTOR) ? 64 : 128;
      multiply_registers<D>(sums.wide, weights + 4 * k, matrix_at<128>(rows + k * 16 * row_bytes, lead), true);
    }
    products_commit();
    if (is(OPERAND_CHANGES)) weights[0]++;
    if (is(RELEASE_BEFORE_WAIT)) release(empty + ring.stage);
    if (!is(NO_WAIT_FOR_SUMS)) products_wait<0>();
    sums.hold_all();
    if (is(RELEASE_BY_ONE_WARP) && warp() != 4) __syncwarp();
    else if (!is(RELEASE_BEFORE_WAIT)) release(empty + ring.stage);
    if (is(RELEASE_TWICE)) release(empty + ring.stage);
    ring.next();
  }
  for (int i = 0; i < D / 2; i++) out[(warp() % 4 * 16 + lane() / 4 + i / 2 % 2 * 8) * D + i / 4 * 8 + 2 * (lane() % 4) + i % 2] = sums.wide[i];
}

emulation::Export copy_export("probe_sm90_copy_bf16", copy_probe);
emulation::Export product_export("probe_sm90_product_bf16", product_probe);
emulation::Export pipeline_export("probe_sm90_pipeline_bf16", pipeline_probe);

} // namespace
