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
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file does not exist.
    #[error("image `{}` does not exist in `{}`", .path.display(), .root.display())]
    Missing {
        /// Path as written in the row.
        path: PathBuf,
        /// Folder that the path is relative to.
        root: PathBuf,
    },
    /// The folder `image_root` cannot be opened.
    #[error("cannot open `image_root` `{}`: {source}", .root.display())]
    Root {
        /// Path of the folder.
        root: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The path points outside of its root folder, directly or through a symbolic link.
    #[error("image `{}` is outside of `image_root` `{}`", .path.display(), .root.display())]
    EscapesRoot {
        /// Path as written in the row.
        path: PathBuf,
        /// Folder that must contain the image.
        root: PathBuf,
    },
    /// The file cannot be read, or is not a regular file.
    #[error("cannot read image `{}`: {source}", .path.display())]
    Read {
        /// Path as written in the row.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The data URI is malformed.
    #[error("cannot read an image from a data URI: {problem}")]
    DataUri {
        /// Description of the defect.
        problem: String,
    },
    /// The row names an image by URL, and the config does not allow that.
    #[error("image `{url}` is a URL, and `data.allow_urls` is `false`")]
    UrlRefused {
        /// Address without its query.
        url: String,
    },
    /// The image cannot be downloaded.
    #[error("cannot download image `{url}`: {cause}")]
    Url {
        /// Address without its query.
        url: String,
        /// Error of the download.
        cause: UrlError,
    },
    /// The bytes are not in a supported format.
    #[error("image {image} is not a PNG, JPEG, WebP, GIF, BMP or TIFF image")]
    UnknownFormat {
        /// The image.
        image: ImageName,
    },
    /// The format is supported, but not this kind of it.
    #[error("image {image} is of a kind that is not supported: {kind}")]
    NotSupported {
        /// The image.
        image: ImageName,
        /// Description of the kind.
        kind: String,
    },
    /// The image is damaged or incomplete.
    #[error("image {image} is damaged: {source}")]
    Broken {
        /// The image.
        image: ImageName,
        /// Error of the decoder.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The aspect ratio is too large for the model.
    #[error("image {image} is {width} x {height} pixels, expected an aspect ratio of at most 200")]
    AspectRatio {
        /// The image.
        image: ImageName,
        /// Upright width in pixels.
        width: u32,
        /// Upright height in pixels.
        height: u32,
    },
    /// The header declares more pixels than the decoder accepts.
    #[error("image {image} is {width} x {height}, expected at most {limit} pixels in total")]
    TooLarge {
        /// The image.
        image: ImageName,
        /// Width in pixels, before orientation.
        width: u32,
        /// Height in pixels, before orientation.
        height: u32,
        /// Maximum number of pixels.
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

    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Missing { .. } => {
                "paths are relative to `image_root` of the data set, which is the folder of the data file by default"
            }
            Self::Root { .. } => "set `image_root` of the data set to an existing folder",
            Self::EscapesRoot { .. } => {
                "move the image into `image_root`, or set `image_root` to a folder that contains it"
            }
            Self::Read { .. } => "the path must point to a regular file with read permission",
            Self::DataUri { .. } => {
                "write `data:image/png;base64,` followed by the base64 text of the file"
            }
            Self::UrlRefused { .. } => {
                "set `data.allow_urls: true`, or download the image and give its path"
            }
            Self::Url { cause, .. } => cause.hint(),
            Self::UnknownFormat { .. } | Self::NotSupported { .. } => {
                "convert the image to PNG or JPEG"
            }
            Self::Broken { .. } => "copy or export the image again",
            Self::AspectRatio { .. } => "crop or pad the image",
            Self::TooLarge { .. } => "crop the image or scale it down",
        }
    }

    /// Returns the key under which rejected samples are counted, such as `image_missing`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "image_missing",
            Self::Root { .. } => "image_root_missing",
            Self::EscapesRoot { .. } => "image_path_escapes_root",
            Self::Read { .. } => "image_unreadable",
            Self::DataUri { .. } => "image_data_uri",
            Self::UrlRefused { .. } | Self::Url { .. } => "image_url",
            Self::UnknownFormat { .. } | Self::NotSupported { .. } => "image_format",
            Self::Broken { .. } => "image_broken",
            Self::AspectRatio { .. } => "image_aspect_ratio",
            Self::TooLarge { .. } => "image_too_large",
        }
    }
}
