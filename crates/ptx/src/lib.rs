//! Executes the PTX that nvcc emits for CUDA kernels, on the CPU, and checks it: state spaces,
//! bounds and alignment of addresses, reads of unwritten memory, data races, warp instructions and
//! barriers that not all threads reach, and asynchronous work.
//!
//! Comments name instructions and sections of NVIDIA's document "PTX ISA" by their titles; the numbers
//! of sections differ between its versions. The semantics were compared with versions 9.0 and 9.1.

mod barriers;
mod block;
pub mod c;
mod copies;
mod execute;
mod fault;
mod global;
pub mod instruction;
mod launch;
mod library;
mod notes;
mod operands;
mod order;
pub mod parse;
pub mod products;
pub mod scalar;
mod shared;
mod warp;
mod warpgroup;

pub use fault::{Access, Failure, Fault};
pub use global::{Global, Host};
pub use instruction::{Kernel, Module};
pub use launch::{Counts, Launch, run};
pub use library::{Library, LibraryError};
pub use parse::{ParseError, parse};
