//! Matrix products by cublasLt, with an optional addend and bias.
//!
//! A row-major `[r, c]` matrix is a column-major `[c, r]` matrix, so each product is computed
//! transposed: `dst^T = op(b)^T op(a)^T`. A product that cublasLt refuses with every setting is
//! computed by our own kernel, which is slow.

#![expect(unsafe_code, reason = "cublasLt takes addresses")]

use super::blas_call::{
    Algorithm, BlasResult, Call, Description, MatmulProblem, MatrixDType, WORKSPACE_BYTES,
    is_refusal, operand_shapes,
};
use super::gemm::{Addend, Gemm, GemmOperand};
use super::product::{self, address_and_stride};
use crate::launch::address;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr as _};
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Maximum number of cached algorithms. Packs vary in length, so new shapes keep occurring.
const MAX_ALGORITHMS: usize = 8192;

struct Library {
    handle: sys::cublasLtHandle_t,
    workspace: Tensor,
    /// `None`: cublasLt refuses the product.
    algorithms: HashMap<MatmulProblem, Option<Algorithm>>,
}

// SAFETY: a handle may be used from any thread, and it is used under the lock only.
unsafe impl Send for Library {}

static LIBRARIES: LazyLock<Mutex<HashMap<DeviceId, Library>>> = LazyLock::new(Mutex::default);

/// Computes `dst = factor op(a) op(b) + addend + bias`. The caller has checked sizes and dtypes.
pub(super) fn run(op: &'static str, gemm: &Gemm<'_>, dst: GemmOperand<'_>) -> Result<()> {
    let Device::Cuda(device) = dst.tensor().device() else {
        bail!("{op}: `{}` is on the CPU, expected a GPU", dst.name());
    };
    device.cuda_stream().context().bind_to_thread().w()?;
    let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    let library = match libraries.entry(device.id()) {
        Entry::Occupied(library) => library.into_mut(),
        Entry::Vacant(entry) => {
            let handle = result::create_handle().map_err(|error| failed(op, gemm, error))?;
            let workspace = Tensor::zeros(WORKSPACE_BYTES / 4, DType::F32, dst.tensor().device())?;
            entry.insert(Library { handle, workspace, algorithms: HashMap::new() })
        }
    };
    library.run(op, gemm, dst, device)
}

fn failed(op: &str, gemm: &Gemm<'_>, error: result::CublasError) -> Error {
    let (transpose, shape) = (gemm.transpose, gemm.shape);
    Error::msg(format!(
        "{op}: product {transpose:?} of (m, n, k) {shape:?}: cublasLt failed: {error}"
    ))
}

fn matrix_dtype(op: &str, dtype: DType) -> Result<MatrixDType> {
    let Some(known) = MatrixDType::of(dtype) else {
        bail!("{op}: products of {dtype:?} are not supported");
    };
    Ok(known)
}

/// Returns the largest power of two, up to 256, that divides the address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// The address of the matrix that is added to a product for the destination `dst`, and its factor.
fn addend_and_factor(op: &str, gemm: &Gemm<'_>, dst: u64) -> Result<(u64, f32)> {
    Ok(match gemm.addend {
        Addend::Nothing => (dst, 0.0),
        Addend::Destination => (dst, 1.0),
        Addend::Residual(addend) => (address(op, "residual", addend)?.0, 1.0),
    })
}

fn warn_of_slow_kernel(product: &MatmulProblem) {
    tracing::warn!(
        %product,
        "cublasLt has no algorithm for this product: a slow kernel computes it"
    );
}

impl Library {
    fn run(
        &mut self,
        op: &'static str,
        gemm: &Gemm<'_>,
        dst: GemmOperand<'_>,
        device: &CudaDevice,
    ) -> Result<()> {
        let (m, n, k) = gemm.shape;
        if k == 0 {
            bail!("{op}: found `k` of 0 in a matrix product, expected at least 1");
        }
        let [[_, a_columns], [_, b_columns]] = operand_shapes(gemm.transpose, [m, n, k]);
        let (a, a_stride) = address_and_stride(op, gemm.a, a_columns)?;
        let (b, b_stride) = address_and_stride(op, gemm.b, b_columns)?;
        let (d, _) = address_and_stride(op, dst, n)?;
        let (c, beta) = addend_and_factor(op, gemm, d)?;
        let bias = gemm.bias.map(|bias| address(op, "bias", bias)).transpose()?;
        // cublasLt has no alignment preference for the bias, so it lowers the alignment of the
        // destination.
        let d_alignment = bias.map_or(256, |bias| alignment(bias.0)).min(alignment(d));
        let product = MatmulProblem {
            transpose: gemm.transpose,
            shape: [m, n, k],
            operands: matrix_dtype(op, gemm.a.dtype())?,
            result: matrix_dtype(op, dst.dtype())?,
            second_halves: [a_stride != a_columns, b_stride != b_columns],
            alignments: [alignment(b), alignment(a), alignment(c), d_alignment],
            in_place: c == d,
            bias: bias.is_some(),
            fast_sums: gemm.fast_sums,
        };
        let failed = |error| failed(op, gemm, error);
        let description = Description::new(&product, bias.map(|bias| bias.0)).map_err(failed)?;
        let call = Call {
            handle: self.handle,
            description: &description,
            operands: [a, b],
            c,
            d,
            factors: [gemm.factor, beta],
            workspace: address(op, "workspace", &self.workspace)?.0,
            stream: device.cuda_stream().cu_stream().cast(),
        };
        if self.start(&product, &call).map_err(failed)? {
            return Ok(());
        }
        product::run(op, gemm, dst)
    }

    /// Starts a product; false if cublasLt refuses it.
    fn start(&mut self, product: &MatmulProblem, call: &Call<'_>) -> BlasResult<bool> {
        let Some(algorithm) = self.algorithm(product, call)? else { return Ok(false) };
        match call.start(&algorithm) {
            Err(error) if is_refusal(error) => {
                warn_of_slow_kernel(product);
                self.algorithms.insert(product.clone(), None);
                Ok(false)
            }
            started => started.map(|()| true),
        }
    }

    /// The first choice of cublasLt; `None` if it has none.
    fn algorithm(
        &mut self,
        product: &MatmulProblem,
        call: &Call<'_>,
    ) -> BlasResult<Option<Algorithm>> {
        if let Some(known) = self.algorithms.get(product) {
            return Ok(*known);
        }
        let found = call.choose(&product.alignments)?;
        if found.is_none() {
            warn_of_slow_kernel(product);
        }
        if self.algorithms.len() >= MAX_ALGORITHMS {
            self.algorithms.clear();
        }
        self.algorithms.insert(product.clone(), found);
        Ok(found)
    }
}
