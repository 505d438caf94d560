//! `trainer check`: all problems of a run before it trains.

use super::args::ConfigArgs;
use super::error_report::text;
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::progress::SetupBars;
use super::terminal::stdout;
use super::track;
use crate::config::{self, ConfigError, Loaded, RunConfig};
use crate::run::{self, CheckReport, Finding, Note, Topic};
use clap::Args;
use fault::Fault;
use std::io::Write as _;

/// Arguments of `check`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer check --config config.yaml\n\n\
    Writes caches of the data and downloads from the Hub, and nothing else. Ends with exit code 65 if \
    the run would stop.")]
pub(super) struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print one JSON object per finding
    #[arg(long)]
    json: bool,
}

/// Prints all findings, by topic.
pub(super) fn run(args: &CheckArgs, logging: &Logging) -> anyhow::Result<()> {
    let Loaded { config, errors, left_out } =
        config::load_all::<RunConfig>(&args.config.config, &args.config.overrides);
    let mut lines: Vec<Line> = errors.into_iter().map(Line::of_config).collect();
    let bars = SetupBars(logging);
    let mut transient = None;
    if let Some(mut config) = config {
        let errors = args.config.expand(&mut config, &left_out);
        lines.extend(errors.into_iter().map(Line::of_config));
        match run::download(&config, &bars) {
            Ok(config) => {
                let report = run::check_run(&config, &left_out, &track::python(), &bars);
                transient = exit_of_transient(&report);
                lines.extend(lines_of(report, args));
            }
            Err(mut error) => {
                error.number_as_in_file(&left_out);
                lines.push(Line::of_error(Topic::Model, &args.config.located(error)));
            }
        }
    }
    let count = |kind: Kind| lines.iter().filter(|line| line.kind == kind).count();
    let [errors, warnings] = [count(Kind::Error), count(Kind::Warning)];
    print(&lines, args.json)?;
    if let Some(exit) = transient {
        let message =
            "the check is not complete: the process or a disk failed while rows were read";
        return Err(Failure::new(exit, message).hint("repair that first; then run again").into());
    }
    if errors > 0 {
        let message = match errors {
            1 => "one problem would stop this run".to_owned(),
            _ => format!("{errors} problems would stop this run"),
        };
        return Err(Failure::new(Exit::Data, message).into());
    }
    tracing::info!(warnings, "found nothing that would stop this run");
    Ok(())
}

/// The exit code of a check during which the process or a disk failed.
fn exit_of_transient(report: &CheckReport) -> Option<Exit> {
    report.findings.iter().find_map(|(_, finding)| match finding {
        Finding::Error(error) if error.is_transient() => error.exit(),
        _ => None,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Error,
    Warning,
    Fact,
}

/// A finding as text.
struct Line {
    topic: Topic,
    kind: Kind,
    note: Note,
}

impl Line {
    fn of_config(error: ConfigError) -> Self {
        Self::of_error(Topic::Config, &error.into())
    }

    /// The error without the word `error`, and its hint.
    fn of_error(topic: Topic, error: &anyhow::Error) -> Self {
        let text = text(error);
        let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
        let (message, hint) = match text.rsplit_once("\nhint: ") {
            Some((message, hint)) => (message, Some(hint.to_owned())),
            None => (text, None),
        };
        let note = Note { message: message.to_owned(), examples: Vec::new(), hint };
        Self { topic, kind: Kind::Error, note }
    }
}

fn lines_of(report: CheckReport, args: &CheckArgs) -> Vec<Line> {
    let line = |(topic, finding)| match finding {
        Finding::Error(error) => Line::of_error(topic, &args.config.located(error)),
        Finding::Problem(note) => Line { topic, kind: Kind::Error, note },
        Finding::Warning(note) => Line { topic, kind: Kind::Warning, note },
        Finding::Fact(message) => {
            Line { topic, kind: Kind::Fact, note: Note { message, ..Note::default() } }
        }
    };
    report.findings.into_iter().map(line).collect()
}

fn print(lines: &[Line], json: bool) -> std::io::Result<()> {
    let out = &mut stdout();
    let mut before = None;
    for Line { topic, kind, note } in lines {
        let Note { message, examples, hint } = note;
        let kind = match kind {
            Kind::Error => "error",
            Kind::Warning => "warning",
            Kind::Fact => "ok",
        };
        if json {
            let row = serde_json::json!({
                "topic": topic.name(), "kind": kind, "message": message,
                "examples": examples, "hint": hint,
            });
            writeln!(out, "{row}")?;
            continue;
        }
        if before.replace(*topic) != Some(*topic) {
            writeln!(out, "{}", topic.name())?;
        }
        writeln!(out, "  {kind}: {}", message.replace('\n', "\n    "))?;
        for example in examples {
            writeln!(out, "    {}", example.replace('\n', "\n    "))?;
        }
        if let Some(hint) = hint {
            writeln!(out, "    hint: {hint}")?;
        }
    }
    Ok(())
}
