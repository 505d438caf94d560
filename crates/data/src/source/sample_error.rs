//! Errors of a row and of its boxes, and failures of the process or of a disk, which is not the
//! fault of the row at which it was found. The message of [`SampleError`] names the file and the
//! line.

use std::error::Error;
use std::time::Duration;
use std::{io, iter, thread};

use rustix::io::Errno;

use crate::encode::truncate::TruncationError;
use crate::media::image::ImageError;
use crate::media::video::VideoError;
use crate::template::TemplateError;
use batch::{MediumKind, SampleId};
use fault::Fault;
use net::UrlError;

/// A row of a data file that is rejected. The message starts with `file:line`.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[error("{id}:{}{fault}", separator(fault))]
#[fault(from = fault)]
pub struct SampleError {
    pub id: SampleId,
    pub fault: SampleFault,
}

/// The reason why a row is rejected.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum SampleFault {
    #[error("cannot read the row: {0}")]
    #[fault(hint = None, reason = "unreadable")]
    Read(io::Error),
    #[error("{column}: invalid JSON: {problem}")]
    #[fault(hint = "write one complete JSON object per line, in UTF-8", reason = "json")]
    Json {
        /// Byte in the line, starting at 1.
        column: usize,
        problem: String,
    },
    #[error("expected a JSON object, found {found}")]
    #[fault(
        hint = "write each row as one JSON object; a file may also be one JSON array of such objects",
        reason = "json"
    )]
    NotAnObject { found: &'static str },
    #[error(
        "unknown row form: found {keys}, expected `messages`, `conversations`, `prompt` and `completion`, `query` and `response`, or `instruction` and `output`"
    )]
    #[fault(
        hint = "docs/data-format.md shows each row form; other columns are named in the data set, for example `columns: {{prompt: question, response: answer, images: image}}`",
        reason = "row_form"
    )]
    UnknownForm { keys: String },
    #[error("`{at}` is {found}, expected {expected}")]
    #[fault(hint = "docs/data-format.md shows each row form", reason = "wrong_type")]
    WrongType { at: String, found: &'static str, expected: &'static str },
    #[error("the row has {found} {what}, expected at most {most}")]
    #[fault(
        hint = "divide the row into several; docs/corpora.md describes data sets of plain text",
        reason = "row_too_large"
    )]
    TooLarge {
        /// What is counted, such as `turns` or `bytes of text`.
        what: &'static str,
        found: usize,
        most: usize,
    },
    #[error("the row has {found} pixels in its images and videos, expected at most {most}")]
    #[fault(
        hint = "divide the row into several, scale its images down, or take fewer frames of its videos (`data.video.max_frames`, `data.video.fps`)",
        reason = "media_too_large"
    )]
    MediaTooLarge { found: usize, most: usize },
    #[error("`{at}` is missing, expected {expected}")]
    #[fault(hint = "docs/data-format.md shows each row form", reason = "missing_key")]
    Missing { at: String, expected: &'static str },
    #[error("`{at}` is empty")]
    #[fault(hint = "add at least one assistant turn", reason = "no_messages")]
    NoMessages { at: &'static str },
    #[error("`{at}` is `{role}`, expected {expected}")]
    #[fault(
        hint = "convert or remove the row; docs/data-format.md lists what is supported",
        reason = "role"
    )]
    UnknownRole { at: String, role: String, expected: &'static str },
    /// Chat templates would drop a later system turn silently.
    #[error("`{at}` is a system turn, but only the first turn may be one")]
    #[fault(hint = "move it to the first place, or make it a user turn", reason = "role")]
    SystemNotFirst { at: String },
    #[error("`{at}`: {what} not supported")]
    #[fault(
        hint = "convert or remove the row; docs/data-format.md lists what is supported",
        reason = "not_supported"
    )]
    NotSupported {
        at: String,
        /// Name of the feature and `is` or `are`, such as `audio is`.
        what: &'static str,
    },
    /// With `data.unknown_keys: error`, or if the key has the only images of the row.
    #[error("unknown key `{at}`")]
    #[fault(hint = key_hint(*nearest), reason = "unknown_key")]
    UnknownKey { at: String, nearest: Option<&'static str> },
    #[error(
        "the turns have {placeholders} {0} placeholders but the row lists {media} {0}s{1}",
        kind_name(*kind), described(misnamed.as_ref())
    )]
    #[fault(hint = media_hint(misnamed.as_ref(), *media), reason = "media_missing")]
    MediaMissing {
        kind: MediumKind,
        /// Number of `<image>` or `<video>` in texts and of parts without a source.
        placeholders: usize,
        media: usize,
        /// An unknown key of the row, and the key that was probably meant.
        misnamed: Option<(String, &'static str)>,
    },
    #[error("the model is text-only, but the row has {num_media} images or videos")]
    #[fault(
        hint = "remove the row, or use a model with a vision encoder (`model.path`)",
        reason = "not_supported"
    )]
    TextOnlyModel { num_media: usize },
    #[error("the turns have {placeholders} image placeholders but the row lists {images} images")]
    #[fault(
        hint = "write one `<image>`, or one part of type `image`, for each image of the row",
        reason = "image_count"
    )]
    ImageCount { placeholders: usize, images: usize },
    #[error("the turns have {placeholders} video placeholders but the row lists {videos} videos")]
    #[fault(
        hint = "write one `<video>`, or one part of type `video`, for each video of the row",
        reason = "video_count"
    )]
    VideoCount { placeholders: usize, videos: usize },
    #[error("{cause} (video {index} of the row)")]
    #[fault(from = cause)]
    Video {
        /// Position of the video in the row, starting at 1.
        index: usize,
        cause: VideoError,
    },
    #[error("{cause} (image {index} of the row)")]
    #[fault(from = cause)]
    Image {
        /// Position of the image in the row, starting at 1.
        index: usize,
        cause: ImageError,
    },
    #[error("{0}")]
    #[fault(from)]
    Grounding(#[from] GroundingError),
    #[error("the text of turn {turn} contains `{token}`, which is reserved for media")]
    #[fault(
        hint = "write `<image>` or `<video>` and list the file in `images` or `videos`, or remove the token from the text",
        reason = "reserved_token"
    )]
    ReservedToken {
        /// Index of the turn, starting at 0.
        turn: usize,
        token: String,
    },
    #[error("the text contains `{token}`, which is reserved for media")]
    #[fault(hint = "remove the token from the text", reason = "reserved_token")]
    ReservedInText { token: String },
    #[error("the rendered chat has {rendered} media placeholders, expected {media}")]
    #[fault(
        hint = "chat templates render images and videos in user turns only: move them to a user turn",
        reason = "image_count"
    )]
    RenderedPlaceholders { rendered: usize, media: usize },
    #[error("{0}")]
    #[fault(from)]
    Template(#[from] TemplateError),
    #[error("{problem}")]
    #[fault(hint = None, reason = "tokenizer")]
    Tokenizer { problem: String },
    #[error("the tokenised text has {tokens} media tokens, expected {expected}")]
    #[fault(hint = None, reason = "image_tokens")]
    ImageTokens { tokens: usize, expected: usize },
    #[error("the row has no assistant turn")]
    #[fault(hint = "add at least one assistant turn", reason = "no_assistant_turn")]
    NoAssistantTurn,
    #[error("none of the {num_tokens} tokens is supervised")]
    #[fault(
        hint = "add an assistant turn, or remove `\"train\": false` from one",
        reason = "no_supervised_token"
    )]
    NoSupervisedToken { num_tokens: usize },
    /// A file changed between reading its header and its pixels.
    #[error("an image or video changed while the row was read")]
    #[fault(hint = "do not change data files during a run", reason = "media_changed")]
    MediaChanged,
    #[error("{0}")]
    #[fault(from)]
    Truncation(#[from] TruncationError),
}

impl SampleFault {
    /// The error of row `id`.
    pub(crate) fn at(self, id: &SampleId) -> SampleError {
        SampleError { id: id.clone(), fault: self }
    }
}

/// Adds the row to the error of a result.
pub(crate) trait AtRow<T> {
    fn at(self, id: &SampleId) -> Result<T, SampleError>;
}

impl<T, E: Into<SampleFault>> AtRow<T> for Result<T, E> {
    fn at(self, id: &SampleId) -> Result<T, SampleError> {
        self.map_err(|error| error.into().at(id))
    }
}

/// A position in a line follows its number without a space.
fn separator(fault: &SampleFault) -> &'static str {
    if matches!(fault, SampleFault::Json { .. }) { "" } else { " " }
}

fn kind_name(kind: MediumKind) -> &'static str {
    match kind {
        MediumKind::Image => "image",
        MediumKind::Video => "video",
    }
}

fn described(misnamed: Option<&(String, &'static str)>) -> String {
    misnamed.map_or_else(String::new, |(found, meant)| {
        format!(" (unknown key `{found}`, did you mean `{meant}`?)")
    })
}

fn key_hint(nearest: Option<&str>) -> String {
    match nearest {
        Some(nearest) => format!(
            "did you mean `{nearest}`? `data.unknown_keys: ignore` accepts the row as it is"
        ),
        None => {
            "remove the key, or set `data.unknown_keys: warn`; docs/data-format.md lists the keys"
                .to_owned()
        }
    }
}

fn media_hint(misnamed: Option<&(String, &'static str)>, listed: usize) -> String {
    match misnamed {
        Some((found, meant)) => format!("rename `{found}` to `{meant}`"),
        None if listed > 0 => {
            "list one more for each placeholder; if `<image>` and `<video>` are plain text, give the listed ones as parts with their source, such as `{\"type\": \"image\", \"image\": \"a.png\"}`, and set `literal_placeholders: true` in the data set"
                .to_owned()
        }
        None => {
            "list each image in `images` and each video in `videos`; if `<image>` and `<video>` are plain text, set `literal_placeholders: true` in the data set"
                .to_owned()
        }
    }
}

/// The reason why the boxes of a row (`objects`) cannot be rendered.
#[derive(Debug, Clone, PartialEq, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum GroundingError {
    #[error("the turns have {placeholders} `{placeholder}` but `objects.{key}` has {listed}")]
    #[fault(
        hint = "list one value for each placeholder, in the order of the text; if `<bbox>` and `<ref-object>` are plain text, set `literal_placeholders: true` in the data set",
        reason = "box_count"
    )]
    Count {
        /// `<bbox>` or `<ref-object>`.
        placeholder: &'static str,
        placeholders: usize,
        /// `bbox` or `ref`.
        key: &'static str,
        listed: usize,
    },
    #[error("`objects.bbox_type` is `{found}`, expected `real`, `norm1` or `norm1000`")]
    #[fault(
        hint = "pixels are `real`, fractions `norm1`, thousandths `norm1000`",
        reason = "box_type"
    )]
    Unit { found: String },
    #[error("`objects.bbox[{index}]` is in image {image}, but the row has {images} images")]
    #[fault(hint = "`objects.image_id` counts the images of the row from 0", reason = "box_image")]
    NoImage { index: usize, image: usize, images: usize },
    #[error(
        "`objects.bbox[{index}]` is {found}, expected `[x1, y1, x2, y2]` with x1 <= x2 and y1 <= y2"
    )]
    #[fault(
        hint = "boxes are corners, not a corner with width and height",
        reason = "box_inverted"
    )]
    Inverted { index: usize, found: String },
    #[error(
        "all numbers of `objects.bbox` are from 0 to 1, and `objects.bbox_type` is not `norm1`"
    )]
    #[fault(
        hint = "write `\"bbox_type\": \"norm1\"` for fractions of the sides; pixels and thousandths are larger numbers",
        reason = "box_type"
    )]
    Fractions,
    #[error("`objects.bbox[{index}]` is {found}, expected x1 < x2 and y1 < y2")]
    #[fault(hint = "remove the box, or write a point as `[x, y]`", reason = "box_no_area")]
    NoArea { index: usize, found: String },
    #[error(
        "`objects.bbox[{index}]` is {found}, expected 0 <= x <= {width} and 0 <= y <= {height}"
    )]
    #[fault(
        hint = "pixels count in the upright image before any resize; relative boxes need `bbox_type`",
        reason = "box_range"
    )]
    Outside {
        index: usize,
        found: String,
        /// Width of the image in the unit of the boxes.
        width: u32,
        /// Height of the image in the unit of the boxes.
        height: u32,
    },
}

/// What failed. The row may be valid, so it must not be rejected. Its reason stands in place of that
/// of the rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Fault)]
pub enum TransientFailure {
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
    /// A downloaded image cannot be stored.
    #[fault(
        exit = CannotWrite,
        hint = "free space, or set `data.cache_dir` to another folder; then run again",
        reason = "cannot_write"
    )]
    Store,
}

/// What a network file system that is gone returns.
const NETWORK_DISK: [Errno; 6] =
    [Errno::STALE, Errno::NOTCONN, Errno::TIMEDOUT, Errno::HOSTDOWN, Errno::REMOTEIO, Errno::NODEV];

impl TransientFailure {
    /// The failure that an error of a row comes from.
    pub fn of(error: &SampleError) -> Option<Self> {
        match &error.fault {
            SampleFault::Read(cause)
            | SampleFault::Video { cause: VideoError::Read { cause, .. }, .. } => {
                Self::of_io(cause)
            }
            SampleFault::Image { cause, .. }
            | SampleFault::Video { cause: VideoError::Frame { cause, .. }, .. } => match cause {
                // a full disk is not the fault of the image
                ImageError::Url { cause: UrlError::Store { .. }, .. } => Some(Self::Store),
                ImageError::Url { cause, .. } => Self::of_causes(cause),
                cause => Self::of_causes(cause),
            },
            _ => None,
        }
    }

    /// The failure that an error of the operating system indicates.
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
        [Self::Resources, Self::Disk, Self::Store]
            .into_iter()
            .find(|failure| failure.reason() == reason)
    }
}

/// Waits between attempts to read a row, in milliseconds.
const WAITS_MS: [u64; 4] = [20, 80, 320, 1280];

/// Reads a row again after a wait if `failure` finds that the process or a disk failed.
pub(crate) fn retry<T, E>(
    failure: impl Fn(&E) -> Option<TransientFailure>,
    mut read: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for wait in WAITS_MS {
        match read() {
            Err(error) if failure(&error).is_some() => thread::sleep(Duration::from_millis(wait)),
            result => return result,
        }
    }
    read()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use batch::SampleId;

    #[test]
    fn what_the_process_lacks_is_not_the_fault_of_a_row() {
        let id = SampleId { file: Path::new("rows.jsonl").into(), line: 3 };
        let image = |code: Errno| ImageError::Read { path: "a.png".into(), source: code.into() };
        for (code, expected) in [
            (Errno::MFILE, Some(TransientFailure::Resources)),
            (Errno::NFILE, Some(TransientFailure::Resources)),
            (Errno::NOMEM, Some(TransientFailure::Resources)),
            (Errno::AGAIN, Some(TransientFailure::Resources)),
            (Errno::IO, Some(TransientFailure::Disk)),
            (Errno::STALE, Some(TransientFailure::Disk)),
            (Errno::NOTCONN, Some(TransientFailure::Disk)),
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
                assert_eq!(TransientFailure::of(&error), expected, "{error}");
            }
        }
        // a full disk while a downloaded image is stored
        let full = UrlError::Store { path: "a".into(), source: Errno::NOSPC.into() };
        let cause = ImageError::Url { url: "https://a".to_owned(), cause: full };
        let failure = TransientFailure::of(&SampleFault::Image { index: 1, cause }.at(&id));
        assert_eq!(failure, Some(TransientFailure::Store));
        assert_eq!(failure.and_then(|failure| failure.exit()), Some(fault::Exit::CannotWrite));
    }
}
