//! `trainer generate`: answers a prompt with images and videos, or holds a conversation.

mod chat;

use super::args::{check_folder, model_folder};
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::terminal::{escaped, stdout};
use crate::checkpoint::{ADAPTER_CONFIG, CheckpointConfig, Checkpointer, PeftConfig};
use crate::data::{Encoder, TokenizerError};
use crate::run::{NewVocabulary, check_model_folder, load_to_generate, with_tokens_of};
use crate::train::{DeviceChoice, GenerateOptions, Generator, ModelSection};
use candle_transformers::generation::Sampling;
use chat::Conversation;
use clap::Args;
use serde_json::json;
use signal_hook::consts::SIGINT;
use std::io::{IsTerminal as _, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

/// Arguments of `generate`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer generate --model runs/demo --image cat.png \
    --prompt 'What is this?' --max-new-tokens 64\n  trainer generate --model runs/demo --chat")]
pub(super) struct GenerateArgs {
    /// Model folder in the transformers layout, hub id, or folder of a run: its `final`, or else
    /// its newest checkpoint
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Adapter of the model, a folder in PEFT's layout
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Text of the user turn; with `--chat`, of the first one
    #[arg(long, required_unless_present = "chat")]
    prompt: Option<String>,
    /// Image, a file or a URL, placed before the text; may be given several times
    #[arg(long = "image", value_name = "FILE")]
    images: Vec<PathBuf>,
    /// Video, placed after the images: a video file, or a folder of frames, which are ordered by
    /// name; may be given several times
    #[arg(long = "video", value_name = "PATH")]
    videos: Vec<PathBuf>,
    /// System message
    #[arg(long)]
    system: Option<String>,
    /// Hold a conversation: read user turns from stdin, one a line, and the commands
    /// `/image FILE`, `/video PATH`, `/reset` and `/exit`
    #[arg(long)]
    chat: bool,
    /// Print each answer as a JSON object when it has ended
    #[arg(long)]
    json: bool,
    /// Maximum number of tokens of an answer
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = positive)]
    max_new_tokens: usize,
    /// End an answer before this text, which is not printed; may be given several times
    #[arg(long = "stop", value_name = "TEXT", value_parser = not_empty)]
    stops: Vec<String>,
    /// Sampling temperature; 0 decodes greedily
    #[arg(long, default_value_t = 0.0, value_parser = temperature)]
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
    /// Seed for sampling; 42 by default
    #[arg(long)]
    seed: Option<u64>,
}

fn probability(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    let is_valid = value > 0.0 && value <= 1.0;
    is_valid.then_some(value).ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}

fn temperature(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    let is_valid = value >= 0.0 && value.is_finite();
    is_valid.then_some(value).ok_or_else(|| "expected a number of at least 0".to_owned())
}

fn positive(text: &str) -> Result<usize, String> {
    let count: usize = text.parse().map_err(|_| "expected a whole number".to_owned())?;
    if count > 0 { Ok(count) } else { Err("expected a number above 0".to_owned()) }
}

fn not_empty(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("expected a text".to_owned()) } else { Ok(text.to_owned()) }
}

impl GenerateArgs {
    /// The sampling; an error if an argument of sampling has no effect.
    fn sampling(&self) -> anyhow::Result<Sampling> {
        let temperature = self.temperature;
        let given = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--seed", self.seed.is_some()),
        ];
        if let Some((name, _)) = given.into_iter().find(|(_, given)| *given && temperature == 0.0) {
            let message =
                format!("`{name}` has no effect at temperature 0, which decodes greedily");
            let hint = format!("set `--temperature` above 0, or leave `{name}` out");
            return Err(Failure::new(Exit::Usage, message).hint(hint).into());
        }
        Ok(match (temperature > 0.0, self.top_k, self.top_p) {
            (false, _, _) => Sampling::ArgMax,
            (true, None, None) => Sampling::All { temperature },
            (true, Some(k), None) => Sampling::TopK { k, temperature },
            (true, None, Some(p)) => Sampling::TopP { p, temperature },
            (true, Some(k), Some(p)) => Sampling::TopKThenTopP { k, p, temperature },
        })
    }
}

/// Answers the turns of a conversation, and prints the answers to stdout while they are made.
struct Session<'a> {
    encoder: &'a Encoder,
    generator: Generator<'a>,
    options: GenerateOptions,
    stops: &'a [String],
    /// Whether answers are printed as JSON.
    json: bool,
    /// Set by Ctrl-C. While it is set, Ctrl-C ends the process: when no answer is made, and when a
    /// second one follows.
    interrupted: Arc<AtomicBool>,
}

impl Session<'_> {
    /// Answers the last turn of `conversation`, and returns the printed text without the final end
    /// of the line.
    fn answer(&mut self, conversation: &Conversation) -> anyhow::Result<String> {
        let (prompt, _) = self.encoder.encode_prompt(&conversation.sample())?;
        let mut streamed = Streamed::new(self.encoder, self.stops);
        let mut out = stdout();
        let is_terminal = std::io::stdout().is_terminal();
        let mut print = |piece: &str| -> anyhow::Result<()> {
            if !piece.is_empty() && !self.json {
                let shown = if is_terminal { escaped(piece) } else { piece.into() };
                out.write_all(shown.as_bytes())?;
                out.flush()?;
            }
            Ok(())
        };
        self.interrupted.store(false, Relaxed);
        let interrupted = &self.interrupted;
        let answer = self.generator.answer(prompt, &self.options, |ids| {
            print(streamed.update(ids)?)?;
            let ends = streamed.has_stopped() || interrupted.load(Relaxed);
            let flow = if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
            Ok::<_, anyhow::Error>(flow)
        });
        let was_interrupted = self.interrupted.swap(true, Relaxed);
        let answer = answer?;
        print(streamed.finish())?;
        print("\n")?;
        if self.json {
            let finish_reason = match answer.ids.len() {
                _ if was_interrupted => "interrupted",
                _ if streamed.has_stopped() => "stop",
                length if length == self.options.max_new_tokens => "length",
                _ => "stop",
            };
            let line = json!({
                "answer": streamed.text,
                "finish_reason": finish_reason,
                "num_prompt_tokens": answer.num_prompt_tokens,
                "num_new_tokens": answer.ids.len(),
            });
            writeln!(out, "{line}")?;
            out.flush()?;
        }
        tracing::debug!(
            prompt_tokens = answer.num_prompt_tokens,
            reused = answer.num_reused,
            new_tokens = answer.ids.len(),
            "answered"
        );
        if was_interrupted && !conversation.is_chat() {
            let message = "stopped by Ctrl-C: the answer is not complete";
            return Err(Failure::new(Exit::Interrupted, message).into());
        }
        // Each answer of a conversation is drawn with other random numbers.
        self.options.seed = self.options.seed.wrapping_add(1);
        Ok(streamed.into_text())
    }
}

/// Prints the answers to stdout, and nothing else.
pub(super) fn run(args: &GenerateArgs, logging: &Logging) -> anyhow::Result<()> {
    let sampling = args.sampling()?;
    let interrupted = Arc::new(AtomicBool::new(true));
    let status = Exit::Interrupted as i32;
    signal_hook::flag::register_conditional_shutdown(SIGINT, status, Arc::clone(&interrupted))?;
    signal_hook::flag::register(SIGINT, Arc::clone(&interrupted))?;
    let ModelPaths { model, adapter } = find(&args.model, args.adapter.as_deref())?;
    let folder = model_folder(&model, logging)?;
    check_model_folder(&folder)?;
    let mut section = ModelSection::new(folder);
    if let Some(adapter) = &adapter {
        check_folder("--adapter", adapter)?;
        section = with_tokens_of(&section, adapter);
    }
    let encoder = encoder(&section)?;
    let mut conversation = Conversation::new(args.system.clone(), args.chat);
    for image in &args.images {
        conversation.add_image(image)?;
    }
    for video in &args.videos {
        conversation.add_video(video)?;
    }
    if let Some(prompt) = &args.prompt {
        conversation.add_user_turn(prompt);
        encoder.encode_prompt(&conversation.sample())?; // before the weights are read
    }
    let device = args.device.open()?;
    let loaded = load_to_generate(&section, adapter.as_deref(), &device)?;
    let options = GenerateOptions {
        max_new_tokens: args.max_new_tokens,
        sampling,
        seed: args.seed.unwrap_or(42),
        stop_ids: encoder.stop_ids().to_vec(),
    };
    let generator = Generator::new(&loaded.model, &device);
    let stops = &args.stops;
    let json = args.json;
    let mut session = Session { encoder: &encoder, generator, options, stops, json, interrupted };
    if args.prompt.is_some() {
        let answer = session.answer(&conversation)?;
        conversation.answered(answer);
    }
    if args.chat { chat::run(&mut session, conversation) } else { Ok(()) }
}

/// The encoder of a model, with the tokens that it receives.
fn encoder(section: &ModelSection) -> anyhow::Result<Encoder> {
    let vocabulary = NewVocabulary::of(section)?;
    let vocabulary = vocabulary.as_ref().map(NewVocabulary::of_encoder);
    let (image, video) = Default::default();
    Ok(Encoder::with_vocabulary(&section.path, &image, &video, vocabulary)?)
}

/// A model folder or hub id, and the adapter of the model.
#[derive(Debug, PartialEq, Eq)]
struct ModelPaths {
    model: PathBuf,
    adapter: Option<PathBuf>,
}

/// Resolves `--model`: the folder of a run is its `final`, or else its newest checkpoint. If that
/// is an adapter, the model is the one that it was trained on.
fn find(model: &Path, adapter: Option<&Path>) -> anyhow::Result<ModelPaths> {
    let folder = of_run(model)?;
    let given = || ModelPaths { model: folder.clone(), adapter: adapter.map(Path::to_owned) };
    if folder.join("config.json").exists() || !folder.join(ADAPTER_CONFIG).exists() {
        return Ok(given());
    }
    if let Some(other) = adapter {
        let (folder, other) = (folder.display(), other.display());
        let message = format!("`--model`: `{folder}` is an adapter, and `--adapter` is `{other}`");
        let hint = "name the model folder with `--model`, or leave `--adapter` out";
        return Err(Failure::new(Exit::Usage, message).hint(hint).into());
    }
    let Some(base) = PeftConfig::read(&folder)?.base_model_name_or_path else {
        let message =
            format!("`--model`: `{}` is an adapter of an unknown model", folder.display());
        let hint = format!("pass `--model MODEL --adapter {}`", folder.display());
        return Err(Failure::new(Exit::Usage, message).hint(hint).into());
    };
    tracing::info!(model = base, adapter = %folder.display(), "loading the adapter and the model it was trained on");
    Ok(ModelPaths { model: base.into(), adapter: Some(folder) })
}

/// The folder with weights of a run; for all other paths, `model` itself.
fn of_run(model: &Path) -> anyhow::Result<PathBuf> {
    let is_weights = |folder: &Path| {
        ["config.json", ADAPTER_CONFIG].iter().any(|name| folder.join(name).exists())
    };
    if !model.is_dir() || is_weights(model) {
        return Ok(model.to_owned());
    }
    let checkpoints = Checkpointer::new(model, &CheckpointConfig::default());
    let last = checkpoints.final_folder();
    if is_weights(&last) {
        tracing::info!(folder = %last.display(), "using the final model of the run");
        return Ok(last);
    }
    let Some(step) = checkpoints.steps()?.pop() else { return Ok(model.to_owned()) };
    let newest = checkpoints.step_folder(step);
    tracing::info!(
        folder = %newest.display(),
        "using the newest checkpoint, because the run has no `final`"
    );
    Ok(newest)
}

type Decode<'a> = Box<dyn Fn(&[u32]) -> Result<String, TokenizerError> + 'a>;

/// The part of an answer that can be printed already. The pieces together are the text of all
/// tokens: bytes of an incomplete character and the beginning of a stop text wait for the next
/// tokens.
struct Streamed<'a> {
    decode: Decode<'a>,
    stops: &'a [String],
    text: String,
    /// Number of bytes of `text` that were returned.
    shown: usize,
    has_stopped: bool,
}

impl<'a> Streamed<'a> {
    fn new(encoder: &'a Encoder, stops: &'a [String]) -> Self {
        Self::with_decoder(move |ids| encoder.decode(ids), stops)
    }

    fn with_decoder(
        decode: impl Fn(&[u32]) -> Result<String, TokenizerError> + 'a,
        stops: &'a [String],
    ) -> Self {
        let decode = Box::new(decode);
        Self { decode, stops, text: String::new(), shown: 0, has_stopped: false }
    }

    /// Whether the answer has a stop text. Its text ends before it.
    fn has_stopped(&self) -> bool {
        self.has_stopped
    }

    /// The next piece, given all ids so far.
    fn update(&mut self, ids: &[u32]) -> Result<&str, TokenizerError> {
        self.text = (self.decode)(ids)?;
        let found = self.stops.iter().filter_map(|stop| self.text.find(stop.as_str())).min();
        if let Some(at) = found {
            self.text.truncate(at);
            self.has_stopped = true;
            return Ok(self.up_to(at));
        }
        // The decoder writes U+FFFD in place of an incomplete character.
        let complete = self.text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let end = complete.len() - started(complete, self.stops);
        Ok(self.up_to(end))
    }

    /// The last piece, after all ids.
    fn finish(&mut self) -> &str {
        self.up_to(self.text.len())
    }

    fn into_text(self) -> String {
        self.text
    }

    fn up_to(&mut self, end: usize) -> &str {
        let start = self.shown.min(end);
        self.shown = self.shown.max(end);
        self.text.get(start..end).unwrap_or_default()
    }
}

/// Number of bytes at the end of `text` that may be the beginning of a stop text.
fn started(text: &str, stops: &[String]) -> usize {
    let of = |stop: &String| {
        let lengths = stop.char_indices().map(|(at, _)| at);
        lengths.rev().find(|length| text.ends_with(&stop[..*length])).unwrap_or(0)
    };
    stops.iter().map(of).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of `bytes`, of which each token is one.
    fn pieces(bytes: &[u8], stops: &[&str]) -> Vec<String> {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let decode = |ids: &[u32]| {
            let bytes: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let ids: Vec<u32> = bytes.iter().map(|byte| u32::from(*byte)).collect();
        let mut streamed = Streamed::with_decoder(decode, &stops);
        let mut pieces = Vec::new();
        for end in 1..=ids.len() {
            pieces.push(streamed.update(&ids[..end]).unwrap().to_owned());
            if streamed.has_stopped() {
                break;
            }
        }
        pieces.push(streamed.finish().to_owned());
        assert_eq!(pieces.concat(), streamed.into_text());
        pieces.retain(|piece| !piece.is_empty());
        pieces
    }

    #[test]
    fn a_character_is_printed_when_its_last_byte_is_there() {
        let text = "n\u{e4}\u{4e2d}\u{1f4bb}!";
        assert_eq!(pieces(text.as_bytes(), &[]), ["n", "\u{e4}", "\u{4e2d}", "\u{1f4bb}", "!"]);
    }

    #[test]
    fn bytes_that_are_no_text_are_printed_as_the_decoder_writes_them() {
        let bytes = [b'a', 0xe4, 0xb8, b'b', 0xff, 0xf0, 0x9f];
        assert_eq!(pieces(&bytes, &[]).concat(), String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn a_stop_text_is_not_printed_and_text_that_only_begins_like_it_is() {
        assert_eq!(pieces(b"one\n\ntwo", &["\n\n"]), ["o", "n", "e"]);
        assert_eq!(pieces(b"a\nb", &["\n\n"]), ["a", "\nb"]);
        assert_eq!(pieces(b"aab", &["aac", "xyz"]), ["aab"]);
        assert_eq!(pieces(b"ends in \n", &["\n\n"]).concat(), "ends in \n");
        assert_eq!(pieces(b"a stop b", &["b", "stop"]).concat(), "a ");
    }
}
