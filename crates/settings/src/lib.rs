//! A config: YAML files are read into structs, and each key is declared once, on the field that it sets.
//!
//! [`parse_file`] makes a tree of nodes with their places, [`set`] replaces values in it, and
//! [`read`] and [`read_all`] read a struct from it. The crate names no section of a config. A caller
//! adds hints about single keys to the errors: `here` and `advice` of [`ConfigError`].
//!
//! ```ignore
//! /// The optimizer and its learning rates.
//! #[section]
//! #[derive(Debug, Clone, PartialEq)]
//! pub struct OptimConfig {
//!     /// The optimizer
//!     #[key(default)]
//!     pub kind: Kind,
//!     /// Peak learning rate
//!     #[key(default = 1e-5)]
//!     #[valid(range = 0.0..=1e6, expected = "a number from 0 to 1e6", hint = "a usual value is 1.0e-5")]
//!     pub lr: f64,
//!     /// Steps of linear warm-up; `null`: 0
//!     pub warmup_steps: Option<u64>,
//! }
//! ```
//!
//! From this come the reader of the section, its defaults, checks of single values, the paths that
//! are expanded, the settings that a resumed run must share, the tables of docs/config.md and the
//! JSON Schema.
//!
//! - The first paragraph of a field's doc comment is its meaning in docs/config.md.
//! - `#[key(default = EXPR)]`, or `default` alone for that of the type. An `Option` is `null` by default.
//!   A key without a default is required. A section without required keys implements `Default`.
//! - `#[key(neutral)]`: a resumed run may have another value.
//! - `#[valid(range = .., expected = "..", hint = "..")]`: a range of `f64` for the numbers of the value.
//!   `hint` may be left out.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

mod de;
mod error;
mod excerpt;
mod keys;
mod load;
mod nearest;
mod scalar;
mod schema;
mod set;
mod tree;
mod unplaced;
mod value;

// The derived code names this crate as others do.
#[cfg(test)]
extern crate self as settings;

pub use de::read;
pub use derive::{Choice, section};
pub use error::{ConfigError, Place};
pub use keys::{Key, Kind, Setting, join};
pub use load::{LeftOut, Loaded, parse_file, parse_text, read_all, to_yaml};
pub use nearest::nearest;
pub use schema::schema;
#[doc(hidden)]
pub use serde_json::to_value;
pub use set::set;
pub use tree::{Entry, Node, Quoting, Value};
pub use value::{Range, ValueError, above, check, range};
