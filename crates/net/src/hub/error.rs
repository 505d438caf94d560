//! Errors of downloads from the hub. No message contains a token or the query of an address.

use super::id::Repo;
use crate::http::HttpError;
use std::io;
use std::path::PathBuf;

/// The reason why a model or data file of the hub cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The text is not `owner/name`.
    #[error("there is {found} at `{text}`, expected a model folder or a hub id")]
    NotAnId {
        /// The text of the config.
        text: String,
        /// What is there.
        found: &'static str,
    },
    /// The text starts with `hf://`, but does not name a file of a data set.
    #[error("`{text}` does not name a file of a data set on the hub")]
    NotADataFile {
        /// The text of the config.
        text: String,
    },
    /// The token contains characters that no token has.
    #[error("`HF_TOKEN` contains a space, a line break or a character outside of ASCII")]
    Token,
    /// The address of the hub is not an address.
    #[error("`HF_ENDPOINT` is `{endpoint}`, expected an address such as `https://huggingface.co`")]
    Endpoint {
        /// Value of the variable.
        endpoint: String,
    },
    /// There is no folder for the cache.
    #[error("there is no folder for the hub's cache: `HF_HOME` and `HOME` are not set")]
    NoCache,
    /// The cache lacks files, and `HF_HUB_OFFLINE` or the build forbids to download them.
    #[error("there is no folder `{repo}`, and the hub's cache `{}` lacks {what}: {reason}", .cache.display())]
    NotCached {
        /// The repository.
        repo: Repo,
        /// Folder of the cache.
        cache: PathBuf,
        /// What the cache lacks.
        what: String,
        /// Why it is not downloaded.
        reason: &'static str,
    },
    /// The hub refuses access.
    #[error("the hub refuses access to `{repo}` (status {status}{code})")]
    Denied {
        /// The repository.
        repo: Repo,
        /// HTTP status: 401 or 403.
        status: u16,
        /// The hub's error code with a comma in front, or nothing.
        code: String,
        /// Whether the request had a token.
        with_token: bool,
        /// Page where the licence can be accepted.
        page: String,
    },
    /// The hub has no such repository, revision or file.
    #[error("the hub has no {what} (status 404)")]
    NotFound {
        /// The repository, revision or file.
        what: String,
        /// What the repository has instead, for the hint.
        others: Option<String>,
    },
    /// The repository has none of the required files.
    #[error("`{repo}` has no {what}")]
    NoFiles {
        /// The repository.
        repo: Repo,
        /// Which files.
        what: &'static str,
    },
    /// The hub answers with another status.
    #[error("the hub answers with status {status} for `{what}`")]
    Status {
        /// The repository or file.
        what: String,
        /// HTTP status.
        status: u16,
    },
    /// The answer of the hub cannot be used.
    #[error("the answer of the hub for `{what}` cannot be used: {problem}")]
    Answer {
        /// The repository or file.
        what: String,
        /// Description of the defect.
        problem: String,
    },
    /// The hub cannot be reached, or the connection was lost too often.
    #[error("cannot download `{what}`: {source}")]
    Http {
        /// The repository or file.
        what: String,
        /// Error of the connection.
        source: HttpError,
    },
    /// A downloaded file does not have the announced size.
    #[error(
        "`{file}` has {found} bytes, but the hub announced {expected}: the download was removed"
    )]
    WrongSize {
        /// The file.
        file: String,
        /// Announced size in bytes.
        expected: u64,
        /// Received size in bytes.
        found: u64,
    },
    /// A downloaded file does not have the announced checksum.
    #[error("`{file}` does not have the content that the hub announced: the download was removed")]
    WrongContent {
        /// The file.
        file: String,
    },
    /// The cache cannot be written.
    #[error("cannot write `{}`: {source}", .path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl HubError {
    pub(super) fn write(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Write { path, source }
    }

    /// Whether the hub or the network failed, so that the same request may succeed later.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Http { .. } | Self::WrongSize { .. } | Self::WrongContent { .. } => true,
            Self::Status { status, .. } => *status == 429 || *status >= 500,
            _ => false,
        }
    }

    /// Whether a download was needed in a build without the feature `hub`.
    pub(super) fn is_not_built(&self) -> bool {
        matches!(self, Self::Http { source: HttpError::NotBuilt, .. })
    }

    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> String {
        let hint = match self {
            Self::NotAnId { text, .. } if text.contains("://") => {
                "copy the model to a folder of this machine, or give a hub id: `owner/name`"
            }
            Self::NotAnId { .. } => {
                "give a model folder in the transformers layout, or a hub id: `owner/name` or `owner/name@revision`"
            }
            Self::NotADataFile { .. } => {
                "write `hf://datasets/owner/name/path/file.parquet`, or `owner/name@revision` for a revision"
            }
            Self::Token => "copy the token again, without spaces and line breaks",
            Self::Endpoint { .. } => "remove `HF_ENDPOINT`, or set it to the address of a mirror",
            Self::NoCache => "set `HF_HOME` to a folder with space for models",
            Self::NotCached { .. } => {
                "check the path if you meant a local folder. Otherwise download it once in a default build and without `HF_HUB_OFFLINE`, \
                 or copy it into the cache (`HF_HOME`)"
            }
            Self::Denied { with_token, page, .. } => {
                return if *with_token {
                    format!(
                        "check the spelling; accept the licence on {page} with the account of the token, or use a token with access to it"
                    )
                } else {
                    format!(
                        "check the spelling, or the path if you meant a local folder; for a private or gated repository, accept the \
                         licence on {page} and set `HF_TOKEN` to a token of the account"
                    )
                };
            }
            Self::NotFound { others: Some(others), .. } => {
                return format!("check the spelling; the repository has {others}");
            }
            Self::NotFound { .. } => {
                "check the spelling of owner, name and revision, or the path if you meant a local folder"
            }
            Self::NoFiles { .. } => {
                "give a repository in the transformers layout, with safetensors"
            }
            Self::Status { .. } | Self::Answer { .. } => {
                "try again later; if `HF_ENDPOINT` is set, check that it is the address of a hub"
            }
            Self::Http { source, .. } => return source.hint().to_owned(),
            Self::WrongSize { .. } | Self::WrongContent { .. } => "run the command again",
            Self::Write { .. } => "free space, or set `HF_HOME` to a folder that you may write to",
        };
        hint.to_owned()
    }
}
