//! Reads the folder of a run.

use super::series::Series;
use crate::config::{self, RunConfig};
use crate::data::DatasetRows;
use crate::files;
use crate::run::{self, DataList, RunError, SetupObserver};
use crate::train::{Health, Spike};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum ReportError {
    #[error("cannot read `{}`", .path.display())]
    #[fault(hint = "pass the `output_dir` of a run")]
    Read { path: PathBuf, source: io::Error },
    #[error("`{}` has no step", .path.display())]
    #[fault(hint = "train at least one step")]
    NoSteps { path: PathBuf },
    #[error("cannot draw an image: {0}")]
    #[fault(hint = "this is a bug in the program: please report it")]
    Image(String),
}

#[derive(Debug)]
pub struct RunFolder {
    /// The folder as given.
    pub(super) path: PathBuf,
    /// Values of the steps by key.
    pub(super) train: BTreeMap<String, Series>,
    /// Values of the evaluations by key.
    pub(super) eval: BTreeMap<String, Series>,
    /// The row of the last step.
    pub(super) last: Value,
    /// Steps that changed no weight.
    pub(super) skipped: Vec<u64>,
    /// Values far above those of the steps before.
    pub(super) spikes: Vec<(u64, Spike)>,
    /// Lines of `starts.jsonl`.
    pub(super) starts: Vec<Value>,
    /// The first lines of `rejects.jsonl`.
    pub(super) rejects: Vec<Value>,
    /// The answers of the last evaluation that wrote some.
    pub(super) answers: Vec<Value>,
    /// The config, or why it cannot be read.
    pub(super) config: Result<RunConfig, String>,
    /// Whether the run has written `final`.
    pub(super) is_finished: bool,
    /// Number of lines that are not JSON.
    pub(super) damaged: u64,
    /// What an hour of all machines of the run costs, in any currency.
    pub price_per_hour: Option<f64>,
}

/// Maximum number of rejected rows that are kept.
const MAX_REJECTS: usize = 20;

impl RunFolder {
    /// Reads the files of a run; only `metrics.jsonl` must exist.
    pub fn read(path: &Path) -> Result<Self, ReportError> {
        let config = config::load::<RunConfig>(&path.join("config.yaml"), &[]);
        let mut run = Self {
            path: path.to_owned(),
            train: BTreeMap::new(),
            eval: BTreeMap::new(),
            last: Value::Null,
            skipped: Vec::new(),
            spikes: Vec::new(),
            starts: Vec::new(),
            rejects: Vec::new(),
            answers: Vec::new(),
            config: config
                .map(|config| config.with_unescaped_paths())
                .map_err(|error| error.to_string()),
            is_finished: path.join("final").is_dir(),
            damaged: 0,
            price_per_hour: None,
        };
        let metrics = path.join("metrics.jsonl");
        if let Err(source) = files::open(&metrics) {
            return Err(ReportError::Read { path: metrics, source });
        }
        let mut health = Health::default();
        run.damaged += rows(&metrics, |row| run.step(row, &mut health))?;
        if run.last.is_null() {
            return Err(ReportError::NoSteps { path: metrics });
        }
        let eval = &mut run.eval;
        run.damaged += rows(&path.join("eval.jsonl"), |row| add(eval, &row))?;
        let starts = &mut run.starts;
        run.damaged += rows(&path.join("starts.jsonl"), |row| starts.push(row))?;
        let rejects = &mut run.rejects;
        run.damaged += rows(&path.join("rejects.jsonl"), |row| {
            if rejects.len() < MAX_REJECTS {
                rejects.push(row);
            }
        })?;
        let answers = &mut run.answers;
        run.damaged += rows(&path.join("predictions.jsonl"), |row| {
            if answers.first().is_some_and(|first: &Value| first["step"] != row["step"]) {
                answers.clear();
            }
            answers.push(row);
        })?;
        Ok(run)
    }

    /// Opens the eval rows of the run, if there are answers to them.
    pub fn eval_rows(&self, observer: &dyn SetupObserver) -> Option<Result<DatasetRows, RunError>> {
        let config = self.config.as_ref().ok().filter(|_| !self.answers.is_empty())?;
        let open = |encoder| run::open_data(config, DataList::Eval, &encoder, observer);
        Some(run::encoder(config).and_then(open))
    }

    fn step(&mut self, row: Value, health: &mut Health) {
        let Some(step) = row["step"].as_u64() else { return };
        add(&mut self.train, &row);
        if row["skipped"] == true {
            self.skipped.push(step);
        } else if let (Some(loss), Some(norm)) = (row["loss"].as_f64(), row["grad_norm"].as_f64()) {
            self.spikes.extend(health.add(loss, norm).into_iter().map(|spike| (step, spike)));
        }
        self.last = row;
    }

    /// Values of the steps under `key`.
    pub(super) fn train(&self, key: &str) -> Option<&Series> {
        self.train.get(key)
    }

    /// Steps after which another process continued the run.
    pub(super) fn restarts(&self) -> Vec<u64> {
        let steps = self.starts.iter().filter_map(|start| start["after_step"].as_u64());
        steps.filter(|step| *step > 0).collect() // 0: no step was trained before
    }
}

fn add(values: &mut BTreeMap<String, Series>, row: &Value) {
    let (Some(step), Some(row)) = (row["step"].as_u64(), row.as_object()) else { return };
    for (key, value) in row {
        let value = match value {
            Value::Number(number) => number.as_f64().unwrap_or(f64::NAN),
            Value::Null if matches!(key.as_str(), "loss" | "grad_norm") => f64::NAN,
            _ => continue,
        };
        if let Some(series) = values.get_mut(key) {
            series.0.push((step, value));
        } else {
            values.insert(key.clone(), Series(vec![(step, value)]));
        }
    }
    let seconds = |key: &str| row.get(key).and_then(Value::as_f64);
    if let (Some(wait), Some(time)) = (seconds("data_wait_s"), seconds("step_time_s")) {
        let share = values.entry("data_wait".to_owned()).or_default();
        share.0.push((step, wait / time.max(f64::MIN_POSITIVE)));
    }
}

/// Reads the rows of a JSON Lines file; a file that does not exist has none. Returns the number of
/// damaged lines.
fn rows(path: &Path, mut each: impl FnMut(Value)) -> Result<u64, ReportError> {
    let cannot = |source| ReportError::Read { path: path.to_owned(), source };
    let file = match files::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(cannot(error)),
    };
    let (mut file, mut line, mut damaged) = (BufReader::new(file), Vec::new(), 0);
    while file.read_until(b'\n', &mut line).map_err(cannot)? > 0 {
        match serde_json::from_slice::<Value>(&line) {
            Ok(row) if row.is_object() => each(row),
            _ => damaged += 1,
        }
        line.clear();
    }
    Ok(damaged)
}
