//! `bench --data`: reading, encoding and loading the rows of a config, without a model.

use super::Table;
use crate::batch::Patches;
use crate::config::RunConfig;
use crate::data::{
    CachedRows, DataState, DatasetRows, LengthCaching, Loader, RowReader, SampleIndex,
};
use crate::metrics::cpu_seconds;
use crate::run::{encoder, loader_options, order};
use rayon::prelude::*;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Instant;

/// Maximum number of rows with images, and of rows without, on which each stage is timed.
const MAX_ROWS: usize = 2000;
/// Number of times that each stage reads these rows; the fastest time is reported.
const ROUNDS: usize = 3;

/// Rows of a pass, their tokens and pixels.
#[derive(Clone, Copy, Default)]
struct PassTotals {
    rows: f64,
    tokens: f64,
    pixels: f64,
}

impl PassTotals {
    fn add(self, other: Self) -> Self {
        let Self { rows, tokens, pixels } = other;
        Self { rows: self.rows + rows, tokens: self.tokens + tokens, pixels: self.pixels + pixels }
    }
}

/// Runs `pass` a few times and prints its rates, per second and per second of CPU time.
fn stage(table: &mut Table, name: &str, pass: impl Fn() -> PassTotals) -> anyhow::Result<()> {
    let (mut totals, mut seconds, mut cpu) = (PassTotals::default(), f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        let (begin, cpu_begin) = (Instant::now(), cpu_seconds());
        totals = pass();
        seconds = seconds.min(begin.elapsed().as_secs_f64());
        cpu = cpu.min(cpu_seconds() - cpu_begin);
    }
    let PassTotals { rows, tokens, pixels } = totals;
    let mut figures = vec![
        ("rows", rows),
        ("tokens", tokens),
        ("rows/s", rows / seconds),
        ("tokens/s", tokens / seconds),
        ("tokens/cpu_s", tokens / cpu),
    ];
    if pixels > 0.0 {
        figures.push(("MPix/s", pixels / seconds / 1e6));
        figures.push(("MPix/cpu_s", pixels / cpu / 1e6));
    }
    table.row(name, &figures)
}

/// Times indexing the files; then measuring and encoding, for rows of text and for rows with
/// images; then one epoch of the loader, with the lengths of the cache if the config has it.
pub(super) fn run(config: &RunConfig, table: &mut Table) -> anyhow::Result<()> {
    let encoder = encoder(config)?;
    let begin = Instant::now();
    let rows = Arc::new(DatasetRows::open(&config.data.train, encoder.clone())?);
    let seconds = begin.elapsed().as_secs_f64();
    let all: Vec<_> = rows.rows().collect();
    table.row("index", &[("rows/s", all.len() as f64 / seconds), ("s", seconds)])?;

    let length = |row: &SampleIndex| {
        let length = rows.length(*row).ok()?;
        Some(PassTotals { rows: 1.0, tokens: length.tokens as f64, pixels: 0.0 })
    };
    // Pixels of one frame: the frames of an image patch are copies of each other.
    let patch = f64::from(encoder.image_processor().patch_size()).powi(2);
    let encode = |row: &SampleIndex| {
        let sample = rows.read(*row).ok()?;
        let patches: usize = sample.media.iter().map(Patches::num_patches).sum();
        Some(PassTotals { rows: 1.0, tokens: sample.len() as f64, pixels: patches as f64 * patch })
    };
    let has_images = |row: &SampleIndex| Some((!rows.sample(*row)?.ok()?.media.is_empty(), *row));
    let kinds: Vec<_> = all.iter().take(2 * MAX_ROWS).filter_map(has_images).collect();
    for (name, images) in [("text", false), ("images", true)] {
        let of_kind = kinds.iter().filter(|kind| kind.0 == images).map(|kind| kind.1);
        let some: Vec<_> = of_kind.take(MAX_ROWS).collect();
        if some.is_empty() {
            continue;
        }
        stage(table, &format!("{name}: length, one core"), || {
            some.iter().filter_map(length).fold(PassTotals::default(), PassTotals::add)
        })?;
        stage(table, &format!("{name}: encode, one core"), || {
            some.iter().filter_map(encode).fold(PassTotals::default(), PassTotals::add)
        })?;
        stage(table, &format!("{name}: encode, all cores"), || {
            some.par_iter().filter_map(encode).reduce(PassTotals::default, PassTotals::add)
        })?;
    }

    let mut options = loader_options(config, &encoder);
    options.epochs = NonZeroU64::new(1);
    let order = order(config, &rows)?;
    let reader: Arc<dyn RowReader> = match config.data.length_cache {
        LengthCaching::Complete => {
            Arc::new(CachedRows::update(rows, &config.cache_dir(), &|_| ())?.0)
        }
        LengthCaching::Off => rows,
    };
    let begin = Instant::now();
    let mut loader = Loader::start(reader, order, options, DataState::default());
    let (mut steps, mut samples, mut tokens, mut fill) = (0.0, 0.0, 0.0, 0.0);
    while let Some(step) = loader.next_step() {
        let step = step?;
        steps += 1.0;
        samples += step.num_samples as f64;
        tokens += step.num_tokens as f64;
        fill += step.fill;
    }
    let seconds = begin.elapsed().as_secs_f64();
    table.row(
        "loader, one epoch",
        &[
            ("rows/s", samples / seconds),
            ("tokens/s", tokens / seconds),
            ("steps/s", steps / seconds),
            ("fill", fill / f64::max(steps, 1.0)),
        ],
    )
}
