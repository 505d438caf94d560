//! Images by URL: refused, or downloaded and kept.

use std::fs::File;
use std::io::BufReader;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use settings::section;

use super::error::ImageError;
use net::{UrlImages, UrlLimits, for_messages};

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
