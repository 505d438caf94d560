//! What can be checked from outside of the crate, one module a topic.

mod encoding;
mod images;
mod parity;
