//! `trainer eval`: loss and share of exact answers on the rows of `data.eval`, or on those that are held
//! out.

use super::args::{ConfigArgs, OutputFile, check_folder};
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::progress::{Progress, SetupBars};
use super::terminal::stdout;
use crate::data::RowReader;
use crate::run::{self, DataList};
use crate::train::{
    EvalReport, Evaluator, Prediction, Predictor, RankWeights, Ranks, SampleScore, Weights,
    metric_keys,
};
use clap::Args;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

/// Arguments of `eval`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer eval --config config.yaml \
    --checkpoint runs/quickstart/final --per-sample scores.jsonl")]
pub(super) struct EvalArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Model folder or checkpoint to evaluate instead of `model.path`
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Adapter of the model, a folder in PEFT's layout, for example `final` of a run with `adapter`
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Write one JSON object per sample: file and line, the row's own `id`, summed negative log
    /// likelihood, number of targets, exact or not
    #[arg(long, value_name = "FILE")]
    per_sample: Option<PathBuf>,
    /// Also generate the answer of each chat, with the settings of `eval.generate`
    #[arg(long, requires = "per_sample")]
    answers: bool,
}

pub(super) fn run(args: &EvalArgs, logging: &Logging) -> anyhow::Result<()> {
    let per_sample_file = OutputFile::open_given("--per-sample", args.per_sample.as_ref())?;
    let mut config = args.config.load(logging)?;
    if let Some(checkpoint) = &args.checkpoint {
        check_folder("--checkpoint", checkpoint)?;
        config.model.path.clone_from(checkpoint);
        config.model.weights = Weights::Pretrained;
    }
    if config.data.eval_sets().is_empty() {
        let problem = "`data.eval` is empty, expected a data set to evaluate";
        let hint = "list one under `data.eval`, or pass `--set 'data.eval=[{path: FILE}]'`";
        return Err(args.config.refuse(&["data", "eval"], problem, hint).into());
    }
    let located = |error| args.config.located(error);
    if let Some(adapter) = &args.adapter {
        check_folder("--adapter", adapter)?;
        config.model = run::with_tokens_of(&config.model, adapter);
    }
    let encoder = run::encoder(&config).map_err(located)?;
    let rows = run::open_data(&config, DataList::Eval, &encoder, &SetupBars(logging));
    let rows = rows.map_err(located)?;
    let device = config.device.open()?;
    let adapter = args.adapter.as_deref();
    let loaded = run::load_for_run(&config.model, adapter, config.seed, &device);
    let loaded = loaded.map_err(located)?;
    let (ranks, weights) = (&Ranks::alone(), &RankWeights::default());
    let evaluator = Evaluator {
        ranks,
        weights,
        rows: &rows,
        max_tokens: config.data.packing_length.get() as usize,
        dtype: config.model.precision.dtype(),
        device: &device,
    };
    let total = rows.num_rows();
    let progress = Progress::items(logging.bars(), "rows", total as u64);
    let report = evaluator.run(&loaded.model, &|done| progress.set(done as u64))?;
    drop(progress);
    for rejection in &report.rejected {
        tracing::warn!(row = %rejection.message, "cannot score an eval row");
    }
    if report.samples.is_empty() {
        let first = report.rejected.first().map_or(String::new(), |row| format!(": {row}"));
        let message = format!("none of the {total} eval rows can be scored{first}");
        return Err(Failure::new(Exit::Data, message)
            .hint("repair these rows; the warnings above list them")
            .into());
    }
    let generate = config.eval.generate.clone().unwrap_or_default();
    let (model, device) = (&loaded.model, &device);
    let predictor = Predictor { rows: &rows, config: &generate, model, device, ranks, weights };
    let answers = args.answers.then(|| answers(&predictor, logging)).transpose()?;
    if let Some(file) = per_sample_file {
        file.write(per_sample(&predictor, &report, answers.as_deref()).as_bytes())?;
    }
    let mut summary = serde_json::json!({
        "loss": report.loss(),
        "num_target_tokens": report.num_targets(),
        "num_samples": report.samples.len(),
        "accuracy": report.accuracy(),
        "rejected": report.rejected.len(),
    });
    let sets = metric_keys(rows.names(), &report.by_dataset(rows.names().len()));
    if let Some(summary) = summary.as_object_mut() {
        summary.extend(sets);
        summary.extend(answers.iter().flat_map(|answers| predictor.means(answers)));
    }
    writeln!(stdout(), "{summary}")?;
    Ok(())
}

fn answers(predictor: &Predictor<'_>, logging: &Logging) -> anyhow::Result<Vec<Prediction>> {
    let total = predictor.num_chats() as u64;
    let progress = Progress::items(logging.bars(), "rows answered", total);
    let report = |done, _| progress.set(done as u64);
    let answers = predictor.run_until(&|| false, &report)?;
    Ok(answers.unwrap_or_default())
}

/// A line of `--per-sample`.
#[derive(Serialize)]
struct SampleLine<'a> {
    /// `file:line`.
    id: String,
    nll_sum: f64,
    num_targets: u32,
    target_weight: f64,
    exact: bool,
    /// The row's own `id`.
    row_id: Option<String>,
    #[serde(flatten)]
    answer: Option<AnswerFields<'a>>,
}

/// What `--answers` adds to a line.
#[derive(Serialize)]
struct AnswerFields<'a> {
    expected: Option<&'a str>,
    answered: Option<&'a str>,
    scores: Option<BTreeMap<String, Option<f64>>>,
}

fn per_sample(
    predictor: &Predictor<'_>,
    report: &EvalReport,
    answers: Option<&[Prediction]>,
) -> String {
    let by_row: HashMap<&str, &Prediction> =
        answers.into_iter().flatten().map(|answer| (answer.row.as_str(), answer)).collect();
    let mut lines = String::new();
    for SampleScore { result, is_chat, exact } in &report.samples {
        let row = result.size.index();
        let id = predictor.rows.id(row).to_string();
        let found = by_row.get(id.as_str()).filter(|_| *is_chat);
        let answer = answers.map(|_| AnswerFields {
            expected: found.map(|answer| answer.expected.as_str()),
            answered: found.map(|answer| answer.answered.as_str()),
            scores: found.map(|answer| predictor.scores(answer)),
        });
        let line = SampleLine {
            id,
            nll_sum: result.nll_sum,
            num_targets: result.size.num_targets,
            target_weight: result.target_weight,
            exact: *exact,
            row_id: predictor.rows.own_id(row),
            answer,
        };
        let line = serde_json::to_string(&line).expect("plain values");
        let _ = writeln!(lines, "{line}"); // writing to a String cannot fail
    }
    lines
}
