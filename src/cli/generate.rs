//! `trainer generate`: answers a prompt, which may have images.

use super::args::{check_folder, model_folder};
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::stdout::stdout;
use crate::batch::{
    Content, MediaRef, MediaSource, Medium, Message, Objects, Part, Sample, SampleId,
};
use crate::data::{Encoder, ImageConfig};
use crate::run::load_for_run;
use crate::train::{DeviceChoice, GenerateOptions, ModelSection, generate};
use candle_transformers::generation::Sampling;
use clap::Args;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments of `generate`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer generate --model runs/demo/final --image cat.png \
    --prompt 'What is this?' --max-new-tokens 64")]
pub(super) struct GenerateArgs {
    /// Model folder in the transformers layout
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Adapter of the model, a folder in PEFT's layout
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Text of the user turn
    #[arg(long)]
    prompt: String,
    /// Image, placed before the text; may be given several times
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// System message
    #[arg(long)]
    system: Option<String>,
    /// Maximum number of tokens of the answer
    #[arg(long, default_value_t = 128)]
    max_new_tokens: usize,
    /// Sampling temperature; 0 decodes greedily, and then `--top-k` and `--top-p` have no effect
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample from the most likely tokens whose probabilities add up to P
    #[arg(long, value_name = "P", value_parser = probability)]
    top_p: Option<f64>,
    /// Sample from the K most likely tokens
    #[arg(long, value_name = "K", value_parser = positive)]
    top_k: Option<usize>,
    /// Device: `auto`, `cpu` or `cuda:N`
    #[arg(long, default_value_t)]
    device: DeviceChoice,
    /// Seed for sampling
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

fn probability(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    let is_valid = value > 0.0 && value <= 1.0;
    is_valid.then_some(value).ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}

fn positive(text: &str) -> Result<usize, String> {
    let count: usize = text.parse().map_err(|_| "expected a whole number".to_owned())?;
    if count > 0 { Ok(count) } else { Err("expected a number above 0".to_owned()) }
}

impl GenerateArgs {
    fn sampling(&self) -> Sampling {
        let temperature = self.temperature;
        match (temperature > 0.0, self.top_k, self.top_p) {
            (false, _, _) => Sampling::ArgMax,
            (true, None, None) => Sampling::All { temperature },
            (true, Some(k), None) => Sampling::TopK { k, temperature },
            (true, None, Some(p)) => Sampling::TopP { p, temperature },
            (true, Some(k), Some(p)) => Sampling::TopKThenTopP { k, p, temperature },
        }
    }

    fn sample(&self) -> anyhow::Result<Sample> {
        let mut media = Vec::new();
        let mut parts = Vec::new();
        for image in &self.images {
            let path = image.canonicalize().map_err(|error| {
                let message = format!("`--image`: cannot read `{}`: {error}", image.display());
                Failure::new(Exit::Data, message).hint("check the path")
            })?;
            let root: Arc<Path> = path.parent().unwrap_or(Path::new("/")).into();
            media.push(Medium::Image(MediaRef::from(MediaSource::File { root, path })));
            parts.push(Part::Image);
        }
        parts.push(Part::Text(self.prompt.clone()));
        let turn = |role: &str, content: Content| Message {
            role: role.to_owned(),
            content,
            tool_calls: None,
            reasoning_content: None,
            weight: 1.0,
        };
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            messages.push(turn("system", Content::Text(system.clone())));
        }
        messages.push(turn("user", Content::Parts(parts)));
        messages.push(turn("assistant", Content::Text(String::new()))); // to be generated
        let id = SampleId { file: Path::new("--prompt").into(), line: 1 };
        Ok(Sample { id, messages, media, tools: None, objects: Objects::default() })
    }
}

/// Prints the answer to stdout, and nothing else.
pub(super) fn run(args: &GenerateArgs, logging: &Logging) -> anyhow::Result<()> {
    let folder = model_folder(&args.model, logging)?;
    let encoder = Encoder::from_folder(&folder, &ImageConfig::default())?;
    let (prompt, _) = encoder.encode_prompt(&args.sample()?)?;
    let section = ModelSection::new(folder);
    let device = args.device.open()?;
    if let Some(adapter) = &args.adapter {
        check_folder("--adapter", adapter)?;
    }
    let loaded = load_for_run(&section, args.adapter.as_deref(), args.seed, &device)?;
    let options = GenerateOptions {
        max_new_tokens: args.max_new_tokens,
        sampling: args.sampling(),
        seed: args.seed,
        stop_ids: encoder.stop_ids().to_vec(),
    };
    let answer = generate(&*loaded.model, prompt, &options, &device)?;
    writeln!(stdout(), "{}", encoder.decode(&answer)?)?;
    Ok(())
}
