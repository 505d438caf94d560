//! YAML files as structs: `--set` arguments, and errors with file, line, column and nearest name.
//!
//! [`parse_file`] makes a tree of nodes with their places, [`set`] replaces values in it, and
//! [`read`] and [`read_all`] read a struct from it. The crate names no section of a config. A caller
//! adds hints about single keys to the errors: `here` and `advice` of [`ConfigError`].

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

mod de;
mod error;
mod excerpt;
mod load;
mod nearest;
mod scalar;
mod set;
mod tree;
mod unplaced;

pub use de::read;
pub use error::{ConfigError, Place};
pub use load::{LeftOut, Loaded, parse_file, parse_text, read_all, to_yaml};
pub use nearest::nearest;
pub use set::set;
pub use tree::{Entry, Node, Quoting, Value};
