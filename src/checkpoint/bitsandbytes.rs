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
use crate::ops::{Nf4Parts, nf4_maps, nf4_places};
use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Dtype, TensorInfo};
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
#[serde(deny_unknown_fields)]
struct Json {
    quant_type: String,
    shape: Vec<usize>,
    dtype: String,
    blocksize: usize,
    nested_blocksize: Option<usize>,
    nested_dtype: Option<String>,
    nested_offset: Option<f64>,
}

impl QuantState {
    pub(super) fn read(name: &str, json: &[u8]) -> Result<Self, CheckpointError> {
        let problem = |problem| CheckpointError::Quantised { tensor: name.to_owned(), problem };
        let json: Json = serde_json::from_slice(json)
            .map_err(|error| problem(format!("has a quant state that is not valid: {error}")))?;
        if json.quant_type != "nf4" {
            let found = json.quant_type;
            return Err(problem(format!("is quantised to `{found}`, expected `nf4`")));
        }
        let Json { shape, dtype, blocksize, nested_blocksize, nested_offset, .. } = json;
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
        let scales = json.nested_dtype.as_deref().unwrap_or("float32");
        if scales != "float32" {
            let found = format!("has scales of the dtype `{scales}`, expected `float32`");
            return Err(problem(found));
        }
        let known = [DType::F32, DType::F16, DType::BF16];
        let dtype =
            known.into_iter().find(|known| torch_name(*known) == dtype).ok_or_else(|| {
                problem(format!("has the dtype `{dtype}`, expected float32, float16 or bfloat16"))
            })?;
        Ok(Self { shape, dtype, offset: offset as f32 })
    }

    /// Compares dtypes and shapes of the tensors of the matrix `name` with this state. `part` finds
    /// the tensor whose name has this end; one that is missing is no problem here.
    pub(super) fn check<'a>(
        &self,
        name: &str,
        part: impl Fn(&str) -> Option<&'a TensorInfo>,
    ) -> Result<(), CheckpointError> {
        let problem = |problem| CheckpointError::Quantised { tensor: name.to_owned(), problem };
        let elements = self.shape.iter().try_fold(1, |count: usize, len| count.checked_mul(*len));
        let elements = elements
            .ok_or_else(|| problem(format!("has the shape {:?} in its quant state", self.shape)))?;
        let [codes, scales, ranges] = nf4_places(&(0..elements)).map(|part| part.len());
        let (bytes, floats) = (&[Dtype::U8][..], &[Dtype::F32][..]);
        // `bnb_4bit_quant_storage` is the dtype in which the codes are stored.
        let storage = &[Dtype::U8, Dtype::BF16, Dtype::F16, Dtype::F32][..];
        for (end, dtypes, size) in [
            ("", storage, codes),
            (ABSMAX, bytes, scales),
            (NESTED_ABSMAX, floats, ranges),
            (MAP, floats, 16),
            (NESTED_MAP, floats, 256),
        ] {
            let Some(TensorInfo { dtype, shape, .. }) = part(end) else { continue };
            let expected = match end {
                "" => vec![size.div_ceil((dtype.bitsize() / 8).max(1)), 1],
                _ => vec![size],
            };
            if !dtypes.contains(dtype) || *shape != expected {
                let (dtypes, of) = (dtypes[0], &self.shape);
                return Err(problem(format!(
                    "has `{name}{end}` of dtype {dtype:?} and shape {shape:?}, expected \
                     {dtypes:?} and {expected:?} for the shape {of:?} in its quant state"
                )));
            }
        }
        Ok(())
    }
}

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
    use fault::Fault;

    #[test]
    fn a_quant_state_that_is_not_understood_is_refused() {
        let state = json!({"quant_type": "nf4", "shape": [2, 64], "dtype": "bfloat16",
            "blocksize": 64, "nested_blocksize": 256, "nested_dtype": "float32",
            "nested_offset": 0.5});
        let read = |state: &Value| QuantState::read("w", state.to_string().as_bytes());
        let expected = QuantState { shape: vec![2, 64], dtype: DType::BF16, offset: 0.5 };
        assert_eq!(read(&state).unwrap(), expected);
        for (field, value, problem) in [
            ("nested_blocksize", Value::Null, "bnb_4bit_use_double_quant=True"),
            ("blocksize", json!(128), "blocks of 128 elements"),
            ("quant_type", json!("fp4"), "is quantised to `fp4`, expected `nf4`"),
            ("dtype", json!("float8"), "has the dtype `float8`, expected float32, float16 or"),
            ("nested_dtype", json!("bfloat16"), "has scales of the dtype `bfloat16`"),
            ("packing", json!("rows"), "unknown field `packing`"),
        ] {
            let mut other = state.clone();
            other[field] = value;
            let error = read(&other).unwrap_err();
            assert!(error.to_string().contains(problem), "{error}");
            assert!(error.hint().unwrap().contains("original weights"), "{error}");
        }
    }

    #[test]
    fn parts_of_other_shapes_and_dtypes_than_their_quant_state_are_refused() {
        // 130 elements: 65 bytes, 3 scales, 1 range
        let state = QuantState { shape: vec![2, 65], dtype: DType::F32, offset: 0.5 };
        let info = |dtype, shape: &[usize]| TensorInfo {
            dtype,
            shape: shape.to_vec(),
            data_offsets: (0, 0),
        };
        let right = [
            ("", info(Dtype::U8, &[65, 1])),
            (ABSMAX, info(Dtype::U8, &[3])),
            (NESTED_ABSMAX, info(Dtype::F32, &[1])),
            (MAP, info(Dtype::F32, &[16])),
            (NESTED_MAP, info(Dtype::F32, &[256])),
        ];
        let check = |parts: &[(&str, TensorInfo)]| {
            let part = |end: &str| parts.iter().find(|(of, _)| *of == end).map(|(_, info)| info);
            state.check("w", part)
        };
        assert!(check(&right).is_ok());
        for (index, wrong) in [
            (0, info(Dtype::U8, &[130, 1])),
            (0, info(Dtype::U8, &[64, 1])),
            (0, info(Dtype::U8, &[65])),
            (0, info(Dtype::F32, &[2, 65])),
            (0, info(Dtype::BF16, &[32, 1])),
            (1, info(Dtype::U8, &[6])),
            (1, info(Dtype::F32, &[3])),
            (2, info(Dtype::BF16, &[1])),
            (2, info(Dtype::F32, &[2])),
            (3, info(Dtype::F32, &[17])),
            (4, info(Dtype::F16, &[256])),
        ] {
            let mut parts = right.clone();
            parts[index].1 = wrong.clone();
            let error = check(&parts).unwrap_err().to_string();
            let end = parts[index].0;
            assert!(error.contains("`w") && error.contains(end), "{wrong:?}: {error}");
        }
        let stored = QuantState { shape: vec![2, 64], ..state };
        let codes = info(Dtype::BF16, &[32, 1]);
        assert!(stored.check("w", |end| end.is_empty().then_some(&codes)).is_ok());
    }
}
