//! Shared code of the CPU kernels: access to tensor memory, SIMD levels, matrix products, and an
//! allocator.

mod attention;
pub(in crate::ops) mod blocks;
mod caching_allocator;
pub(in crate::ops) mod column_sums;
pub(in crate::ops) mod delta_rule;
pub(in crate::ops) mod delta_rule_backward;
mod few_rows;
pub(in crate::ops) mod gemm;
pub(in crate::ops) mod grouped;
pub(in crate::ops) mod in_place;
mod memory;
pub(in crate::ops) mod narrow;
mod out_of_memory;
pub(in crate::ops) mod panels;
pub(in crate::ops) mod simd;
pub(crate) mod simd_level;
mod tile_copies;
mod tiles;

pub(in crate::ops) use attention::{
    Heads, Inputs, Span, backward as attention_backward, forward as attention_forward,
};
pub use caching_allocator::CachingAllocator;
pub use in_place::RecomputeInput;
pub(in crate::ops) use memory::{
    BLOCK, Element, Operand, ROWS, Shared, add, add_scaled, column_sums, compute_dtype, distinct,
    expect_f32, expect_shape, for_each_task, read, tensor, weighted_dtype, write,
};
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
pub(in crate::ops) use memory::{read_block, write_block};
#[cfg(feature = "cuda")]
pub(in crate::ops) use out_of_memory::record_failed_gpu_allocation;
pub use out_of_memory::{
    exit_when_out_of_memory, failed_gpu_allocation, memory_advice, set_memory_advice,
    set_predicted_memory, share_one_heap_under_a_limit,
};
pub use simd_level::{SimdError, SimdLevel, simd_level};
