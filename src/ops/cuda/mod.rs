//! CUDA kernels: one `.cu` an op, and the code that launches it.
//!
//! The functions here have the contract of their twins in `ops`, which check the operands and come here when those are
//! on a GPU. Built by `build.rs` under the feature `cuda`. Under `cuda-emulation` the same sources run on the host, one
//! fiber a thread, and the same launch code works on CPU tensors: that is how they are tested without a GPU: with `TRAINER_EMULATE_CUDA` set, every op of every test takes this path.

mod attention;
mod launch;
#[cfg(feature = "cuda")]
mod module;
mod rms_norm;

pub(super) use attention::{decode_attention, flash_attention, flash_attention_backward};
pub(super) use launch::on_gpu;
pub(super) use rms_norm::{rms_norm, rms_norm_apply, rms_norm_backward};
