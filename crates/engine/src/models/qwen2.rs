//! What Qwen2-VL and Qwen2.5-VL share: the decoder, with biases in the attention and M-RoPE without
//! interleaving, and the layout of `config.json`.

use super::config::{ModelConfigError, Section};
use super::model_config::ModelConfig;
use super::vision::VisionConfig;
use crate::nn::{AttentionSpec, DecoderConfig, Mrope, MropeLayout, TensorNames};
use serde_json::Value;

/// Numbers of rotary frequencies of time, height and width if the file does not have them.
const MROPE_SECTION: [usize; 3] = [16, 24, 24];

const ATTENTION: AttentionSpec =
    AttentionSpec { qk_norm: false, qkv_bias: true, output_gate: false, window: None };

/// Reads the sizes from the parsed `config.json`. `vision` reads those of the vision encoder from the
/// whole file and the section `vision_config`, for this decoder. Published files have the sizes of
/// the decoder at the top level, newer ones in `text_config`.
pub(super) fn read(
    json: &Value,
    vision: impl Fn(
        &Section<'_>,
        &Section<'_>,
        &DecoderConfig,
    ) -> Result<VisionConfig, ModelConfigError>,
) -> Result<ModelConfig, ModelConfigError> {
    let top = Section { value: json, name: "" };
    let nested = json["text_config"].is_object();
    let text = if nested { Section::of(json, "text_config")? } else { Section { ..top } };
    let rope = text.rope()?;
    rope.expect("mrope_interleaved", &Value::Bool(false), "`false` (Qwen2-VL, Qwen2.5-VL)")?;
    let sizes = text.decoder(ATTENTION)?;
    if sizes.num_attention_heads * sizes.head_dim != sizes.hidden_size {
        let what = format!(
            "`num_attention_heads` {} of size {} do not fill `hidden_size` {}",
            sizes.num_attention_heads, sizes.head_dim, sizes.hidden_size
        );
        return Err(ModelConfigError::Shape { what });
    }
    let vision = vision(&top, &Section::of(json, "vision_config")?, &sizes)?;
    let section = rope.mrope_section(MROPE_SECTION)?;
    let config = ModelConfig {
        text: DecoderConfig {
            tie_word_embeddings: top.is_true("tie_word_embeddings")?
                || text.is_true("tie_word_embeddings")?,
            mrope: Some(Mrope { section, layout: MropeLayout::Blocks }),
            ..sizes
        },
        vision: Some(vision),
        tensor_names: TensorNames::Flat,
    };
    config.check()?;
    Ok(config)
}
