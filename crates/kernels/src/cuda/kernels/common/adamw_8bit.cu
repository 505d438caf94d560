// AdamW with moments in 8 bits; see crates/kernels/src/eight_bit.rs for the codes and adamw.cu for the lists.
//
// A warp processes 256 elements, which share a scale, in accesses of consecutive elements by
// consecutive lanes: 12 bytes per element with weights in f32.
// As in adamw.cu, the bits of an update do not depend on how a parameter is divided.
// nvcc: -fmad=false
#include "adamw.cuh"

namespace {

constexpr int SCALED = 256;                // elements that share a scale
constexpr int EACH = SCALED / WARP;        // elements of a lane
constexpr int CODES = 256;                 // entries of a map

// Maps and tensors of an update.
struct Updates {
  static constexpr int MOST = 20;
  float maps[2][CODES]; // of the first and of the second moment
  float *weight[MOST];  // f32, or null if `copy` is the only weight
  bf16 *copy[MOST];     // bf16 copy of the weight, or null if the model computes in f32
  uint8_t *codes[2][MOST];
  float *scales[2][MOST];
  const float *grad[MOST];
  long long count[MOST];
  float keep[MOST];      // factor of the weight after decay
  float step_size[MOST]; // learning rate, with bias correction of the first moment
  uint32_t seed[MOST];   // of the random numbers for bf16 weights
  uint32_t offset[MOST]; // index of the first element in the parameter, if this is a part of one
  int first[MOST + 1];
};

static_assert(sizeof(Updates) < 4000, "kernel arguments are limited to 4 KB");

// Code of the entry of `map` that is nearest to x, from -1 to 1; of the lower one on a midpoint.
__device__ __forceinline__ uint8_t nearest(const float *map, float x) {
  int low = 0; // number of midpoints below x
#pragma unroll
  for (int step = CODES / 2; step > 0; step /= 2) {
    int at = low + step - 1;
    if (x > (map[at] + map[at + 1]) / 2) low += step;
  }
  return uint8_t(low);
}

// Stores the codes and the scale of a moment. The scale is NaN if a value is, which fmaxf ignores.
__device__ __forceinline__ void store_codes(const float *map, const float (&x)[EACH], uint8_t *codes, float *scale, int count) {
  float largest = 0, nans = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    largest = fmaxf(largest, fabsf(x[i]));
    if ((float_to_bits(x[i]) & 0x7FFFFFFFu) > 0x7F800000u) nans++;
  }
  largest = warp_max(largest);
  if (warp_sum(nans) > 0) largest = bits_to_float(0x7FC00000u);
  if (lane() == 0) *scale = largest;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = i * WARP + lane();
    if (at < count) codes[at] = largest > 0 ? nearest(map, x[i] / largest) : uint8_t(0);
  }
}

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_8bit_f32(const __grid_constant__ Updates updates, int num, const float *grad_scale, float lerp, float beta2, float one_minus_beta2,
                   float inverse_root_correction2, float eps) {
  __shared__ float maps[2][CODES];
  for (int i = int(threadIdx.x); i < 2 * CODES; i += THREADS) maps[i / CODES][i % CODES] = updates.maps[i / CODES][i % CODES];
  __syncthreads();
  float scale = *grad_scale;
  if (scale < 0) return; // the gradients are not finite: change nothing
  Scalars s = {lerp, beta2, one_minus_beta2, inverse_root_correction2, eps};
  int tensor = tensor_of_block(updates, num);
  long long chunk = (long long)(int(blockIdx.x) - updates.first[tensor]) * CHUNK;
  long long end = min(chunk + CHUNK, updates.count[tensor]);
  for (long long start = chunk + warp() * SCALED; start < end; start += THREADS / WARP * SCALED) {
    int count = int(min((long long)SCALED, end - start));
    float *weight = element(updates.weight[tensor], start);
    bf16 *copy = element(updates.copy[tensor], start);
    float *scales[2] = {updates.scales[0][tensor] + start / SCALED, updates.scales[1][tensor] + start / SCALED};
    uint8_t *codes[2] = {updates.codes[0][tensor] + start, updates.codes[1][tensor] + start};
    float old[2] = {*scales[0], *scales[1]};
    float m[EACH] = {}, v[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int at = i * WARP + lane();
      if (at >= count) continue;
      Element e = {load_weight(weight, copy, at), maps[0][codes[0][at]] * old[0], maps[1][codes[1][at]] * old[1]};
      update(e, updates.grad[tensor][start + at] * scale, s, updates.keep[tensor], updates.step_size[tensor]);
      m[i] = e.exp_avg, v[i] = e.exp_avg_sq;
      store_weight(weight, copy, at, e.weight, updates.seed[tensor], updates.offset[tensor] + uint32_t(start) + at);
    }
    __syncwarp(); // all lanes have read the old scales
    store_codes(maps[0], m, codes[0], scales[0], count);
    store_codes(maps[1], v, codes[1], scales[1], count);
  }
}
EXPORT(adamw_8bit_f32)
