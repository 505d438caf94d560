//! The command line: parses arguments, draws progress, prints, and picks exit codes.
//!
//! One file per command; [`crate::run`] loads their model, data and optimizer. Only this module
//! prints, and only this module reads the environment, except for `TRAINER_SIMD`, which `ops`
//! reads, and the variables of the Hub, proxies and certificates, which `net` reads.

mod args;
mod bench;
mod cache;
mod check;
mod completions;
mod config;
mod convert;
mod error_report;
mod eval;
mod export;
mod failure;
mod generate;
mod gpu_error;
mod init;
mod inspect;
mod launch;
mod logging;
mod new;
mod panics;
mod plan;
mod progress;
mod ranks;
mod replay;
mod report;
mod selftest;
mod sft;
mod signals;
mod terminal;
mod tips;
mod track;
mod verify;
mod why;

use self::failure::{Exit, Failure};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::io::Write as _;
use std::process::ExitCode;

/// Version and GPU code of this binary.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("TRAINER_GPU_CODE"), ")");

/// Supervised fine-tuning of Qwen3-VL-style vision-language models, in one binary
#[derive(Debug, Parser)]
#[command(name = "trainer", version = VERSION, propagate_version = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fine-tune a model
    Sft(sft::SftArgs),
    /// Write a model folder in the transformers layout with random weights
    Init(init::InitArgs),
    /// Write a config for a model folder and data files
    New(new::NewArgs),
    /// List the keys of a config, or print its JSON Schema
    Config(config::ConfigKeysArgs),
    /// Find all problems of a config, its model and its data, without training
    Check(check::CheckArgs),
    /// Show what the model sees of each row: turns, supervised tokens, image grids, packs
    Inspect(inspect::InspectArgs),
    /// Compute the loss and the share of exact answers on the rows to evaluate on
    Eval(eval::EvalArgs),
    /// Merge an adapter into its model, or write a clean model folder from a checkpoint
    Export(export::ExportArgs),
    /// Answer a prompt
    Generate(generate::GenerateArgs),
    /// Measure every row of `data.train` once and store the lengths for later runs
    Cache(cache::CacheArgs),
    /// Write a config from one of ms-swift, LLaMA-Factory or lmms-engine
    Convert(convert::ConvertArgs),
    /// Measure the speed of operations, of a training step, and of the data loader
    Bench(bench::BenchArgs),
    /// Predict memory, steps and time of a config, and find the settings with which it fits
    Plan(plan::PlanArgs),
    /// Compute rows in every layout, and compare losses and gradients
    Verify(verify::VerifyArgs),
    /// Write a page with the curves, answers and settings of runs
    Report(report::ReportArgs),
    /// Send the rows of a run to Weights & Biases, MLflow or SwanLab
    Track(track::TrackArgs),
    /// List the rows of a step of a run, with their losses
    Why(why::WhyArgs),
    /// Check the connections between ranks: messages, sums, and failures
    Selftest(selftest::SelftestArgs),
    /// Print the script that completes commands and options in a shell
    Completions(completions::CompletionsArgs),
    /// Write the man pages
    Man(completions::ManArgs),
}

impl Cli {
    fn read() -> Result<Self, clap::Error> {
        let mut command = args::expand_arguments(Self::command());
        let mut matches = command.try_get_matches_from_mut(std::env::args_os())?;
        Self::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
    }
}

/// Runs the command that the arguments name, and reports its error.
pub fn main() -> ExitCode {
    hide_library_backtraces();
    crate::ops::share_one_heap_under_a_limit();
    let cli = match Cli::read() {
        Ok(cli) => cli,
        Err(error) => {
            // clap returns help and version as errors.
            let printed = error.print();
            if let Some(tip) = tips::tip(&error) {
                // The error itself has been printed; a closed stderr does not matter.
                let _ = writeln!(std::io::stderr(), "\nhint: write {tip}");
            }
            return match (printed, error.use_stderr()) {
                (Err(error), false) => error_report::report(&terminal::wrap(error).into()),
                (_, false) => ExitCode::SUCCESS,
                (_, true) => Exit::Usage.into(),
            };
        }
    };
    crate::ops::exit_when_out_of_memory(Exit::Resources as i32);
    // The stack size of a main thread. No pool exists yet, so an error is one of the system.
    if let Err(error) = rayon::ThreadPoolBuilder::new().stack_size(8 << 20).build_global() {
        return error_report::report(&panics::no_thread(&error).into());
    }
    // The command runs on a worker of the pool: from any other thread, each of the hundreds of
    // parallel ops of a step would put that thread to sleep and wake it again.
    match rayon::scope(|_| panics::caught(|| run(&cli.command))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error_report::report(&error),
    }
}

/// With `RUST_BACKTRACE`, candle appends a backtrace to each of its errors, which hides the
/// message. Only `RUST_LIB_BACKTRACE` shows it.
#[expect(unsafe_code, reason = "the standard library has no safe way to change a variable")]
fn hide_library_backtraces() {
    if std::env::var_os("RUST_LIB_BACKTRACE").is_none() {
        // SAFETY: this is the first statement of the process, which has no other thread yet.
        unsafe { std::env::set_var("RUST_LIB_BACKTRACE", "0") };
    }
}

fn run(command: &Command) -> anyhow::Result<()> {
    let logging = logging::Logging::start(ranks::log_level())?;
    crate::ops::simd_level().map_err(|error| {
        Failure::of(Exit::Usage, error)
            .hint("unset it: the default is the highest level that the CPU supports")
    })?;
    match command {
        Command::Sft(args) => sft::run(args, &logging),
        Command::Init(args) => init::run(args),
        Command::New(args) => new::run(args, &logging),
        Command::Config(args) => config::run(args),
        Command::Check(args) => check::run(args, &logging),
        Command::Inspect(args) => inspect::run(args, &logging),
        Command::Eval(args) => eval::run(args, &logging),
        Command::Export(args) => export::run(args, &logging),
        Command::Generate(args) => generate::run(args, &logging),
        Command::Cache(args) => cache::run(args, &logging),
        Command::Convert(args) => convert::run(args),
        Command::Bench(args) => bench::run(args, &logging),
        Command::Plan(args) => plan::run(args, &logging),
        Command::Verify(args) => verify::run(args, &logging),
        Command::Report(args) => report::run(args, &logging),
        Command::Track(args) => track::run(args),
        Command::Why(args) => why::run(args),
        Command::Selftest(args) => selftest::run(args),
        Command::Completions(args) => completions::completions(args),
        Command::Man(args) => completions::man(args),
    }
}
