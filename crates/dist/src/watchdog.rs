//! Notices that a run in one process makes no progress.

use super::Monitor;
use super::heartbeat::Clock;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time between two checks of the last report.
const TICK: Duration = Duration::from_secs(1);

/// The last report and its time; `None` before the first one and after the end.
type Last = Mutex<Option<(String, Instant)>>;

fn lock(last: &Last) -> MutexGuard<'_, Option<(String, Instant)>> {
    last.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a function when nothing was reported for some time, from the first report on until
/// [`Monitor::finish`]. Drop ends it.
pub struct Watchdog {
    last: Arc<Last>,
    _running: Sender<()>, // its drop ends the thread
}

impl Watchdog {
    /// `on_stuck` receives the last report if none follows for `timeout`; it runs on a thread of
    /// its own, once. Time in which the process is stopped, for example by SIGSTOP, does not count.
    pub fn start(
        timeout: Duration,
        on_stuck: impl FnOnce(&str) + Send + 'static,
    ) -> io::Result<Self> {
        let last = Arc::new(Last::default());
        let (running, ended) = channel();
        let watched = Arc::clone(&last);
        let watch = move || {
            if let Some(work) = stuck_work(&watched, timeout, &ended) {
                on_stuck(&work);
            }
        };
        thread::Builder::new().name("watchdog".to_owned()).spawn(watch)?;
        Ok(Self { last, _running: running })
    }
}

/// Waits until there is no report for `timeout`, and returns the last one; `None` if the watchdog
/// was dropped before.
fn stuck_work(last: &Last, timeout: Duration, ended: &Receiver<()>) -> Option<String> {
    let mut clock = Clock::new(timeout);
    loop {
        if ended.recv_timeout(TICK.min(timeout / 4)) != Err(RecvTimeoutError::Timeout) {
            return None;
        }
        let stopped = clock.stopped().unwrap_or_default();
        if let Some((work, since)) = &mut *lock(last) {
            *since += stopped;
            if Instant::now().saturating_duration_since(*since) > timeout {
                return Some(std::mem::take(work));
            }
        }
    }
}

impl Monitor for Watchdog {
    fn report(&self, work: &str) {
        *lock(&self.last) = Some((work.to_owned(), Instant::now()));
    }

    fn fail(&self, _: &str) {}

    fn finish(&self) {
        *lock(&self.last) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_names_the_last_work_when_reports_end() {
        let (sender, receiver) = channel();
        let on_stuck = move |work: &str| sender.send(work.to_owned()).unwrap();
        let watchdog = Watchdog::start(Duration::from_millis(400), on_stuck).unwrap();
        for step in 0..12 {
            watchdog.report(&format!("step {step}"));
            thread::sleep(Duration::from_millis(50));
        }
        assert!(receiver.try_recv().is_err(), "600 ms with reports");
        let work = receiver.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(work, "step 11");
    }

    #[test]
    fn it_does_not_watch_the_work_after_the_end() {
        let (sender, receiver) = channel();
        let on_stuck = move |work: &str| sender.send(work.to_owned()).unwrap();
        let watchdog = Watchdog::start(Duration::from_millis(40), on_stuck).unwrap();
        watchdog.report("step 1");
        watchdog.finish();
        thread::sleep(Duration::from_millis(200));
        assert!(receiver.try_recv().is_err());
        watchdog.report("step 2"); // another run
        assert_eq!(receiver.recv_timeout(Duration::from_secs(20)).unwrap(), "step 2");
    }

    #[test]
    fn it_waits_for_the_first_report_and_ends_when_it_is_dropped() {
        let (sender, receiver) = channel();
        let on_stuck = move |work: &str| sender.send(work.to_owned()).unwrap();
        let watchdog = Watchdog::start(Duration::from_millis(40), on_stuck).unwrap();
        thread::sleep(Duration::from_millis(200));
        drop(watchdog);
        assert_eq!(
            receiver.recv_timeout(Duration::from_secs(20)),
            Err(RecvTimeoutError::Disconnected)
        );
    }
}
