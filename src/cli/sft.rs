//! `trainer sft`: trains, and shows the progress and the result: a few answers of the model, and
//! the next commands.

use super::args::{ConfigArgs, check_folder, expand};
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::progress::{Progress, SetupBars};
use super::ranks::{Ending, group, started_ranks};
use super::report::{read_card, write_card, write_report};
use super::signals::{Requests, requests_to_save};
use super::terminal::{MAX_COLUMNS, Terminal, command, escaped, shortened, wrapped};
use super::{error_report, replay, track};
use crate::config::RunConfig;
use crate::dist::{Monitor, Watchdog};
use crate::files;
use crate::metrics::{EvalMetrics, StepMetrics};
use crate::report::{Outcome, duration, model_card, thousands};
use crate::run::{self, Resume, Run, RunOptions, SetupObserver};
use crate::train::{
    EvalReport, GenerateConfig, Observer, Prediction, Predictor, StepRunner, TrainOutcome, Trainer,
    Weights,
};
use clap::Args;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Arguments of `sft`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer sft --config config.yaml\n  \
    trainer sft --config config.yaml --set optim.lr=5e-4 --resume never")]
pub(super) struct SftArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// `auto`: resume from the newest good checkpoint of this run, or start from step 0;
    /// `never`: start from step 0; DIR: resume from this checkpoint
    #[arg(long, value_name = "auto|never|DIR", default_value = "auto")]
    resume: String,
    /// Train this step again from the checkpoint before it, and print its losses and gradient
    /// norms; no file of the run changes
    #[arg(long, value_name = "N", conflicts_with = "resume")]
    replay_step: Option<u64>,
}

/// Trains a model, prints a few answers, and prints the next commands.
pub(super) fn run(args: &SftArgs, logging: &Logging) -> anyhow::Result<()> {
    let save = requests_to_save()?;
    let config = args.config.load(logging)?;
    if let Some(step) = args.replay_step {
        return replay::run(&args.config, &config, step, logging);
    }
    let check =
        |world| run::check_world(&config, world).map_err(|error| args.config.located(error));
    if started_ranks(&config.distributed, config.device, check)? {
        return Ok(());
    }
    let resume = match args.resume.as_str() {
        "auto" => Resume::Auto,
        "never" => Resume::Never,
        folder => {
            let folder = PathBuf::from(expand(folder)?);
            check_folder("--resume", &folder)?;
            Resume::From(folder)
        }
    };
    let requests = Requests::listen(save)?;
    let group = group(&config.distributed, config.device)?;
    let is_first = group.as_ref().is_none_or(|group| group.rank.is_first());
    let ending = group.as_ref().map(Ending::of);
    let bars = SetupBars(logging);
    let observer: &dyn SetupObserver = if is_first { &bars } else { &() };
    let is_alone = group.is_none();
    let monitor = if is_alone { watchdog(config.train.timeout_s)? } else { None };
    let Requests { stop, save, is_setup } = requests;
    let python = Some(track::python());
    let options =
        RunOptions { resume, stop, save, monitor, python, observer, ..RunOptions::default() };
    // Ranks stop together, between two steps.
    is_setup.store(is_alone, Ordering::Relaxed);
    let run = Run::with_group(&config, &options, group);
    is_setup.store(false, Ordering::Relaxed);
    let (run, trained) = match run {
        Ok(mut run) => {
            let trained = train(&mut run, &config, &options.resume, logging, is_first);
            (Some(run), trained)
        }
        Err(error) => (None, Err(args.config.located(error))),
    };
    let trained = match ending {
        Some(ending) => ending.after(trained),
        None => trained,
    };
    let Some(mut run) = run.filter(|_| is_first) else { return trained.map(|_| ()) };
    let finished = match trained {
        Ok(finished) => finished,
        Err(error) => {
            if run.trainer().state().step > 0 {
                write_report(&config, run.trainer().eval_rows());
            }
            if is_alone && error_report::exit(&error) == Exit::Stopped {
                // Drop would wait for rows that the loader is reading, such as an image that a
                // server does not send.
                std::mem::forget(run);
            }
            return Err(error);
        }
    };
    show_end(&mut run, finished, (&config, &args.config), &options.stop);
    Ok(())
}

/// Writes the report and the model card, and prints the result of a run and the next commands.
/// `given` is its config as the user gave it.
fn show_end(
    run: &mut Run,
    finished: Finished,
    (config, given): (&RunConfig, &ConfigArgs),
    stop: &AtomicBool,
) {
    let Finished { eval, folder, stopped_early, card } = finished;
    tracing::info!(folder = %folder.display(), "finished: wrote a model for transformers and vLLM");
    let done = write_report(config, run.trainer().eval_rows());
    if let Some(done) = &done {
        let what = if config.adapter.is_some() { "adapter" } else { "model" };
        let made = format!("The {what} that a run of `trainer sft` has trained.");
        let base = config.model.path.display().to_string();
        let new = || model_card(&folder, &base, Some(done), &made).into_bytes();
        write_card(&folder, &card.unwrap_or_else(new));
    }
    if let Some(reason) = stopped_early {
        print_end(&reason);
    }
    if let Some(done) = &done {
        print(&summary(&done.outcome(), config, columns()));
    }
    if let Some(eval) = eval {
        // The model is saved: a failure to show answers must not fail the run.
        if let Err(error) = show_answers(config, run.trainer(), &eval) {
            tracing::warn!("cannot show answers: {error:#}");
        }
    }
    run.wait_for_trackers(stop);
    let counts = &run.trainer().state().datasets_seen;
    let sees_images = counts.values().any(|counts| counts.num_images > 0);
    print_next_steps(config, given, &folder, sees_images);
}

/// The end of a run: the last evaluation, the folder `final`, and the reason if it ended early.
struct Finished {
    eval: Option<EvalReport>,
    folder: PathBuf,
    stopped_early: Option<String>,
    /// The model card of `folder` before the run, if `folder` has the same files since: a person may
    /// have edited it.
    card: Option<Vec<u8>>,
}

fn train(
    run: &mut Run,
    config: &RunConfig,
    resume: &Resume,
    logging: &Logging,
    is_first: bool,
) -> anyhow::Result<Finished> {
    let manifest = || files::read(config.output_dir.join("final/manifest.json")).ok();
    let before = manifest();
    let card = is_first.then(|| read_card(&config.output_dir.join("final"))).flatten();
    let outcome = if is_first {
        let mut bars = Bars::new(logging, config, run.trainer());
        run.train(&mut bars)
    } else {
        run.train(&mut ())
    };
    match outcome? {
        TrainOutcome::Stopped { folder } => Err(stopped(folder, resume).into()),
        TrainOutcome::Finished { eval, folder, stopped_early } => {
            let card = card.filter(|_| before.is_some() && manifest() == before);
            Ok(Finished { eval, folder, stopped_early, card })
        }
    }
}

/// The error of a run that a signal has stopped.
fn stopped(folder: Option<PathBuf>, resume: &Resume) -> Failure {
    let message = folder.map_or_else(
        || "stopped by a signal before the first step".to_owned(),
        |folder| format!("stopped by a signal; the run is saved in `{}`", folder.display()),
    );
    Failure::new(Exit::Stopped, message).hint(match resume {
        Resume::Auto => "run the same command again to resume",
        _ => "run the same command with `--resume auto` to resume",
    })
}

/// Ends the process if the training loop makes no progress for `timeout_s`; 0: never.
fn watchdog(timeout_s: u64) -> anyhow::Result<Option<Arc<dyn Monitor>>> {
    if timeout_s == 0 {
        return Ok(None);
    }
    let watchdog = Watchdog::start(Duration::from_secs(timeout_s), move |work| {
        let error = Failure::new(Exit::Ranks, format!("no progress for {timeout_s} s: {work}"))
            .hint(
                "the newest checkpoint is intact: run the same command again to resume; if this \
                   work takes so long, raise `train.timeout_s`",
            );
        let _ = error_report::report(&error.into());
        std::process::exit(Exit::Ranks as i32);
    })?;
    Ok(Some(Arc::new(watchdog)))
}

/// Number of steps after which the memory has almost reached its peak.
const STEPS_UNTIL_PEAK: u64 = 3;

/// Shows a run: bars on a terminal, log lines everywhere.
struct Bars<'a> {
    logging: &'a Logging,
    log_every: u64,
    /// Step after which the predicted memory is compared with the real one.
    compare_at: u64,
    steps: Progress,
    eval: Option<Progress>,
}

impl<'a> Bars<'a> {
    fn new(logging: &'a Logging, config: &RunConfig, trainer: &Trainer) -> Self {
        let state = trainer.state();
        let steps = Progress::steps(logging.bars(), state.total_steps, state.step);
        let compare_at = state.step + STEPS_UNTIL_PEAK;
        Self { logging, log_every: config.log.every_steps.get(), compare_at, steps, eval: None }
    }
}

impl Observer for Bars<'_> {
    fn step(&mut self, metrics: &StepMetrics, total_steps: u64) {
        self.steps.step(metrics);
        if metrics.step.is_multiple_of(self.log_every) || metrics.step == total_steps {
            metrics.log();
        }
        if metrics.step == self.compare_at || metrics.step == total_steps {
            metrics.memory().inspect(|text| tracing::info!("{text}"));
        }
    }

    fn evaluating(&mut self, done: usize, total: usize) {
        let bars = self.logging.bars();
        let bar =
            self.eval.get_or_insert_with(|| Progress::items(bars, "rows scored", total as u64));
        bar.set(done as u64);
    }

    fn evaluated(&mut self, metrics: &EvalMetrics) {
        self.eval = None;
        metrics.log();
    }
}

/// Maximum number of tokens generated per answer; each is shown in one line.
const MAX_NEW_TOKENS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);

/// Prints the share of exact answers, generates a few answers to eval rows and prints them.
fn show_answers(
    config: &RunConfig,
    trainer: &Trainer,
    eval: &crate::train::EvalReport,
) -> anyhow::Result<()> {
    let Some(rows) = trainer.eval_rows() else { return Ok(()) };
    // `None` if all eval rows come from corpora, which have no answers.
    let Some(accuracy) = eval.accuracy() else { return Ok(()) };
    let exact = eval.chats().filter(|sample| sample.exact).count();
    let total = eval.chats().count();
    let runner = trainer.runner();
    // No rank can generate alone if each has a part of the weights.
    let show = if runner.weights.are_whole() { config.eval.show } else { 0 };
    let mut text = format!(
        "\n{exact} of {total} held-out answers are exact ({:.1} %).{}\n",
        100.0 * accuracy,
        if show > 0 { " Some of them:" } else { "" }
    );
    // Half of the shown answers are wrong ones, if there are enough of each.
    let num_wrong = (total - exact).min((show / 2).max(show.saturating_sub(exact)));
    let wrong = eval.chats().filter(|sample| !sample.exact).take(num_wrong);
    let right = eval.chats().filter(|sample| sample.exact);
    let shown: BTreeMap<_, _> = right
        .take(show - num_wrong)
        .chain(wrong)
        .map(|sample| (sample.result.size.index(), sample.exact))
        .collect();
    let generate = GenerateConfig { max_new_tokens: MAX_NEW_TOKENS, ..GenerateConfig::default() };
    let StepRunner { model, device, ranks, weights, .. } = runner;
    let (model, config) = (model, &generate);
    let predictor = Predictor { rows, config, model, device, ranks, weights };
    for row in rows.rows() {
        let Some(exact) = shown.get(&row) else { continue };
        let Some(Prediction { row, expected, answered, ended, num_media: images, .. }) =
            predictor.answer(row)?
        else {
            continue;
        };
        // A row counts as exact if all of its answers are; the last one is shown.
        let last = if ended { answered == expected } else { expected.starts_with(&answered) };
        let (mark, why) = match (exact, last) {
            (true, _) => ("right", ""),
            (false, false) => ("wrong", ""),
            (false, true) => ("wrong", ", but an earlier answer of the row is not exact"),
        };
        let row = row.rsplit('/').next().unwrap_or_default(); // the file without its folder
        // so that the line fits the terminal, unless the name of the file is long
        let left = columns().saturating_sub(50 + row.len() + why.len()) / 2;
        let cut = |text: &str| shortened(&text.replace('\n', " "), left.clamp(12, 60));
        let _ = writeln!(
            text,
            "  {mark}  {row}  ({images} image{})  expected `{}`, answered `{}`{why}",
            if images == 1 { "" } else { "s" },
            cut(&expected),
            cut(&answered)
        ); // writing to a String cannot fail
    }
    print(&prose(&text));
    Ok(())
}

fn print_end(reason: &str) {
    print(&prose(&format!("\nThe run has ended before its last step: {reason}.\n")));
}

/// What a run has learned and what went wrong, at most `columns` columns wide.
fn summary(of: &Outcome, config: &RunConfig, columns: usize) -> String {
    let file = |name: &str| config.output_dir.join(name).display().to_string();
    let mut lines = Vec::new();
    if let Some((first, last, steps)) = of.loss {
        let over = if steps > 1 { format!(", means of {steps} steps") } else { String::new() };
        lines.push(("training loss", format!("{first:.4} -> {last:.4}{over}")));
    }
    if let Some([(at, last), (step, best)]) = of.eval {
        let when = if at < of.last_step { format!(" after step {at}") } else { String::new() };
        let by_loss = config.checkpoint.best.as_ref().filter(|best| best.metric == "eval.loss");
        let kept = by_loss.map(|_| format!("; {}", file("best")));
        let lowest = if best < last {
            format!(", the lowest is {best:.4} after step {step}{}", kept.unwrap_or_default())
        } else {
            String::new()
        };
        lines.push(("evaluation loss", format!("{last:.4}{when}{lowest}")));
    } else if config.data.eval_sets().is_empty() {
        let how = if config.data.train.iter().any(|set| set.corpus.is_some()) {
            "none; `data.eval` lists files to evaluate on"
        } else {
            "none; `--set data.eval_share=0.01` holds out 1 % of the rows"
        };
        lines.push(("evaluation", how.to_owned()));
    }
    if of.rejected > 0 {
        let reasons = of.reasons.iter().map(|(reason, rows)| format!("{reason} {rows}"));
        let (reasons, rows) = (reasons.collect::<Vec<_>>().join(", "), thousands(of.rejected));
        lines.push(("rejected rows", format!("{rows} ({reasons}): {}", file("rejects.jsonl"))));
    }
    if of.truncated > 0 {
        let how = "to `data.max_length`; `trainer inspect --html` shows them";
        lines.push(("truncated rows", format!("{} {how}", thousands(of.truncated))));
    }
    if of.skipped > 0 {
        let why = "whose loss or gradient was not finite";
        lines.push(("skipped steps", format!("{}, {why}: {}", of.skipped, file("metrics.jsonl"))));
    }
    lines.push(("report", file("report.html")));
    let [steps, rows, tokens] = [of.steps, of.rows, of.tokens].map(thousands);
    let speed = thousands((of.tokens as f64 / of.seconds.max(f64::MIN_POSITIVE)) as u64);
    let time = duration(of.seconds);
    let head = format!("\n{steps} steps in {time}: {rows} rows, {tokens} tokens, {speed} tok/s\n");
    let line = |(name, text): (&str, String)| format!("  {name:16} {text}\n");
    wrapped(&(head + &lines.into_iter().map(line).collect::<String>()), columns).into_owned()
}

/// Prints commands that use the model or the adapter in `folder`, which a run has trained. `given`
/// is its config as the user gave it.
fn print_next_steps(run: &RunConfig, given: &ConfigArgs, folder: &Path, sees_images: bool) {
    let shown = folder.display();
    // the config in the folder of the run has the values of `--set`
    let config = match given.overrides.as_slice() {
        [] => given.config.clone(),
        _ => run.output_dir.join("config.yaml"),
    };
    let config = format!("--config {}", config.display());
    let prompt = ["--prompt \"What is this?\"", "--image cat.png"];
    let prompt = &prompt[..if sees_images { 2 } else { 1 }];
    let mut commands = String::new();
    let mut add = |program: &str, arguments: &[&str]| {
        commands += &command(program, arguments, columns());
    };
    let adapter = run.adapter.is_some().then(|| format!("--adapter {shown}"));
    let model = if adapter.is_some() { run.model.path.as_path() } else { folder };
    let model = format!("--model {}", model.display());
    let both = [Some(&*model), adapter.as_deref()].into_iter().flatten();
    add("trainer generate", &both.chain(prompt.iter().copied()).collect::<Vec<_>>());
    if !run.data.eval_sets().is_empty() {
        let trained = adapter.clone().unwrap_or_else(|| format!("--checkpoint {shown}"));
        add("trainer eval", &[&config, &trained, "--per-sample scores.jsonl"]);
    }
    let (what, more) = if let Some(adapter) = &adapter {
        add("trainer export", &[adapter, "--merge", "--out merged"]);
        ("adapter", "")
    } else if run.model.weights == Weights::Pretrained {
        ("model", "")
    } else {
        (
            "model",
            "  your own data, and a published checkpoint: `trainer new --model FOLDER --data \
             rows.jsonl --out config.yaml`\n",
        )
    };
    let head = prose(&format!("\nThe trained {what} is in {shown}. Next:\n"));
    print(&(head + &commands + &prose(more)));
}

/// The text with its long lines broken at spaces.
fn prose(text: &str) -> String {
    wrapped(text, columns()).into_owned()
}

fn columns() -> usize {
    Terminal::stderr().columns().unwrap_or(MAX_COLUMNS)
}

/// Writes text to stderr, outside of the log.
fn print(text: &str) {
    use std::io::Write as _;
    // A finished run must not fail because stderr is closed.
    let _ = std::io::stderr().lock().write_all(escaped(text).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(more: &str) -> RunConfig {
        let text = format!(
            "output_dir: runs/a\nmodel: {{path: m}}\ndata: {{train: [{{path: a.jsonl}}]}}\n{more}"
        );
        crate::config::load_text(Path::new("a.yaml"), &text).unwrap()
    }

    #[test]
    fn the_summary_has_what_was_learned_and_what_went_wrong_and_fits_the_terminal() {
        let mut outcome = Outcome {
            steps: 400,
            last_step: 400,
            rows: 6384,
            tokens: 165_984,
            targets: 12_768,
            seconds: 75.0,
            loss: Some((2.5, 0.0125, 10)),
            eval: Some([(400, 0.5), (300, 0.25)]),
            rejected: 1234,
            reasons: vec![("bad_json".to_owned(), 1000), ("image_missing".to_owned(), 234)],
            truncated: 12,
            skipped: 2,
        };
        let text = summary(&outcome, &config("checkpoint: {best: {metric: eval.loss}}\n"), 200);
        assert_eq!(
            text,
            "\n400 steps in 1 min 15 s: 6,384 rows, 165,984 tokens, 2,213 tok/s\n  \
             training loss    2.5000 -> 0.0125, means of 10 steps\n  \
             evaluation loss  0.5000, the lowest is 0.2500 after step 300; runs/a/best\n  \
             rejected rows    1,234 (bad_json 1000, image_missing 234): runs/a/rejects.jsonl\n  \
             truncated rows   12 to `data.max_length`; `trainer inspect --html` shows them\n  \
             skipped steps    2, whose loss or gradient was not finite: runs/a/metrics.jsonl\n  \
             report           runs/a/report.html\n"
        );
        let narrow = summary(&outcome, &config(""), 80);
        assert!(narrow.lines().all(|line| line.len() <= 80), "{narrow}");
        outcome = Outcome { eval: None, rejected: 0, truncated: 0, skipped: 0, ..outcome };
        let text = summary(&outcome, &config(""), 80);
        assert!(
            text.contains("\n  evaluation       none; `--set data.eval_share=0.01` "),
            "{text}"
        );
        assert_eq!(text.lines().count(), 5, "{text}");
    }
}
