//! What a step costs: memory and operations.

mod memory_model;
mod model_flops;
mod vendor_peak;

pub use memory_model::{ActivationMemory, Division, MemoryModel, MemoryParts, MicroBatchSizes};
pub use model_flops::{ModelWork, PartWork, RowKind, StepSizes};
pub use vendor_peak::vendor_peak_flops;
