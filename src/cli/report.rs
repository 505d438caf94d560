//! `trainer report`: a page with the curves, answers and settings of runs.

use super::args::OutputFile;
use super::logging::Logging;
use super::progress::SetupBars;
use super::terminal::stdout;
use crate::checkpoint::write_atomically;
use crate::config::RunConfig;
use crate::data::DatasetRows;
use crate::files;
use crate::report::{RunFolder, report};
use clap::Args;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Arguments of `report`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer report runs/quickstart\n  \
    trainer report runs/a runs/b runs/c --out compared.html\n  \
    trainer report runs/quickstart --price-per-hour 2.5")]
pub(super) struct ReportArgs {
    /// Folders of runs: their `output_dir`; at most 16
    #[arg(value_name = "RUN_DIR", required = true, num_args = 1..=MAX_RUNS)]
    runs: Vec<PathBuf>,
    /// What an hour of all machines of a run costs, in any currency: the page then has the cost of
    /// each run and of 1,000 tokens
    #[arg(long, value_name = "PRICE", value_parser = price)]
    price_per_hour: Option<f64>,
    /// The page; by default `report.html` in the folder of the run, or for several runs in the
    /// present folder
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

const MAX_RUNS: usize = 16;
const NAME: &str = "report.html";
const CARD: &str = "README.md";

fn price(text: &str) -> Result<f64, String> {
    let price = text.parse().ok().filter(|price: &f64| price.is_finite() && *price >= 0.0);
    price.ok_or_else(|| "expected a number of 0 or more, such as 2.5".to_owned())
}

pub(super) fn run(args: &ReportArgs, logging: &Logging) -> anyhow::Result<()> {
    let given = OutputFile::open_given("--out", args.out.as_ref())?; // before any work
    let default = match args.runs.as_slice() {
        [run] => run.join(NAME),
        _ => NAME.into(),
    };
    let read = |path: &PathBuf| RunFolder::read(path);
    let mut runs = args.runs.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    for run in &mut runs {
        run.price_per_hour = args.price_per_hour;
    }
    let file = given.map_or_else(|| OutputFile::open("--out", &default), Ok)?;
    let path = file.path().to_owned();
    let rows: Vec<Option<DatasetRows>> = runs.iter().map(|run| eval_rows(run, logging)).collect();
    let rows: Vec<Option<&DatasetRows>> = rows.iter().map(Option::as_ref).collect();
    let page = report(&runs, &rows)?;
    file.write(page.as_bytes())?;
    writeln!(stdout(), "{}", path.display())?;
    Ok(())
}

/// The eval rows of a run, if answers need their images.
fn eval_rows(run: &RunFolder, logging: &Logging) -> Option<DatasetRows> {
    let rows = run.eval_rows(&SetupBars(logging))?;
    rows.map_err(|error| tracing::warn!("the report has no images of answers: {error}")).ok()
}

/// Writes the page of a run to its folder, and returns the run. A failure must not fail the run.
pub(super) fn write_report(config: &RunConfig, rows: Option<&DatasetRows>) -> Option<RunFolder> {
    let path = config.output_dir.join(NAME);
    let written =
        RunFolder::read(&config.output_dir).map_err(anyhow::Error::from).and_then(|run| {
            let page = report(std::slice::from_ref(&run), &[rows])?;
            write_atomically(&path, page.as_bytes())?;
            Ok(run)
        });
    match written {
        Ok(run) => {
            tracing::info!(file = %path.display(), "wrote a report of the run");
            Some(run)
        }
        Err(error) => {
            tracing::warn!("cannot write the report of the run: {error:#}");
            None
        }
    }
}

/// The run whose last model or adapter is in `folder`: its `final`.
pub(super) fn run_of(folder: &Path) -> Option<RunFolder> {
    let is_final = folder.file_name().is_some_and(|name| name == "final");
    is_final.then(|| RunFolder::read(folder.parent()?).ok())?
}

/// Writes the model card of `folder`. A failure must not fail what made the folder.
pub(super) fn write_card(folder: &Path, card: &[u8]) {
    if let Err(error) = write_atomically(&folder.join(CARD), card) {
        tracing::warn!("cannot write the model card: {error:#}");
    }
}

/// The model card in a folder of a finished run, which a person may have edited.
pub(super) fn read_card(folder: &Path) -> Option<Vec<u8>> {
    files::read(folder.join(CARD)).ok()
}
