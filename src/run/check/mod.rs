//! Everything that can be known about a run before it trains: all problems at once.

mod data;
mod model;
mod resources;
mod start;

use super::error::RunError;
use super::inputs::{SetupObserver, encoder};
use super::output_dir::TemporaryFolder;
use super::trackers::Imports;
use crate::config::{LeftOut, RunConfig};
use crate::data::{DataConfig, Encoder, VideoConfig};
use resources::Need;
pub(super) use resources::warn_about_disk;
pub(crate) use resources::{copy_of_checkpoint, predicted_memory};
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::sync::Arc;

/// A part of a run that is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Topic {
    /// Values of the config.
    Config,
    /// The model folder: `config.json`, names and shapes of tensors, freeze and learning rate
    /// patterns.
    Model,
    /// Tokenizer, chat template and processor.
    Encoder,
    /// The rows of `data.train`.
    Train,
    /// The rows of `data.eval`.
    Eval,
    /// Number of steps and packs.
    Plan,
    /// Predicted memory.
    Memory,
    /// Disk space for checkpoints.
    Disk,
    /// `output_dir`.
    Output,
}

impl Topic {
    /// Name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Model => "model",
            Self::Encoder => "tokenizer and template",
            Self::Train => "data.train",
            Self::Eval => "data.eval",
            Self::Plan => "plan",
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Output => "output_dir",
        }
    }
}

/// What a check found.
#[derive(Debug)]
pub enum Finding {
    /// An error with which the run would stop.
    Error(RunError),
    /// A problem with which the run would stop: what was found, the first examples, and a fix.
    Problem(Note),
    /// Something that the run survives, but its user may not want.
    Warning(Note),
    /// A fact.
    Fact(String),
}

/// A message with examples and a hint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Note {
    /// What was found.
    pub message: String,
    /// The first cases, with file and line.
    pub examples: Vec<String>,
    /// What to do.
    pub hint: Option<String>,
}

impl Note {
    fn new(message: impl Into<String>, hint: &str) -> Self {
        Self { message: message.into(), examples: Vec::new(), hint: Some(hint.to_owned()) }
    }
}

/// All findings, in the order of the topics.
#[derive(Debug, Default)]
pub struct CheckReport {
    /// The findings, each with its topic.
    pub findings: Vec<(Topic, Finding)>,
}

impl CheckReport {
    /// Number of findings with which the run would stop, and number of warnings.
    pub fn counts(&self) -> [usize; 2] {
        let count = |of: fn(&Finding) -> bool| self.findings.iter().filter(|(_, f)| of(f)).count();
        [
            count(|finding| matches!(finding, Finding::Error(_) | Finding::Problem(_))),
            count(|finding| matches!(finding, Finding::Warning(_))),
        ]
    }

    fn add(&mut self, topic: Topic, finding: Finding) {
        self.findings.push((topic, finding));
    }

    fn fact(&mut self, topic: Topic, text: impl Into<String>) {
        self.add(topic, Finding::Fact(text.into()));
    }

    fn error(&mut self, topic: Topic, error: impl Into<RunError>) {
        self.add(topic, Finding::Error(error.into()));
    }

    fn has_error(&self, text: &str) -> bool {
        let is_same =
            |found: &Finding| matches!(found, Finding::Error(error) if error.to_string() == text);
        self.findings.iter().any(|(_, finding)| is_same(finding))
    }

    fn errors(&mut self, topic: Topic, errors: impl Iterator<Item = RunError>) {
        errors.for_each(|error| self.error(topic, error));
    }
}

/// The bytes that a run needs and those that are free, if the memory does not suffice.
pub(super) fn memory_lack(config: &RunConfig) -> Result<Option<[f64; 2]>, RunError> {
    Ok(Need::of(config)?.memory_lack(config))
}

/// Predicts the memory before the data is read.
pub(super) fn announce_memory(config: &RunConfig) {
    let Ok(need) = Need::of(config) else { return }; // loading the model reports the error
    if let Err(error) = need.run.announce(&need.shape) {
        tracing::debug!(%error, "the memory cannot be predicted");
    }
}

/// The encoder, and the config without wrong settings of images or videos, which are reported: rows
/// are still checked. An error that has been reported, perhaps by the model, is reported once.
fn usable_encoder(
    config: &RunConfig,
    report: &mut CheckReport,
) -> Option<(RunConfig, Arc<Encoder>)> {
    let mut config = config.clone();
    loop {
        let error = match encoder(&config) {
            Ok(encoder) => {
                report.fact(Topic::Encoder, "the chat template can be used");
                return Some((config, encoder));
            }
            Err(error) => error,
        };
        let data = &mut config.data;
        let is_changed = match &error {
            RunError::Setting { key, .. } => match key.strip_prefix("data.video.") {
                Some(key) => {
                    let changed = without(&data.video, key);
                    std::mem::replace(&mut data.video, changed) != data.video
                }
                // all keys of `data.image` are limits on the same pixels
                None => std::mem::take(&mut data.image) != data.image,
            },
            _ => false,
        };
        if !report.has_error(&error.to_string()) {
            report.error(Topic::Encoder, error);
        }
        if !is_changed {
            return None;
        }
    }
}

/// `video` without a wrong setting, and without the one that is compared with it.
fn without(video: &VideoConfig, wrong: &str) -> VideoConfig {
    let (default, video) = (VideoConfig::default(), video.clone());
    match wrong {
        "fps" => VideoConfig { fps: None, ..video },
        "min_frames" | "max_frames" => VideoConfig { min_frames: None, max_frames: None, ..video },
        "min_pixels" | "max_pixels" => VideoConfig { min_pixels: None, max_pixels: None, ..video },
        "marks" => VideoConfig { marks: default.marks, ..video },
        "timeout_s" => VideoConfig { timeout_s: default.timeout_s, ..video },
        _ => default,
    }
}

/// Checks a config without training. It writes caches of the data only. `config` lacks `left_out`
/// of its file: errors number list items as in the file, and none is only about the lack of these
/// values. `python` is [`RunOptions::python`](super::RunOptions::python).
pub fn check_run(
    config: &RunConfig,
    left_out: &LeftOut,
    python: &OsStr,
    observer: &dyn SetupObserver,
) -> CheckReport {
    let mut report = CheckReport::default();
    let imports = Imports::start(python, &config.log.trackers);
    let values = config.problems(left_out);
    let is_valid = values.is_empty();
    let has_folder = values.iter().all(|error| error.key != "output_dir");
    for error in values {
        report.error(Topic::Config, error);
    }
    // The plan starts the workers, and so many threads would abort the process.
    let mut config = config.clone();
    config.data.workers = config.data.workers.min(DataConfig::MAX_WORKERS);
    // An address would become a folder of that name.
    let aside = if has_folder { None } else { TemporaryFolder::create(&env::temp_dir()).ok() };
    if let Some(aside) = &aside {
        config.data.cache_dir.get_or_insert_with(|| aside.path().to_owned());
    }
    let config = &config;
    // If this fails, the update of the cache reports it.
    let _ = fs::create_dir_all(config.cache_dir());
    start::check(config, left_out, &mut report);
    model::check(config, &mut report);
    // With a part of the config, it is not known which run it continues.
    let found = (is_valid && left_out.is_empty()).then(|| start::resumes(config, &mut report));
    let found = found.flatten();
    let packs = if let Some((usable, encoder)) = usable_encoder(config, &mut report) {
        // Otherwise a file that both read would be reported twice.
        start::check_carried(config, &mut report);
        let found = found.as_ref().filter(|_| usable.data == config.data);
        let packs = data::check(&usable, &encoder, found, observer, &mut report);
        // with other settings, the packs are not those of the run
        let [of_run, of_check] = [config, &usable].map(|config| &config.data);
        packs.filter(|_| of_run.image == of_check.image && of_run.video == of_check.video)
    } else {
        data::check_files(config, &mut report);
        None
    };
    if is_valid {
        resources::check(config, packs.as_ref(), &mut report);
    }
    if has_folder {
        resources::check_output(config, &mut report);
    }
    if let Err(error) = imports.and_then(Imports::finish) {
        report.error(Topic::Config, error);
    }
    report.findings.sort_by_key(|(topic, _)| *topic);
    for (_, finding) in &mut report.findings {
        if let Finding::Error(error) = finding {
            error.number_as_in_file(left_out);
        }
    }
    report
}
