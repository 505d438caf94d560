use super::super::error_report::{exit, text};
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
        (["exit 75", "exit 101"], Exit::Software, "rank 1 has failed with exit code 101"),
    ] {
        let error = run(&scripts, LONG).unwrap_err();
        assert_eq!((exit(&error), error.to_string()), (code, message.to_owned()), "{scripts:?}");
    }
}

#[test]
fn a_failure_of_mpirun_itself_is_no_bug_of_this_program() {
    let error = run(&["exit 1"], LONG).unwrap_err();
    assert_eq!(exit(&error), Exit::Ranks);
    assert_eq!(error.to_string(), "`mpirun` has failed with exit code 1");
    let absent = Command::new("no-such-program-of-mpi");
    let error = watch(vec![absent], &Signals::none(), Forwarded::AsUsr2, LONG).unwrap_err();
    assert_eq!(exit(&error), Exit::Usage);
    assert!(text(&error).contains("`no-such-program-of-mpi`: it is not in PATH"), "{error}");
    assert!(text(&error).contains("install OpenMPI"));
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

#[test]
fn only_a_second_ctrl_c_or_sigterm_ends_the_ranks_of_mpirun_at_once() {
    for (signal, earlier, sent) in [
        (Signal::INT, &[][..], Signal::USR2),
        (Signal::HUP, &[], Signal::USR2),
        (Signal::HUP, &[Signal::HUP], Signal::USR2),
        (Signal::XCPU, &[Signal::XCPU], Signal::USR2),
        (Signal::USR2, &[Signal::TERM], Signal::USR2),
        (Signal::TERM, &[Signal::HUP], Signal::TERM),
        (Signal::INT, &[Signal::INT], Signal::INT),
    ] {
        assert_eq!(Forwarded::AsUsr2.signal(signal, earlier), sent, "{earlier:?} {signal:?}");
        assert_eq!(Forwarded::Unchanged.signal(signal, earlier), signal);
    }
}

/// Starts a rank that saves on the signal of the first variable, as `mpirun` does if the second
/// one is set; the rank creates the file of the third one when it is ready.
const RECEIVER: [&str; 3] = ["TRAINER_TEST_SIGNAL", "TRAINER_TEST_MPIRUN", "TRAINER_TEST_READY"];

/// Starts this test in a process of its own, so that signals reach no other test.
#[cfg(target_os = "linux")]
#[test]
fn each_signal_to_the_process_that_started_the_ranks_stops_them_after_they_saved() {
    let name = "cli::launch::tests::each_signal_to_the_process_that_started_the_ranks_stops_them_after_they_saved";
    if let [Some(signal), by_mpirun, Some(ready)] = RECEIVER.map(std::env::var_os) {
        let how = by_mpirun.map_or(Forwarded::Unchanged, |_| Forwarded::AsUsr2);
        let (signal, ready) = (signal.display(), ready.display());
        let script = format!("trap 'exit 75' {signal}; : >{ready}; while :; do sleep 0.01; done");
        let signals = Signals::receive().unwrap();
        let error = watch(vec![shell(&script)], &signals, how, LONG).unwrap_err();
        std::process::exit(exit(&error) as i32);
    }
    let folder = tempfile::tempdir().unwrap();
    for (signal, trapped) in [
        (Signal::INT, "INT"),
        (Signal::TERM, "TERM"),
        (Signal::HUP, "HUP"),
        (Signal::USR2, "USR2"),
        (Signal::XCPU, "XCPU"),
    ] {
        // Under `nohup`, the signal stays ignored.
        if signal == Signal::HUP && is_hangup_ignored() {
            continue;
        }
        for by_mpirun in [false, true] {
            let ready = folder.path().join(format!("{trapped}-{by_mpirun}"));
            let mut starter = Command::new(std::env::current_exe().unwrap());
            starter.args(["--exact", name, "--nocapture"]).stdout(Stdio::null());
            let trapped = if by_mpirun { "USR2" } else { trapped };
            starter.env(RECEIVER[0], trapped).env(RECEIVER[2], &ready);
            if by_mpirun {
                starter.env(RECEIVER[1], "1");
            }
            let mut starter = starter.spawn().unwrap();
            wait_until(|| ready.exists());
            let pid = Pid::from_child(&starter);
            rustix::process::kill_process(pid, signal).unwrap();
            let ended = starter.wait().unwrap();
            assert_eq!(ended.code(), Some(75), "{signal:?}, mpirun: {by_mpirun}: {ended}");
        }
    }
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
    let runs = || status().lines().any(|line| line.starts_with("State:") && !line.contains('Z'));
    assert!(runs());
    starter.kill().unwrap();
    starter.wait().unwrap();
    wait_until(|| !runs());
}
