//! Progress of the slow parts of assembling a run.

use std::io;
use std::path::Path;

/// Work whose progress is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetupWork {
    /// Downloading files from the hub; counted in bytes.
    DownloadBytes,
    /// Tokenising the text of a corpus; counted in bytes.
    TokeniseBytes,
    /// Measuring rows for the length cache; counted in rows.
    MeasureRows,
}

/// Observes how a run is assembled. Every method does nothing by default; `()` is an observer.
pub trait SetupObserver {
    /// Called when work on `total` items begins. The returned function receives the number of items
    /// done, and is dropped when the work ends or fails.
    fn begin(&self, _work: SetupWork, _total: u64) -> Box<dyn Fn(u64) + '_> {
        Box::new(|_| ())
    }

    /// Called when the files of an earlier run have been moved. From then on, log lines may be
    /// appended to `log_file`.
    fn log_to(&self, _log_file: &Path) -> io::Result<()> {
        Ok(())
    }
}

impl SetupObserver for () {}
