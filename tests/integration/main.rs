//! What can be checked from outside of the crate, one module a topic.

mod laws;
