//! `trainer init`: writes a model folder with random weights, in the shape of a preset.

use super::args::check_folder;
use super::failure::{Exit, Failure};
use crate::checkpoint::{
    CarriedFiles, FolderLayout, ModelFolder, SavedTensor, WeightFiles, write_atomically,
};
use crate::models::config_from_json;
use crate::nn::random_tensor;
use candle_core::{DType, Device};
use clap::{Args, ValueEnum};
use serde_json::Value;
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
/// Limits on the pixels of an image: those of the quickstart, and the published ones. `tiny` has the
/// latter, so that memory, steps and truncation are predicted as for a published model.
const PIXELS: [&str; 2] = [
    "\"longest_edge\": 200704,\n    \"shortest_edge\": 4096",
    "\"longest_edge\": 16777216,\n    \"shortest_edge\": 65536",
];

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
            let text = match args.preset {
                Preset::Tiny => text.replace(PIXELS[0], PIXELS[1]),
                _ => text.to_owned(),
            };
            write_atomically(&args.out.join(name), text.as_bytes())?;
        }
    }
    let with_weights = args.preset.is_small() || args.weights;
    let weights = if with_weights { random_weights(&config, args.seed)? } else { Vec::new() };
    let carried = args.tokenizer.as_deref().map(CarriedFiles::read).transpose()?;
    let carried = carried.unwrap_or_default();
    let files = ModelFolder {
        layout: FolderLayout::Model,
        weights: &weights,
        config_json: &config,
        carried: &carried,
        max_shard_bytes: ModelFolder::MAX_SHARD_BYTES,
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
    let names = config.tensor_names;
    let mut weights = Vec::new();
    for spec in config.param_specs() {
        let tensor = random_tensor(&spec, config.text.initializer_range, seed, &Device::Cpu)?;
        let tensor = SavedTensor::whole(names.in_file(&spec.name), tensor.to_dtype(dtype)?);
        let pieces = spec.pieces().into_iter().map(|(name, shape)| (names.in_file(&name), shape));
        match pieces.collect::<Vec<_>>() {
            pieces if pieces.is_empty() => weights.push(tensor),
            pieces => weights.extend(tensor.split(&pieces)?),
        }
    }
    Ok(weights)
}

/// Model shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Preset {
    /// 0.7 M parameters, for tests
    Debug,
    /// 1.6 M parameters, for the CPU
    Tiny,
    /// 0.9 M parameters, a mixture of experts for tests
    TinyMoe,
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
    /// Qwen3-VL 30B-A3B, a mixture of experts
    #[value(name = "30b-a3b")]
    B30A3,
    /// Qwen3-VL 235B-A22B, a mixture of experts
    #[value(name = "235b-a22b")]
    B235A22,
    /// Qwen3.5 0.8B
    #[value(name = "qwen3.5-0.8b")]
    Hybrid0B8,
    /// Qwen3.5 4B
    #[value(name = "qwen3.5-4b")]
    Hybrid4B,
    /// Qwen3.5 9B
    #[value(name = "qwen3.5-9b")]
    Hybrid9B,
    /// Qwen3.5 27B
    #[value(name = "qwen3.5-27b")]
    Hybrid27B,
    /// Qwen2.5-VL 3B
    #[value(name = "qwen2.5-vl-3b")]
    Windowed3B,
    /// Qwen2.5-VL 7B
    #[value(name = "qwen2.5-vl-7b")]
    Windowed7B,
    /// Qwen2.5-VL 32B
    #[value(name = "qwen2.5-vl-32b")]
    Windowed32B,
    /// Qwen2.5-VL 72B
    #[value(name = "qwen2.5-vl-72b")]
    Windowed72B,
}

impl Preset {
    /// The content of `config.json`. The vision encoders of Qwen3.5 0.8B and 4B were not confirmed with
    /// the published files.
    fn config(self) -> Value {
        let text = match self {
            Self::Debug => include_str!("init/presets/debug.json"),
            Self::Tiny => include_str!("../../data/quickstart/model/config.json"),
            Self::TinyMoe => include_str!("init/presets/tiny-moe.json"),
            Self::B2 => include_str!("init/presets/2b.json"),
            Self::B4 => include_str!("init/presets/4b.json"),
            Self::B8 => include_str!("init/presets/8b.json"),
            Self::B32 => include_str!("init/presets/32b.json"),
            Self::B30A3 => include_str!("init/presets/30b-a3b.json"),
            Self::B235A22 => include_str!("init/presets/235b-a22b.json"),
            Self::Hybrid0B8 => include_str!("init/presets/qwen3.5-0.8b.json"),
            Self::Hybrid4B => include_str!("init/presets/qwen3.5-4b.json"),
            Self::Hybrid9B => include_str!("init/presets/qwen3.5-9b.json"),
            Self::Hybrid27B => include_str!("init/presets/qwen3.5-27b.json"),
            Self::Windowed3B => include_str!("init/presets/qwen2.5-vl-3b.json"),
            Self::Windowed7B => include_str!("init/presets/qwen2.5-vl-7b.json"),
            Self::Windowed32B => include_str!("init/presets/qwen2.5-vl-32b.json"),
            Self::Windowed72B => include_str!("init/presets/qwen2.5-vl-72b.json"),
        };
        serde_json::from_str(text).expect("a file of ours")
    }

    /// Whether the preset has its own tokenizer and always gets weights.
    fn is_small(self) -> bool {
        matches!(self, Self::Debug | Self::Tiny | Self::TinyMoe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::config_from_json;
    use candle_core::{DType, Device, Tensor};
    use serde_json::json;

    #[test]
    fn the_limits_on_pixels_are_in_the_processor_file() {
        assert!(SMALL_FILES.iter().any(|(_, text)| text.contains(PIXELS[0])));
    }

    #[test]
    fn weights_have_the_dtype_that_their_config_names() {
        assert_eq!(stored_dtype(&Preset::B2.config()), DType::BF16);
        assert_eq!(stored_dtype(&Preset::Tiny.config()), DType::F32);
        let mut config = Preset::Debug.config();
        config["text_config"]["dtype"] = json!("bfloat16");
        config["dtype"] = Value::Null;
        let weights = random_weights(&config, 1).unwrap();
        let files = ModelFolder {
            layout: FolderLayout::Model,
            weights: &weights,
            config_json: &config,
            carried: &CarriedFiles::default(),
            max_shard_bytes: ModelFolder::MAX_SHARD_BYTES,
        };
        let folder = tempfile::tempdir().unwrap();
        files.write_into(folder.path()).unwrap();
        let file = folder.path().join("model.safetensors");
        let stored = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        assert!(stored.values().all(|tensor| tensor.dtype() == DType::BF16));
    }

    #[test]
    fn the_decoders_of_qwen35_have_as_many_parameters_as_their_names_say() {
        for (preset, expected) in [
            (Preset::Hybrid0B8, 0.75e9),
            (Preset::Hybrid4B, 4.2e9),
            (Preset::Hybrid9B, 8.95e9),
            (Preset::Hybrid27B, 26.9e9),
        ] {
            let config = config_from_json(&preset.config()).unwrap();
            let specs = config.param_specs();
            let decoder = specs.iter().filter(|spec| spec.component.name == "llm");
            let count: usize = decoder.map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert!((count as f64 / expected - 1.0).abs() < 0.02, "{preset:?}: {count}");
        }
    }

    #[test]
    fn models_with_experts_have_as_many_parameters_and_active_ones_as_their_names_say() {
        for (preset, all, active) in
            [(Preset::B30A3, 30.53e9, 3.35e9), (Preset::B235A22, 235.09e9, 22.19e9)]
        {
            let config = config_from_json(&preset.config()).unwrap();
            let specs = config.param_specs();
            let decoder = specs.iter().filter(|spec| spec.component.name == "llm");
            let count: usize = decoder.map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert!((count as f64 / all - 1.0).abs() < 1e-3, "{preset:?}: {count}");
            let count = count - config.text.idle_weights();
            assert!((count as f64 / active - 1.0).abs() < 1e-2, "{preset:?}: {count} active");
        }
    }

    #[test]
    fn the_shapes_of_qwen25_vl_have_as_many_parameters_as_the_published_models() {
        for (preset, expected) in [
            (Preset::Windowed3B, 3_754_622_976),
            (Preset::Windowed7B, 8_292_166_656),
            (Preset::Windowed32B, 33_452_718_336),
            (Preset::Windowed72B, 73_410_777_344),
        ] {
            let specs = config_from_json(&preset.config()).unwrap().param_specs();
            let count: usize = specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert_eq!(count, expected, "{preset:?}");
        }
    }

    /// With `TRAINER_EMULATE_CUDA`, the ops run the CUDA kernels.
    #[test]
    fn the_norms_of_the_presets_have_a_width_that_their_ops_support() -> candle_core::Result<()> {
        let mut widths = std::collections::BTreeSet::new();
        for preset in Preset::value_variants() {
            let specs = config_from_json(&preset.config()).unwrap().param_specs();
            let has = |name: &str| specs.iter().any(|spec| spec.name == name);
            for spec in specs.iter().filter(|spec| spec.name.ends_with("weight")) {
                let [width] = spec.shape[..] else { continue };
                widths.insert((width, has(&spec.name.replace("weight", "bias"))));
            }
        }
        assert!(widths.contains(&(8192, false)) && widths.contains(&(4608, true)), "{widths:?}");
        for (width, bias) in widths {
            let x = Tensor::ones((2, width), DType::F32, &Device::Cpu)?;
            let w = Tensor::ones(width, DType::F32, &Device::Cpu)?;
            if bias {
                let (y, stats) = crate::ops::layer_norm(&x, &w, &w, 1e-6)?;
                crate::ops::layer_norm_backward(&x, &stats, &w, &y, None, None, None)?;
                continue;
            }
            let scale = crate::ops::NormScale::Weight;
            let (y, rstd) = crate::ops::rms_norm(&x, &w, scale, 1e-6)?;
            crate::ops::rms_norm_backward(&x, &rstd, &w, scale, &y, None, None)?;
        }
        Ok(())
    }
}
