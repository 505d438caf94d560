//! Progress of long work: a bar on a terminal, otherwise a log line at most every 20 s.

use super::logging::Logging;
use super::terminal::{MAX_COLUMNS, Terminal};
use crate::metrics::StepMetrics;
use crate::run::{SetupObserver, SetupWork};
use indicatif::{HumanCount, MultiProgress, ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(200);
/// Minimum time between log lines where there is no terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(20);

/// A bar that fits in 80 columns and disappears when it is dropped.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    reported: Cell<Instant>, // when the last line was logged
}

impl Progress {
    /// A bar over `total` optimizer steps, which starts at `done` if a run is resumed.
    pub(super) fn steps(bars: &MultiProgress, total: u64, done: u64) -> Self {
        let progress = Self::new(bars, total, STEPS);
        progress.bar.set_position(done);
        // The remaining time is estimated from the steps of this process.
        progress.bar.reset_eta();
        progress
    }

    /// A bar over `total` items. `label` describes finished items, for example `rows measured`.
    pub(super) fn items(bars: &MultiProgress, label: &'static str, total: u64) -> Self {
        let progress = Self::new(bars, total, ITEMS);
        progress.bar.set_prefix(label);
        progress
    }

    /// A bar over `total` bytes. `label` describes finished bytes, for example `downloaded`.
    fn bytes(bars: &MultiProgress, label: &'static str, total: u64) -> Self {
        let progress = Self::new(bars, total, BYTES);
        progress.bar.set_prefix(label);
        progress
    }

    pub(super) fn step(&self, metrics: &StepMetrics) {
        self.bar.set_position(metrics.step);
        let columns = Terminal::stderr().columns().unwrap_or(MAX_COLUMNS);
        let counts = format!("{}/{}", metrics.step, self.bar.length().unwrap_or(0));
        self.bar
            .set_message(message(metrics, columns.saturating_sub(AROUND_COUNTS + counts.len())));
    }

    /// Sets the number of items done. Without a terminal, logs it at most every 20 s.
    pub(super) fn set(&self, done: u64) {
        self.bar.set_position(done);
        if self.bar.is_hidden() && self.reported.get().elapsed() > BETWEEN_LINES {
            self.reported.set(Instant::now());
            let total = self.bar.length().unwrap_or(0);
            tracing::info!(done, total, "{}", self.bar.prefix());
        }
    }

    fn new(bars: &MultiProgress, total: u64, template: &str) -> Self {
        let style = ProgressStyle::with_template(template)
            .expect("the templates of this file are valid")
            .progress_chars("=> ");
        let bar = bars.add(ProgressBar::new(total).with_style(style));
        // Keeps the elapsed time running during a long step.
        bar.enable_steady_tick(TICK);
        Self { bar, reported: Cell::new(Instant::now()) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Bars for the slow parts of assembling a run.
pub(super) struct SetupBars<'a>(pub(super) &'a Logging);

impl SetupObserver for SetupBars<'_> {
    fn begin(&self, work: SetupWork, total: u64) -> Box<dyn Fn(u64) + '_> {
        let bars = self.0.bars();
        let bar = match work {
            SetupWork::DownloadBytes => Progress::bytes(bars, "downloaded", total),
            SetupWork::TokeniseBytes => Progress::bytes(bars, "tokenised", total),
            SetupWork::MeasureRows => Progress::items(bars, "rows measured", total),
        };
        Box::new(move |done| bar.set(done))
    }

    fn log_to(&self, log_file: &Path) -> io::Result<()> {
        self.0.write_to(log_file)
    }
}

const STEPS: &str = "{elapsed:>4} [{bar:10}] {pos}/{len} eta {eta} {wide_msg}";
/// Maximum number of columns of the bar over steps, without its counts and its message.
const AROUND_COUNTS: usize = 28;
const ITEMS: &str = "{elapsed:>4} [{bar:10}] {human_pos}/{human_len} {prefix} eta {eta}";
const BYTES: &str = "{elapsed:>4} [{bar:10}] {bytes}/{total_bytes} {prefix} eta {eta}";

/// The first metrics of a step that fit in `columns`; a bar would cut the last one.
fn message(metrics: &StepMetrics, columns: usize) -> String {
    let wait = 100.0 * metrics.data_wait_s / metrics.step_time_s.max(f64::MIN_POSITIVE);
    let parts = [
        format!("loss {:.4}", metrics.loss),
        format!("{} tok/s", HumanCount(metrics.tokens_per_s as u64)),
        format!("fill {:.0}%", 100.0 * metrics.fill),
        format!("data wait {wait:.0}%"),
    ];
    let joined = |count| parts[..count].join(" ");
    (1..=parts.len())
        .map(joined)
        .take_while(|text| text.len() <= columns)
        .last()
        .unwrap_or_default()
}

#[cfg(test)]
pub(super) fn metrics_of_step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        epoch: 0.5,
        loss: 1.25,
        grad_norm: 1.0,
        skipped: false,
        lr: 1e-5,
        num_tokens: 1000,
        num_target_tokens: 100,
        target_weight: 100.0,
        num_samples: 2,
        fill: 0.97,
        step_time_s: 2.0,
        data_wait_s: 0.1,
        save_hold_s: None,
        save_s: None,
        tokens_per_s: 12345.6,
        peak_memory_bytes: 0,
        peak_device_memory_bytes: None,
        peak_device_reserved_bytes: None,
        predicted_memory_bytes: None,
        rejected: 0,
        rejected_by_reason: std::collections::BTreeMap::new(),
        rejected_by_file: std::collections::BTreeMap::new(),
        ranks: None,
        experts: std::collections::BTreeMap::new(),
        datasets: std::collections::BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::metrics_of_step as metrics;
    use super::*;
    use indicatif::{ProgressDrawTarget, TermLike};
    use std::sync::{Arc, Mutex};

    /// The content of a terminal with 120 columns.
    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<Shown>>);

    #[derive(Debug, Default)]
    struct Shown {
        lines: Vec<Vec<char>>,
        row: usize,
        column: usize,
    }

    impl Screen {
        fn bars(&self) -> MultiProgress {
            MultiProgress::with_draw_target(ProgressDrawTarget::term_like(Box::new(self.clone())))
        }

        fn lines(&self) -> Vec<String> {
            let shown = self.0.lock().unwrap();
            let lines = shown.lines.iter().map(|line| line.iter().collect::<String>());
            let mut lines: Vec<_> = lines.map(|line| line.trim_end().to_owned()).collect();
            while lines.last().is_some_and(String::is_empty) {
                lines.pop();
            }
            lines
        }

        fn change<T>(&self, change: impl FnOnce(&mut Shown) -> T) -> io::Result<T> {
            self.0
                .lock()
                .map(|mut shown| change(&mut shown))
                .map_err(|_| io::ErrorKind::Other.into())
        }
    }

    impl Shown {
        fn put(&mut self, text: &str) {
            for letter in text.chars() {
                match letter {
                    '\n' => (self.row, self.column) = (self.row + 1, 0),
                    '\r' => self.column = 0,
                    letter => {
                        self.lines.resize(self.lines.len().max(self.row + 1), Vec::new());
                        let line = &mut self.lines[self.row];
                        line.resize(line.len().max(self.column + 1), ' ');
                        line[self.column] = letter;
                        self.column += 1;
                    }
                }
            }
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            120
        }
        fn move_cursor_up(&self, n: usize) -> io::Result<()> {
            self.change(|shown| shown.row = shown.row.saturating_sub(n))
        }
        fn move_cursor_down(&self, n: usize) -> io::Result<()> {
            self.change(|shown| shown.row += n)
        }
        fn move_cursor_right(&self, n: usize) -> io::Result<()> {
            self.change(|shown| shown.column += n)
        }
        fn move_cursor_left(&self, n: usize) -> io::Result<()> {
            self.change(|shown| shown.column = shown.column.saturating_sub(n))
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.change(|shown| shown.put(&format!("{text}\n")))
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.change(|shown| shown.put(text))
        }
        fn clear_line(&self) -> io::Result<()> {
            self.change(|shown| {
                let row = shown.row;
                shown.column = 0;
                if let Some(line) = shown.lines.get_mut(row) {
                    line.clear();
                }
            })
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_bar_shows_steps_time_and_speed() {
        let screen = Screen::default();
        let bars = screen.bars();
        let progress = Progress::steps(&bars, 40, 10);
        progress.step(&metrics(20));
        progress.bar.force_draw();
        let shown = screen.lines().join("\n");
        for part in ["20/40", "eta", "loss 1.2500", "12,345 tok/s", "fill 97%", "data wait 5%"] {
            assert!(shown.contains(part), "{part} not in {shown}");
        }
        assert_eq!(shown.lines().count(), 1, "{shown}");
        drop(progress);
        assert!(screen.lines().is_empty());
    }

    #[test]
    fn a_narrow_bar_shows_whole_metrics() {
        let all = message(&metrics(20), 100);
        assert_eq!(all, "loss 1.2500 12,345 tok/s fill 97% data wait 5%");
        for columns in 0..60 {
            let shown = message(&metrics(20), columns);
            assert!(shown.len() <= columns && all.starts_with(&shown), "{columns}: {shown}");
            let last = shown.split(' ').next_back().unwrap();
            assert!(["", "1.2500", "tok/s", "97%", "5%"].contains(&last), "{columns}: {shown}");
        }
    }

    #[test]
    fn a_log_line_goes_above_the_bar_and_does_not_tear_it() {
        let screen = Screen::default();
        let bars = screen.bars();
        let progress = Progress::items(&bars, "rows", 2000);
        for line in ["first", "second"] {
            progress.set(1234);
            progress.bar.force_draw();
            bars.suspend(|| screen.write_line(line)).unwrap();
        }
        progress.bar.force_draw();
        let lines = screen.lines();
        assert_eq!(lines[..2], ["first", "second"]);
        assert!(lines.len() == 3 && lines[2].contains("1,234/2,000 rows eta"), "{lines:?}");
    }

    #[test]
    fn without_a_terminal_nothing_is_drawn() {
        let bars = MultiProgress::with_draw_target(ProgressDrawTarget::hidden());
        let progress = Progress::steps(&bars, 2, 0);
        progress.step(&metrics(1));
        assert!(progress.bar.is_hidden());
    }
}
