//! Tensor operations (ops) of the model, each with a forward and a backward function.
//!
//! Shapes: `T` tokens, `P` patches, `N` rows of any kind, `M` selected rows or outputs of a linear
//! layer, `S` supervised rows, `D` hidden size, `K` inputs of a linear layer, `H`/`Hkv` heads, `Dh`
//! head dim, `V` vocabulary.
//!
//! Conventions of every op:
//! - Tensors are storage only. Ops record no autograd graph; the caller calls the backward
//!   functions.
//! - Operands are contiguous (exceptions are documented) and share one compute dtype, `f32` or
//!   `bf16`. Arithmetic is in `f32`.
//! - `rstd`, `stats`, `lse`, `nll` and all gradient buffers (`dw`, `db`, `dtable`) are `f32`.
//! - Backward functions *add* to gradient buffers in place. An op may overwrite an operand that it
//!   takes by value, clones included, and returns a result in that memory. Other results are new
//!   tensors.
//! - Results have the same bits for any number of threads.
//! - An operand that is written in place must not share memory with another operand.
//! - Errors name the op, the operand, the value found and the value expected.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

/// The allocator of test programs: it lists allocations while kernels are executed from their PTX.
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
#[macro_export]
macro_rules! test_allocator {
    () => {
        #[global_allocator]
        static ALLOCATOR: $crate::PtxAllocator = $crate::PtxAllocator;
    };
}
/// Without emulated kernels, test programs have the allocator of the system.
#[cfg(not(all(feature = "cuda-emulation", not(feature = "cuda"))))]
#[macro_export]
macro_rules! test_allocator {
    () => {};
}
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
pub use cuda::PtxAllocator;
#[cfg(test)]
test_allocator!();

mod adafactor;
mod adamw;
mod attention;
mod bytes;
mod causal_conv1d;
mod column_shares;
pub mod cpu;
mod cuda;
mod delta_gates;
mod driver_version;
mod dropout;
mod dropout_linear;
mod e4m3;
mod e4m3_linear;
mod eight_bit;
mod embedding;
mod expert_swiglu;
mod gated_delta_rule;
mod gated_rms_norm;
mod gelu;
mod gpu;
mod grouped_linear;
mod host_copies;
mod launch;
mod layer_norm;
mod layer_scale;
mod linear;
mod linear_cross_entropy;
mod muon;
mod nf4;
mod norm_geometry;
mod progress;
mod rms_norm;
mod rope;
mod rope_heads;
mod route;
mod router_probabilities;
mod rows;
mod sigmoid_gate;
mod stochastic_rounding;
mod stored;
mod swiglu;
#[cfg(test)]
mod testing;
mod uploaded;
mod vision_rope;

pub use adafactor::{Adafactor, AdafactorUpdate, SecondMoment, adafactor_step};
pub use adamw::{
    AdamW, AdamWTensors, AdamWUpdate, SQUARES_BLOCK, adamw_step, clip_scale, clipped_update,
    fill_zero, fill_zero_all, squares_of_blocks, sum_of_squares, sums_of_squares,
    sums_of_squares_in_order,
};
#[cfg(feature = "flash-attn")]
pub use attention::FlashAttn;
pub use attention::{
    AttentionBackend, Flash, HeadExchange, Masked, Masking, Qkv, QkvGrad, Scores, Segments,
    decode_attention,
};
pub use bytes::{change_bytes, change_f32, with_bytes};
pub use causal_conv1d::{CONV_TAPS, causal_conv1d, causal_conv1d_backward};
pub use column_shares::join_column_sums;
pub use cpu::products::Store;
pub use cpu::{
    CachingAllocator, RecomputeInput, exit_when_out_of_memory, failed_gpu_allocation,
    memory_advice, set_memory_advice, set_predicted_memory, share_one_heap_under_a_limit,
};
#[cfg(feature = "cuda")]
pub use cuda::SideStream;
pub use delta_gates::{DeltaGatesGrad, delta_gates, delta_gates_backward};
pub use driver_version::needed_driver;
pub use dropout::{DropoutMask, dropout, dropout_add};
pub use dropout_linear::{
    dropout_linear, dropout_linear_backward, dropout_linear_backward_input_add,
};
pub use e4m3_linear::{
    E4m3Sums, Matmul, e4m3_linear, e4m3_linear_backward_input, e4m3_linear_backward_weight,
    gpu_without_e4m3,
};
pub use eight_bit::EIGHT_BIT_BLOCK;
pub use embedding::{
    embedding, embedding_backward, interpolate_rows, interpolate_rows_add,
    interpolate_rows_backward,
};
pub use expert_swiglu::{expert_swiglu, expert_swiglu_backward};
pub use gated_delta_rule::{
    DeltaGrad, DeltaHeads, DeltaInputs, GPU_DELTA_BYTES, gated_delta_rule,
    gated_delta_rule_backward,
};
pub use gated_rms_norm::{gated_rms_norm, gated_rms_norm_backward};
pub use gelu::{Gelu, gelu, gelu_backward};
pub use gpu::{
    CUDA_BUILD, GpuMemory, GpuProperties, copy_from_host, copy_to_host, count_gpus, exit_at_once,
    gpu_memory, gpu_of_rank, gpu_properties, open_gpu, upload, upload_rounded,
};
pub use grouped_linear::{
    ExpertLayout, grouped_linear, grouped_linear_backward_input, grouped_linear_backward_weight,
};
pub use host_copies::HostCopies;
pub use layer_norm::{layer_norm, layer_norm_apply, layer_norm_backward};
pub use layer_scale::{layer_scale_add, layer_scale_backward};
pub use linear::{
    LowRank, bias_backward, linear, linear_add, linear_backward_input, linear_backward_input_add,
    linear_backward_input_low_rank, linear_backward_input_times, linear_backward_weight,
    linear_backward_weight_into, linear_low_rank, linear_times,
};
pub use linear_cross_entropy::{
    GPU_LOGITS_BYTES, LOGITS_BYTES, LossScale, linear_cross_entropy, linear_cross_entropy_backward,
};
pub use muon::{MuonUpdate, muon_step};
pub use nf4::{Nf4, Nf4Parts, is_nf4_map, nf4_bytes, nf4_maps, nf4_places, nf4_span};
pub use progress::Progress;
pub use rms_norm::{NormScale, rms_norm, rms_norm_apply, rms_norm_backward};
pub use rope::{RopeTable, qk_norm_rope, qk_norm_rope_backward};
pub use rope_heads::{rope_heads, rope_heads_backward};
pub use route::{Routing, combine, expert_rows, expert_rows_backward, route, route_backward};
pub use router_probabilities::{router_probabilities, router_probabilities_backward};
pub use rows::{add_in_place, gather_rows, index_add, index_copy, scatter_rows, zero_rows};
pub use sigmoid_gate::{sigmoid_gate, sigmoid_gate_backward};
pub use simd::{SimdError, SimdLevel, simd_level};
pub use swiglu::{swiglu, swiglu_backward};
pub use vision_rope::{vision_rope_merge_backward, vision_rope_split};
