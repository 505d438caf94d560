//! Tensor maps: what a GPU of compute capability 9.0 must know of a tensor to copy boxes of it to
//! shared memory (TMA).

#![cfg_attr(feature = "cuda", expect(unsafe_code, reason = "a function of the driver"))]

use crate::launch::{Address, address};
use candle_core::{Result, Tensor};

/// Number of words of eight bytes of a tensor map.
const WORDS: usize = 16;
/// Size of a bf16 element in bytes.
const ELEMENT: u64 = 2;

/// A tensor `[N, H, Dh]` in bf16, and the boxes that are copied from it: rows of one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Boxes {
    address: u64,
    /// Number of columns, heads and rows of the tensor.
    dims: [u64; 3],
    /// Number of columns, heads and rows of a box.
    size: [u32; 3],
}

impl Boxes {
    /// Boxes with this number of rows of one head. A row of a box has 128, 64 or 32 bytes, and its
    /// 16-byte columns are permuted in shared memory.
    pub(crate) fn new(
        (op, name): (&str, &str),
        t: &Tensor,
        columns: usize,
        rows: usize,
    ) -> Result<Self> {
        let ((n, h, dh), Address(address)) = (t.dims3()?, address(op, name, t)?);
        let dims = [dh as u64, h as u64, n as u64];
        Ok(Self { address, dims, size: [columns as u32, 1, rows as u32] })
    }

    /// Distances in bytes between heads, and between rows.
    fn strides(&self) -> [u64; 2] {
        [self.dims[0] * ELEMENT, self.dims[0] * self.dims[1] * ELEMENT]
    }

    /// The stand-in that executed PTX reads, if the driver would accept the tensor and the boxes.
    #[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
    pub(crate) fn encode(&self) -> Result<[u64; WORDS]> {
        use ptx::products::{Swizzle, TensorMap};
        let swizzle = match u64::from(self.size[0]) * ELEMENT {
            128 => Swizzle::Bytes128,
            64 => Swizzle::Bytes64,
            _ => Swizzle::Bytes32,
        };
        let (address, sizes, strides) = (self.address, self.dims, self.strides());
        let box_sizes = self.size.map(u64::from);
        let bytes = TensorMap { address, sizes, strides, box_sizes, swizzle }.to_bytes();
        TensorMap::from_bytes(&bytes).map_err(candle_core::Error::wrap)?;
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Ok(words)
    }

    #[cfg(not(any(feature = "cuda", feature = "cuda-emulation")))]
    pub(crate) fn encode(&self) -> Result<[u64; WORDS]> {
        unreachable!("no device has kernels in this build: {:?}", self.strides())
    }

    /// The tensor map that the driver encodes.
    #[cfg(feature = "cuda")]
    pub(crate) fn encode(&self) -> Result<[u64; WORDS]> {
        use candle_core::cuda_backend::WrapErr as _;
        use candle_core::cuda_backend::cudarc::driver::sys::{
            self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
            CUtensorMapL2promotion, CUtensorMapSwizzle,
        };
        let swizzle = match u64::from(self.size[0]) * ELEMENT {
            128 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            64 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        };
        let (strides, steps) = (self.strides(), [1; 3]);
        let mut map = CUtensorMap { opaque: [0; WORDS] };
        // SAFETY: the arrays have the lengths of three dims, and the result is written to a
        // variable.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                self.address as *mut std::ffi::c_void,
                self.dims.as_ptr(),
                strides.as_ptr(),
                self.size.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        status.result().w()?;
        Ok(map.opaque)
    }
}

/// The `HeadMaps` of attention_sm90.cuh for boxes of `rows` rows: one of 64 columns, and one of 16.
pub(crate) fn head_maps(op: &str, name: &str, t: &Tensor, rows: usize) -> Result<Vec<u64>> {
    let mut words = Vec::with_capacity(2 * WORDS);
    for columns in [64, 16] {
        words.extend(Boxes::new((op, name), t, columns, rows)?.encode()?);
    }
    Ok(words)
}
