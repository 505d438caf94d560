//! Computes rows of the user's data in every layout, and compares losses and gradients.
//!
//! The reference is the model of the config that computes the rows one by one. [`verify`] compares
//! with it packs, padded rows, several micro-batches, another attention kernel and, for a GPU, the
//! CPU. Further checks need no reference: which tokens, pixels and weights affect which losses, and
//! whether gradients are derivatives of the loss. In bf16 the bounds are what the rounding to bf16
//! changes: the differences from the same model in f32.

mod checks;
mod derivative;
mod difference;
mod effects;
mod layouts;
mod pipeline;
mod report;
mod resume;
mod rows;
mod subject;
mod table;
mod verification;

pub use layouts::Layout;
pub use pipeline::{Pipeline, RowLosses, RunPipeline, StepLosses, run_step};
pub use report::{Check, Difference, LayoutReport, Outcome, Report, StageReport};
pub use verification::{VerifyOptions, compare, verify};
