//! Which algorithms the products on GPUs use.

use super::algorithms::{AlgorithmEntry, MatmulLibrary};
use candle_core::{Device, Result};

/// What computes a product that no entry serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtherProducts {
    /// The first choice of cuBLASLt.
    FirstChoice,
    /// The fastest of its choices, which are measured when the product is computed for the first
    /// time. The result is then an entry.
    Measure,
}

/// Sets the algorithms of the products of this process: those of `entries`, and for all other
/// products what `others` says. Builds without CUDA ignore it.
pub fn set_algorithms(entries: Vec<AlgorithmEntry>, others: OtherProducts) {
    #[cfg(feature = "cuda")]
    super::cuda::set_algorithms(entries, others);
    #[cfg(not(feature = "cuda"))]
    let _ = (entries, others);
}

/// The entries that were set, and those measured since.
pub fn algorithm_entries() -> Vec<AlgorithmEntry> {
    #[cfg(feature = "cuda")]
    return super::cuda::algorithm_entries();
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

/// The GPU `device` and the library of its products; `None` on the CPU. Fails if the driver reports
/// an error.
pub fn matmul_library(device: &Device) -> Result<Option<MatmulLibrary>> {
    #[cfg(feature = "cuda")]
    return super::cuda::matmul_library(device);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        Ok(None)
    }
}
