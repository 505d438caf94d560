//! Models with an explicit backward pass, the loss and the optimizers.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

#[cfg(test)]
kernels::test_allocator!();

pub mod cost;
pub mod loss;
pub mod models;
pub mod nn;
pub mod optim;
pub mod tape;
