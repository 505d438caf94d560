//! `starts.jsonl`: one line for each process that trained the run.

use crate::config::RunConfig;
use crate::metrics::JsonlSink;
use serde::Serialize;
use std::time::SystemTime;

#[derive(Serialize)]
struct Start {
    after_step: u64,
    time: u64,
    version: &'static str,
    world: usize,
}

/// Adds a line for a process that continues after `after_step`.
pub(super) fn log_start(config: &RunConfig, after_step: u64, world: usize) {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let time = since.map_or(0, |since| since.as_secs());
    let start = Start { after_step, time, version: env!("CARGO_PKG_VERSION"), world };
    let file = JsonlSink::open(&config.output_dir.join("starts.jsonl"));
    if let Err(error) = file.and_then(|mut file| file.write(&start)) {
        tracing::warn!("{error}: the report of the run will not have this start");
    }
}
