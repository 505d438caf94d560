//! Starts ranks as processes on this machine, and watches them until all have ended.

use super::error_report::BUG;
use super::failure::{Exit, Failure};
use super::signals::is_hangup_ignored;
use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long the other ranks may continue after one has failed. They learn of it at once and need
/// no more than a moment to end; a rank that hangs is ended after this time.
const GRACE: Duration = Duration::from_secs(3);

/// Programs that report the signal that ended another one add its number to this exit code.
const SIGNALLED: i32 = 128;

/// Time between two checks of the processes and signals.
const POLL: Duration = Duration::from_millis(10);

/// The signals that a rank handles. A process that has started ranks forwards them.
const HANDLED: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::USR1, Signal::HUP, Signal::USR2, Signal::XCPU];

/// Signals that a process receives and forwards to the ranks that it has started.
pub(super) struct Signals([(Signal, Arc<AtomicBool>); HANDLED.len()]);

impl Signals {
    /// Receives the signals from now on, in place of their default action, which would end this
    /// process and with it the ranks. SIGHUP stays ignored if the parent process ignores it.
    pub(super) fn receive() -> io::Result<Self> {
        let signals = Self::none();
        let ignores_hangup = is_hangup_ignored();
        for (signal, received) in &signals.0 {
            if *signal != Signal::HUP || !ignores_hangup {
                signal_hook::flag::register(signal.as_raw(), Arc::clone(received))?;
            }
        }
        Ok(signals)
    }

    /// Receives no signals.
    pub(super) fn none() -> Self {
        Self(HANDLED.map(|signal| (signal, Arc::default())))
    }

    /// The signals that were received after the last call.
    fn take(&self) -> impl Iterator<Item = Signal> {
        let received = self.0.iter().filter(|(_, flag)| flag.swap(false, Ordering::Relaxed));
        received.map(|(signal, _)| *signal)
    }
}

/// Runs each of `commands` as a rank, in their order, and waits until all have ended.
///
/// Signals are forwarded to all ranks, as `forwarded` says. If a rank fails, the others have a few
/// seconds to end, and are then ended with SIGKILL. If this process ends before them, the system
/// ends them. Returns an error unless all ranks succeed: [`Exit::Stopped`] if they were stopped
/// after they saved the run, and otherwise the exit code of the failure that came first. A rank
/// that was lost ([`Exit::Ranks`]) only explains the failure if no other rank has a code of its
/// own.
pub(super) fn launch(
    commands: Vec<Command>,
    signals: &Signals,
    forwarded: Forwarded,
) -> anyhow::Result<()> {
    watch(commands, signals, forwarded, GRACE)
}

/// How signals reach the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Forwarded {
    /// Unchanged: the processes are the ranks.
    Unchanged,
    /// As SIGUSR2 to `mpirun`, which passes it on to the ranks. On SIGINT, SIGTERM, SIGHUP and
    /// SIGXCPU, `mpirun` ends the ranks before they can save.
    AsUsr2,
}

impl Forwarded {
    /// The signal to send when `signal` was received. `earlier` are the signals received before.
    fn signal(self, signal: Signal, earlier: &[Signal]) -> Signal {
        // A terminal that closes may send SIGHUP twice, and SIGXCPU follows each second.
        let can_end_at_once = [Signal::INT, Signal::TERM].contains(&signal);
        match self {
            Self::AsUsr2 if earlier.is_empty() || !can_end_at_once => Signal::USR2,
            _ => signal,
        }
    }
}

fn watch(
    commands: Vec<Command>,
    signals: &Signals,
    how: Forwarded,
    grace: Duration,
) -> anyhow::Result<()> {
    let mut ranks = RankProcesses(Vec::new());
    for (rank, command) in commands.into_iter().enumerate() {
        let program = command.get_program().to_string_lossy().into_owned();
        let child = match spawn(command) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(missing(&program)),
            child => child.with_context(|| format!("cannot start rank {rank}"))?,
        };
        ranks.0.push(Some(child));
    }
    let mut ends = Vec::new();
    let mut forwarded = Vec::new();
    let mut deadline = None;
    while ranks.0.iter().any(Option::is_some) {
        for signal in signals.take() {
            if signal == Signal::USR1 {
                ranks.kill(signal); // the ranks save and continue; `mpirun` passes it on
                continue;
            }
            ranks.kill(how.signal(signal, &forwarded));
            forwarded.push(signal);
        }
        for (rank, status) in ranks.ended()? {
            let end = End::of(status, &forwarded);
            if !matches!(end, End::Done | End::Stopped) {
                deadline.get_or_insert_with(|| Instant::now() + grace);
            }
            // Later than the deadline, this process has ended it.
            if deadline.is_none_or(|deadline| Instant::now() < deadline) {
                ends.push((rank, end));
            }
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            ranks.kill(Signal::KILL);
        }
        thread::sleep(POLL);
    }
    outcome(&ends, ranks.0.len() == 1)
}

fn missing(program: &str) -> anyhow::Error {
    let failure = Failure::new(Exit::Usage, format!("cannot start `{program}`: it is not in PATH"));
    let hint = "install OpenMPI, which starts ranks on the CPU, or set `distributed.processes: 1`";
    failure.hint(hint).into()
}

/// Starts a process that the system ends when this thread ends.
fn spawn(mut command: Command) -> io::Result<Child> {
    command.stdin(Stdio::null());
    // A process group of its own: the terminal sends Ctrl-C to this process only, which forwards
    // it.
    command.process_group(0);
    #[cfg(target_os = "linux")]
    {
        let parent = rustix::process::getpid();
        let bind = move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            match rustix::process::getppid() {
                Some(found) if found == parent => Ok(()),
                _ => Err(io::Error::other("the process that started this one has ended")),
            }
        };
        // SAFETY: the closure makes two system calls and allocates memory only in the process
        // that fails.
        #[expect(unsafe_code, reason = "code between fork and exec must not take locks")]
        unsafe {
            command.pre_exec(bind);
        }
    }
    command.spawn()
}

struct RankProcesses(Vec<Option<Child>>);

impl RankProcesses {
    /// The ranks that have ended after the last call.
    fn ended(&mut self) -> io::Result<Vec<(usize, ExitStatus)>> {
        let mut ended = Vec::new();
        for (rank, place) in self.0.iter_mut().enumerate() {
            let Some(child) = place else { continue };
            if let Some(status) = child.try_wait()? {
                *place = None;
                ended.push((rank, status));
            }
        }
        Ok(ended)
    }

    fn kill(&self, signal: Signal) {
        for child in self.0.iter().flatten() {
            // An error means that the process has ended.
            let _ = kill_process_group(Pid::from_child(child), signal);
        }
    }
}

impl Drop for RankProcesses {
    /// Ends the ranks that run, after an error.
    fn drop(&mut self) {
        self.kill(Signal::KILL);
        for child in self.0.iter_mut().flatten() {
            let _ = child.wait();
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    /// After it saved the run.
    Stopped,
    Failed(Exit),
    /// With a code that is none of this program: `mpirun`, or the runtime of the language.
    Unknown(i32),
    /// By a signal that was not forwarded.
    Killed(i32),
}

impl End {
    fn of(status: ExitStatus, forwarded: &[Signal]) -> Self {
        let signal = |number: &i32| forwarded.iter().any(|signal| signal.as_raw() == *number);
        match (status.code(), status.signal()) {
            (Some(0), _) => Self::Done,
            (Some(code), _) if code == Exit::Stopped as i32 => Self::Stopped,
            // A rank that had not yet prepared for the signal, under `mpirun`.
            (Some(code), _)
                if code == SIGNALLED + Signal::USR2.as_raw() && !forwarded.is_empty() =>
            {
                Self::Failed(Exit::Interrupted)
            }
            (Some(code), _) => match Exit::from_code(code) {
                Some(exit) => Self::Failed(exit),
                // `mpirun` ends with this code if a signal ended a rank.
                None if code > SIGNALLED => Self::Killed(code - SIGNALLED),
                None => Self::Unknown(code),
            },
            // It had not yet prepared for signals.
            (None, number) if number.as_ref().is_some_and(signal) => {
                Self::Failed(Exit::Interrupted)
            }
            (None, number) => Self::Killed(number.unwrap_or_default()),
        }
    }
}

/// The result of ranks that ended in this order. `by_mpirun`: the only process is `mpirun`, which
/// has printed the number of the rank.
fn outcome(ends: &[(usize, End)], by_mpirun: bool) -> anyhow::Result<()> {
    let failures = || ends.iter().filter(|(_, end)| !matches!(end, End::Done | End::Stopped));
    let Some(first) = failures().next() else {
        if ends.iter().all(|(_, end)| *end == End::Done) {
            return Ok(());
        }
        let message = "stopped by a signal; the run is saved";
        let hint = "run the same command again to resume";
        return Err(Failure::new(Exit::Stopped, message).hint(hint).into());
    };
    // A rank that fails ends others, which may end before it.
    let lost = |end: End| end == End::Failed(Exit::Ranks);
    let (rank, end) = failures().find(|(_, end)| !lost(*end)).unwrap_or(first);
    let rank = if by_mpirun { "a rank".to_owned() } else { format!("rank {rank}") };
    Err(match end {
        End::Killed(signal) => {
            let name = signal_hook::low_level::signal_name(*signal).unwrap_or("signal");
            let message = format!("{rank} was ended by {name} ({signal})");
            let failure = Failure::new(Exit::Ranks, message);
            if *signal == Signal::KILL.as_raw() {
                failure.hint("the system does this when memory is full: see `dmesg`")
            } else {
                failure
            }
        }
        End::Failed(exit) => {
            let code = *exit as u8;
            Failure::new(*exit, format!("{rank} has failed with exit code {code}"))
        }
        End::Unknown(code) if by_mpirun => {
            Failure::new(Exit::Ranks, format!("`mpirun` has failed with exit code {code}"))
                .hint("its own message is above")
        }
        End::Unknown(code) => {
            Failure::new(Exit::Software, format!("{rank} has failed with exit code {code}"))
                .hint(BUG)
        }
        End::Done | End::Stopped => unreachable!("not a failure"),
    }
    .into())
}

#[cfg(test)]
mod tests;
