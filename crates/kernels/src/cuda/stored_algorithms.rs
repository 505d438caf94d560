//! Algorithms of cublasLt from a table.

#![expect(unsafe_code, reason = "cublasLt takes addresses")]

use super::blas_call::{Algorithm, Call};
use crate::{AlgorithmEntry, AlgorithmSettings, MatmulLibrary, OtherProducts, Product};
use candle_core::cuda_backend::WrapErr as _;
use candle_core::cuda_backend::cudarc::cublaslt::sys;
use candle_core::cuda_backend::cudarc::driver;
use candle_core::{Device, Result};
use std::ffi::c_void;
use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;

/// The entries that products use.
#[derive(Default)]
pub(super) struct BlasAlgorithms {
    pub(super) entries: Vec<AlgorithmEntry>,
    measures: bool,
    /// Whether there was a warning about an entry that cublasLt refuses.
    warned: bool,
}

impl BlasAlgorithms {
    pub(super) fn new(entries: Vec<AlgorithmEntry>, others: OtherProducts) -> Self {
        Self { entries, measures: others == OtherProducts::Measure, warned: false }
    }

    /// Whether the product is to be measured.
    pub(super) fn lacks(&self, product: &Product) -> bool {
        self.measures && AlgorithmEntry::nearest(&self.entries, product).is_none()
    }

    /// The algorithm of the entry for a product; `None` if there is no entry, its algorithm is the
    /// first choice of cublasLt, or cublasLt refuses it.
    pub(super) fn algorithm(&mut self, product: &Product, call: &Call<'_>) -> Option<Algorithm> {
        let entry =
            AlgorithmEntry::nearest(&self.entries, product).filter(|entry| entry.place > 0)?;
        let algorithm = Algorithm { data: entry.data };
        if settings(&algorithm) == Some(entry.settings) && call.accepts(&algorithm) {
            return Some(algorithm);
        }
        self.warn(product);
        None
    }

    /// Warns, for the first such product, that cublasLt refuses the algorithm of its entry.
    pub(super) fn warn(&mut self, product: &Product) {
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                %product,
                "cublasLt refuses an algorithm of the table of `model.algorithms`, and uses its own \
                 choice for this product"
            );
        }
    }

    /// Whether an entry has another algorithm for the product than the first choice of cublasLt.
    pub(super) fn replaces(&self, product: &Product) -> bool {
        AlgorithmEntry::nearest(&self.entries, product).is_some_and(|entry| entry.place > 0)
    }
}

/// The settings of an algorithm; `None` if cublasLt cannot read them. The last two are 0 with a
/// version or for a GPU that does not know them.
pub(super) fn settings(algorithm: &Algorithm) -> Option<AlgorithmSettings> {
    Some(AlgorithmSettings {
        id: setting(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_ID)?,
        tile: setting(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID)?,
        stages: setting(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID)?,
        split_k: setting(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM)?,
        reduction: setting(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)?,
        swizzle: setting(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING)?,
        custom: setting(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION)?,
        inner_shape: setting(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID)
            .unwrap_or(0),
        cluster_shape: setting(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)
            .unwrap_or(0),
    })
}

/// A setting, whose type in the library has 4 or 2 bytes.
fn setting(algorithm: &Algorithm, attribute: Attribute) -> Option<u32> {
    [4, 2].into_iter().find_map(|bytes| {
        let (mut value, mut written) = ([0u8; 4], 0);
        // SAFETY: the library writes at most this number of bytes.
        let found = unsafe {
            sys::cublasLtMatmulAlgoConfigGetAttribute(
                algorithm,
                attribute,
                value.as_mut_ptr().cast::<c_void>(),
                bytes,
                &raw mut written,
            )
        };
        found.result().is_ok().then_some(u32::from_le_bytes(value))
    })
}

pub(crate) fn matmul_library(device: &Device) -> Result<Option<MatmulLibrary>> {
    let Device::Cuda(gpu) = device else { return Ok(None) };
    let stream = gpu.cuda_stream();
    let context = stream.context();
    let (major, minor) = context.compute_capability().w()?;
    let mut driver = 0;
    // SAFETY: the result is written to a variable.
    unsafe { driver::sys::cuDriverGetVersion(&raw mut driver) }.result().w()?;
    Ok(Some(MatmulLibrary {
        gpu: context.name().w()?,
        compute_capability: format!("{major}.{minor}"),
        // SAFETY: it has no requirements.
        cublaslt: unsafe { sys::cublasLtGetVersion() },
        driver,
    }))
}
