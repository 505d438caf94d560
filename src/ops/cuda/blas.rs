//! Matrix products by cublasLt, with an optional addend and bias.
//!
//! A row-major `[r, c]` matrix is a column-major `[c, r]` matrix, so each product is computed
//! transposed: `dst^T = op(b)^T op(a)^T`. A product that cublasLt refuses with every setting is
//! computed by our own kernel, which is slow.

#![expect(unsafe_code, reason = "cublasLt takes addresses")]

use super::gemm::{Addend, Gemm, Matrix, Transpose};
use super::launch::address;
use super::product::{self, address_and_stride};
use candle_core::cuda_backend::cudarc::cublas::sys::cublasOperation_t;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr as _};
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, PoisonError};
use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
use sys::cublasLtReductionScheme_t as ReductionScheme;

/// Workspace size that NVIDIA recommends for Hopper, in bytes. All products of a device share the
/// workspace, because they run on one stream.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Maximum number of cached algorithms. Packs vary in length, so new shapes keep occurring.
const MAX_ALGORITHMS: usize = 8192;
/// Settings of a product, in the order in which they are tried: bytes of the workspace, and how a
/// product that is split adds its parts. All of them add in `f32`.
const SETTINGS: [(usize, ReductionScheme); 3] = [
    (WORKSPACE_BYTES, ReductionScheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE),
    (4 << 20, ReductionScheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE),
    (0, ReductionScheme::CUBLASLT_REDUCTION_SCHEME_NONE),
];

/// Properties that determine the choice of an algorithm.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    transpose: Transpose,
    shape: (usize, usize, usize),
    operands: DType,
    dst: DType,
    row_strides: [usize; 2],
    /// Alignments of `b`, `a`, addend and destination, in bytes.
    alignments: [u32; 4],
    in_place: bool,
    bias: bool,
}

struct Library {
    handle: sys::cublasLtHandle_t,
    workspace: Tensor,
    /// `None`: cublasLt refuses the product.
    algorithms: HashMap<Key, Option<sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: a handle may be used from any thread, and it is used under the lock only.
unsafe impl Send for Library {}

static LIBRARIES: LazyLock<Mutex<HashMap<DeviceId, Library>>> = LazyLock::new(Mutex::default);

/// Computes `dst = op(a) op(b) + addend + bias`. The caller has checked sizes and dtypes.
pub(super) fn run(op: &'static str, gemm: &Gemm<'_>, dst: Matrix<'_>) -> Result<()> {
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

fn data_type(op: &str, dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::U8 => Ok(sys::cudaDataType::CUDA_R_8F_E4M3),
        dtype => bail!("{op}: products of {dtype:?} are not supported"),
    }
}

/// Returns the largest power of two, up to 256, that divides the address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// A cublasLt descriptor that is destroyed on drop.
struct Owned<T: Copy>(T, unsafe fn(T) -> std::result::Result<(), result::CublasError>);

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: created by the matching function and destroyed once. A failure cannot be reported
        // here.
        let _ = unsafe { self.1(self.0) };
    }
}

type Layout = Owned<sys::cublasLtMatrixLayout_t>;
type Status<T> = std::result::Result<T, result::CublasError>;

/// Layout of a row-major matrix `[rows, columns]`, described as column-major.
fn layout(
    data_type: sys::cudaDataType,
    rows: usize,
    columns: usize,
    stride: usize,
) -> Status<Layout> {
    let made = result::create_matrix_layout(data_type, columns as u64, rows as u64, stride as i64)?;
    Ok(Owned(made, result::destroy_matrix_layout))
}

fn set<V>(descriptor: sys::cublasLtMatmulDesc_t, attribute: Attribute, value: &V) -> Status<()> {
    let from = std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: the descriptor is valid, and each attribute is set with its type in the library.
    unsafe { result::set_matmul_desc_attribute(descriptor, attribute, from, size_of::<V>()) }
}

fn prefer<V>(
    preference: sys::cublasLtMatmulPreference_t,
    which: Preference,
    value: &V,
) -> Status<()> {
    let from = std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: as in `set`.
    unsafe { result::set_matmul_pref_attribute(preference, which, from, size_of::<V>()) }
}

/// Layouts of `A`, `B` and `C` = `D` of cublasLt, which are our `b`, `a` and `dst`.
struct Layouts {
    a: Layout,
    b: Layout,
    c: Layout,
}

/// Rows and columns of `a` and of `b`, as they are stored.
fn operand_shapes(gemm: &Gemm<'_>) -> ([usize; 2], [usize; 2]) {
    let (m, n, k) = gemm.shape;
    match gemm.transpose {
        Transpose::Nt => ([m, k], [n, k]),
        Transpose::Nn => ([m, k], [k, n]),
        Transpose::Tn => ([k, m], [k, n]),
    }
}

/// The address of the matrix that is added to a product for the destination `dst`, and its factor.
fn addend_and_factor(op: &str, gemm: &Gemm<'_>, dst: u64) -> Result<(u64, f32)> {
    Ok(match gemm.addend {
        Addend::Nothing => (dst, 0.0),
        Addend::Destination => (dst, 1.0),
        Addend::Residual(addend) => (address(op, "residual", addend)?.0, 1.0),
    })
}

impl Library {
    fn run(
        &mut self,
        op: &'static str,
        gemm: &Gemm<'_>,
        dst: Matrix<'_>,
        device: &CudaDevice,
    ) -> Result<()> {
        let (m, n, k) = gemm.shape;
        if k == 0 {
            bail!("{op}: found `k` of 0 in a matrix product, expected at least 1");
        }
        let ([a_rows, a_columns], [b_rows, b_columns]) = operand_shapes(gemm);
        let (a, a_stride) = address_and_stride(op, gemm.a, a_columns)?;
        let (b, b_stride) = address_and_stride(op, gemm.b, b_columns)?;
        let (d, _) = address_and_stride(op, dst, n)?;
        let (c, beta) = addend_and_factor(op, gemm, d)?;
        let bias = gemm.bias.map(|bias| address(op, "bias", bias)).transpose()?;
        // cublasLt has no alignment preference for the bias, so it lowers the alignment of the
        // destination.
        let d_alignment = bias.map_or(256, |bias| alignment(bias.0)).min(alignment(d));
        let key = Key {
            transpose: gemm.transpose,
            shape: gemm.shape,
            operands: gemm.a.dtype(),
            dst: dst.dtype(),
            row_strides: [a_stride, b_stride],
            alignments: [alignment(b), alignment(a), alignment(c), d_alignment],
            in_place: c == d,
            bias: bias.is_some(),
        };
        let (operands, result) = (data_type(op, key.operands)?, data_type(op, key.dst)?);
        let workspace = address(op, "workspace", &self.workspace)?.0;
        let status = (|| {
            let descriptor = Self::descriptor(gemm.transpose, bias.map(|bias| bias.0))?;
            let layouts = Layouts {
                a: layout(operands, b_rows, b_columns, b_stride)?,
                b: layout(operands, a_rows, a_columns, a_stride)?,
                c: layout(result, m, n, n)?,
            };
            let Some(algorithm) = self.algorithm(key.clone(), descriptor.0, &layouts)? else {
                return Ok(false);
            };
            let alpha = 1f32;
            // SAFETY: addresses and layouts describe tensors that outlive the work on their stream.
            let started = unsafe {
                result::matmul(
                    self.handle,
                    descriptor.0,
                    (&raw const alpha).cast(),
                    (&raw const beta).cast(),
                    b as *const c_void,
                    layouts.a.0,
                    a as *const c_void,
                    layouts.b.0,
                    c as *const c_void,
                    layouts.c.0,
                    d as *mut c_void,
                    layouts.c.0,
                    &raw const algorithm,
                    workspace as *mut c_void,
                    WORKSPACE_BYTES,
                    device.cuda_stream().cu_stream().cast(),
                )
            };
            match started {
                Err(error) if is_refusal(error) => {
                    self.algorithms.insert(key, None);
                    Ok(false)
                }
                started => started.map(|()| true),
            }
        })();
        if status.map_err(|error| failed(op, gemm, error))? {
            return Ok(());
        }
        product::run(op, gemm, dst)
    }

    /// Creates a descriptor with `f32` sums, without TF32, and with the bias if there is one.
    fn descriptor(
        transpose: Transpose,
        bias: Option<u64>,
    ) -> Status<Owned<sys::cublasLtMatmulDesc_t>> {
        let made = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType::CUDA_R_32F,
        )?;
        let descriptor = Owned(made, result::destroy_matmul_desc as _);
        let (plain, transposed) = (cublasOperation_t::CUBLAS_OP_N, cublasOperation_t::CUBLAS_OP_T);
        let (a, b) = match transpose {
            Transpose::Nt => (transposed, plain),
            Transpose::Nn => (plain, plain),
            Transpose::Tn => (plain, transposed),
        };
        set(descriptor.0, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &a)?;
        set(descriptor.0, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &b)?;
        if let Some(bias) = bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            set(descriptor.0, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            set(descriptor.0, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        Ok(descriptor)
    }

    /// Returns the first choice of cublasLt for the first settings with which it has one; `None` if
    /// there are none.
    fn algorithm(
        &mut self,
        key: Key,
        descriptor: sys::cublasLtMatmulDesc_t,
        layouts: &Layouts,
    ) -> Status<Option<sys::cublasLtMatmulAlgo_t>> {
        if let Some(known) = self.algorithms.get(&key) {
            return Ok(*known);
        }
        let mut found = None;
        for settings in SETTINGS {
            match self.choice(&key, settings, descriptor, layouts) {
                Ok(algorithm) => found = Some(algorithm),
                Err(error) if is_refusal(error) => continue,
                Err(error) => return Err(error),
            }
            break;
        }
        if found.is_none() {
            tracing::warn!(
                product = ?key,
                "cublasLt has no algorithm for this product: a slow kernel computes it"
            );
        }
        if self.algorithms.len() >= MAX_ALGORITHMS {
            self.algorithms.clear();
        }
        self.algorithms.insert(key, found);
        Ok(found)
    }

    /// Returns the first choice of cublasLt for these settings.
    fn choice(
        &self,
        key: &Key,
        (workspace, reduction): (usize, ReductionScheme),
        descriptor: sys::cublasLtMatmulDesc_t,
        layouts: &Layouts,
    ) -> Status<sys::cublasLtMatmulAlgo_t> {
        let preference = Owned(result::create_matmul_pref()?, result::destroy_matmul_pref as _);
        prefer(preference.0, Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)?;
        prefer(preference.0, Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction)?;
        let alignments = [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (which, bytes) in alignments.into_iter().zip(&key.alignments) {
            prefer(preference.0, which, bytes)?;
        }
        // SAFETY: all descriptors are valid.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                self.handle,
                descriptor,
                layouts.a.0,
                layouts.b.0,
                layouts.c.0,
                layouts.c.0,
                preference.0,
            )
        }?;
        Ok(found.algo)
    }
}

/// Whether cublasLt has no way to compute a product, as opposed to a failure of the GPU.
fn is_refusal(result::CublasError(status): result::CublasError) -> bool {
    use sys::cublasStatus_t as Code;
    matches!(
        status,
        Code::CUBLAS_STATUS_NOT_SUPPORTED
            | Code::CUBLAS_STATUS_INVALID_VALUE
            | Code::CUBLAS_STATUS_ARCH_MISMATCH
    )
}
