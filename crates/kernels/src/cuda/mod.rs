//! CUDA kernels, and what all launches share: the choice of kernels for a GPU, matrix products,
//! transfers. The launch of a kernel is in the file of its op (`crate::launch`). Most ops have one
//! `.cu` file.
//!
//! `build.rs` compiles the kernels with the feature `cuda`. With `cuda-emulation` the same sources run
//! on the host, with one fiber per CUDA thread, or their PTX is executed (`interpreted`; the only way
//! for the kernels in `sm90/`), and the ops launch them with CPU tensors, so that tests need no GPU. If
//! the environment variable `TRAINER_EMULATE_CUDA` is set, all ops in all tests run this way.

#[cfg(feature = "cuda")]
mod blas;
#[cfg(feature = "cuda")]
mod blas_call;
#[cfg(all(feature = "cuda", unix))]
mod download;
#[cfg(any(feature = "cuda", test))]
mod driver;
pub(super) mod gemm;
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
pub(super) mod interpreted;
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
pub use interpreted::PtxAllocator;
#[cfg(feature = "cuda")]
pub(super) mod module;
#[cfg(any(feature = "cuda", all(test, feature = "cuda-emulation")))]
mod product;
pub(super) mod select;
#[cfg(feature = "cuda")]
mod side_stream;
pub(super) mod tensor_map;
#[cfg(test)]
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
mod tests;
#[cfg(feature = "cuda")]
mod upload;

#[cfg(all(feature = "cuda", unix))]
pub(super) use download::download;
#[cfg(feature = "cuda")]
pub(super) use select::gpu_without_e4m3;
#[cfg(feature = "cuda")]
pub use side_stream::SideStream;
#[cfg(feature = "cuda")]
pub(super) use upload::{upload, upload_bf16, upload_bytes};
