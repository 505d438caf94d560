//! Signals that make a run save or stop.

use super::failure::Exit;
use crate::files;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;
use std::io;
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

/// What the signals so far require.
#[derive(Debug, Clone, Default)]
pub(super) struct Requests {
    /// Save a checkpoint and stop.
    pub(super) stop: Arc<AtomicBool>,
    /// Save a checkpoint and go on.
    pub(super) save: Arc<AtomicBool>,
    /// There is nothing to save yet: a signal ends the process.
    pub(super) is_setup: Arc<AtomicBool>,
}

/// From now on, SIGUSR1 requests a checkpoint, and does not end the process.
pub(super) fn requests_to_save() -> io::Result<Arc<AtomicBool>> {
    let save = Arc::default();
    signal_hook::flag::register(SIGUSR1, Arc::clone(&save))?;
    Ok(save)
}

impl Requests {
    /// From now on, SIGINT, SIGTERM, SIGHUP, SIGXCPU and SIGUSR2 (which `mpirun` passes on to the
    /// ranks) stop the run after the current step, and SIGUSR1 saves a checkpoint. A second SIGINT
    /// ends the process. `save` has the requests before.
    pub(super) fn listen(save: Arc<AtomicBool>) -> io::Result<Self> {
        let requests = Self { save, ..Self::default() };
        // SIGXFSZ: without a handler, a file beyond the size limit would kill the process. With it,
        // the write fails with an error.
        let mut handled = vec![SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ];
        if !is_hangup_ignored() {
            handled.push(SIGHUP);
        }
        let mut signals = Signals::new(handled)?;
        let of_thread = requests.clone();
        let listen = move || signals.forever().for_each(|signal| of_thread.handle(signal));
        thread::Builder::new().name("signals".to_owned()).spawn(listen)?;
        Ok(requests)
    }

    fn handle(&self, signal: i32) {
        let name = signal_name(signal).unwrap_or("signal");
        match signal {
            SIGXFSZ => {}
            SIGUSR1 => {
                tracing::info!("received {name}: saving a checkpoint after this step");
                self.save.store(true, Relaxed);
            }
            SIGINT if self.stop.load(Relaxed) => exit(Exit::Interrupted as i32),
            _ if self.is_setup.load(Relaxed) => {
                tracing::error!("received {name}: stopped before the first step");
                exit(Exit::Stopped as i32);
            }
            _ => {
                tracing::info!(
                    "received {name}: saving a checkpoint after this step, then stopping"
                );
                self.stop.store(true, Relaxed);
            }
        }
    }
}

/// Whether the parent process, such as `nohup`, ignores SIGHUP.
pub(super) fn is_hangup_ignored() -> bool {
    is_ignored(SIGHUP, &files::read_to_string("/proc/self/status").unwrap_or_default())
}

/// Whether the parent process, such as `nohup`, ignores a signal, given `/proc/self/status`.
fn is_ignored(signal: i32, status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_nohup_ignores_is_found() {
        let status = "Name:\ttrainer\nSigIgn:\t0000000000000001\nSigCgt:\t0000000000000000\n";
        assert!(is_ignored(SIGHUP, status));
        assert!(!is_ignored(SIGINT, status));
        assert!(!is_ignored(SIGHUP, ""));
    }
}
