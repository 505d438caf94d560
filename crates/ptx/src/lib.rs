//! Executes the PTX that nvcc emits for CUDA kernels, on the CPU, and checks it: state spaces,
//! bounds and alignment of addresses, reads of unwritten memory, data races, warp instructions and
//! barriers that not all threads reach, and asynchronous work.
//!
//! Sections in comments are those of the PTX ISA document, version 9.0.

pub mod instruction;
pub mod parse;
pub mod products;
pub mod scalar;
