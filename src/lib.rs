//! Supervised fine-tuning of Qwen3-VL-style vision-language models.
//!
//! The walk of the data, each arrow done once and never again:
//!
//! ```text
//! YAML -> RunConfig
//! JSONL -> Sample -> EncodedSample -> Pack -> Batch [B, L] -> VarlenBatch [T] -> Targets [S]
//!                                                    -> ModelInput -> stages forward -> hidden [T, D] -> loss
//!                                                    <- stages backward <- d hidden <- fused linear cross-entropy
//! Grads -> clip -> AdamW -> weights;   TrainState + tensors -> checkpoint;   StepReport -> sinks
//! ```

pub mod batch;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod loss;
pub mod metrics;
pub mod models;
pub mod ops;
pub mod optim;
pub mod tape;
pub mod train;

/// A step runs in the memory of the step before it.
#[global_allocator]
static ALLOCATOR: ops::CachingAllocator = ops::CachingAllocator::new();
