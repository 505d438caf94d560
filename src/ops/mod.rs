//! Our own ops, forward and backward: what the stages of the model are made of.
//!
//! Shapes: `T` tokens, `P` patches, `N` rows of any kind, `M` rows taken out of them or outputs of a linear, `S` supervised
//! rows, `D` hidden, `K` inputs of a linear, `H`/`Hkv` heads, `Dh` head dim, `V` vocabulary.
//!
//! Conventions, for every op:
//! - Tensors are storage: no op is recorded, and a backward is a function of its own.
//! - Operands are contiguous and of one compute dtype, `f32` or `bf16`; arithmetic is in `f32`.
//! - `rstd`, `stats`, `lse`, `nll` and all gradient buffers (`dw`, `db`, `dtable`) are `f32`.
//! - Gradient buffers are *added* to, in place. An operand that is taken by value is given up, with all its clones: its
//!   memory holds a result afterwards. Other results are new tensors.
//! - Results are the same bits for every number of threads.
//! - An operand that is written in place may not share memory with another operand.
//! - Errors name the op, the operand, what was found and what was expected.

/// `gpu!(x => op(..))`: returns what the CUDA twin of an op gives, if `x` is on a GPU.
macro_rules! gpu {
    ($x:expr => $($call:tt)*) => {
        #[cfg(any(feature = "cuda", feature = "cuda-emulation"))]
        if $crate::ops::cuda::on_gpu($x) {
            return $crate::ops::cuda::$($call)*;
        }
        #[cfg(not(any(feature = "cuda", feature = "cuda-emulation")))]
        let _ = $x;
    };
}

mod adamw;
mod attention;
mod blocks;
mod column_sums;
mod cpu;
#[cfg(any(feature = "cuda", feature = "cuda-emulation"))]
mod cuda;
mod embedding;
mod gelu;
mod gpu;
mod in_place;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod matmul;
mod moments;
mod panels;
mod recycler;
mod rms_norm;
mod rope;
mod rows;
mod simd;
mod swiglu;
#[cfg(test)]
mod testing;
mod vision_rope;

pub use adamw::{
    AdamW, AdamWTensors, AdamWUpdate, adamw_step, clipped_update, fill_zero, fill_zero_all,
    sum_of_squares, sums_of_squares,
};
#[cfg(feature = "flash-attn")]
pub use attention::FlashAttn;
pub use attention::{
    AttentionBackend, Flash, Masked, Masking, Qkv, QkvGrad, Segments, decode_attention,
};
pub use embedding::{
    embedding, embedding_backward, interpolate_rows, interpolate_rows_add,
    interpolate_rows_backward,
};
pub use gelu::{Gelu, gelu, gelu_backward};
pub use gpu::{CUDA_BUILD, GpuMemory, gpu_memory, open_gpu, upload};
pub use in_place::Again;
pub use layer_norm::{layer_norm, layer_norm_apply, layer_norm_backward};
pub use linear::{
    bias_backward, linear, linear_add, linear_backward_input, linear_backward_input_add,
    linear_backward_weight,
};
pub use linear_cross_entropy::{LOGITS_BYTES, linear_cross_entropy, linear_cross_entropy_backward};
pub use recycler::CachingAllocator;
pub use rms_norm::{rms_norm, rms_norm_apply, rms_norm_backward};
pub use rope::{RopeTable, qk_norm_rope, qk_norm_rope_backward};
pub use rows::{add_in_place, index_add, gather_rows, index_copy, scatter_rows, zero_rows};
pub use simd::{SimdError, SimdLevel, simd_level};
pub use swiglu::{swiglu, swiglu_backward};
pub use vision_rope::{vision_rope_merge_backward, vision_rope_split};
