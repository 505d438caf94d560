//! Reading, encoding and loading the rows of a config, without a model.

use super::Table;
use crate::cli::sft;
use crate::config::RunConfig;
use crate::data::{DataState, Encoder, Loader, RowReader};
use crate::train::JsonlRows;
use rayon::prelude::*;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Instant;

/// Rows that the single stages are timed on.
const MAX_ROWS: usize = 2000;

/// One row a stage: indexing, lengths, encoding on one core and on all, and the loader.
pub(super) fn run(config: &RunConfig, table: &mut Table) -> anyhow::Result<()> {
    let encoder = Arc::new(Encoder::from_folder(&config.model.path, &config.data.image)?);
    let begin = Instant::now();
    let rows = Arc::new(JsonlRows::open(&config.data.train, encoder.clone())?);
    let seconds = begin.elapsed().as_secs_f64();
    let all: Vec<_> = rows.rows().collect();
    table.row("index", &[("rows/s", all.len() as f64 / seconds), ("s", seconds)])?;
    let some = &all[..all.len().min(MAX_ROWS)];

    let begin = Instant::now();
    let lengths: Vec<_> = some.iter().filter_map(|row| rows.length(*row).ok()).collect();
    let seconds = begin.elapsed().as_secs_f64();
    let tokens: usize = lengths.iter().map(|length| length.tokens).sum();
    let rates = [("rows/s", some.len() as f64 / seconds), ("tokens/s", tokens as f64 / seconds)];
    table.row("length, one core", &rates)?;

    let encode = |begin: Instant, samples: Vec<(usize, f64)>| {
        let seconds = begin.elapsed().as_secs_f64();
        let tokens: usize = samples.iter().map(|(tokens, _)| tokens).sum();
        let pixels: f64 = samples.iter().map(|(_, pixels)| pixels).sum();
        [
            ("rows/s", some.len() as f64 / seconds),
            ("tokens/s", tokens as f64 / seconds),
            ("MPix/s", pixels / seconds / 1e6),
        ]
    };
    // A patch holds three channels of each of its frames; a picture repeats one frame.
    let patch = f64::from(encoder.image_processor().patch_size()).powi(2);
    let measure = |row: &crate::data::Row| {
        let sample = rows.read(*row).ok()?;
        let patches: usize = sample.media.iter().map(crate::batch::Patches::num_patches).sum();
        Some((sample.len(), patches as f64 * patch))
    };
    let begin = Instant::now();
    let samples = some.iter().filter_map(measure).collect();
    table.row("encode, one core", &encode(begin, samples))?;
    let begin = Instant::now();
    let samples = some.par_iter().filter_map(measure).collect();
    table.row("encode, all cores", &encode(begin, samples))?;

    let mut options = sft::loader_options(config, &encoder);
    options.epochs = NonZeroU64::new(1);
    let order = sft::order(config, &rows)?;
    let begin = Instant::now();
    let mut loader = Loader::start(rows, order, options, DataState::default());
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
