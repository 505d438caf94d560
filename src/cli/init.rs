//! `trainer init`: writes a model folder with random weights.

mod preset;

use super::args::check_folder;
use super::failure::{Exit, Failure};
use crate::checkpoint::{
    CarriedFiles, FolderLayout, ModelFiles, SavedTensor, WeightFiles, write_atomically,
};
use crate::models::config_from_json;
use crate::nn::random_tensor;
use candle_core::{DType, Device};
use clap::Args;
use preset::Preset;
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
    let names = config.tensor_names();
    let mut weights = Vec::new();
    for spec in config.param_specs() {
        let tensor = random_tensor(&spec, config.initializer_range(), seed, &Device::Cpu)?;
        let tensor = SavedTensor::whole(names.in_file(&spec.name), tensor.to_dtype(dtype)?);
        let pieces = spec.pieces().into_iter().map(|(name, shape)| (names.in_file(&name), shape));
        match pieces.collect::<Vec<_>>() {
            pieces if pieces.is_empty() => weights.push(tensor),
            pieces => weights.extend(tensor.split(&pieces)?),
        }
    }
    Ok(weights)
}

#[cfg(test)]
mod tests {
    use super::*;
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
