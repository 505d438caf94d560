//! Metrics of a run: one row per optimizer step and one per evaluation.
//!
//! Rows are written to `metrics.jsonl` and `eval.jsonl` in the `output_dir` through [`JsonlSink`],
//! and logged by `log`. Counts refer to this step, except that `rejected` and the peak memory refer
//! to the run so far.

mod jsonl;
mod memory;
mod rows;
mod step_rows;
mod tensorboard;

pub use engine::cost::{
    ActivationMemory, Division, MemoryModel, MemoryParts, MicroBatchSizes, ModelWork, PartWork,
    RowKind, StepSizes, vendor_peak_flops,
};
pub use jsonl::{JsonlError, JsonlSink};
pub use memory::{
    available_memory_bytes, cpu_seconds, memory_text, peak_memory_bytes, resident_memory_bytes,
};
pub use rows::{EvalMetrics, RankMetrics, RankValues, StepMetrics};
pub use step_rows::StepRows;
pub use tensorboard::{EventFile, scalars};
