//! What a run reports: one row an optimizer step, one a pass over the evaluation data.
//!
//! Rows go to `<output_dir>/metrics.jsonl` through [`JsonlSink`] and to the log by `log`. Counts
//! are of this step; `rejected` and `peak_memory_bytes` are of the run so far.

mod jsonl;
mod memory;
mod memory_model;
mod model_flops;
mod rows;

pub use jsonl::{JsonlError, JsonlSink};
pub use memory::{cpu_seconds, peak_memory_bytes};
pub use memory_model::{ActivationMemory, MemoryModel, MicroBatchSizes};
pub use model_flops::{ModelWork, PartWork, Rows, StepSizes};
pub use rows::{EvalMetrics, StepMetrics};
