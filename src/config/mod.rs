//! YAML to structs, with errors that point at the bad line.

mod de;
mod error;
mod excerpt;
mod fault;
mod load;
mod nearest;
mod scalar;
mod set;
mod tree;

pub use error::{ConfigError, Place};
pub use load::{load, to_yaml};
