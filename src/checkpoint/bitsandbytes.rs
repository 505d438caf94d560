//! Matrices that bitsandbytes stores in NF4 with double quantisation.
//!
//! A matrix `X.weight` has two codes in each byte of the tensor `X.weight`, and these tensors:
//!
//! | tensor | contents |
//! |---|---|
//! | `X.weight.absmax` | 8-bit codes of the scales |
//! | `X.weight.nested_absmax` | `f32`: the range of each 256 scales |
//! | `X.weight.quant_map`, `X.weight.nested_quant_map` | `f32`: the values of the codes |
//! | `X.weight.quant_state.bitsandbytes__nf4` | JSON: shape, dtype, mean of the scales |

use super::{CheckpointError, SavedTensor};
use crate::ops::{Nf4Parts, nf4_maps};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};

/// End of the name of the tensor that describes a matrix.
pub(super) const STATE: &str = ".quant_state.bitsandbytes__nf4";
/// End of the name of the tensor that describes a matrix of the type FP4.
pub(super) const FP4_STATE: &str = ".quant_state.bitsandbytes__fp4";
/// Ends of the names of the other tensors.
pub(super) const ABSMAX: &str = ".absmax";
pub(super) const NESTED_ABSMAX: &str = ".nested_absmax";
pub(super) const MAP: &str = ".quant_map";
pub(super) const NESTED_MAP: &str = ".nested_quant_map";

/// What is known of a matrix.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct QuantState {
    pub(super) shape: Vec<usize>,
    /// Dtype of the matrix before it was quantised.
    pub(super) dtype: DType,
    pub(super) offset: f32,
}

/// The JSON of a matrix.
#[derive(serde::Deserialize)]
struct Json {
    shape: Vec<usize>,
    dtype: String,
    blocksize: usize,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

impl QuantState {
    /// Reads the JSON of the matrix `name`.
    pub(super) fn read(name: &str, json: &[u8]) -> Result<Self, CheckpointError> {
        let problem = |problem: String| CheckpointError::Parts { tensor: name.to_owned(), problem };
        let json: Json = serde_json::from_slice(json)
            .map_err(|error| problem(format!("has a quant state that is not valid: {error}")))?;
        let Json { shape, dtype, blocksize, nested_blocksize, nested_offset } = json;
        let (Some(nested_blocksize), Some(offset)) = (nested_blocksize, nested_offset) else {
            return Err(problem(
                "is quantised without double quantisation; save it again with \
                 `bnb_4bit_use_double_quant=True`, or use the original weights"
                    .to_owned(),
            ));
        };
        if (blocksize, nested_blocksize) != (64, 256) {
            return Err(problem(format!(
                "has blocks of {blocksize} elements and {nested_blocksize} scales, expected 64 and 256"
            )));
        }
        let dtype = match dtype.as_str() {
            "float32" => DType::F32,
            "float16" => DType::F16,
            _ => DType::BF16,
        };
        Ok(Self { shape, dtype, offset: offset as f32 })
    }
}

/// The name of a dtype in torch.
fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F16 => "float16",
        _ => "bfloat16",
    }
}

/// The tensors of the matrix `name` in NF4. `dtype` is that of the matrix before it was quantised.
/// `codes` computes the codes when they are written; those in `parts` are not used.
pub fn nf4_tensors(
    name: &str,
    dtype: DType,
    parts: &Nf4Parts,
    codes: impl Fn() -> Result<Vec<u8>, CheckpointError> + Send + Sync + 'static,
) -> Result<Vec<SavedTensor>, CheckpointError> {
    let fault = |source| CheckpointError::Tensor { tensor: name.to_owned(), source };
    let state = json!({
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": torch_name(dtype),
        "shape": parts.shape,
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": parts.offset,
    });
    let (of_codes, of_scales) = nf4_maps();
    let floats = |end: &str, values: &[f32]| {
        let tensor = Tensor::new(values, &Device::Cpu).map_err(fault)?;
        Ok(SavedTensor::whole(format!("{name}{end}"), tensor))
    };
    let bytes = |end: &str, values: &[u8]| {
        let tensor = Tensor::new(values, &Device::Cpu).map_err(fault)?;
        Ok(SavedTensor::whole(format!("{name}{end}"), tensor))
    };
    let (of, shape) = (name.to_owned(), [parts.codes.len(), 1]);
    let codes = move || {
        let tensor = Tensor::from_vec(codes()?, shape.as_slice(), &Device::Cpu);
        tensor.map_err(|source| CheckpointError::Tensor { tensor: of.clone(), source })
    };
    Ok(vec![
        SavedTensor::made(name, &shape, DType::U8, codes),
        bytes(ABSMAX, &parts.scales)?,
        floats(NESTED_ABSMAX, &parts.ranges)?,
        floats(MAP, of_codes)?,
        floats(NESTED_MAP, of_scales)?,
        bytes(STATE, state.to_string().as_bytes())?,
    ])
}

/// `quantization_config` of the `config.json` of a model in NF4 that computes in `dtype`.
pub fn quantization_config(dtype: DType) -> Value {
    json!({
        "quant_method": "bitsandbytes",
        "_load_in_4bit": true,
        "_load_in_8bit": false,
        "load_in_4bit": true,
        "load_in_8bit": false,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": true,
        "bnb_4bit_compute_dtype": torch_name(dtype),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": null,
        "llm_int8_threshold": 6.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_without_double_quantisation_or_with_other_blocks_is_refused() {
        let read = |json: &str| QuantState::read("w", json.as_bytes()).unwrap_err().to_string();
        let plain = r#"{"shape": [2, 64], "dtype": "bfloat16", "blocksize": 64}"#;
        assert!(read(plain).contains("bnb_4bit_use_double_quant=True"), "{}", read(plain));
        let other = r#"{"shape": [2, 64], "dtype": "bfloat16", "blocksize": 128,
            "nested_blocksize": 256, "nested_offset": 0.5}"#;
        assert!(read(other).contains("blocks of 128 elements"), "{}", read(other));
    }
}
