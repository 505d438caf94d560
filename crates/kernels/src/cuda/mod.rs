//! CUDA kernels, and the code that launches them. Most ops have one `.cu` file.
//!
//! Each function has the contract of the function with the same name in the root of this crate, which
//! validates the operands and calls this module if they are on a GPU. `build.rs` compiles the kernels
//! with the feature `cuda`. With `cuda-emulation` the same sources run on the host, with one fiber per
//! CUDA thread, or their PTX is executed (`interpreted`; the only way for the kernels in `sm90/`), and
//! the same launch code takes CPU tensors, so that tests need no GPU. If the environment variable
//! `TRAINER_EMULATE_CUDA` is set, all ops in all tests run this way.

pub(super) mod adafactor;
mod adamw;
mod attention;
#[cfg(feature = "cuda")]
mod blas;
#[cfg(feature = "cuda")]
mod blas_call;
mod causal_conv1d;
mod delta_gates;
#[cfg(all(feature = "cuda", unix))]
mod download;
#[cfg(any(feature = "cuda", test))]
mod driver;
mod dropout;
mod e4m3;
mod embedding;
mod gated_delta_rule;
mod gated_rms_norm;
mod gemm;
mod grouped_linear;
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
mod interpreted;
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
pub use interpreted::PtxAllocator;
mod launch;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
#[cfg(feature = "cuda")]
mod module;
mod muon;
mod nf4;
mod norm;
mod pointwise;
#[cfg(any(feature = "cuda", test))]
mod product;
mod rms_norm;
mod rope;
mod route;
mod rows;
mod select;
#[cfg(feature = "cuda")]
mod side_stream;
mod tensor_map;
#[cfg(test)]
#[cfg(not(feature = "cuda"))]
mod tests;
#[cfg(feature = "cuda")]
mod upload;
mod uploaded;

pub(super) use adamw::{
    adamw_step, clipped_update, fill_zero_all, squares_of_blocks, sum_of_squares, sums_of_squares,
};
pub(super) use attention::{decode_attention, flash_attention, flash_attention_backward};
pub(super) use causal_conv1d::{causal_conv1d, causal_conv1d_backward};
pub(super) use delta_gates::{delta_gates, delta_gates_backward};
#[cfg(all(feature = "cuda", unix))]
pub(super) use download::download;
pub(super) use dropout::{dropout, dropout_add};
pub(super) use e4m3::{e4m3_linear, e4m3_linear_backward_input, e4m3_linear_backward_weight};
pub(super) use embedding::{
    embedding, embedding_backward, interpolate_rows, interpolate_rows_backward,
};
pub(super) use gated_delta_rule::{gated_delta_rule, gated_delta_rule_backward};
pub(super) use gated_rms_norm::{gated_rms_norm, gated_rms_norm_backward};
pub(super) use gemm::products_of_this_thread;
pub(super) use grouped_linear::{add_grouped_outer_products, grouped_products};
pub(super) use launch::{on_gpu, supports_device};
pub(super) use layer_norm::{layer_norm, layer_norm_apply, layer_norm_backward};
pub(super) use linear::{
    bias_backward, joined_linear, joined_linear_backward_input, joined_linear_backward_weight,
    linear, linear_backward_input, linear_backward_input_add, linear_backward_weight,
};
pub(super) use linear_cross_entropy::{
    linear_cross_entropy, linear_cross_entropy_backward, linear_cross_entropy_rows,
};
pub(super) use muon::combine;
pub(super) use nf4::nf4_dequantize;
pub(super) use pointwise::{
    add_in_place, fill_zero, gelu, gelu_backward, sigmoid_gate, sigmoid_gate_backward, swiglu,
    swiglu_backward,
};
pub(super) use rms_norm::{rms_norm, rms_norm_apply, rms_norm_backward};
pub(super) use rope::{
    qk_norm_rope, qk_norm_rope_backward, rope_heads, rope_heads_backward,
    vision_rope_merge_backward, vision_rope_split,
};
pub(super) use route::{
    combine_experts, expert_rows, expert_swiglu, expert_swiglu_backward, route, route_backward,
};
pub(super) use rows::{copy_columns, gather_rows, own_columns, update_rows, zero_rows};
pub(super) use select::attention_kernel;
#[cfg(feature = "cuda")]
pub(super) use select::gpu_without_e4m3;
#[cfg(feature = "cuda")]
pub use side_stream::SideStream;
#[cfg(feature = "cuda")]
pub(super) use upload::{upload, upload_bf16, upload_bytes};
