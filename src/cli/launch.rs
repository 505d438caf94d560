//! Starts ranks as processes on this machine, and watches them until all have ended.

use super::failure::{Exit, Failure};
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

/// SIGINT, SIGTERM and SIGUSR1, which a process receives and forwards to the ranks that it has
/// started.
pub(super) struct Signals([(Signal, Arc<AtomicBool>); 3]);

impl Signals {
    /// Receives the signals from now on, in place of their default action.
    pub(super) fn receive() -> io::Result<Self> {
        let signals = Self::none();
        for (signal, received) in &signals.0 {
            signal_hook::flag::register(signal.as_raw(), Arc::clone(received))?;
        }
        Ok(signals)
    }

    /// Receives no signals.
    pub(super) fn none() -> Self {
        Self([Signal::INT, Signal::TERM, Signal::USR1].map(|signal| (signal, Arc::default())))
    }

    /// The signals that were received after the last call.
    fn take(&self) -> impl Iterator<Item = Signal> {
        let received = self.0.iter().filter(|(_, flag)| flag.swap(false, Ordering::Relaxed));
        received.map(|(signal, _)| *signal)
    }
}

/// Runs each of `commands` as a rank, in their order, and waits until all have ended.
///
/// Signals are forwarded to all ranks, as `forwarded` says. If a rank fails, the others have a few seconds to end, and
/// are then ended with SIGKILL. If this process ends before them, the system ends them. Returns an
/// error unless all ranks succeed: [`Exit::Stopped`] if they were stopped after they saved the run,
/// and otherwise the exit code of the failure that came first. A rank that was lost
/// ([`Exit::Ranks`]) only explains the failure if no other rank has a code of its own.
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
    /// As SIGUSR2 to `mpirun`, which passes it on to the ranks. On SIGINT and SIGTERM, `mpirun` ends
    /// the ranks before they can save.
    AsUsr2,
}

fn watch(
    commands: Vec<Command>,
    signals: &Signals,
    how: Forwarded,
    grace: Duration,
) -> anyhow::Result<()> {
    let mut ranks = Ranks(Vec::new());
    for (rank, command) in commands.into_iter().enumerate() {
        let child = spawn(command).with_context(|| format!("cannot start rank {rank}"))?;
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
            let is_first = forwarded.is_empty();
            forwarded.push(signal);
            ranks.kill(match how {
                // a second signal ends the ranks at once
                Forwarded::AsUsr2 if is_first => Signal::USR2,
                _ => signal,
            });
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

/// Starts a process that the system ends when this thread ends.
fn spawn(mut command: Command) -> io::Result<Child> {
    command.stdin(Stdio::null());
    // A process group of its own: the terminal sends Ctrl-C to this process only, which forwards it.
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

/// The processes of the ranks that have not ended.
struct Ranks(Vec<Option<Child>>);

impl Ranks {
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

impl Drop for Ranks {
    /// Ends the ranks that run, after an error.
    fn drop(&mut self) {
        self.kill(Signal::KILL);
        for child in self.0.iter_mut().flatten() {
            let _ = child.wait();
        }
    }
}

/// How a rank has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    /// After it saved the run.
    Stopped,
    Failed(Exit),
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
            // `mpirun` ends with this code if a signal ended a rank.
            (Some(code), _) if code > SIGNALLED && Exit::from_code(code) == Exit::Unknown => {
                Self::Killed(code - SIGNALLED)
            }
            (Some(code), _) => Self::Failed(Exit::from_code(code)),
            // It had not yet prepared for signals.
            (None, number) if number.as_ref().is_some_and(signal) => {
                Self::Failed(Exit::Interrupted)
            }
            (None, number) => Self::Killed(number.unwrap_or_default()),
        }
    }
}

/// The result of ranks that ended in this order. `by_mpirun`: the only process is `mpirun`, which has
/// printed the number of the rank.
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
        End::Done | End::Stopped => unreachable!("not a failure"),
    }
    .into())
}

#[cfg(test)]
mod tests {
    use super::super::report::exit;
    use super::*;
    use std::path::Path;

    const LONG: Duration = Duration::from_mins(1);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn run(scripts: &[&str], grace: Duration) -> anyhow::Result<()> {
        let commands = scripts.iter().map(|script| shell(script)).collect();
        watch(commands, &Signals::none(), Forwarded::Unchanged, grace)
    }

    fn wait_until(mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + LONG;
        while !condition() {
            assert!(Instant::now() < deadline, "it took too long");
            thread::sleep(POLL);
        }
    }

    #[test]
    fn ranks_that_succeed_are_a_success() {
        run(&["exit 0", "sleep 0.1"], LONG).unwrap();
    }

    #[test]
    fn the_rank_that_explains_the_failure_is_named() {
        for (scripts, code, message) in [
            // Rank 1 reports bad data to rank 0, which ends before it.
            (["exit 74", "sleep 0.2; exit 65"], Exit::Data, "rank 1 has failed with exit code 65"),
            (["exit 65", "sleep 0.2; exit 73"], Exit::Data, "rank 0 has failed with exit code 65"),
            (["kill -9 $$", "sleep 0.2; exit 74"], Exit::Ranks, "rank 0 was ended by SIGKILL (9)"),
            (["kill -9 $$", "sleep 0.2; exit 1"], Exit::Ranks, "rank 0 was ended by SIGKILL (9)"),
            (["exit 0", "exit 74"], Exit::Ranks, "rank 1 has failed with exit code 74"),
            (["exit 75", "exit 101"], Exit::Unknown, "rank 1 has failed with exit code 1"),
        ] {
            let error = run(&scripts, LONG).unwrap_err();
            assert_eq!(
                (exit(&error), error.to_string()),
                (code, message.to_owned()),
                "{scripts:?}"
            );
        }
    }

    #[test]
    fn a_rank_that_hangs_is_ended_a_moment_after_another_has_failed() {
        let started = Instant::now();
        let error = run(&["kill -STOP $$", "exit 74"], Duration::from_millis(100)).unwrap_err();
        assert_eq!(exit(&error), Exit::Ranks);
        assert!(started.elapsed() < LONG);
    }

    #[test]
    fn a_signal_is_forwarded_to_all_ranks_and_their_code_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let ready = |rank: usize| folder.path().join(rank.to_string());
        let script = |rank: usize| {
            let ready = ready(rank);
            format!("trap 'exit 75' TERM; : >{}; while :; do sleep 0.01; done", ready.display())
        };
        let signals = Signals::none();
        let stopped = thread::scope(|scope| {
            scope.spawn(|| {
                wait_until(|| ready(0).exists() && ready(1).exists());
                signals.0[1].1.store(true, Ordering::Relaxed);
            });
            watch(vec![shell(&script(0)), shell(&script(1))], &signals, Forwarded::Unchanged, LONG)
                .unwrap_err()
        });
        assert_eq!(exit(&stopped), Exit::Stopped);
        // A rank that has not yet prepared for the signal ends at once.
        signals.0[1].1.store(true, Ordering::Relaxed);
        let ended =
            watch(vec![shell("exec sleep 60")], &signals, Forwarded::Unchanged, LONG).unwrap_err();
        assert_eq!(exit(&ended), Exit::Interrupted);
    }

    #[test]
    fn a_request_to_save_is_forwarded_and_the_ranks_continue() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, rank: usize| folder.path().join(format!("{name}-{rank}"));
        let script = |rank: usize| {
            let (ready, saved) = (file("ready", rank), file("saved", rank));
            let (ready, saved) = (ready.display(), saved.display());
            format!(
                "trap ': >{saved}' USR1; : >{ready}; until [ -e {saved} ]; do sleep 0.01; done; exit 0"
            )
        };
        let signals = Signals::none();
        thread::scope(|scope| {
            scope.spawn(|| {
                wait_until(|| file("ready", 0).exists() && file("ready", 1).exists());
                signals.0[2].1.store(true, Ordering::Relaxed);
            });
            let ranks = vec![shell(&script(0)), shell(&script(1))];
            watch(ranks, &signals, Forwarded::AsUsr2, LONG).unwrap();
        });
    }

    /// Starts a rank that sleeps and writes its process id to the file of the variable.
    const STARTER: &str = "TRAINER_TEST_STARTER";

    #[cfg(target_os = "linux")]
    #[test]
    fn no_rank_remains_if_the_process_that_started_it_is_killed() {
        let name = "cli::launch::tests::no_rank_remains_if_the_process_that_started_it_is_killed";
        if let Some(file) = std::env::var_os(STARTER) {
            let script = format!("echo $$ >{}; exec sleep 60", Path::new(&file).display());
            run(&[&script], LONG).unwrap();
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let mut starter = Command::new(std::env::current_exe().unwrap());
        starter.args(["--exact", name]).env(STARTER, &file).stdout(Stdio::null());
        let mut starter = starter.spawn().unwrap();
        let mut pid = String::new();
        wait_until(|| {
            pid = std::fs::read_to_string(&file).unwrap_or_default();
            pid.ends_with('\n')
        });
        let status = Path::new("/proc").join(pid.trim()).join("status");
        let status = || std::fs::read_to_string(&status).unwrap_or_default();
        let runs =
            || status().lines().any(|line| line.starts_with("State:") && !line.contains('Z'));
        assert!(runs());
        starter.kill().unwrap();
        starter.wait().unwrap();
        wait_until(|| !runs());
    }
}
