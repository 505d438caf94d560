//! `trainer init`: writes a model folder with random weights, in the shape of a preset.

use super::args::check_folder;
use super::failure::{Exit, Failure};
use crate::checkpoint::{
    CarriedFiles, FolderLayout, ModelFolder, SavedTensor, WeightFiles, write_atomically,
};
use crate::models::{PRESETS, Preset, config_from_json};
use crate::nn::random_tensor;
use candle_core::{DType, Device};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Arguments of `init`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer init --preset tiny --out models/tiny --seed 1\n  \
    trainer init --preset 2b --out models/2b --tokenizer models/Qwen3-VL-2B-Instruct")]
pub(super) struct InitArgs {
    /// Shape of the model
    #[arg(long, value_parser = preset_parser())]
    preset: &'static Preset,
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
    let config = config_of(args.preset);
    let is_small = SMALL.iter().any(|of| of.name == args.preset.name);
    if is_small {
        for (name, text) in SMALL_FILES {
            let text = match args.preset.name {
                TINY => text.replace(PIXELS[0], PIXELS[1]),
                _ => text.to_owned(),
            };
            write_atomically(&args.out.join(name), text.as_bytes())?;
        }
    }
    let with_weights = is_small || args.weights;
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
    if !is_small && !has_tokenizer(&args.out) {
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

/// Shapes with their own tokenizer, which always get weights.
static SMALL: [Preset; 3] = [
    Preset {
        name: "debug",
        title: "0.7 M parameters, for tests",
        config: include_str!("init/presets/debug.json"),
    },
    Preset {
        name: TINY,
        title: "1.6 M parameters, for the CPU",
        config: include_str!("../../data/quickstart/model/config.json"),
    },
    Preset {
        name: "tiny-moe",
        title: "0.9 M parameters, a mixture of experts for tests",
        config: include_str!("init/presets/tiny-moe.json"),
    },
];
const TINY: &str = "tiny";

fn presets() -> impl Iterator<Item = &'static Preset> {
    SMALL.iter().chain(PRESETS)
}

fn preset_parser() -> impl TypedValueParser<Value = &'static Preset> {
    let values = presets().map(|of| PossibleValue::new(of.name).help(of.title));
    PossibleValuesParser::new(values)
        .map(|name| presets().find(|of| of.name == name).expect("one of the names above"))
}

/// The content of `config.json`.
fn config_of(preset: &Preset) -> Value {
    serde_json::from_str(preset.config).expect("a file of ours")
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Tensor};
    use serde_json::json;

    fn named(name: &str) -> Value {
        config_of(presets().find(|of| of.name == name).unwrap())
    }

    #[test]
    fn the_limits_on_pixels_are_in_the_processor_file() {
        assert!(SMALL_FILES.iter().any(|(_, text)| text.contains(PIXELS[0])));
    }

    #[test]
    fn weights_have_the_dtype_that_their_config_names() {
        assert_eq!(stored_dtype(&named("2b")), DType::BF16);
        assert_eq!(stored_dtype(&named("tiny")), DType::F32);
        let mut config = named("debug");
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
            ("qwen3.5-0.8b", 0.75e9),
            ("qwen3.5-4b", 4.2e9),
            ("qwen3.5-9b", 8.95e9),
            ("qwen3.5-27b", 26.9e9),
        ] {
            let config = config_from_json(&named(preset)).unwrap();
            let specs = config.param_specs();
            let decoder = specs.iter().filter(|spec| spec.component.name == "llm");
            let count: usize = decoder.map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert!((count as f64 / expected - 1.0).abs() < 0.02, "{preset:?}: {count}");
        }
    }

    #[test]
    fn models_with_experts_have_as_many_parameters_and_active_ones_as_their_names_say() {
        for (preset, all, active) in
            [("30b-a3b", 30.53e9, 3.35e9), ("235b-a22b", 235.09e9, 22.19e9)]
        {
            let config = config_from_json(&named(preset)).unwrap();
            let specs = config.param_specs();
            let decoder = specs.iter().filter(|spec| spec.component.name == "llm");
            let count: usize = decoder.map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert!((count as f64 / all - 1.0).abs() < 1e-3, "{preset:?}: {count}");
            let count = count - config.text.idle_weights();
            assert!((count as f64 / active - 1.0).abs() < 1e-2, "{preset:?}: {count} active");
        }
    }

    #[test]
    fn shapes_have_as_many_parameters_as_the_published_models() {
        for (preset, expected) in [
            ("qwen2.5-vl-3b", 3_754_622_976),
            ("qwen2.5-vl-7b", 8_292_166_656),
            ("qwen2.5-vl-32b", 33_452_718_336),
            ("qwen2.5-vl-72b", 73_410_777_344),
            ("qwen2-vl-2b", 2_208_985_600),
            ("qwen2-vl-7b", 8_291_375_616),
            ("internvl3.5-1b", 1_060_897_792),
            ("internvl3.5-8b", 8_528_318_464),
            ("minicpm-v-4.6", 1_300_428_016),
        ] {
            let specs = config_from_json(&named(preset)).unwrap().param_specs();
            let count: usize = specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert_eq!(count, expected, "{preset:?}");
        }
    }

    /// With `TRAINER_EMULATE_CUDA`, the ops run the CUDA kernels.
    #[test]
    fn the_norms_of_the_presets_have_a_width_that_their_ops_support() -> candle_core::Result<()> {
        let mut widths = std::collections::BTreeSet::new();
        for preset in presets() {
            let specs = config_from_json(&config_of(preset)).unwrap().param_specs();
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
