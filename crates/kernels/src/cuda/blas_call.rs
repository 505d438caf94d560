//! Calls of cublasLt for a product.

#![expect(unsafe_code, reason = "cublasLt takes addresses")]

use super::gemm::Transpose;
use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublas::sys::cublasOperation_t;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use std::ffi::c_void;
use std::fmt;
use std::mem::MaybeUninit;
use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
use sys::cublasLtReductionScheme_t as ReductionScheme;

/// Workspace size that NVIDIA recommends for Hopper, in bytes. All products of a device share the
/// workspace, because they run on one stream.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;
/// Settings of a product, in the order in which they are tried: bytes of the workspace, and how a
/// product that is split adds its parts. All of them add in `f32`.
const SETTINGS: [(usize, ReductionScheme); 3] = [
    (WORKSPACE_BYTES, ReductionScheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE),
    (4 << 20, ReductionScheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE),
    (0, ReductionScheme::CUBLASLT_REDUCTION_SCHEME_NONE),
];

pub(super) type Algorithm = sys::cublasLtMatmulAlgo_t;
pub(super) type BlasResult<T> = std::result::Result<T, result::CublasError>;

/// Dtype of the elements of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum MatrixDType {
    Bf16,
    F32,
    /// Codes of FP8, in tensors of `u8`.
    E4m3,
}

impl MatrixDType {
    /// The dtype of the elements of a tensor; `None` if no product has it.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::BF16 => Some(Self::Bf16),
            DType::F32 => Some(Self::F32),
            DType::U8 => Some(Self::E4m3),
            _ => None,
        }
    }
}

/// Properties of a product that decide which algorithms can compute it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct MatmulProblem {
    pub(super) transpose: Transpose,
    /// Rows of the result, its columns, and the number of terms of each sum.
    pub(super) shape: [usize; 3],
    /// Dtype of `a` and `b`.
    pub(super) operands: MatrixDType,
    pub(super) result: MatrixDType,
    /// Whether `a` and `b` are the second halves of the rows of a matrix.
    pub(super) second_halves: [bool; 2],
    /// Alignments of `b`, `a`, the addend and the result, in bytes; at most 256.
    pub(super) alignments: [u32; 4],
    /// Whether the addend is the result, or there is none.
    pub(super) in_place: bool,
    pub(super) bias: bool,
    /// See [`super::gemm::Gemm`].
    pub(super) fast_sums: bool,
}

impl fmt::Display for MatmulProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([m, n, k], name) = (self.shape, |dtype| match dtype {
            MatrixDType::Bf16 => "bf16",
            MatrixDType::F32 => "f32",
            MatrixDType::E4m3 => "e4m3",
        });
        write!(f, "{:?} {m}x{n}x{k} {}", self.transpose, name(self.operands))?;
        if self.operands != self.result {
            write!(f, " to {}", name(self.result))?;
        }
        f.write_str(if self.fast_sums { ", fast sums" } else { "" })?;
        f.write_str(if self.bias { ", bias" } else { "" })?;
        f.write_str(if self.in_place { "" } else { ", residual" })
    }
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

/// Layout of a row-major matrix `[rows, columns]`, described as column-major.
fn layout(
    data_type: sys::cudaDataType,
    rows: usize,
    columns: usize,
    stride: usize,
) -> BlasResult<Layout> {
    let made = result::create_matrix_layout(data_type, columns as u64, rows as u64, stride as i64)?;
    Ok(Owned(made, result::destroy_matrix_layout))
}

fn set<V>(
    descriptor: sys::cublasLtMatmulDesc_t,
    attribute: Attribute,
    value: &V,
) -> BlasResult<()> {
    let from = std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: the descriptor is valid, and each attribute is set with its type in the library.
    unsafe { result::set_matmul_desc_attribute(descriptor, attribute, from, size_of::<V>()) }
}

fn prefer<V>(
    preference: sys::cublasLtMatmulPreference_t,
    which: Preference,
    value: &V,
) -> BlasResult<()> {
    let from = std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: as in `set`.
    unsafe { result::set_matmul_pref_attribute(preference, which, from, size_of::<V>()) }
}

/// The description of a product, with layouts of `A`, `B` and `C` = `D` of cublasLt, which are our
/// `b`, `a` and result.
pub(super) struct Description {
    product: Owned<sys::cublasLtMatmulDesc_t>,
    a: Layout,
    b: Layout,
    c: Layout,
}

impl Description {
    /// Describes a product and its bias, if it has one.
    pub(super) fn new(product: &MatmulProblem, bias: Option<u64>) -> BlasResult<Self> {
        let [m, n, _] = product.shape;
        let operand = |[rows, columns]: [usize; 2], is_half| {
            let stride = if is_half { 2 * columns } else { columns };
            layout(data_type(product.operands), rows, columns, stride)
        };
        let ([a, b], halves) =
            (operand_shapes(product.transpose, product.shape), product.second_halves);
        Ok(Self {
            product: descriptor(product.transpose, bias, product.fast_sums)?,
            a: operand(b, halves[1])?,
            b: operand(a, halves[0])?,
            c: layout(data_type(product.result), m, n, n)?,
        })
    }
}

/// Rows and columns of `a` and of `b`, as they are stored.
pub(super) fn operand_shapes(transpose: Transpose, [m, n, k]: [usize; 3]) -> [[usize; 2]; 2] {
    match transpose {
        Transpose::Nt => [[m, k], [n, k]],
        Transpose::Nn => [[m, k], [k, n]],
        Transpose::Tn => [[k, m], [k, n]],
    }
}

/// A product with everything that cublasLt takes, except for the algorithm. The tensors at the
/// addresses outlive the work on their stream.
pub(super) struct Call<'a> {
    pub(super) handle: sys::cublasLtHandle_t,
    pub(super) description: &'a Description,
    /// Addresses of our `a` and `b`.
    pub(super) operands: [u64; 2],
    /// Address of the addend.
    pub(super) c: u64,
    /// Address of the result.
    pub(super) d: u64,
    /// Factors of the product and of the addend.
    pub(super) factors: [f32; 2],
    pub(super) workspace: u64,
    pub(super) stream: sys::cudaStream_t,
}

impl Call<'_> {
    /// Starts the product.
    pub(super) fn start(&self, algorithm: &Algorithm) -> BlasResult<()> {
        let ([alpha, beta], [a, b]) = (&self.factors, self.operands);
        let Description { product, a: layout_a, b: layout_b, c: layout_c } = self.description;
        // SAFETY: addresses and layouts describe tensors that outlive the work on their stream.
        unsafe {
            result::matmul(
                self.handle,
                product.0,
                std::ptr::from_ref(alpha).cast(),
                std::ptr::from_ref(beta).cast(),
                b as *const c_void,
                layout_a.0,
                a as *const c_void,
                layout_b.0,
                self.c as *const c_void,
                layout_c.0,
                self.d as *mut c_void,
                layout_c.0,
                algorithm,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                self.stream,
            )
        }
    }

    /// The first choice of cublasLt, for the first settings with which it has one.
    pub(super) fn choose(&self, alignments: &[u32; 4]) -> BlasResult<Option<Algorithm>> {
        for settings in SETTINGS {
            match self.choose_with(settings, alignments) {
                Err(error) if is_refusal(error) => {}
                found => return found.map(Some),
            }
        }
        Ok(None)
    }

    fn choose_with(
        &self,
        (workspace, reduction): (usize, ReductionScheme),
        alignments: &[u32; 4],
    ) -> BlasResult<Algorithm> {
        let preference = Owned(result::create_matmul_pref()?, result::destroy_matmul_pref as _);
        prefer(preference.0, Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)?;
        prefer(preference.0, Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction)?;
        let which = [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (which, bytes) in which.into_iter().zip(alignments) {
            prefer(preference.0, which, bytes)?;
        }
        let Description { product, a, b, c } = self.description;
        let mut found = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut number = 0;
        // SAFETY: all descriptors are valid, and there is room for one result. Zeros are a valid
        // result.
        let found = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                product.0,
                a.0,
                b.0,
                c.0,
                c.0,
                preference.0,
                1,
                found.as_mut_ptr(),
                &raw mut number,
            )
            .result()?;
            found.assume_init()
        };
        if number < 1 || found.state.result().is_err() {
            return Err(result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
        }
        Ok(found.algo)
    }
}

fn data_type(dtype: MatrixDType) -> sys::cudaDataType {
    match dtype {
        MatrixDType::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        MatrixDType::F32 => sys::cudaDataType::CUDA_R_32F,
        MatrixDType::E4m3 => sys::cudaDataType::CUDA_R_8F_E4M3,
    }
}

/// Creates a descriptor with `f32` sums, without TF32, and with the bias if there is one.
fn descriptor(
    transpose: Transpose,
    bias: Option<u64>,
    fast_sums: bool,
) -> BlasResult<Owned<sys::cublasLtMatmulDesc_t>> {
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
    if fast_sums {
        set(descriptor.0, Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1i8)?;
    }
    if let Some(bias) = bias {
        let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        set(descriptor.0, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        set(descriptor.0, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
    }
    Ok(descriptor)
}

/// Whether cublasLt has no way to compute a product, as opposed to a failure of the GPU.
pub(super) fn is_refusal(result::CublasError(status): result::CublasError) -> bool {
    use sys::cublasStatus_t as Code;
    matches!(
        status,
        Code::CUBLAS_STATUS_NOT_SUPPORTED
            | Code::CUBLAS_STATUS_INVALID_VALUE
            | Code::CUBLAS_STATUS_ARCH_MISMATCH
    )
}
