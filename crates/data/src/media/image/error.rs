//! Errors of images.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use super::header::DecodeError;
use batch::{MediaRef, MediaSource};
use net::{UrlError, for_messages};

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
