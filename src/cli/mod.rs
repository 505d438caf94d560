//! The edge to the user: errors as text and exit codes, log lines, progress bars.

pub mod logging;
pub mod progress;
pub mod report;
