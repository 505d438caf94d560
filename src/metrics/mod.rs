//! Metrics of a run: one row per optimizer step and one per evaluation.
//!
//! Rows are written to `metrics.jsonl` and `eval.jsonl` in the `output_dir` through [`JsonlSink`],
//! and logged by `log`. Counts refer to this step, except that `rejected` and the peak memory refer
//! to the run so far.

mod collective_time;
mod jsonl;
mod memory;
mod memory_model;
mod model_flops;
mod rows;
mod step_rows;
mod tensorboard;
mod vendor_peak;

pub use collective_time::{Cluster, CollectiveTime, StepTraffic};
pub use jsonl::{JsonlError, JsonlSink};
pub use memory::{
    available_memory_bytes, cpu_seconds, memory_text, peak_memory_bytes, resident_memory_bytes,
};
pub use memory_model::{ActivationMemory, Division, MemoryModel, MemoryParts, MicroBatchSizes};
pub use model_flops::{ModelWork, PartWork, Rows, StepSizes};
pub use rows::{EvalMetrics, RankMetrics, RankValues, StepMetrics};
pub use step_rows::StepRows;
pub use tensorboard::{EventFile, scalars};
pub use vendor_peak::vendor_peak_flops;
