//! `trainer init`: writes a model folder with random weights.

use super::args::check_folder;
use super::failure::{Exit, Failure};
use crate::checkpoint::{
    CarriedFiles, FolderLayout, ModelFiles, SavedTensor, WeightFiles, write_atomically,
};
use crate::models::config_from_json;
use crate::nn::random_tensor;
use candle_core::{DType, Device};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Arguments of `init`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer init --preset tiny --out models/tiny --seed 1\n  \
    trainer init --preset 2b --out models/2b --tokenizer models/Qwen3-VL-2B-Instruct")]
pub(super) struct InitArgs {
    /// Shape of the model
    #[arg(long, value_enum)]
    preset: Preset,
    /// Folder to write; it must not contain a model
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Seed of the weights
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Write weights for a published shape too, in the dtype of its config; they are large
    #[arg(long)]
    weights: bool,
    /// Copy the tokenizer files of this folder, for the published shapes
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
}

/// Model shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Preset {
    /// 0.4 M parameters, for tests
    Debug,
    /// 1.5 M parameters, for the CPU
    Tiny,
    /// Qwen3-VL 2B
    #[value(name = "2b")]
    B2,
    /// Qwen3-VL 4B
    #[value(name = "4b")]
    B4,
    /// Qwen3-VL 8B
    #[value(name = "8b")]
    B8,
    /// Qwen3-VL 32B
    #[value(name = "32b")]
    B32,
    /// Qwen3-VL 30B-A3B, a mixture of experts (config only)
    #[value(name = "30b-a3b")]
    B30A3,
}

/// Tokenizer, template and processor files of the small presets.
const SMALL_FILES: [(&str, &str); 5] = [
    ("tokenizer.json", include_str!("../../data/quickstart/model/tokenizer.json")),
    ("tokenizer_config.json", include_str!("../../data/quickstart/model/tokenizer_config.json")),
    ("chat_template.jinja", include_str!("../../data/quickstart/model/chat_template.jinja")),
    (
        "preprocessor_config.json",
        include_str!("../../data/quickstart/model/preprocessor_config.json"),
    ),
    ("generation_config.json", include_str!("../../data/quickstart/model/generation_config.json")),
];
const SMALL_CONFIG: &str = include_str!("../../data/quickstart/model/config.json");

/// Widths and depths of a published shape.
struct Published {
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    intermediate: u64,
    tied: bool,
    vision: [u64; 3], // depth, hidden, intermediate
    deepstack: [u64; 3],
}

impl Preset {
    fn config(self) -> Value {
        let small = || serde_json::from_str::<Value>(SMALL_CONFIG).expect("a file of ours");
        let vit_l = ([24, 1024, 4096], [5, 11, 17]);
        let vit_so = ([27, 1152, 4304], [8, 16, 24]);
        let (layers, hidden, heads, kv_heads, intermediate, tied, (vision, deepstack)) = match self
        {
            Self::Tiny => return small(),
            Self::Debug => {
                let mut config = small();
                config["text_config"]["num_hidden_layers"] = json!(2);
                config["text_config"]["hidden_size"] = json!(64);
                config["text_config"]["intermediate_size"] = json!(128);
                config["vision_config"]["out_hidden_size"] = json!(64);
                config["vision_config"]["depth"] = json!(2);
                config["vision_config"]["deepstack_visual_indexes"] = json!([0]);
                return config;
            }
            Self::B2 => (28, 2048, 16, 8, 6144, true, vit_l),
            Self::B4 => (36, 2560, 32, 8, 9728, true, vit_l),
            Self::B8 => (36, 4096, 32, 8, 12288, false, vit_so),
            Self::B32 => (64, 5120, 64, 8, 25600, false, vit_so),
            Self::B30A3 => (48, 2048, 32, 4, 6144, false, vit_so),
        };
        let mut config =
            Published { layers, hidden, heads, kv_heads, intermediate, tied, vision, deepstack }
                .config();
        if self == Self::B30A3 {
            config["architectures"] = json!(["Qwen3VLMoeForConditionalGeneration"]);
            config["model_type"] = json!("qwen3_vl_moe");
            config["vision_config"]["model_type"] = json!("qwen3_vl_moe");
            let text = &mut config["text_config"];
            text["model_type"] = json!("qwen3_vl_moe_text");
            for (key, value) in [
                ("decoder_sparse_step", json!(1)),
                ("mlp_only_layers", json!([])),
                ("moe_intermediate_size", json!(768)),
                ("norm_topk_prob", json!(true)),
                ("num_experts", json!(128)),
                ("num_experts_per_tok", json!(8)),
            ] {
                text[key] = value;
            }
        }
        config
    }

    fn is_small(self) -> bool {
        matches!(self, Self::Debug | Self::Tiny)
    }
}

impl Published {
    fn config(&self) -> Value {
        let [depth, vision_hidden, vision_intermediate] = self.vision;
        json!({
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "image_token_id": 151655,
            "model_type": "qwen3_vl",
            "text_config": {
                "attention_bias": false,
                "attention_dropout": 0.0,
                "bos_token_id": 151643,
                "dtype": "bfloat16",
                "eos_token_id": 151645,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": self.hidden,
                "initializer_range": 0.02,
                "intermediate_size": self.intermediate,
                "max_position_embeddings": 262144,
                "model_type": "qwen3_vl_text",
                "num_attention_heads": self.heads,
                "num_hidden_layers": self.layers,
                "num_key_value_heads": self.kv_heads,
                "rms_norm_eps": 1e-6,
                "rope_scaling": {
                    "mrope_interleaved": true,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default"
                },
                "rope_theta": 5000000,
                "tie_word_embeddings": self.tied,
                "use_cache": true,
                "vocab_size": 151936
            },
            "tie_word_embeddings": self.tied,
            "transformers_version": "4.57.0.dev0",
            "video_token_id": 151656,
            "vision_config": {
                "deepstack_visual_indexes": self.deepstack,
                "depth": depth,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": vision_hidden,
                "in_channels": 3,
                "initializer_range": 0.02,
                "intermediate_size": vision_intermediate,
                "model_type": "qwen3_vl",
                "num_heads": 16,
                "num_position_embeddings": 2304,
                "out_hidden_size": self.hidden,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2
            },
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652
        })
    }
}

/// Writes `config.json`, and weights and tokenizer files if the arguments require them.
pub(super) fn run(args: &InitArgs) -> anyhow::Result<()> {
    if args.out.join("config.json").exists() || WeightFiles::open(&args.out).is_ok() {
        let message = format!("`{}` already contains a model", args.out.display());
        return Err(Failure::new(Exit::Usage, message)
            .hint("choose another `--out`, or remove the folder first")
            .into());
    }
    std::fs::create_dir_all(&args.out).map_err(|error| {
        let message = format!("cannot create folder `{}`: {error}", args.out.display());
        Failure::new(Exit::CannotWrite, message).hint("choose another `--out`")
    })?;
    if let Some(folder) = &args.tokenizer {
        check_folder("--tokenizer", folder)?;
    }
    let config = args.preset.config();
    if args.preset.is_small() {
        for (name, text) in SMALL_FILES {
            write_atomically(&args.out.join(name), text.as_bytes())?;
        }
    }
    let with_weights = args.preset.is_small() || args.weights;
    let weights = if with_weights { random_weights(&config, args.seed)? } else { Vec::new() };
    let carried = args.tokenizer.as_deref().map(CarriedFiles::read).transpose()?;
    let carried = carried.unwrap_or_default();
    let files = ModelFiles {
        layout: FolderLayout::Model,
        weights: &weights,
        config_json: &config,
        carried: &carried,
        max_shard_bytes: ModelFiles::MAX_SHARD_BYTES,
    };
    files.write_into(&args.out)?;
    let count: usize = weights.iter().map(SavedTensor::elem_count).sum();
    tracing::info!(folder = %args.out.display(), parameters = count, "wrote a model folder");
    if !args.preset.is_small() && !has_tokenizer(&args.out) {
        tracing::warn!("the folder has no tokenizer: pass `--tokenizer` or copy the files");
    }
    Ok(())
}

fn has_tokenizer(folder: &Path) -> bool {
    folder.join("tokenizer.json").is_file()
}

/// The dtype that a config names for its weights; f32 if it names none.
fn stored_dtype(config: &Value) -> DType {
    let named = [config, &config["text_config"]].into_iter().find_map(|section| {
        ["dtype", "torch_dtype"].into_iter().find_map(|key| section[key].as_str())
    });
    match named {
        Some("bfloat16") => DType::BF16,
        Some("float16") => DType::F16,
        _ => DType::F32,
    }
}

fn random_weights(config: &Value, seed: u64) -> anyhow::Result<Vec<SavedTensor>> {
    let dtype = stored_dtype(config);
    let config = config_from_json(config)?;
    config
        .param_specs()
        .into_iter()
        .map(|spec| {
            let tensor = random_tensor(&spec, config.initializer_range(), seed, &Device::Cpu)?;
            Ok(SavedTensor::whole(spec.name, tensor.to_dtype(dtype)?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_have_the_dtype_that_their_config_names() {
        assert_eq!(stored_dtype(&Preset::B2.config()), DType::BF16);
        assert_eq!(stored_dtype(&Preset::Tiny.config()), DType::F32);
        let mut config = Preset::Debug.config();
        config["text_config"]["dtype"] = json!("bfloat16");
        config["dtype"] = Value::Null;
        let weights = random_weights(&config, 1).unwrap();
        let files = ModelFiles {
            layout: FolderLayout::Model,
            weights: &weights,
            config_json: &config,
            carried: &CarriedFiles::default(),
            max_shard_bytes: ModelFiles::MAX_SHARD_BYTES,
        };
        let folder = tempfile::tempdir().unwrap();
        files.write_into(folder.path()).unwrap();
        let file = folder.path().join("model.safetensors");
        let stored = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        assert!(stored.values().all(|tensor| tensor.dtype() == DType::BF16));
    }
}
