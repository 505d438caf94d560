//! `trainer cache`: measures every row of `data.train` once and stores the lengths.

use super::args::ConfigArgs;
use super::logging::Logging;
use super::progress::SetupBars;
use super::terminal::stdout;
use crate::data::CacheWork;
use crate::run::{self, DataList};
use clap::Args;
use serde_json::json;
use std::io::Write;
use std::sync::Arc;

/// Arguments of `cache`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer cache --config config.yaml\n  \
    trainer cache --config config.yaml --set data.image.max_pixels=401408")]
pub(super) struct CacheArgs {
    #[command(flatten)]
    config: ConfigArgs,
}

/// Writes the caches. Prints one JSON object per data set of chats: how many of its rows the limits
/// of the config use, truncate and reject.
pub(super) fn run(args: &CacheArgs, logging: &Logging) -> anyhow::Result<()> {
    let config = args.config.load(logging)?;
    let located = |error| args.config.located(error);
    let bars = SetupBars(logging);
    let encoder = run::encoder(&config).map_err(located)?;
    // Data files that must be unpacked are stored there. If this fails, the update reports it.
    let _ = std::fs::create_dir_all(config.cache_dir());
    let rows = run::open_data(&config, DataList::Train, &encoder, &bars).map_err(located)?;
    let (cached, work) = run::update_cache(&config, Arc::new(rows), &bars).map_err(located)?;
    let CacheWork { measured, reused } = work;
    tracing::info!(measured, reused, "measured the rows");
    let out = &mut stdout();
    for summary in cached.summaries(&run::loader_options(&config, &encoder)) {
        let line = json!({
            "file": summary.file,
            "cache": summary.cache,
            "rows": summary.rows,
            "usable": summary.usable,
            "truncated": summary.truncated,
            "tokens_cut": summary.tokens_cut,
            "answers_cut": summary.answers_cut,
            "tokens": summary.tokens,
            "longest": summary.longest,
            "rejected": summary.rejected,
        });
        writeln!(out, "{line}")?;
    }
    Ok(())
}
