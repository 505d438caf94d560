//! Logging to stderr and to `<output_dir>/train.log`; progress bars stay below the log lines.
//!
//! ```text
//! 14:03:31 INFO train step=20 epoch=0.21 loss=1.2517 grad=3.67 lr=2.00e-3 tok/s=11811 wait=6%
//! ```
//!
//! A terminal shows no `INFO`. The file has the date in front of the time, and all levels down to `debug`.

use super::terminal::{Terminal, escaped_line, fitted, wrapped};
use chrono::Local;
use clap::builder::styling::{AnsiColor, Style};
use indicatif::{MultiProgress, ProgressDrawTarget};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::FilterExt;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{EnvFilter, fmt};

/// What the log file has, whatever `RUST_LOG` is.
const FILE_LEVELS: &str = "info,trainer=debug";
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
    /// level on stderr, by default `level`.
    pub(super) fn start(level: &str) -> Result<Self, TryInitError> {
        let terminal = Terminal::stderr();
        let logging = Self::new();
        if !terminal.has_cursor {
            logging.bars.set_draw_target(ProgressDrawTarget::hidden());
        }
        let requested = std::env::var("RUST_LOG").ok();
        let (filters, problem) = Filters::new(requested.as_deref(), level);
        let stderr = Stderr { bars: logging.bars.clone(), terminal };
        logging.subscriber(filters, stderr, terminal).try_init()?;
        if let Some(problem) = problem {
            tracing::warn!("`RUST_LOG` is ignored: {problem}");
        }
        Ok(logging)
    }

    /// Appends all log lines to `path`, including those logged before this call.
    pub(super) fn write_to(&self, path: &Path) -> io::Result<()> {
        let mut file = crate::files::append(path)?;
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

    fn subscriber<W>(
        &self,
        filters: Filters,
        stderr: W,
        terminal: Terminal,
    ) -> impl Subscriber + use<W>
    where
        W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
    {
        let log_file = LogFile(Arc::clone(&self.file));
        let hides_info = terminal.is_tty;
        let on_stderr = fmt::layer().event_format(LogFormat { time: "%H:%M:%S", hides_info });
        let time = "%Y-%m-%d %H:%M:%S";
        let in_file = fmt::layer().event_format(LogFormat { time, hides_info: false });
        let Filters { stderr: on, file: always, file_too } = filters;
        tracing_subscriber::registry()
            .with(on_stderr.with_ansi(terminal.colours).with_writer(stderr).with_filter(on))
            .with(in_file.with_ansi(false).with_writer(log_file).with_filter(always.or(file_too)))
    }
}

struct Filters {
    stderr: EnvFilter,
    file: EnvFilter,
    /// What stderr has, the log file has too.
    file_too: EnvFilter,
}

impl Filters {
    /// Returns the filters, and the reason if `requested` is not used.
    fn new(requested: Option<&str>, level: &str) -> (Self, Option<String>) {
        let requested = requested.filter(|text| !text.trim().is_empty());
        let (used, problem) = match requested.map(EnvFilter::try_new) {
            None => (level, None),
            Some(Ok(_)) => (requested.unwrap_or(level), None),
            Some(Err(error)) => (level, Some(error.to_string())),
        };
        let [stderr, file_too] = [used, used].map(EnvFilter::new);
        (Self { stderr, file: EnvFilter::new(FILE_LEVELS), file_too }, problem)
    }
}

/// One line: local time, level, message, fields.
#[derive(Debug)]
struct LogFormat {
    time: &'static str,
    /// Whether usual lines have no level: a person recognises the others.
    hides_info: bool,
}

impl<S, N> FormatEvent<S, N> for LogFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let (mut dim, mut colour) = (Style::new(), Style::new());
        let level = *event.metadata().level();
        if writer.has_ansi_escapes() {
            dim = dim.dimmed();
            colour = colour_of(level);
        }
        let time = Local::now().format(self.time);
        write!(writer, "{dim}{time}{dim:#} ")?;
        if !(self.hides_info && level == Level::INFO) {
            write!(writer, "{colour}{level}{colour:#} ")?;
        }
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

fn colour_of(level: Level) -> Style {
    match level {
        Level::ERROR => AnsiColor::Red,
        Level::WARN => AnsiColor::Yellow,
        Level::INFO => AnsiColor::Green,
        Level::DEBUG => AnsiColor::Blue,
        Level::TRACE => AnsiColor::Magenta,
    }
    .on_default()
}

/// Hides the bars while a line is written to stderr.
#[derive(Debug, Clone)]
struct Stderr {
    bars: MultiProgress,
    terminal: Terminal,
}

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = escaped_line(&text, self.terminal.colours);
        let shown = self.terminal.columns().map(|columns| {
            let text = fitted(&text, columns);
            wrapped(&text, columns).into_owned()
        });
        let text = shown.as_deref().unwrap_or(&text);
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
        let text = escaped_line(&text, false);
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
        let filters = Filters::new(Some("off"), "info").0;
        tracing::subscriber::with_default(
            logging.subscriber(filters, io::sink, Terminal { colours: true, ..PIPE }),
            || {
                tracing::info!(step = 1, "early");
                logging.write_to(&path).unwrap();
                tracing::warn!(path = "a b", "late");
                tracing::warn!(row = %"\u{1b}[2J\n2026-11-23 14:03:31 INFO finished", "rejected");
                tracing::debug!("a decision");
                tracing::debug!(target: "a_library", "not ours");
            },
        );
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[0].ends_with(" INFO early step=1"), "{text}");
        assert!(lines[1].ends_with(" WARN late path=\"a b\""), "{text}");
        assert!(!text.contains('\u{1b}'), "raw escapes in a file: {text:?}");
        assert!(lines[2].contains(r"rejected row=\u{1b}[2J\n2026-11-23 14:03:31 INFO"), "{text}");
        assert!(lines[3].ends_with(" DEBUG a decision"), "{text}");
        assert_eq!(lines[0].len(), "2026-11-23 14:03:31 INFO early step=1".len(), "{text}");
    }

    /// Receives the lines of stderr.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(line);
            Ok(line.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const PIPE: Terminal = Terminal { is_tty: false, has_cursor: false, colours: false };

    /// What stderr shows of the log lines that `log` writes.
    fn shown(requested: Option<&str>, log: impl FnOnce()) -> String {
        shown_on(PIPE, requested, log)
    }

    fn shown_on(terminal: Terminal, requested: Option<&str>, log: impl FnOnce()) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let filters = Filters::new(requested, "info").0;
        let subscriber = Logging::new().subscriber(filters, move || writer.clone(), terminal);
        tracing::subscriber::with_default(subscriber, log);
        String::from_utf8(lines.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_line_of_a_long_run_fits_80_columns_of_a_terminal_and_100_of_a_file() {
        let metrics = crate::cli::progress::metrics_of_step(123_456);
        let text = shown_on(Terminal { is_tty: true, ..PIPE }, None, || metrics.log());
        assert!(!text.contains("INFO") && text.contains(" train step=123456 "), "{text}");
        let line = fitted(&text, 80);
        assert!(line.trim_end().len() <= 80 && line.contains("lr=1.00e-5 tok/s=12346"), "{line}");
        let warning = || tracing::warn!("late");
        assert!(shown_on(Terminal { is_tty: true, ..PIPE }, None, warning).contains(" WARN late"));
        let text = shown(None, || metrics.log());
        assert!(
            text.contains(" INFO train step=123456 epoch=0.50 loss=1.2500 grad=1.00 "),
            "{text}"
        );
        assert!(text.trim_end().len() < 100, "{} columns: {text}", text.trim_end().len());
    }

    #[test]
    fn stderr_has_the_time_in_seconds_and_the_levels_of_the_variable() {
        let log = || {
            tracing::info!("one");
            tracing::debug!("two");
        };
        let text = shown(None, log);
        let (time, rest) = text.split_once(' ').unwrap();
        assert!(time.len() == 8 && time.matches(':').count() == 2, "{text}");
        assert_eq!(rest, "INFO one\n");
        assert_eq!(shown(Some("debug"), log).lines().count(), 2);
        assert_eq!(shown(Some("warn"), log), "");
    }

    #[test]
    fn a_second_run_appends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.log");
        for _ in 0..2 {
            let logging = Logging::new();
            logging.write_to(&path).unwrap();
            let subscriber = logging.subscriber(Filters::new(None, "info").0, io::sink, PIPE);
            tracing::subscriber::with_default(subscriber, || tracing::info!("again"));
        }
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        assert!(Logging::new().write_to(Path::new("/no/such/folder/train.log")).is_err());
    }

    #[test]
    fn the_variable_sets_the_level_if_it_is_valid() {
        let level = |requested, level| Filters::new(requested, level).0.stderr.to_string();
        assert_eq!(level(None, "info"), "info");
        assert_eq!(level(Some(""), "warn"), "warn");
        assert_eq!(level(Some("debug"), "info"), "debug");
        let (filters, problem) = Filters::new(Some("trainer=loud"), "info");
        assert_eq!(filters.stderr.to_string(), "info");
        assert!(problem.is_some());
    }
}
