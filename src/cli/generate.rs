//! `trainer generate`: an answer to a prompt with images.

use super::report::{Exit, Failure};
use crate::batch::{Content, MediaRef, MediaSource, Medium, Message, Part, Sample, SampleId};
use crate::data::{Encoder, ImageConfig};
use crate::train::{
    AttentionChoice, DeviceChoice, GenerateOptions, ModelSection, Precision, RecomputeChoice,
    Weights, generate, load_model,
};
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
    /// What the user says
    #[arg(long)]
    prompt: String,
    /// Images, before the text; may be given several times
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// System message
    #[arg(long)]
    system: Option<String>,
    /// Tokens after which the answer is cut
    #[arg(long, default_value_t = 128)]
    max_new_tokens: usize,
    /// Sampling temperature; 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample from the smallest set of tokens with this probability
    #[arg(long, value_parser = share)]
    top_p: Option<f64>,
    /// Sample from this many most likely tokens
    #[arg(long, value_parser = positive)]
    top_k: Option<usize>,
    /// Where to compute: auto, cpu, cuda:N
    #[arg(long, default_value_t)]
    device: DeviceChoice,
    /// Seed of the sampling
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

/// A probability above 0.
fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if share > 0.0 && share <= 1.0 {
        Ok(share)
    } else {
        Err("not above 0 and at most 1".to_owned())
    }
}

fn positive(text: &str) -> Result<usize, String> {
    let count: usize = text.parse().map_err(|_| "not a whole number".to_owned())?;
    if count > 0 { Ok(count) } else { Err("not above 0".to_owned()) }
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
            media.push(Medium::Image(MediaRef { source: MediaSource::File { root, path } }));
            parts.push(Part::Image);
        }
        parts.push(Part::Text(self.prompt.clone()));
        let turn = |role: &str, content: Content| Message {
            role: role.to_owned(),
            content,
            tool_calls: None,
            train: true,
        };
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            messages.push(turn("system", Content::Text(system.clone())));
        }
        messages.push(turn("user", Content::Parts(parts)));
        messages.push(turn("assistant", Content::Text(String::new()))); // what is asked for
        let id = SampleId { file: Path::new("--prompt").into(), line: 1 };
        Ok(Sample { id, messages, media, tools: None })
    }
}

/// Prints the answer to stdout as it stands, and nothing else.
pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let folder = super::resolve_model(&args.model)?;
    let encoder = Encoder::from_folder(&folder, &ImageConfig::default())?;
    let (prompt, _) = encoder.encode_prompt(&args.sample()?)?;
    let section = ModelSection {
        path: folder,
        weights: Weights::Pretrained,
        use_rmpad: true,
        attention: AttentionChoice::Auto,
        precision: Precision::F32,
        freeze: vec![],
        recompute: RecomputeChoice::None,
    };
    let device = super::open_device(args.device)?;
    let loaded = load_model(&section, args.seed, &device)?;
    let options = GenerateOptions {
        max_new_tokens: args.max_new_tokens,
        sampling: args.sampling(),
        seed: args.seed,
        stop_ids: encoder.stop_ids().to_vec(),
    };
    let answer = generate(&*loaded.model, prompt, &options, &device)?;
    writeln!(super::stdout::stdout(), "{}", encoder.decode(&answer)?)?;
    Ok(())
}
