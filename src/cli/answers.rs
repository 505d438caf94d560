//! The end of a training run: a few answers of the model, and the next commands.

use super::escaped::escaped;
use super::terminal::{MAX_COLUMNS, Terminal, command, wrapped};
use crate::config::RunConfig;
use crate::data::RowReader;
use crate::train::{GenerateConfig, Prediction, Predictor, StepRunner, Trainer};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::path::Path;

/// Maximum number of tokens generated per answer; each is shown in one line.
const MAX_NEW_TOKENS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);

/// Prints the share of exact answers, generates a few answers to eval rows and prints them.
pub(super) fn show_answers(
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
        .map(|sample| (&sample.id, sample.exact))
        .collect();
    let generate = GenerateConfig { max_new_tokens: MAX_NEW_TOKENS, ..GenerateConfig::default() };
    let StepRunner { model, device, ranks, weights, .. } = runner;
    let (model, config) = (&**model, &generate);
    let predictor = Predictor { rows, config, model, device, ranks, weights };
    for row in rows.rows() {
        let Some(exact) = shown.get(&rows.id(row)) else { continue };
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
        let cut = |text: &str| text.chars().take(60).collect::<String>().replace('\n', " ");
        let _ = writeln!(
            text,
            "  {mark}  {}  ({images} image{})  expected `{}`, answered `{}`{why}",
            row,
            if images == 1 { "" } else { "s" },
            cut(&expected),
            cut(&answered)
        ); // writing to a String cannot fail
    }
    print(&prose(&text));
    Ok(())
}

/// Prints the reason why a run ended before its last step.
pub(super) fn print_end(reason: &str) {
    print(&prose(&format!("\nThe run has ended before its last step: {reason}.\n")));
}

/// Prints commands that use the model or the adapter in `folder`, which a run has trained.
pub(super) fn print_next_steps(run: &RunConfig, folder: &Path) {
    let shown = folder.display();
    // the config of the run has the values of `--set`
    let config = format!("--config {}", run.output_dir.join("config.yaml").display());
    let prompt = ["--prompt \"What is this?\"", "--image cat.png"];
    let mut commands = String::new();
    let mut add = |program: &str, arguments: &[&str]| {
        commands += &command(program, arguments, columns());
    };
    let adapter = run.adapter.is_some().then(|| format!("--adapter {shown}"));
    let model = if adapter.is_some() { run.model.path.as_path() } else { folder };
    let model = format!("--model {}", model.display());
    let both = [Some(&*model), adapter.as_deref()].into_iter().flatten();
    add("trainer generate", &both.chain(prompt).collect::<Vec<_>>());
    if !run.data.eval.is_empty() {
        let trained = adapter.clone().unwrap_or_else(|| format!("--checkpoint {shown}"));
        add("trainer eval", &[&config, &trained, "--per-sample scores.jsonl"]);
    }
    let (what, more) = if let Some(adapter) = &adapter {
        add("trainer export", &[adapter, "--merge", "--out merged"]);
        ("adapter", "")
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
