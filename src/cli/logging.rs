//! Logging to stderr and to `<output_dir>/train.log`; progress bars stay below the log lines.

use super::escaped::{escaped, escaped_with_colours};
use indicatif::MultiProgress;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tracing::Subscriber;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{EnvFilter, fmt};

/// Maximum number of bytes of log lines kept in memory before the log file is known.
const MAX_EARLY_BYTES: usize = 1 << 20;

/// Handle to the log of this process and its progress bars.
#[derive(Debug, Clone)]
pub(super) struct Logging {
    bars: MultiProgress,
    file: Arc<Mutex<LogTarget>>,
}

/// The log file, or the lines logged so far if the log file is not known yet.
#[derive(Debug)]
enum LogTarget {
    Early(Vec<u8>),
    File(File),
}

impl Logging {
    /// Starts logging: to stderr now, and to a file from [`Self::write_to`] on. `RUST_LOG` sets the
    /// level, by default `level`. Colours only on a terminal, and not if `NO_COLOR` is set.
    pub(super) fn start(level: &str) -> Result<Self, TryInitError> {
        let logging = Self::new();
        let colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let (filter, problem) = filter(std::env::var("RUST_LOG").ok().as_deref(), level);
        let stderr = Stderr { bars: logging.bars.clone(), colours };
        logging.subscriber(filter, stderr, colours).try_init()?;
        if let Some(problem) = problem {
            tracing::warn!("ignoring `RUST_LOG`: {problem}");
        }
        Ok(logging)
    }

    /// Appends all log lines to `path`, including those logged before this call.
    pub(super) fn write_to(&self, path: &Path) -> io::Result<()> {
        let mut file = File::options().create(true).append(true).open(path)?;
        let mut target = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let LogTarget::Early(lines) = &*target {
            file.write_all(lines)?;
        }
        *target = LogTarget::File(file);
        Ok(())
    }

    /// The progress bars; they are hidden while a log line is written.
    pub(super) fn bars(&self) -> &MultiProgress {
        &self.bars
    }

    fn new() -> Self {
        Self {
            bars: MultiProgress::new(),
            file: Arc::new(Mutex::new(LogTarget::Early(Vec::new()))),
        }
    }

    fn subscriber<W>(&self, filter: EnvFilter, stderr: W, colours: bool) -> impl Subscriber + use<W>
    where
        W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
    {
        let log_file = LogFile(Arc::clone(&self.file));
        tracing_subscriber::registry()
            .with(filter)
            .with(fmt::layer().compact().with_target(false).with_ansi(colours).with_writer(stderr))
            .with(fmt::layer().compact().with_target(false).with_ansi(false).with_writer(log_file))
    }
}

/// Returns the log filter, and the reason if `requested` is not used.
fn filter(requested: Option<&str>, level: &str) -> (EnvFilter, Option<String>) {
    let default = || EnvFilter::new(level);
    match requested.filter(|text| !text.trim().is_empty()).map(EnvFilter::try_new) {
        None => (default(), None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (default(), Some(error.to_string())),
    }
}

/// Hides the bars while a line is written to stderr.
#[derive(Debug, Clone)]
struct Stderr {
    bars: MultiProgress,
    colours: bool,
}

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = if self.colours { escaped_with_colours(&text) } else { escaped(&text) };
        self.bars.suspend(|| io::stderr().lock().write_all(text.as_bytes()))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[derive(Debug, Clone)]
struct LogFile(Arc<Mutex<LogTarget>>);

impl Write for LogFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = escaped(&text);
        match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            LogTarget::Early(lines) if lines.len() + text.len() > MAX_EARLY_BYTES => {}
            LogTarget::Early(lines) => lines.extend_from_slice(text.as_bytes()),
            // The log must not end a run when the disk is full; the next checkpoint reports it.
            LogTarget::File(file) => drop(file.write_all(text.as_bytes())),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogFile {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_file_has_every_line_including_earlier_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.log");
        let logging = Logging::new();
        let subscriber = logging.subscriber(filter(None, "info").0, io::sink, true);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(step = 1, "early");
            logging.write_to(&path).unwrap();
            tracing::warn!(path = "a b", "late");
            tracing::warn!(row = %"\u{1b}[2J", "rejected");
            tracing::debug!("not at this level");
        });
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[0].contains("INFO") && lines[0].ends_with("early step=1"), "{text}");
        assert!(lines[1].contains("WARN") && lines[1].ends_with("late path=\"a b\""), "{text}");
        assert!(!text.contains('\u{1b}'), "raw escapes in a file: {text:?}");
        assert!(lines[2].ends_with(r"rejected row=\u{1b}[2J"), "{text}");
    }

    #[test]
    fn a_second_run_appends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.log");
        for _ in 0..2 {
            let logging = Logging::new();
            logging.write_to(&path).unwrap();
            let subscriber = logging.subscriber(filter(None, "info").0, io::sink, false);
            tracing::subscriber::with_default(subscriber, || tracing::info!("again"));
        }
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        assert!(Logging::new().write_to(Path::new("/no/such/folder/train.log")).is_err());
    }

    #[test]
    fn the_variable_sets_the_level_if_it_is_valid() {
        assert_eq!(filter(None, "info").0.to_string(), "info");
        assert_eq!(filter(Some(""), "warn").0.to_string(), "warn");
        assert_eq!(filter(Some("debug"), "info").0.to_string(), "debug");
        let (filter, problem) = filter(Some("trainer=loud"), "info");
        assert_eq!(filter.to_string(), "info");
        assert!(problem.is_some());
    }
}
