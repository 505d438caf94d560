//! Supervised fine-tuning of Qwen3-VL-style vision-language models.
//!
//! [`run::Run`] trains from a [`config::RunConfig`]; its page has an example. The data flows
//! through these types, in this order:
//!
//! ```text
//! YAML -> RunConfig
//! JSONL -> Sample -> EncodedSample -> Pack -> Batch [B, L] -> VarlenBatch [T] -> Targets [S]
//!                                     -> ModelInput -> stages forward -> hidden [T, D] -> loss
//!                                     <- stages backward <- d hidden <- linear cross-entropy
//! Grads -> clip -> AdamW -> weights
//! TrainState + tensors -> checkpoint;   StepMetrics -> metrics.jsonl
//! ```

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

#[cfg(test)]
kernels::test_allocator!();

pub use batch;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub use convert;
pub use data;
pub use dist;
pub use engine::{loss, models, nn, optim, tape};
pub use files;
pub use kernels as ops;
pub mod metrics;
pub use net;
pub mod report;
pub mod run;
pub mod train;
