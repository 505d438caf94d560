//! All network access: models and data files of the Hugging Face hub, and images by URL.
//!
//! No other module opens a connection. A build without the feature `hub` reads what is in the
//! caches of this module; a download fails with [`HttpError::NotBuilt`].

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

#[cfg(feature = "hub")]
mod address;
mod http;
pub mod hub;
mod images;

pub use http::HttpError;
pub use images::{UrlError, UrlImages, UrlLimits};
pub use images::{for_messages, is_web_address};
