//! Shared code of the CPU kernels: access to tensor memory, SIMD levels, matrix products, and an
//! allocator.

mod attention;
pub(crate) mod blocks;
mod caching_allocator;
pub(crate) mod column_sums;
pub(crate) mod delta_rule;
pub(crate) mod delta_rule_backward;
pub(crate) mod grouped;
pub(crate) mod in_place;
mod memory;
mod out_of_memory;
pub(crate) mod products;
pub(crate) mod simd;

pub(crate) use attention::{
    BackwardInputs, Heads, Span, backward as attention_backward, forward as attention_forward,
};
pub use caching_allocator::CachingAllocator;
pub use in_place::RecomputeInput;
pub(crate) use memory::{
    BLOCK, Element, Operand, ROWS, Shared, add, add_scaled, compute_dtype, distinct, expect_f32,
    expect_shape, for_each_task, read, tensor, weighted_dtype, write,
};
#[cfg(feature = "cuda")]
pub(crate) use out_of_memory::record_failed_gpu_allocation;
pub use out_of_memory::{
    exit_when_out_of_memory, failed_gpu_allocation, memory_advice, set_memory_advice,
    set_predicted_memory, share_one_heap_under_a_limit,
};
