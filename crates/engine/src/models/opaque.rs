//! Values that a model creates and receives back. Only its family reads their contents.

use candle_core::{Error, Result};
use std::any::Any;

/// One micro-batch on the device.
pub struct ModelInput(Box<dyn Any + Send + Sync>);

impl ModelInput {
    pub(super) fn new<T: Any + Send + Sync>(input: T) -> Self {
        Self(Box::new(input))
    }

    /// Fails if the input was made by a model of another family.
    pub(super) fn get<T: Any>(&self) -> Result<&T> {
        self.0.downcast_ref().ok_or_else(other_family)
    }
}

/// Activations that forward kept. Backward consumes them.
pub struct Tape(Box<dyn Any>);

impl Tape {
    pub(super) fn new<T: Any>(tape: T) -> Self {
        Self(Box::new(tape))
    }

    /// Fails if the tape was made by a model of another family.
    pub(super) fn take<T: Any>(self) -> Result<T> {
        self.0.downcast().map(|tape| *tape).map_err(|_| other_family())
    }
}

fn other_family() -> Error {
    Error::msg("the value was made by a model of another family")
}
