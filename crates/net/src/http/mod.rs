//! HTTP requests. Redirects are followed here, so that a token is sent to one host only.

#[cfg(feature = "hub")]
mod client;
#[cfg(not(feature = "hub"))]
mod no_client;

#[cfg(feature = "hub")]
pub(super) use client::Client;
#[cfg(not(feature = "hub"))]
pub(super) use no_client::Client;

use std::fmt;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// A secret that no message contains.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Token(String);

impl Token {
    /// `None` if `text` contains a character that a token cannot contain.
    pub(super) fn new(text: &str) -> Option<Self> {
        let is_token = !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic());
        is_token.then(|| Self(text.to_owned()))
    }

    /// Value of the header `Authorization`.
    #[cfg(feature = "hub")]
    fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Addresses that a client connects to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Any address, through a proxy if the environment names one.
    Any,
    /// Addresses of the public internet, without a proxy.
    Public,
    /// Like `Public`, and 127.0.0.1; for tests.
    #[cfg_attr(not(any(test, feature = "hub")), expect(dead_code, reason = "for the client only"))]
    PublicAndTests,
}

/// Limits on the time of a request.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "hub"), expect(dead_code, reason = "for the client only"))]
pub(super) struct Limits {
    /// Maximum time without a received byte.
    pub(super) idle: Duration,
    /// Maximum time of a request with its redirects and its body.
    pub(super) total: Option<Duration>,
}

/// What the answer of a request has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    /// Headers and body, from this byte on.
    Get { from: u64 },
    /// Headers only. Redirects to other hosts are not followed.
    Head,
}

#[derive(Debug)]
#[cfg_attr(not(feature = "hub"), expect(dead_code, reason = "for the client only"))]
pub(super) struct Request<'a> {
    pub(super) method: Method,
    pub(super) url: &'a str,
    /// Sent to the host and port of `url` only.
    pub(super) token: Option<&'a Token>,
    pub(super) max_redirects: usize,
}

/// An answer; of a redirect only if [`Method::Head`] does not follow it.
pub(super) struct Answer {
    pub(super) status: u16,
    headers: Vec<(String, String)>,
    pub(super) body: Box<dyn Read + Send>,
}

impl Answer {
    /// Value of a header; `name` is in lower case.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(header, _)| header == name)?;
        Some(&found.1)
    }

    /// Value of a header that is a number.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.header(name)?.trim().parse().ok()
    }
}

/// Host and port of an address, without user, password, path and query.
pub(super) fn host(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let end = rest.find(['/', '?', '#', '\\']).unwrap_or(rest.len());
    let authority = &rest[..end];
    authority.rsplit_once('@').map_or(authority, |(_, host)| host)
}

/// The reason why a request has no answer.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = None)]
pub enum HttpError {
    #[error("this build cannot open network connections")]
    #[fault(hint = "build with the default features")]
    NotBuilt,
    #[error("it is not a valid `http` or `https` address")]
    #[fault(hint = "write a complete address, such as `https://example.com/a.jpg`")]
    Address,
    #[error("`{host}` did not answer in time")]
    #[fault(
        hint = "check the network; `HTTPS_PROXY` names a proxy, `SSL_CERT_FILE` its certificates. The same command continues a download that was cut off"
    )]
    Timeout {
        /// Host and port.
        host: String,
    },
    #[error("`{host}` has the address {address}, which is not on the public internet")]
    #[fault(hint = "download the file, and give its path")]
    NotPublic {
        /// Host and port.
        host: String,
        address: IpAddr,
    },
    #[error("more than {limit} redirects")]
    #[fault(hint = "give the final address")]
    TooManyRedirects { limit: usize },
    #[error("the connection to `{host}` failed: {problem}")]
    #[fault(
        hint = "check the network; `HTTPS_PROXY` names a proxy, `SSL_CERT_FILE` its certificates. The same command continues a download that was cut off"
    )]
    Connection {
        /// Host and port.
        host: String,
        problem: String,
    },
    #[error("`SSL_CERT_FILE`: cannot read certificates from `{}`", .path.display())]
    #[fault(hint = "give a file with certificates in PEM format")]
    Certificates { path: PathBuf },
}

impl HttpError {
    /// The error of a body that was cut off.
    pub(super) fn lost(error: &io::Error, host: &str) -> Self {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Self>());
        match inner {
            Some(Self::Timeout { host }) => Self::Timeout { host: host.clone() },
            Some(Self::Connection { host, problem }) => {
                Self::Connection { host: host.clone(), problem: problem.clone() }
            }
            _ => Self::Connection { host: host.to_owned(), problem: error.to_string() },
        }
    }

    /// Whether the same request may succeed later.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Timeout { .. } | Self::Connection { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_an_address_has_no_password_and_no_path() {
        for (url, expected) in [
            ("https://hub.co/a?b=c", "hub.co"),
            ("http://user:secret@hub.co:81/a@b", "hub.co:81"),
            ("http://[::1]:8/x", "[::1]:8"),
            ("http://hub.co?x=@y", "hub.co"),
        ] {
            assert_eq!(host(url), expected);
        }
    }
}
