//! `trainer cache`: measures every row of `data.train` once, for all runs to come.

use super::ConfigArgs;
use super::logging::Logging;
use super::progress::Progress;
use crate::config::RunConfig;
use crate::data::CacheWork;
use crate::train::{CachedRows, JsonlRows};
use clap::Args;
use serde_json::json;
use std::io::Write;
use std::sync::Arc;

/// Arguments of `cache`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer cache --config configs/quickstart.yaml\n  \
    trainer cache --config configs/quickstart.yaml --set data.image.max_pixels=401408")]
pub(super) struct CacheArgs {
    #[command(flatten)]
    config: ConfigArgs,
}

/// Writes the caches and prints one JSON object a data set of chats: what becomes of its rows under the limits of
/// the config.
pub(super) fn run(args: &CacheArgs, logging: &Logging) -> anyhow::Result<()> {
    let config = args.config.load()?;
    let encoder = args.config.encoder(&config)?;
    let rows = Arc::new(args.config.open_rows("train", &config, &encoder, logging)?);
    let (cached, work) = update(&config, rows, logging)?;
    let options = super::sft::loader_options(&config, &encoder);
    let CacheWork { measured, reused } = work;
    tracing::info!(measured, reused, "cache");
    let out = &mut super::stdout::stdout();
    for summary in cached.summaries(&options) {
        let line = json!({
            "file": summary.file,
            "cache": summary.cache,
            "rows": summary.rows,
            "usable": summary.usable,
            "truncated": summary.truncated,
            "tokens_cut": summary.tokens_cut,
            "tokens": summary.tokens,
            "longest": summary.longest,
            "rejected": summary.rejected,
        });
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Brings the caches of `data.train` up to date, with a bar.
pub(super) fn update(
    config: &RunConfig,
    rows: Arc<JsonlRows>,
    logging: &Logging,
) -> anyhow::Result<(CachedRows, CacheWork)> {
    let progress = bar(&rows, logging);
    Ok(CachedRows::update(rows, &config.cache_dir(), &|done| progress.set(done))?)
}

/// The same where it takes no long time and measures at most `most` rows.
pub(super) fn update_if_quick(
    config: &RunConfig,
    rows: Arc<JsonlRows>,
    most: usize,
    logging: &Logging,
) -> anyhow::Result<Option<(CachedRows, CacheWork)>> {
    let progress = bar(&rows, logging);
    let progress = |done| progress.set(done);
    Ok(CachedRows::update_if_quick(rows, &config.cache_dir(), most, &progress)?)
}

fn bar(rows: &JsonlRows, logging: &Logging) -> Progress {
    let chats = rows.sets().iter().filter(|set| set.corpus().is_none());
    let total = chats.map(|set| set.len() as u64).sum();
    Progress::items(logging.bars(), "rows measured", total)
}
