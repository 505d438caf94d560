//! Trouble of the process or of a disk, which is not the fault of the row at which it was found.

use std::error::Error;
use std::time::Duration;
use std::{io, iter, thread};

use fault::Fault;
use rustix::io::Errno;

use super::error::{SampleError, SampleFault};
use crate::media::image::ImageError;
use crate::media::video::VideoError;
use net::UrlError;

/// What failed. The row may be valid, so it must not be rejected. Its reason stands in place of that
/// of the rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Fault)]
pub enum Trouble {
    /// The process has too many open files or too little memory.
    #[fault(
        exit = Resources,
        hint = "raise the limit of open files (`ulimit -n`), free memory, or lower `data.workers`",
        reason = "process_resources"
    )]
    Resources,
    /// A disk or a network file system failed.
    #[fault(
        exit = Ranks,
        hint = "check the disk or the mount that holds the data; then run again",
        reason = "disk_failure"
    )]
    Disk,
}

/// What a network file system that is gone returns.
const NETWORK_DISK: [Errno; 6] =
    [Errno::STALE, Errno::NOTCONN, Errno::TIMEDOUT, Errno::HOSTDOWN, Errno::REMOTEIO, Errno::NODEV];

impl Trouble {
    /// The trouble that an error of a row comes from.
    pub fn of(error: &SampleError) -> Option<Self> {
        match &error.fault {
            SampleFault::Read(cause)
            | SampleFault::Video { cause: VideoError::Read { cause, .. }, .. } => {
                Self::of_io(cause)
            }
            SampleFault::Image { cause, .. }
            | SampleFault::Video { cause: VideoError::Frame { cause, .. }, .. } => match cause {
                // a full disk is not the fault of the image
                ImageError::Url { cause: UrlError::Store { .. }, .. } => Some(Self::Disk),
                ImageError::Url { cause, .. } => Self::of_causes(cause),
                cause => Self::of_causes(cause),
            },
            _ => None,
        }
    }

    /// The trouble that an error of the operating system indicates.
    pub(crate) fn of_io(error: &io::Error) -> Option<Self> {
        Self::of_causes(error)
    }

    fn of_causes(error: &(dyn Error + 'static)) -> Option<Self> {
        iter::successors(Some(error), |error| (**error).source())
            .filter_map(|error| Errno::from_io_error(error.downcast_ref::<io::Error>()?))
            .find_map(Self::of_code)
    }

    fn of_code(code: Errno) -> Option<Self> {
        if [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN].contains(&code) {
            Some(Self::Resources)
        } else if NETWORK_DISK.contains(&code) || code == Errno::IO {
            Some(Self::Disk)
        } else {
            None
        }
    }

    /// The variant whose [`Fault::reason`] is `reason`.
    pub fn with_reason(reason: &str) -> Option<Self> {
        [Self::Resources, Self::Disk].into_iter().find(|trouble| trouble.reason() == reason)
    }
}

/// Waits between attempts to read a row, in milliseconds.
const WAITS_MS: [u64; 4] = [20, 80, 320, 1280];

/// Reads a row again after a wait if `trouble` finds that the process or a disk failed.
pub(crate) fn with_patience<T, E>(
    trouble: impl Fn(&E) -> Option<Trouble>,
    mut read: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for wait in WAITS_MS {
        match read() {
            Err(error) if trouble(&error).is_some() => thread::sleep(Duration::from_millis(wait)),
            result => return result,
        }
    }
    read()
}

#[cfg(test)]
mod tests {
    use super::*;
    use batch::SampleId;
    use std::path::Path;

    #[test]
    fn what_the_process_lacks_is_not_the_fault_of_a_row() {
        let id = SampleId { file: Path::new("rows.jsonl").into(), line: 3 };
        let image = |code: Errno| ImageError::Read { path: "a.png".into(), source: code.into() };
        for (code, expected) in [
            (Errno::MFILE, Some(Trouble::Resources)),
            (Errno::NFILE, Some(Trouble::Resources)),
            (Errno::NOMEM, Some(Trouble::Resources)),
            (Errno::AGAIN, Some(Trouble::Resources)),
            (Errno::IO, Some(Trouble::Disk)),
            (Errno::STALE, Some(Trouble::Disk)),
            (Errno::NOTCONN, Some(Trouble::Disk)),
            (Errno::NOENT, None),
            (Errno::ACCESS, None),
        ] {
            let video = VideoError::Read { path: "a.mp4".into(), cause: code.into() };
            let frame = VideoError::Frame { frame: 1, cause: image(code) };
            for error in [
                SampleFault::Read(code.into()),
                SampleFault::Image { index: 1, cause: image(code) },
                SampleFault::Video { index: 1, cause: frame },
                SampleFault::Video { index: 1, cause: video },
            ] {
                let error = error.at(&id);
                assert_eq!(Trouble::of(&error), expected, "{error}");
            }
        }
    }
}
