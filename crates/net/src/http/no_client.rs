//! The client of builds without the feature `hub`: every request fails.

use super::{Answer, HttpError, Limits, Reach, Request};

#[derive(Debug)]
pub(crate) struct Client;

impl Client {
    #[expect(clippy::unnecessary_wraps, reason = "the other client can fail")]
    pub(crate) fn new(_reach: Reach, _limits: Limits) -> Result<Self, HttpError> {
        Ok(Self)
    }

    #[expect(clippy::unused_self, reason = "the other client uses it")]
    pub(crate) fn send(&self, _request: &Request<'_>) -> Result<Answer, HttpError> {
        Err(HttpError::NotBuilt)
    }
}
