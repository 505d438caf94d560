//! `trainer selftest`: checks the connections between ranks on this machine or on a cluster.

use super::error_report;
use super::failure::{Exit, Failure};
use super::launch::{Forwarded, Signals, launch};
use super::ranks::{Ending, end, group, rank_commands, started_ranks};
use super::terminal::stdout;
use crate::dist::{
    CaseResult, Distributed, Group, Launched, NUM_CASES, agree, connect, selftest, threads,
};
use crate::train::DeviceChoice;
use anyhow::Context as _;
use candle_core::Device;
use clap::{Args, ValueEnum};
use rustix::process::{Signal, getpid, kill_process};
use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

/// Arguments of `selftest`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  mpirun -n 4 trainer selftest --distributed\n  \
    srun trainer selftest --distributed\n\nStart it in the same way as `trainer sft`. Without a \
    launcher and without several GPUs, it tests\nfour ranks that are threads of one process.")]
pub(super) struct SelftestArgs {
    /// Test the connections between ranks
    #[arg(long, required = true)]
    distributed: bool,
    /// Device of the tensors that are added up: `auto`, `cpu` or `cuda:N`
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    device: DeviceChoice,
    /// Network interface of rank 0, as `distributed.interface`
    #[arg(long, value_name = "NAME|IP")]
    interface: Option<String>,
    /// TCP port of rank 0, as `distributed.port`
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Seconds after which a rank without progress ends the test
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
        value_parser = clap::value_parser!(u32).range(i64::from(MIN_TIMEOUT_S)..=86_400))]
    timeout_s: u32,
    /// Size of the largest sum, in millions of bytes
    #[arg(long, value_name = "MB", default_value_t = 100)]
    megabytes: usize,
    /// Makes this process a rank of a case with a planted failure
    #[arg(long, hide = true)]
    planted: Option<Planted>,
}

/// Rank 0 takes this long for the cases with planted failures, while the others wait.
const MIN_TIMEOUT_S: u32 = 30;

/// The ranks of a case with a planted failure, and the one that fails.
const PLANTED_WORLD: usize = 3;
const PLANTED_RANK: usize = 1;

/// `timeout_s` of the ranks of a case with a planted failure.
const PLANTED_TIMEOUT_S: u32 = 2;

/// The cases with planted failures. Only the machine of rank 0 runs them.
const PLANTED: [(&str, Planted); 2] = [
    ("all ranks end when one is killed, and name it", Planted::Killed),
    ("all ranks end when one hangs, and name it", Planted::Stopped),
];

/// How a rank fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Planted {
    Killed,
    Stopped,
}

/// Runs the cases, and prints a line for each and one for all.
pub(super) fn run(args: &SelftestArgs) -> anyhow::Result<()> {
    if let Some(planted) = args.planted {
        return fail_as(planted);
    }
    let distributed = Distributed {
        timeout_s: args.timeout_s,
        interface: args.interface.clone(),
        port: args.port,
        ..Distributed::default()
    };
    if started_ranks(&distributed, args.device, |_| Ok(()))? {
        return Ok(());
    }
    let large = args.megabytes * 250_000;
    let passed = match group(&distributed, args.device)? {
        Some(mut group) => {
            let ending = Ending::of(&group);
            let device = match &group.device {
                Some(device) => Ok(device.clone()),
                None => args.device.open_for(group.rank).map_err(Into::into),
            };
            ending.after(device.and_then(|device| cases(&mut group, &device, large)))?
        }
        None => on_threads(large)?,
    };
    if passed {
        return Ok(());
    }
    let hint = "the lines above that begin with `FAILED` name the first rank that found a problem";
    Err(Failure::new(Exit::Ranks, "the self-test has failed").hint(hint).into())
}

/// Runs the cases on ranks that are threads of this process.
fn on_threads(large: usize) -> anyhow::Result<bool> {
    thread::scope(|scope| {
        let mut ranks = Vec::new();
        for mut group in threads(4)? {
            ranks.push(scope.spawn(move || cases(&mut group, &Device::Cpu, large)));
        }
        let mut passed = true;
        for rank in ranks {
            passed &= rank.join().expect("a case does not panic")?;
        }
        Ok(passed)
    })
}

#[derive(Default)]
struct Tally {
    /// Whether to print a line for each case.
    print: bool,
    done: usize,
    failed: usize,
}

impl Tally {
    fn add(&mut self, result: &CaseResult) -> anyhow::Result<()> {
        self.done += 1;
        self.failed += usize::from(result.problem.is_some());
        if !self.print {
            return Ok(());
        }
        let CaseResult { name, problem, measured, .. } = result;
        let place = format!("{:2}/{}", self.done, NUM_CASES + PLANTED.len());
        let mut out = stdout();
        match (problem, measured) {
            (Some(problem), _) => writeln!(out, "FAILED {place} {name}: {problem}")?,
            (None, Some(measured)) => writeln!(out, "ok     {place} {name} ({measured})")?,
            (None, None) => writeln!(out, "ok     {place} {name}")?,
        }
        Ok(())
    }
}

/// Runs all cases on this rank, and returns whether they pass. Rank 0 prints.
fn cases(group: &mut Group, device: &Device, large: usize) -> anyhow::Result<bool> {
    let is_first = group.rank.is_first();
    let mut tally = Tally { print: is_first, ..Tally::default() };
    let mut printed = Ok(());
    let ran = selftest(group, device, large, |result| {
        if printed.is_ok() {
            printed = tally.add(&result);
        }
    });
    printed?;
    ran.with_context(|| format!("case {} has ended early", tally.done + 1))?;
    for (name, planted) in PLANTED {
        group.monitor.report(name);
        let started = Instant::now();
        let found = if is_first { plant(planted)? } else { None };
        let time = started.elapsed();
        let problem = agree(group, found.as_deref())?;
        let measured = Some(format!("{:.1} s", time.as_secs_f64()));
        tally.add(&CaseResult { name, problem, time, measured })?;
    }
    if is_first {
        let (passed, world) = (tally.done - tally.failed, group.rank.world);
        writeln!(stdout(), "{passed} of {} cases passed on {world} ranks", tally.done)?;
    }
    Ok(tally.failed == 0)
}

/// Starts ranks on this machine, one of which fails, and checks how the others end. Returns the
/// problem.
fn plant(planted: Planted) -> anyhow::Result<Option<String>> {
    let value = planted.to_possible_value().expect("no value is skipped");
    let arguments = ["selftest", "--distributed", "--planted", value.get_name()];
    let mut commands = rank_commands(PLANTED_WORLD, None, &arguments.map(Into::into))?;
    // The few lines that the ranks print fit into the pipe.
    let (mut printed, stderr) = std::io::pipe()?;
    for command in &mut commands {
        command.stdout(Stdio::null()).stderr(stderr.try_clone()?);
    }
    drop(stderr);
    let started = Instant::now();
    let ended = launch(commands, &Signals::none(), Forwarded::Unchanged);
    let took = started.elapsed();
    let mut text = String::new();
    printed.read_to_string(&mut text)?;
    let limit = Duration::from_secs(u64::from(PLANTED_TIMEOUT_S) + 5);
    let named = text.matches(&format!("error: rank {PLANTED_RANK} ")).count();
    let problem = match ended {
        Ok(()) => "the ranks ended as if none had failed".to_owned(),
        Err(error) if error_report::exit(&error) != Exit::Ranks => {
            format!("the ranks ended: {error}")
        }
        Err(_) if took > limit => format!("the ranks ended after {:.1} s", took.as_secs_f64()),
        Err(_) if named < PLANTED_WORLD - 1 => {
            format!("{named} of {} other ranks named the rank", PLANTED_WORLD - 1)
        }
        Err(_) => return Ok(None),
    };
    Ok(Some(format!("{problem}; the ranks printed: {text}")))
}

/// A rank of a case with a planted failure: exchanges messages until the run ends.
fn fail_as(planted: Planted) -> anyhow::Result<()> {
    let place = Launched::find(|name| std::env::var(name).ok())?.context("not a rank")?;
    let distributed = Distributed { timeout_s: PLANTED_TIMEOUT_S, ..Distributed::default() };
    let mut connections = connect(&place, &distributed, end)?;
    for round in 0.. {
        if round == 3 && connections.rank.rank == PLANTED_RANK {
            let signal = match planted {
                Planted::Killed => Signal::KILL,
                Planted::Stopped => Signal::STOP,
            };
            kill_process(getpid(), signal)?;
        }
        let exchanged = connections.step.all_gather(Vec::new());
        if let Err(error) = exchanged {
            // The monitor ends this process, with the reason.
            thread::sleep(Duration::from_secs(u64::from(PLANTED_TIMEOUT_S) + 1));
            return Err(error.into());
        }
    }
    Ok(())
}
