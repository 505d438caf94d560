//! CUDA kernels: one `.cu` an op, and the code that launches it.
//!
//! The functions here have the contract of their twins in `ops`, which check the operands and come here when those are
//! on a GPU. Built by `build.rs` under the feature `cuda`. Under `cuda-emulation` the same sources run on the host, one
//! fiber a thread, and the same launch code works on CPU tensors: that is how they are tested without a GPU. With
//! `TRAINER_EMULATE_CUDA` set, every op of every test takes this path.

mod adamw;
mod attention;
#[cfg(feature = "cuda")]
mod blas;
mod embedding;
mod launch;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod matmul;
#[cfg(feature = "cuda")]
mod module;
mod norm;
mod pointwise;
mod rms_norm;
mod rope;
mod rows;
#[cfg(test)]
#[cfg(not(feature = "cuda"))]
mod tests;
#[cfg(feature = "cuda")]
mod upload;

pub(super) use adamw::{
    adamw_step, clipped_update, fill_zero_all, sum_of_squares, sums_of_squares,
};
pub(super) use attention::{
    attention_kernel, decode_attention, flash_attention, flash_attention_backward,
};
pub(super) use embedding::{
    embedding, embedding_backward, interpolate_rows, interpolate_rows_backward,
};
pub(super) use launch::{on_gpu, takes};
pub(super) use layer_norm::{layer_norm, layer_norm_apply, layer_norm_backward};
pub(super) use linear::{
    bias_backward, linear, linear_backward_input, linear_backward_input_add, linear_backward_weight,
};
pub(super) use linear_cross_entropy::{
    linear_cross_entropy, linear_cross_entropy_backward, linear_cross_entropy_rows,
};
pub(super) use pointwise::{add_in_place, fill_zero, gelu, gelu_backward, swiglu, swiglu_backward};
pub(super) use rms_norm::{rms_norm, rms_norm_apply, rms_norm_backward};
pub(super) use rope::{
    qk_norm_rope, qk_norm_rope_backward, vision_rope_merge_backward, vision_rope_split,
};
pub(super) use rows::{gather_rows, update_rows, zero_rows};
#[cfg(feature = "cuda")]
pub(super) use upload::upload;
