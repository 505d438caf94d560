//! Errors of downloads from the hub. No message contains a token or the query of an address.

use super::id::Repo;
use crate::http::HttpError;
use fault::Exit;
use std::io;
use std::path::PathBuf;

/// The reason why a model or data file of the hub cannot be used.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = if self.is_temporary() { Exit::Ranks } else { Exit::Usage })]
pub enum HubError {
    #[error("there is {found} at `{text}`, expected a model folder or a hub id")]
    #[fault(hint = id_hint(text))]
    NotAnId { text: String, found: &'static str },
    #[error("`{text}` does not name a file of a data set on the hub")]
    #[fault(
        hint = "write `hf://datasets/owner/name/path/file.parquet`, or `owner/name@revision` for a revision"
    )]
    NotADataFile { text: String },
    #[error("`HF_TOKEN` contains a space, a line break or a character outside of ASCII")]
    #[fault(hint = "copy the token again, without spaces and line breaks")]
    Token,
    #[error("`HF_ENDPOINT` is `{endpoint}`, expected an address such as `https://huggingface.co`")]
    #[fault(hint = "remove `HF_ENDPOINT`, or set it to the address of a mirror")]
    Endpoint { endpoint: String },
    #[error("there is no folder for the hub's cache: `HF_HOME` and `HOME` are not set")]
    #[fault(hint = "set `HF_HOME` to a folder with space for models")]
    NoCache,
    /// The cache lacks files, and `HF_HUB_OFFLINE` or the build forbids to download them.
    #[error("there is no folder `{repo}`, and the hub's cache `{}` lacks {what}: {reason}", .cache.display())]
    #[fault(
        hint = "check the path if you meant a local folder. Otherwise download it once in a default build and without `HF_HUB_OFFLINE`, or copy it into the cache (`HF_HOME`)"
    )]
    NotCached { repo: Repo, cache: PathBuf, what: String, reason: &'static str },
    #[error("the hub refuses access to `{repo}` (status {status}{code})")]
    #[fault(hint = access_hint(*with_token, page))]
    Denied {
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
    #[error("the hub has no {what} (status 404)")]
    #[fault(hint = missing_hint(others.as_deref()))]
    NotFound {
        what: String,
        /// What the repository has instead, for the hint.
        others: Option<String>,
    },
    #[error("`{repo}` has no {what}")]
    #[fault(hint = "give a repository in the transformers layout, with safetensors")]
    NoFiles { repo: Repo, what: &'static str },
    #[error("the hub answers with status {status} for `{what}`")]
    #[fault(
        hint = "try again later; if `HF_ENDPOINT` is set, check that it is the address of a hub"
    )]
    Status { what: String, status: u16 },
    #[error("the answer of the hub for `{what}` cannot be used: {problem}")]
    #[fault(
        hint = "try again later; if `HF_ENDPOINT` is set, check that it is the address of a hub"
    )]
    Answer { what: String, problem: String },
    #[error("cannot download `{what}`: {source}")]
    #[fault(exit = Ranks, from = source)]
    Http { what: String, source: HttpError },
    #[error(
        "`{file}` has {found} bytes, but the hub announced {expected}: the download was removed"
    )]
    #[fault(hint = "run the command again")]
    WrongSize { file: String, expected: u64, found: u64 },
    #[error("`{file}` does not have the content that the hub announced: the download was removed")]
    #[fault(hint = "run the command again")]
    WrongContent { file: String },
    #[error("cannot write `{}`: {source}", .path.display())]
    #[fault(
        exit = CannotWrite,
        hint = "free space, or set `HF_HOME` to a folder that you may write to"
    )]
    Write { path: PathBuf, source: io::Error },
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
}

fn id_hint(text: &str) -> &'static str {
    if text.contains("://") {
        "copy the model to a folder of this machine, or give a hub id: `owner/name`"
    } else {
        "give a model folder in the transformers layout, or a hub id: `owner/name` or `owner/name@revision`"
    }
}

fn access_hint(with_token: bool, page: &str) -> String {
    if with_token {
        format!(
            "check the spelling; accept the licence on {page} with the account of the token, or use a token with access to it"
        )
    } else {
        format!(
            "check the spelling, or the path if you meant a local folder; for a private or gated repository, accept the \
             licence on {page} and set `HF_TOKEN` to a token of the account"
        )
    }
}

fn missing_hint(others: Option<&str>) -> String {
    match others {
        Some(others) => format!("check the spelling; the repository has {others}"),
        None => "check the spelling of owner, name and revision, or the path if you meant a local folder".to_owned(),
    }
}
