//! `trainer export`: merges an adapter, cleans a checkpoint, changes the dtype.

use super::args::{check_folder, model_folder};
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::report;
use super::terminal::stdout;
use crate::checkpoint::{GgufDtype, PeftConfig};
use crate::net::hub::Cached;
use crate::report::model_card;
use crate::run::{ExportDtype, export_adapter, export_gguf, export_model};
use crate::train::Precision;
use clap::{Args, ValueEnum};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Arguments of `export`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  trainer export --adapter runs/mine/final --merge --out merged\n  \
    trainer export --model runs/mine/checkpoints/step-00000200 --out model --dtype bf16\n  \
    trainer export --model runs/mine/final --gguf for_llama_cpp --quant q8_0"
)]
pub(super) struct ExportArgs {
    /// New folder to write
    #[arg(long, value_name = "DIR", required_unless_present = "gguf")]
    out: Option<PathBuf>,
    /// New folder to write for llama.cpp: a GGUF file of the model, and one of its vision encoder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "dtype", "transformers_4"])]
    gguf: Option<PathBuf>,
    /// Dtype of the matrices in the file of the model
    #[arg(long, value_name = "DTYPE", requires = "gguf", default_value = "f16")]
    quant: QuantArg,
    /// Adapter in PEFT's layout, for example `final` of a run with `adapter`
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Write the model with the adapter added to its weights, instead of the adapter
    #[arg(long, requires = "adapter")]
    merge: bool,
    /// Write adapters of the experts of Qwen3-VL as PEFT has them with transformers 4
    #[arg(long, requires = "adapter", conflicts_with = "merge")]
    transformers_4: bool,
    /// Model folder or checkpoint; with `--merge` by default the model of adapter_config.json
    #[arg(long, value_name = "DIR", required_unless_present = "adapter")]
    model: Option<PathBuf>,
    /// Dtype of the tensors; by default that of the files. `nf4`: linear layers of a model in 4
    /// bits
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<DtypeArg>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
    Nf4,
}

impl From<DtypeArg> for ExportDtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Self::Dtype(Precision::F32),
            DtypeArg::Bf16 => Self::Dtype(Precision::Bf16),
            DtypeArg::Nf4 => Self::Nf4,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum QuantArg {
    F16,
    Bf16,
    /// 8 bits, with a scale for each 32 values
    #[value(name = "q8_0")]
    Q8_0,
    /// 4 bits, with a scale for each 32 values; embedding and head in 8 bits
    #[value(name = "q4_0")]
    Q4_0,
}

impl From<QuantArg> for GgufDtype {
    fn from(quant: QuantArg) -> Self {
        match quant {
            QuantArg::F16 => Self::F16,
            QuantArg::Bf16 => Self::Bf16,
            QuantArg::Q8_0 => Self::Q8_0,
            QuantArg::Q4_0 => Self::Q4_0,
        }
    }
}

/// Writes the folder and prints one JSON object with the numbers of tensors.
pub(super) fn run(args: &ExportArgs, logging: &Logging) -> anyhow::Result<()> {
    let (argument, out) = match (&args.gguf, &args.out) {
        (Some(folder), _) => ("--gguf", folder),
        (None, Some(folder)) => ("--out", folder),
        (None, None) => return Ok(()), // clap requires one of them
    };
    if out.exists() {
        let message = format!("`{argument}`: `{}` exists", out.display());
        return Err(Failure::new(Exit::Usage, message).hint("choose a new folder").into());
    }
    let dtype = args.dtype.map(ExportDtype::from);
    if let Some(adapter) = &args.adapter {
        check_folder("--adapter", adapter)?;
    }
    let exported = match (&args.adapter, args.merge) {
        (Some(_), false) if args.gguf.is_some() => {
            let message = "`--gguf` writes models, not adapters";
            return Err(Failure::new(Exit::Usage, message).hint("add `--merge`").into());
        }
        (adapter, _) if args.gguf.is_some() => {
            let base = base(args, adapter.as_deref(), logging)?;
            export_gguf(&base, adapter.as_deref(), args.quant.into(), out)?
        }
        (Some(adapter), false) => {
            if args.model.is_some() {
                let message = "`--model` has no effect without `--merge`";
                return Err(Failure::new(Exit::Usage, message).hint("add `--merge`").into());
            }
            let precision = match dtype {
                None => None,
                Some(ExportDtype::Dtype(precision)) => Some(precision),
                Some(ExportDtype::Nf4) => {
                    let message = "`--dtype nf4` stores models, not adapters";
                    return Err(Failure::new(Exit::Usage, message).hint("add `--merge`").into());
                }
            };
            let exported = export_adapter(adapter, precision, args.transformers_4, out)?;
            let base = PeftConfig::read(adapter)?.base_model_name_or_path;
            let made = "An adapter, written by `trainer export`.";
            write_card(out, Path::new(&base.unwrap_or_default()), adapter, made);
            exported
        }
        (adapter, _) => {
            let base = base(args, adapter.as_deref(), logging)?;
            let exported = export_model(&base, adapter.as_deref(), dtype, out)?;
            let made = if adapter.is_some() {
                "A model with the adapter added to its weights, written by `trainer export`."
            } else {
                "A model, written by `trainer export`."
            };
            write_card(out, &base, adapter.as_ref().unwrap_or(&base), made);
            exported
        }
    };
    let summary = serde_json::json!({
        "tensors": exported.tensors,
        "merged": exported.merged,
        "replaced": exported.replaced,
        "quantized": exported.quantized,
        "out": out,
    });
    writeln!(stdout(), "{summary}")?;
    Ok(())
}

/// Writes the card of the folder `out`, which was made from the model `base` and from the folder
/// `source`, which may be that of a run.
fn write_card(out: &Path, base: &Path, source: &Path, made: &str) {
    let base = Cached::of(base).map_or_else(|| base.display().to_string(), |hub| hub.name());
    let card = model_card(out, &base, report::run_of(source).as_ref(), made);
    report::write_card(out, card.as_bytes());
}

/// The folder of the model: that of the argument, or that of the adapter's config.
fn base(args: &ExportArgs, adapter: Option<&Path>, logging: &Logging) -> anyhow::Result<PathBuf> {
    if let Some(model) = &args.model {
        return model_folder(model, logging);
    }
    let named = adapter.map(PeftConfig::read).transpose()?;
    let named = named.and_then(|config| config.base_model_name_or_path);
    let Some(named) = named else {
        let message = "adapter_config.json has no `base_model_name_or_path`";
        return Err(Failure::new(Exit::Usage, message)
            .hint("pass the model with `--model`")
            .into());
    };
    model_folder(Path::new(&named), logging)
}
