//! MiniCPM-V 4.6 and 4.7 in the layout of transformers: a decoder of Qwen3.5 with positions on one
//! axis (4.6) or three (4.7), and a vision encoder with a merger in the middle of the blocks. An
//! image and each of its slices are frames.

use super::config::{ModelConfigError, ReadDecoder, Section};
use super::model_config::ModelConfig;
use super::qwen3_5_decoder::{decoder, decoder_with_experts, on_three_axes};
use super::vision::{
    EarlyMerger, MergerHidden, MergerParts, NormPlace, TableReading, VisionAttention, VisionConfig,
    VisionMlp, VisionNames, VisionNorm, VisionParts, gelu,
};
use crate::nn::{DecoderConfig, TensorNames};
use batch::{SliceSizes, read_side};
use kernels::Gelu;
use serde_json::{Value, json};

const NAMES: VisionNames = VisionNames {
    patch_embed: "model.vision_tower.embeddings.patch_embedding",
    positions: "model.vision_tower.embeddings.position_embedding.weight",
    class_token: None,
    blocks: "model.vision_tower.encoder.layers",
    norms: ["layer_norm1", "layer_norm2"],
    attention: "self_attn",
    attention_output: "self_attn.out_proj",
    layer_scales: None,
};
const MERGER: MergerParts = MergerParts {
    name: "model.merger.mlp.0",
    layers: ["pre_norm", "linear_1", "linear_2"],
    norm: VisionNorm::Layer,
    eps: 1e-6, // whatever that of the blocks is
    place: NormPlace::AfterMerge,
    hidden: MergerHidden::Input,
};

/// Reads the sizes of 4.6 from the parsed `config.json`.
pub(super) fn read(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    read_with(json, ["minicpmv4_6_vision", "`minicpmv4_6_vision`"], |_, text| Ok(text))
}

/// As [`read`], for 4.7.
pub(super) fn read_canvas(json: &Value) -> Result<ModelConfig, ModelConfigError> {
    read_with(json, ["minicpmv4_7_vision", "`minicpmv4_7_vision`"], on_three_axes)
}

/// `vision_type` is the `model_type` of the vision encoder, plain and for messages, and `axes` sets those
/// of positions.
fn read_with(
    json: &Value,
    [vision_type, known]: [&'static str; 2],
    axes: impl Fn(&Section<'_>, DecoderConfig) -> Result<DecoderConfig, ModelConfigError>,
) -> Result<ModelConfig, ModelConfigError> {
    let top = Section { value: json, name: "" };
    let section = Section::of(json, "text_config")?;
    let vision_section = Section::of(json, "vision_config")?;
    vision_section.expect("model_type", &Value::from(vision_type), known)?;
    let readers: [(&str, ReadDecoder); 2] =
        [("qwen3_5_text", decoder), ("qwen3_5_moe_text", decoder_with_experts)];
    let known = "`qwen3_5_text` or `qwen3_5_moe_text`";
    let text = section.decoder_of_kind(readers, Some("qwen3_5_text"), known)?;
    let config = ModelConfig {
        vision: Some(vision(&top, &vision_section, &text)?),
        // transformers reads only the key of the whole file
        text: DecoderConfig {
            tie_word_embeddings: top.is_true("tie_word_embeddings")?,
            ..axes(&section, text)?
        },
        tensor_names: TensorNames::Modules,
    };
    config.check()?;
    Ok(config)
}

/// Sizes that the file lacks are those of transformers.
fn vision(
    top: &Section<'_>,
    section: &Section<'_>,
    text: &DecoderConfig,
) -> Result<VisionConfig, ModelConfigError> {
    expect_supported(top, section)?;
    let depth = section.size_or("num_hidden_layers", 12)?;
    let eps = section.epsilon("layer_norm_eps", Some(1e-6))?;
    let SliceSizes { patch, merge, .. } = SliceSizes::read(top.value)?;
    let side = read_side(top.value, "vision_config.image_size", 224)?;
    let early_merger = match merge {
        SliceSizes::INNER => None,
        _ => Some(EarlyMerger {
            after_block: after_block(top, depth)?,
            norm: "layer_norm1",
            merger: MergerParts {
                name: "model.vision_tower.vit_merger",
                eps,
                hidden: MergerHidden::Mlp,
                ..MERGER
            },
        }),
    };
    Ok(VisionConfig {
        depth,
        hidden_size: section.size_or("hidden_size", 768)?,
        intermediate_size: section.size_or("intermediate_size", 3072)?,
        num_heads: section.size_or("num_attention_heads", 12)?,
        in_channels: section.size_or("num_channels", 3)?,
        patch_size: patch as usize,
        temporal_patch_size: 1,
        spatial_merge_size: merge as usize,
        out_hidden_size: text.hidden_size,
        // without it, transformers trains without the images
        image_token_id: top.size("image_token_id")? as u32,
        parts: VisionParts {
            names: NAMES,
            eps,
            attention: VisionAttention::Separate { has_bias: true, has_norms: false },
            mlp: VisionMlp::Gelu { act: gelu(section, Gelu::Tanh)?, layers: ["fc1", "fc2"] },
            has_temporal_kernel: false,
            has_patch_bias: true,
            num_position_embeddings: Some((side / patch).pow(2) as usize),
            table_reading: TableReading::Nearest,
            early_merger,
            post_norm: Some("model.vision_tower.post_layernorm"),
            merger: MERGER,
            ..VisionParts::QWEN
        },
    })
}

/// The block after which patches are merged. transformers ignores the key of `vision_config`.
fn after_block(top: &Section<'_>, depth: usize) -> Result<usize, ModelConfigError> {
    let value = &top.value["insert_layer_id"];
    let block = if value.is_null() { Some(6) } else { value.as_u64() };
    match block {
        Some(block) if block < depth as u64 => Ok(block as usize),
        _ => {
            let expected = format!("a block, 0 to {} (6 without the key)", depth - 1);
            Err(top.range("insert_layer_id", expected))
        }
    }
}

/// Fails if a setting that changes the computation is not that of the published model.
fn expect_supported(top: &Section<'_>, section: &Section<'_>) -> Result<(), ModelConfigError> {
    top.expect("merge_kernel_size", &json!([2, 2]), "`[2, 2]`")?;
    top.expect("merger_times", &Value::from(1), "`1`")?;
    top.expect("drop_vision_last_layer", &Value::from(false), "`false`")?;
    section.expect("window_kernel_size", &json!([2, 2]), "`[2, 2]`")?;
    section.expect_no_dropout("attention_dropout")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::config::assert_refused;
    use crate::nn::{Mrope, MropeLayout};

    fn published() -> Value {
        serde_json::from_str(include_str!("presets/minicpm-v-4.6.json")).unwrap()
    }

    #[test]
    fn the_published_model_has_as_many_parameters_as_transformers_counts() {
        let config = read(&published()).unwrap();
        let count = |part: &str| -> usize {
            let specs = config.param_specs();
            let of_part = specs.iter().filter(|spec| spec.name.starts_with(part));
            of_part.map(|spec| spec.shape.iter().product::<usize>()).sum()
        };
        assert_eq!(count("model.vision_tower."), 522_299_312);
        assert_eq!(count("model.merger."), 25_967_104);
        assert_eq!(count(""), 1_300_428_016);
        assert!(config.text.mrope.is_none());
    }

    #[test]
    fn positions_of_4_7_are_on_three_axes() {
        let mut json = published();
        json["vision_config"]["model_type"] = json!("minicpmv4_7_vision");
        let axes = |section| Some(Mrope { section, layout: MropeLayout::Interleaved });
        let config = read_canvas(&json).unwrap();
        assert_eq!(config.text.mrope, axes([11, 11, 10]));
        json["text_config"]["rope_parameters"]["mrope_section"] = json!([16, 8, 8]);
        assert_eq!(read_canvas(&json).unwrap().text.mrope, axes([16, 8, 8]));
        let changes =
            [("vision_config", "model_type", json!("minicpmv4_6_vision"), "`minicpmv4_7_vision`")];
        assert_refused(read_canvas, &json, changes);
        json["text_config"]["rope_parameters"]["mrope_section"] = json!([8, 8, 8]);
        let error = read_canvas(&json).unwrap_err().to_string();
        assert!(error.contains("`mrope_section` [8, 8, 8]"), "{error}");
        // 4.6 has no such key
        json["vision_config"]["model_type"] = json!("minicpmv4_6_vision");
        assert_eq!(read(&json).unwrap().text.mrope, None);
    }

    #[test]
    fn in_mode_4x_nothing_is_merged_between_the_blocks() {
        let mut json = published();
        json["downsample_mode"] = json!("4x");
        let config = read(&json).unwrap();
        let vision = config.vision.as_ref().unwrap();
        assert_eq!((vision.spatial_merge_size, &vision.parts.early_merger), (2, &None));
        assert!(config.param_specs().iter().all(|spec| !spec.name.contains("vit_merger")));
    }

    #[test]
    fn the_block_before_the_early_merger_is_that_of_the_whole_file() {
        for (value, block) in [(Value::Null, 6), (json!(0), 0), (json!(26), 26)] {
            let mut json = published();
            json["insert_layer_id"] = value;
            json["vision_config"]["insert_layer_id"] = json!(3);
            let vision = read(&json).unwrap().vision.unwrap();
            assert_eq!(vision.parts.early_merger.unwrap().after_block, block);
        }
    }

    #[test]
    fn values_that_are_not_supported_are_refused_by_name() {
        let changes = [
            ("", "downsample_mode", json!("8x"), "downsample_mode"),
            ("", "downsample_mode", json!(4), "downsample_mode"),
            ("", "merge_kernel_size", json!([4, 4]), "merge_kernel_size"),
            ("", "merger_times", json!(2), "merger_times"),
            ("", "drop_vision_last_layer", json!(true), "drop_vision_last_layer"),
            ("", "insert_layer_id", json!(27), "a block, 0 to 26 (6"),
            ("", "insert_layer_id", json!(-1), "insert_layer_id"),
            ("", "image_token_id", Value::Null, "image_token_id"),
            ("text_config", "model_type", json!("qwen3"), "text_config.model_type"),
            ("vision_config", "model_type", json!("siglip"), "minicpmv4_6_vision"),
            ("vision_config", "window_kernel_size", json!([4, 4]), "window_kernel_size"),
            ("vision_config", "attention_dropout", json!(0.1), "attention_dropout"),
            ("vision_config", "hidden_act", json!("relu"), "vision_config.hidden_act"),
            ("vision_config", "layer_norm_eps", json!(2), "vision_config.layer_norm_eps"),
        ];
        assert_refused(read, &published(), changes);
    }
}
