//! Trackers that their own Python clients serve: Weights & Biases, MLflow and SwanLab.
//!
//! For each of them a run starts a process with the script `follow.py`, which reads the files of
//! the run and sends their rows. Training only looks whether the process still exists; it never
//! waits for it, and never ends because of it.

use super::error::RunError;
use super::output_dir::check_unused;
use crate::checkpoint::write_atomically;
use crate::config::RunConfig;
use crate::files;
use crate::train::Tracker;
use serde_json::{Value, json};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const SCRIPT: &str = include_str!("follow.py");
const SCRIPT_NAME: &str = "follow.py";
/// What the script logs besides the rows.
const ABOUT: &str = "run.json";

/// The time after which a process is started again. It doubles if the process has sent nothing.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Number of processes that end one after another without sending a row, before no other is started.
const MAX_FAILURES: u32 = 5;
/// Maximum time that a finished run waits until its last rows are sent.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(30);

/// Maximum time that the import of a client may take.
const MAX_IMPORT: Duration = Duration::from_mins(2);
/// The signal of an alarm.
const SIGALRM: i32 = rustix::process::Signal::ALARM.as_raw();

/// Python processes that import the clients of a run, to find out whether they are installed.
pub(super) struct Imports {
    python: OsString,
    running: Vec<(&'static str, Child)>,
}

impl Imports {
    /// Starts the imports, which take seconds.
    pub(super) fn start(python: &OsStr, trackers: &[Tracker]) -> Result<Self, RunError> {
        let start =
            |(name, symbol)| import(python, name, symbol, MAX_IMPORT).map(|child| (name, child));
        let running = trackers.iter().filter_map(|tracker| tracker.package()).map(start);
        Ok(Self { python: python.to_owned(), running: running.collect::<Result<_, _>>()? })
    }

    /// Waits for the imports, and fails if a package cannot be imported.
    pub(super) fn finish(self) -> Result<Clients, RunError> {
        let Self { python, running } = self;
        let mut names = Vec::new();
        for (name, child) in running {
            let output = child.wait_with_output().map_err(|problem| no_python(&python, problem))?;
            if !output.status.success() {
                let problem = match last_line(&output.stderr) {
                    _ if output.status.signal() == Some(SIGALRM) => {
                        "its import takes too long".to_owned()
                    }
                    line => line.unwrap_or_else(|| output.status.to_string()),
                };
                let python = python.display().to_string();
                return Err(RunError::NoClient { python, package: name, problem });
            }
            names.push(name);
        }
        Ok(Clients { python, names })
    }
}

/// Starts a process that imports `symbol` from the package `name`. Its alarm ends it after `limit`.
fn import(python: &OsStr, name: &str, symbol: &str, limit: Duration) -> Result<Child, RunError> {
    // Without the working folder, as the script is started. A folder of the name of the package is
    // importable, but has no content.
    let code = format!(
        "import signal, sys; signal.alarm({}); sys.path.pop(0); assert sys.version_info >= (3, 9), \
         'Python 3.9 or later is needed'; from {name} import {symbol}",
        limit.as_secs()
    );
    let mut command = Command::new(python);
    command.arg("-c").arg(code).stdin(Stdio::null());
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    child.map_err(|problem| no_python(python, problem))
}

fn no_python(python: &OsStr, problem: io::Error) -> RunError {
    RunError::NoPython { python: python.display().to_string(), problem }
}

fn last_line(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_owned)
}

/// Clients that are installed.
pub(super) struct Clients {
    python: OsString,
    names: Vec<&'static str>,
}

impl Clients {
    /// Starts a process for each client. `about` describes the process that trains.
    pub(super) fn follow(
        self,
        config: &RunConfig,
        about: &Value,
    ) -> Result<Vec<Follower>, RunError> {
        if !self.names.is_empty() {
            prepare(&config.output_dir, config, about)?;
        }
        Ok(self.start(&config.output_dir))
    }

    fn start(self, run: &Path) -> Vec<Follower> {
        let start = |name| {
            let mut follower = Follower {
                python: self.python.clone(),
                run: run.to_owned(),
                name,
                process: None,
                again_at: None,
                failures: 0,
                sent: Vec::new(),
            };
            follower.start();
            follower
        };
        self.names.into_iter().map(start).collect()
    }
}

/// Writes the files that the script needs to `trackers/`.
fn prepare(run: &Path, config: &RunConfig, about: &Value) -> Result<(), RunError> {
    let folder = run.join("trackers");
    fs::create_dir_all(&folder).map_err(|problem| RunError::OutputFile {
        action: "create",
        path: folder.clone(),
        problem,
    })?;
    let default = config.output_dir.file_name().map_or("run".into(), OsStr::to_string_lossy);
    let info = json!({
        "project": config.log.project,
        "name": config.log.run_name.as_deref().unwrap_or(&default),
        "config": config.portable(),
        "data": config.data, // the files of rows and images, which are not sent
        "run": about,
    });
    write_atomically(&folder.join(ABOUT), info.to_string().as_bytes())?;
    Ok(write_atomically(&folder.join(SCRIPT_NAME), SCRIPT.as_bytes())?)
}

/// A process that sends the rows of a run to a tracker while the run trains.
#[derive(Debug)]
pub(super) struct Follower {
    python: OsString,
    /// `output_dir`.
    run: PathBuf,
    name: &'static str,
    process: Option<Child>,
    /// When the next process starts; `None` if no process has ended, or too many have.
    again_at: Option<Instant>,
    /// Number of processes that have ended one after another without sending a row.
    failures: u32,
    /// The state file of the last process that ended.
    sent: Vec<u8>,
}

impl Follower {
    /// Looks whether the process still exists, and starts another one if it is time to.
    pub(super) fn watch(&mut self) {
        match self.process.as_mut().map(Child::try_wait) {
            Some(Ok(Some(status))) => self.ended(status),
            None if self.again_at.is_some_and(|at| at <= Instant::now()) => self.start(),
            _ => {}
        }
    }

    fn start(&mut self) {
        self.again_at = None;
        match self.spawn() {
            Ok(process) => {
                let log = self.file("log");
                tracing::info!(log = %log.display(), "sending rows to `{}`", self.name);
                self.process = Some(process);
            }
            Err(error) => self.warn(&error.to_string()),
        }
    }

    fn spawn(&self) -> io::Result<Child> {
        let log = files::append(&self.file("log"))?;
        let script = self.run.join("trackers").join(SCRIPT_NAME);
        let mut command = Command::new(&self.python);
        command.arg(script).arg(&self.run).arg(self.name);
        command.stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log);
        command.process_group(0).spawn() // Ctrl-C is for the training process only
    }

    fn file(&self, extension: &str) -> PathBuf {
        self.run.join("trackers").join(self.name).with_extension(extension)
    }

    fn ended(&mut self, status: ExitStatus) {
        self.process = None;
        let sent = files::read(self.file("json")).unwrap_or_default();
        self.failures = if sent == self.sent { self.failures + 1 } else { 1 };
        self.sent = sent;
        if self.failures < MAX_FAILURES {
            let pause = FIRST_PAUSE * (1 << (self.failures - 1));
            self.again_at = Some(Instant::now() + pause);
        }
        let log = files::read(self.file("log")).unwrap_or_default();
        let last = last_line(&log).map(|line| format!(": {line}")).unwrap_or_default();
        self.warn(&format!("the process has ended ({status}){last}"));
    }

    fn warn(&self, problem: &str) {
        let log = self.file("log");
        let next = match self.again_at {
            Some(_) => "another process continues where it stopped".to_owned(),
            None => format!("{}; training continues without it", self.later()),
        };
        tracing::warn!(log = %log.display(), "tracker `{}`: {problem}. {next}", self.name);
    }

    fn later(&self) -> String {
        format!("`trainer track {}` sends the rows that are missing", self.run.display())
    }

    /// Lets the process send the last rows and end. It continues after the end of this process.
    pub(super) fn end(&mut self, is_finished: bool) {
        self.watch();
        if self.again_at.is_some() {
            self.start();
        }
        let stdin = self.process.as_mut().and_then(|process| process.stdin.take());
        if let Some(mut stdin) = stdin.filter(|_| is_finished) {
            // A process that has ended does not read it.
            let _ = stdin.write_all(b"finished\n");
        }
    }

    /// Whether the last rows of a finished run are still being sent.
    fn is_sending(&mut self) -> bool {
        match self.process.as_mut().map(Child::try_wait) {
            Some(Ok(Some(status))) if status.success() => return false,
            Some(Ok(Some(status))) => self.ended(status),
            None if self.again_at.is_some_and(|at| at <= Instant::now()) => self.end(true),
            _ => {}
        }
        self.process.is_some() || self.again_at.is_some()
    }
}

/// Waits until the last rows of a finished run are sent, for at most `limit`, or until `stop` is set.
pub(super) fn wait(followers: &mut [Follower], limit: Duration, stop: &AtomicBool) {
    let mut sending: Vec<&mut Follower> = followers.iter_mut().collect();
    sending.retain_mut(|follower| follower.is_sending());
    if sending.is_empty() {
        return;
    }
    tracing::info!("sending the last rows to the trackers, for at most {limit:?}");
    let until = Instant::now() + limit;
    while !sending.is_empty() && Instant::now() < until && !stop.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
        sending.retain_mut(|follower| follower.is_sending());
    }
    for follower in sending {
        let (log, later) = (follower.file("log"), follower.later());
        tracing::warn!(log = %log.display(), "tracker `{}`: not all rows are sent yet; {later}", follower.name);
    }
}

/// Sends the rows of a run that a tracker does not have yet. The run must have ended.
pub fn track(
    python: &OsStr,
    run: &Path,
    config: &RunConfig,
    trackers: &[Tracker],
) -> Result<(), RunError> {
    check_unused(run)?;
    let Clients { python, names } = Imports::start(python, trackers)?.finish()?;
    let folder = run.join("trackers");
    if folder.join(ABOUT).exists() {
        write_atomically(&folder.join(SCRIPT_NAME), SCRIPT.as_bytes())?;
    } else {
        prepare(run, config, &json!({"version": env!("CARGO_PKG_VERSION")}))?;
    }
    for name in names {
        let mut command = Command::new(&python);
        command.arg(folder.join(SCRIPT_NAME)).arg(run).args([name, "--once"]);
        let status = command.status().map_err(|problem| no_python(&python, problem))?;
        if !status.success() {
            return Err(RunError::NotTracked { tracker: name, status });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_import_that_hangs_is_an_error() {
        let python = OsString::from("python3");
        let child = import(&python, "time", "sleep; sleep(600)", Duration::from_secs(1)).unwrap();
        let error = Imports { python, running: vec![("wandb", child)] }.finish().err().unwrap();
        assert!(error.to_string().contains("its import takes too long"), "{error}");
    }

    #[test]
    fn a_client_that_hangs_does_not_keep_a_finished_run() {
        let folder = tempfile::tempdir().unwrap();
        let trackers = folder.path().join("trackers");
        fs::create_dir(&trackers).unwrap();
        let hang = b"import time\ntime.sleep(600)\n";
        write_atomically(&trackers.join(SCRIPT_NAME), hang).unwrap();
        let clients = Clients { python: "python3".into(), names: vec!["wandb"] };
        let mut followers = clients.start(folder.path());
        followers[0].end(true);
        let start = Instant::now();
        wait(&mut followers, Duration::from_millis(200), &AtomicBool::new(false));
        wait(&mut followers, Duration::from_mins(10), &AtomicBool::new(true)); // Ctrl-C
        assert!(start.elapsed() < Duration::from_secs(20));
        followers[0].process.as_mut().unwrap().kill().unwrap();
    }

    #[test]
    fn no_process_is_started_after_five_that_sent_nothing() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("trackers")).unwrap();
        let clients = Clients { python: "false".into(), names: vec!["wandb"] };
        let mut follower = clients.start(folder.path()).pop().unwrap();
        for failure in 1..=MAX_FAILURES {
            let status = follower.process.as_mut().unwrap().wait().unwrap();
            follower.ended(status);
            assert_eq!(follower.again_at.is_some(), failure < MAX_FAILURES);
            if follower.again_at.is_some() {
                follower.start();
            }
        }
        follower.end(true); // starts no other
        assert!(follower.process.is_none());
    }
}
