//! The decoder of Qwen3.5 and MiniCPM-V: most layers have linear attention (the gated delta rule), the
//! others attention with an output gate; dense or with experts.

use super::config::{ModelConfigError, Section};
use super::experts::Family;
use crate::nn::{
    AttentionSpec, DecoderConfig, ExpertFiles, LinearAttentionSpec, MixerSpec, Mrope, MropeLayout,
};
use kernels::{CONV_TAPS, NormScale};
use serde_json::Value;

/// Share of a head that is rotated if the file does not say it.
const ROTARY_SHARE: f64 = 0.25;
/// Every how many layers one has full attention if the file does not list the kinds.
const FULL_INTERVAL: u64 = 4;

/// Numbers of rotary frequencies of time, height and width if the file does not have them.
const MROPE_SECTION: [usize; 3] = [11, 11, 10];

const ATTENTION: AttentionSpec =
    AttentionSpec { qk_norm: true, qkv_bias: false, output_gate: true, window: None };
const EXPERTS: Family =
    Family { published: ExpertFiles::OutIn, must_have_norm: false, has_shared: true };

/// [`decoder`], with experts.
pub(super) fn decoder_with_experts(text: &Section<'_>) -> Result<DecoderConfig, ModelConfigError> {
    text.with_experts(decoder(text)?, EXPERTS)
}

/// The decoder with the sizes of a section; positions on one axis.
pub(super) fn decoder(text: &Section<'_>) -> Result<DecoderConfig, ModelConfigError> {
    let mut sizes = text.decoder_sizes(ATTENTION)?;
    let rope = text.rope()?;
    let share = [&rope, text].into_iter().find_map(|of| of.value["partial_rotary_factor"].as_f64());
    let rotary = sizes.head_dim as f64 * share.unwrap_or(ROTARY_SHARE);
    let is_even = rotary > 0.0 && rotary <= sizes.head_dim as f64 && rotary % 2.0 == 0.0;
    if !is_even {
        let expected = format!("a share of `head_dim` {} that is even", sizes.head_dim);
        return Err(rope.range("partial_rotary_factor", expected));
    }
    let linear = linear_attention(text)?;
    let is_linear = kinds_of_layers(text, sizes.layers.len())?;
    for (layer, _) in sizes.layers.iter_mut().zip(is_linear).filter(|(_, is_linear)| *is_linear) {
        layer.mixer = MixerSpec::LinearAttention(linear);
    }
    Ok(DecoderConfig { rotary_dim: rotary as usize, norm_scale: NormScale::OnePlusWeight, ..sizes })
}

/// `decoder`, read from the section, with positions on three axes.
pub(super) fn on_three_axes(
    text: &Section<'_>,
    decoder: DecoderConfig,
) -> Result<DecoderConfig, ModelConfigError> {
    let section = text.rope()?.mrope_section(MROPE_SECTION)?;
    Ok(DecoderConfig {
        mrope: Some(Mrope { section, layout: MropeLayout::Interleaved }),
        ..decoder
    })
}

fn linear_attention(text: &Section<'_>) -> Result<LinearAttentionSpec, ModelConfigError> {
    let spec = LinearAttentionSpec {
        num_key_heads: text.size("linear_num_key_heads")?,
        num_value_heads: text.size("linear_num_value_heads")?,
        key_head_dim: text.size("linear_key_head_dim")?,
        value_head_dim: text.size("linear_value_head_dim")?,
        conv_kernel: text.size("linear_conv_kernel_dim")?,
    };
    if spec.conv_kernel != CONV_TAPS {
        return Err(text.range("linear_conv_kernel_dim", format!("{CONV_TAPS}")));
    }
    if !spec.num_value_heads.is_multiple_of(spec.num_key_heads) {
        let what = format!(
            "`linear_num_key_heads` {} does not divide `linear_num_value_heads` {}",
            spec.num_key_heads, spec.num_value_heads
        );
        return Err(ModelConfigError::Shape { what });
    }
    Ok(spec)
}

/// Whether each layer has linear attention.
fn kinds_of_layers(text: &Section<'_>, num_layers: usize) -> Result<Vec<bool>, ModelConfigError> {
    let Some(kinds) = text.value["layer_types"].as_array() else {
        let interval = text.value["full_attention_interval"].as_u64().unwrap_or(FULL_INTERVAL);
        return Ok((1..=num_layers as u64).map(|k| !k.is_multiple_of(interval.max(1))).collect());
    };
    if kinds.len() != num_layers {
        let what = format!(
            "`layer_types` has {} entries, expected `num_hidden_layers` {num_layers}",
            kinds.len()
        );
        return Err(ModelConfigError::Shape { what });
    }
    let is_linear = |kind: &Value| match kind.as_str() {
        Some("linear_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(ModelConfigError::Unsupported {
            key: "layer_types",
            found: kind.to_string(),
            known: "`linear_attention` and `full_attention`",
        }),
    };
    kinds.iter().map(is_linear).collect()
}
