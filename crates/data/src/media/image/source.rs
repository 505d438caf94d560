//! Sources of image bytes: a file inside a root folder, a data URI, or a URL, which is refused, or
//! downloaded and kept. Errors of images.

use std::error::Error;
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, ErrorKind};
use std::num::NonZeroU64;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine as _, alphabet};
use settings::section;

use super::header::DecodeError;
use batch::{MediaRef, MediaSource};
use net::{UrlError, UrlImages, UrlLimits, for_messages};

/// Padding is removed before decoding. Spare bits of the last character are ignored, as in other
/// decoders.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::RequireNone)
        .with_decode_allow_trailing_bits(true),
);

/// Opens the file at `path` if it is inside `root`; see [`resolve`].
pub(super) fn open(root: &Path, path: &Path) -> Result<BufReader<File>, ImageError> {
    let real = resolve(root, path)?;
    let read_error = |source| ImageError::Read { path: path.to_owned(), source };
    let file = files::open(&real).map_err(read_error)?;
    let bytes = file.metadata().map_err(read_error)?.len();
    if bytes > MAX_FILE_BYTES {
        let problem = format!("the file has {bytes} bytes, and the limit is {MAX_FILE_BYTES}");
        return Err(read_error(std::io::Error::new(ErrorKind::FileTooLarge, problem)));
    }
    Ok(BufReader::new(file))
}

/// Maximum size of an image file, which is read as a whole: 512 MiB.
const MAX_FILE_BYTES: u64 = 512 << 20;

/// Resolves `path`, which is absolute or relative to `root`, to its canonical path.
///
/// Fails unless it is a regular file inside `root` after all symbolic links and `..` are resolved.
pub(crate) fn resolve(root: &Path, path: &Path) -> Result<PathBuf, ImageError> {
    let read_error = |source| ImageError::Read { path: path.to_owned(), source };
    let real_root =
        root.canonicalize().map_err(|source| ImageError::Root { root: root.to_owned(), source })?;
    // An error with `.` would not name the folder.
    let named = if root == Path::new(".") { &*real_root } else { root };
    let escapes = || ImageError::EscapesRoot { path: path.to_owned(), root: named.to_owned() };
    let real = match real_root.join(path).canonicalize() {
        Ok(real) => real,
        // `canonicalize` cannot resolve a missing file: choose the error from the path's text.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let written = normalise(&real_root.join(path));
            let inside = written.starts_with(&real_root)
                || path.is_absolute() && written.starts_with(normalise(root));
            return Err(if inside {
                ImageError::Missing { path: path.to_owned(), root: named.to_owned() }
            } else {
                escapes()
            });
        }
        Err(error) => return Err(read_error(error)),
    };
    if !real.starts_with(&real_root) {
        return Err(escapes());
    }
    // Checked before opening, because opening a pipe blocks until it has a writer.
    if !real.metadata().map_err(read_error)?.is_file() {
        let problem = "it is not a regular file";
        return Err(read_error(std::io::Error::new(ErrorKind::InvalidInput, problem)));
    }
    Ok(real)
}

/// Resolves `.` and `..` in the text of a path, without access to the file system.
fn normalise(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                if normal.file_name().map_or("".as_ref(), |name| name) == OsStr::new("") {
                    normal.push("..");
                } else {
                    normal.pop();
                }
            }
            other => normal.push(other),
        }
    }
    normal
}

/// Decodes `data:[mime][;param]..;base64,..`. The MIME type is ignored. The base64 text may contain
/// whitespace, use the URL-safe alphabet and omit the padding.
pub(super) fn decode_data_uri(uri: &str) -> Result<Vec<u8>, ImageError> {
    let error = |problem: String| ImageError::DataUri { problem };
    let rest = match uri.trim_start().split_at_checked(5) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("data:") => rest,
        _ => return Err(error("it does not start with `data:`".into())),
    };
    let Some((header, text)) = rest.split_once(',') else {
        return Err(error("it has no `,` before the data".into()));
    };
    if !header.split(';').skip(1).any(|param| param.trim().eq_ignore_ascii_case("base64")) {
        return Err(error("it has no `;base64` before the `,`".into()));
    }
    let mut text: Vec<u8> = text
        .bytes()
        .filter(|byte| !byte.is_ascii_whitespace())
        .map(|byte| match byte {
            b'-' => b'+',
            b'_' => b'/',
            other => other,
        })
        .collect();
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    text.truncate(text.len() - padding);
    BASE64.decode(&text).map_err(|source| {
        let source = source.to_string();
        error(format!("its base64 text is invalid: {}", source.trim_end_matches('.')))
    })
}

/// The section `data.url` of the config.
#[section]
#[derive(Debug, Clone, PartialEq)]
pub struct UrlConfig {
    /// Maximum seconds to download one image, redirects included
    #[key(default = 30.0, neutral)]
    #[valid(
        range = 1e-9..=1e19,
        expected = "a number of seconds above 0",
        hint = "remove it for the default of 30 seconds"
    )]
    pub timeout_s: f64,
    /// Maximum bytes of one image by URL
    #[key(default = const { NonZeroU64::new(32 << 20).unwrap() })]
    pub max_bytes: NonZeroU64,
}

impl UrlConfig {
    /// `None` if `timeout_s` is not a positive number of seconds.
    pub fn limits(&self) -> Option<UrlLimits> {
        let timeout = Duration::try_from_secs_f64(self.timeout_s).ok()?;
        let limits = UrlLimits { timeout, max_bytes: self.max_bytes.get() };
        Some(limits).filter(|_| !timeout.is_zero())
    }
}

/// How images by URL are handled.
#[derive(Debug, Clone)]
pub(super) enum Urls {
    /// They are an error.
    Refused,
    /// They are downloaded once.
    Fetched(Arc<UrlImages>),
}

impl Urls {
    /// The bytes of an image, after downloading it if necessary. They are those of the download.
    pub(super) fn read(&self, url: &str) -> Result<Vec<u8>, ImageError> {
        let bytes = self.images(url)?.read(url);
        bytes.map_err(|cause| ImageError::Url { url: for_messages(url), cause })
    }

    fn images(&self, url: &str) -> Result<&UrlImages, ImageError> {
        match self {
            Self::Refused => Err(ImageError::UrlRefused { url: for_messages(url) }),
            Self::Fetched(images) => Ok(images),
        }
    }

    /// Opens the file that an image is kept in, after downloading it if necessary, to read its
    /// header.
    pub(super) fn open(&self, url: &str) -> Result<BufReader<File>, ImageError> {
        let path = self.images(url)?.path(url);
        let path = path.map_err(|cause| ImageError::Url { url: for_messages(url), cause })?;
        let file = files::open(&path).map_err(|source| ImageError::Read { path, source })?;
        Ok(BufReader::new(file))
    }

    /// Removes a URL whose content cannot be read as an image, so that the next run downloads it
    /// again.
    pub(super) fn forget(&self, url: &str) {
        if let Self::Fetched(images) = self {
            images.forget(url);
        }
    }
}

/// How an error message names an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageName {
    /// Path as written in the row.
    Path(PathBuf),
    /// A data URI; its text is too long for a message.
    DataUri,
    /// Address without its query.
    Url(String),
    /// Bytes stored in the row.
    Bytes,
}

impl ImageName {
    pub(super) fn of(media: &MediaRef) -> Self {
        match &media.source {
            MediaSource::File { path, .. } => Self::Path(path.clone()),
            MediaSource::DataUri(_) => Self::DataUri,
            MediaSource::Url(url) => Self::Url(for_messages(url)),
            MediaSource::Bytes(_) => Self::Bytes,
        }
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "`{}`", path.display()),
            Self::DataUri => f.write_str("in a data URI"),
            Self::Url(url) => write!(f, "`{url}`"),
            Self::Bytes => f.write_str("in the row"),
        }
    }
}

/// The reason why an image cannot be loaded.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Data)]
pub enum ImageError {
    #[error("image `{}` does not exist in `{}`", .path.display(), .root.display())]
    #[fault(
        hint = "paths are relative to `image_root` of the data set, which is the folder of the data file by default",
        reason = "image_missing"
    )]
    Missing { path: PathBuf, root: PathBuf },
    #[error("cannot open `image_root` `{}`: {source}", .root.display())]
    #[fault(
        hint = "set `image_root` of the data set to an existing folder",
        reason = "image_root_missing"
    )]
    Root { root: PathBuf, source: std::io::Error },
    #[error("image `{}` is outside of `image_root` `{}`", .path.display(), .root.display())]
    #[fault(
        hint = "move the image into `image_root`, or set `image_root` to a folder that contains it",
        reason = "image_path_escapes_root"
    )]
    EscapesRoot { path: PathBuf, root: PathBuf },
    #[error("cannot read image `{}`: {source}", .path.display())]
    #[fault(
        hint = "the path must point to a regular file with read permission",
        reason = "image_unreadable"
    )]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot read an image from a data URI: {problem}")]
    #[fault(
        hint = "write `data:image/png;base64,` followed by the base64 text of the file",
        reason = "image_data_uri"
    )]
    DataUri { problem: String },
    #[error("image `{url}` is a URL, and `data.allow_urls` is `false`")]
    #[fault(
        hint = "set `data.allow_urls: true`, or download the image and give its path",
        reason = "image_url"
    )]
    UrlRefused {
        /// Address without its query.
        url: String,
    },
    #[error("cannot download image `{url}`: {cause}")]
    #[fault(from = cause, exit = Data, reason = "image_url")]
    Url {
        /// Address without its query.
        url: String,
        cause: UrlError,
    },
    #[error("image {image} is not a PNG, JPEG, WebP, GIF, BMP or TIFF image")]
    #[fault(hint = "convert the image to PNG or JPEG", reason = "image_format")]
    UnknownFormat { image: ImageName },
    #[error("image {image} is of a kind that is not supported: {kind}")]
    #[fault(hint = "convert the image to PNG or JPEG", reason = "image_format")]
    NotSupported { image: ImageName, kind: String },
    #[error("image {image} is damaged: {source}")]
    #[fault(hint = "copy or export the image again", reason = "image_broken")]
    Broken { image: ImageName, source: Box<dyn Error + Send + Sync> },
    #[error("image {image} is {width} x {height} pixels, expected an aspect ratio of at most 200")]
    #[fault(hint = "crop or pad the image", reason = "image_aspect_ratio")]
    AspectRatio {
        image: ImageName,
        /// Upright width in pixels.
        width: u32,
        /// Upright height in pixels.
        height: u32,
    },
    #[error("image {image} has `min_pixels`, but the model scales every image to a fixed area")]
    #[fault(hint = "remove `min_pixels` from the row", reason = "image_min_pixels")]
    Minimum { image: ImageName },
    #[error("image {image} is {width} x {height}, expected at most {limit} pixels in total")]
    #[fault(hint = "crop the image or scale it down", reason = "image_too_large")]
    TooLarge {
        image: ImageName,
        /// Width in pixels, before orientation.
        width: u32,
        /// Height in pixels, before orientation.
        height: u32,
        limit: u64,
    },
}

impl ImageError {
    pub(super) fn of(media: &MediaRef, error: DecodeError) -> Self {
        let image = ImageName::of(media);
        match error {
            DecodeError::UnknownFormat => Self::UnknownFormat { image },
            DecodeError::TooLarge { width, height, limit } => {
                Self::TooLarge { image, width, height, limit }
            }
            DecodeError::NotSupported(kind) => Self::NotSupported { image, kind },
            DecodeError::Broken(source) => Self::Broken { image, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fault::Fault;

    fn reason(error: Result<impl Sized, ImageError>) -> &'static str {
        error.err().map_or("none", |error| error.reason())
    }

    #[test]
    fn common_spellings_of_a_data_uri_are_decoded() {
        let bytes = [0xfb, 0xff, 0xfe, 1];
        for uri in [
            "data:image/png;base64,+//+AQ==",
            "data:image/png;base64,+//+AQ",
            "data:image/png;base64,-__-AQ==",
            "data:image/png;charset=utf-8;base64,+//+AQ==",
            "data:;base64,+//+AQ==",
            "DATA:image/PNG;BASE64,+//+AQ==",
            " data:image/png;base64,\r\n +//+\n AQ= =\n",
        ] {
            assert_eq!(decode_data_uri(uri).unwrap(), bytes, "{uri}");
        }
    }

    #[test]
    fn an_invalid_data_uri_is_an_error_that_names_the_defect() {
        for (uri, problem) in [
            ("data:image/png;base64", "no `,`"),
            ("data:image/png,abcd", "no `;base64`"),
            ("data:base64,abcd", "no `;base64`"),
            ("data", "start with `data:`"),
            ("\u{e9}\u{e9}\u{e9}", "start with `data:`"),
            ("data:;base64,abcde", "base64 text is invalid"),
            ("data:;base64,ab*d", "base64 text is invalid"),
            ("data:;base64,ab=d", "base64 text is invalid"),
        ] {
            let error = decode_data_uri(uri).unwrap_err();
            assert!(error.to_string().contains(problem), "{uri}: {error}");
            assert_eq!(error.reason(), "image_data_uri");
        }
    }

    #[test]
    fn only_files_inside_the_root_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        File::create(root.join("in.png")).unwrap();
        File::create(folder.path().join("out.png")).unwrap();
        let absolute = |path: &str| folder.path().join(path).display().to_string();
        for path in ["in.png", "./in.png", "sub/../in.png", "../root/in.png"] {
            assert_eq!(reason(open(&root, path.as_ref())), "none", "{path}");
        }
        assert_eq!(reason(open(&root, absolute("root/in.png").as_ref())), "none");
        for (path, expected) in [
            ("../out.png", "image_path_escapes_root"),
            ("sub/../../out.png", "image_path_escapes_root"),
            ("../no.png", "image_path_escapes_root"),
            ("../../../../../../../../../no.png", "image_path_escapes_root"),
            (&absolute("out.png"), "image_path_escapes_root"),
            (&absolute("no.png"), "image_path_escapes_root"),
            (&absolute("root/no.png"), "image_missing"),
            ("no.png", "image_missing"),
            ("sub", "image_unreadable"),
            ("nul\0.png", "image_unreadable"),
            ("in.png/more.png", "image_unreadable"),
        ] {
            assert_eq!(reason(open(&root, path.as_ref())), expected, "{path:?}");
        }
        assert_eq!(reason(open(&root.join("no"), "in.png".as_ref())), "image_root_missing");
    }

    #[test]
    fn a_file_that_no_image_needs_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("a.png")).unwrap();
        file.set_len(MAX_FILE_BYTES).unwrap();
        assert_eq!(reason(open(folder.path(), "a.png".as_ref())), "none");
        file.set_len(MAX_FILE_BYTES + 1).unwrap();
        let error = open(folder.path(), "a.png".as_ref()).unwrap_err();
        assert_eq!(error.reason(), "image_unreadable");
        let source = std::error::Error::source(&error).map(ToString::to_string);
        let text = format!("{error}: {source:?}");
        assert!(text.contains("536870913 bytes, and the limit is 536870912"), "{text}");
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_may_point_inside_the_root_but_not_outside() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        File::create(root.join("in.png")).unwrap();
        File::create(folder.path().join("out.png")).unwrap();
        symlink("../in.png", root.join("sub/link.png")).unwrap();
        symlink("../out.png", root.join("out.png")).unwrap();
        symlink(folder.path(), root.join("up")).unwrap();
        symlink(&root, folder.path().join("alias")).unwrap();
        assert_eq!(reason(open(&root, "sub/link.png".as_ref())), "none");
        assert_eq!(reason(open(&root, "out.png".as_ref())), "image_path_escapes_root");
        assert_eq!(reason(open(&root, "up/out.png".as_ref())), "image_path_escapes_root");
        let alias = folder.path().join("alias");
        assert_eq!(reason(open(&alias, &alias.join("in.png"))), "none");
        assert_eq!(reason(open(&alias, &alias.join("no.png"))), "image_missing");
    }
}
