//! The client: ureq with rustls.

use super::{Answer, HttpError, Limits, Method, Reach, Request, Token, host};
use crate::address::is_public;
use std::fmt;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use ureq::config::{Config, ConfigBuilder};
use ureq::http::Uri;
use ureq::http::header::{ACCEPT_ENCODING, AUTHORIZATION, LOCATION, RANGE};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::typestate::AgentScope;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Error};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum rate of a body, on average, after [`GRACE`] idle limits. A server that sends a byte now and
/// then would otherwise hold a download for ever.
const MIN_BYTES_PER_S: f64 = 1024.0;
const GRACE: u32 = 6;
const USER_AGENT: &str = concat!("trainer/", env!("CARGO_PKG_VERSION"));

/// Sends requests. Connections are kept open for the next request to the same host.
#[derive(Debug)]
pub(crate) struct Client {
    agent: Agent,
    limits: Limits,
}

impl Client {
    pub(crate) fn new(reach: Reach, limits: Limits) -> Result<Self, HttpError> {
        let config = Agent::config_builder()
            .user_agent(USER_AGENT)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT.min(limits.total.unwrap_or(CONNECT_TIMEOUT))))
            .timeout_recv_response(Some(limits.idle))
            .timeout_per_read(Some(limits.idle));
        let config = with_certificates(config)?;
        let agent = match reach {
            Reach::Any => config.build().into(),
            // A proxy would connect to addresses that are not checked here.
            Reach::Public | Reach::PublicAndTests => {
                let resolver = PublicOnly { reach, inner: DefaultResolver::default() };
                let config = config.proxy(None).build();
                Agent::with_parts(config, DefaultConnector::default(), resolver)
            }
        };
        Ok(Self { agent, limits })
    }

    /// Sends a request and follows redirects.
    pub(crate) fn send(&self, request: &Request<'_>) -> Result<Answer, HttpError> {
        let deadline = self.limits.total.map(|total| Instant::now() + total);
        let first: Uri = parse(request.url)?;
        let mut uri = first.clone();
        for _ in 0..=request.max_redirects {
            let token = request.token.filter(|_| has_same_origin(&first, &uri));
            let answer = self.exchange(&uri, request.method, token, deadline)?;
            let is_redirect = matches!(answer.status, 301 | 302 | 303 | 307 | 308);
            let Some(location) = answer.header(LOCATION.as_str()).filter(|_| is_redirect) else {
                return Ok(answer);
            };
            let next = joined(&uri, location)?;
            if request.method == Method::Head && !has_same_origin(&first, &next) {
                return Ok(answer);
            }
            uri = next;
        }
        Err(HttpError::TooManyRedirects { limit: request.max_redirects })
    }

    fn exchange(
        &self,
        uri: &Uri,
        method: Method,
        token: Option<&Token>,
        deadline: Option<Instant>,
    ) -> Result<Answer, HttpError> {
        let host = host(&uri.to_string()).to_owned();
        let mut request = match method {
            Method::Get { .. } => self.agent.get(uri),
            Method::Head => self.agent.head(uri),
        };
        // The received bytes are counted and resumed, so they must not be compressed.
        request = request.header(ACCEPT_ENCODING, "identity");
        if let Method::Get { from: from @ 1.. } = method {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token.bearer());
        }
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            request = request.config().timeout_global(Some(left)).build();
        }
        let response = request.call().map_err(|error| failure(error, &host))?;
        let (parts, body) = response.into_parts();
        let text = |value: &ureq::http::HeaderValue| value.to_str().unwrap_or_default().to_owned();
        let headers = parts.headers.iter();
        Ok(Answer {
            status: parts.status.as_u16(),
            headers: headers.map(|(name, value)| (name.as_str().to_owned(), text(value))).collect(),
            body: Box::new(Body {
                host,
                reader: body.into_reader(),
                started: Instant::now(),
                received: 0,
                grace: self.limits.idle * GRACE,
            }),
        })
    }
}

/// A body whose errors name the host.
struct Body<R> {
    host: String,
    reader: R,
    started: Instant,
    received: u64,
    /// Time in which the body may be slower than [`MIN_BYTES_PER_S`].
    grace: Duration,
}

impl<R: Read> Read for Body<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let late = self.started.elapsed().saturating_sub(self.grace);
        if late.as_secs_f64() > self.received as f64 / MIN_BYTES_PER_S {
            return Err(io::Error::other(HttpError::Timeout { host: self.host.clone() }));
        }
        let count = self
            .reader
            .read(buffer)
            .map_err(|error| io::Error::other(failure(error.into(), &self.host)))?;
        self.received += count as u64;
        Ok(count)
    }
}

/// Trusts the certificates of `SSL_CERT_FILE` in place of the built-in ones, as other programs do.
fn with_certificates(
    config: ConfigBuilder<AgentScope>,
) -> Result<ConfigBuilder<AgentScope>, HttpError> {
    let Some(path) = std::env::var_os("SSL_CERT_FILE").filter(|path| !path.is_empty()) else {
        return Ok(config);
    };
    let path = PathBuf::from(path);
    let error = || HttpError::Certificates { path: path.clone() };
    let pem = files::read(&path).map_err(|_| error())?;
    let certificates = parse_pem(&pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let certificates: Vec<Certificate<'static>> = certificates.collect();
    if certificates.is_empty() {
        return Err(error());
    }
    let roots = RootCerts::Specific(Arc::new(certificates));
    Ok(config.tls_config(TlsConfig::builder().root_certs(roots).build()))
}

/// Resolves names to public addresses only. The client connects to the addresses that are returned
/// here, so that a name cannot have another address when it is looked up again.
#[derive(Debug)]
struct PublicOnly {
    reach: Reach,
    inner: DefaultResolver,
}

impl Resolver for PublicOnly {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let found = self.inner.resolve(uri, config, timeout)?;
        let is_allowed = |address: IpAddr| {
            is_public(address)
                || (self.reach == Reach::PublicAndTests && address == Ipv4Addr::LOCALHOST)
        };
        let mut allowed = self.empty();
        for address in &found {
            if is_allowed(address.ip()) {
                allowed.push(*address);
            }
        }
        match found.first() {
            Some(first) if allowed.is_empty() => Err(Error::Other(Box::new(NotPublic(first.ip())))),
            _ => Ok(allowed),
        }
    }
}

/// None of the addresses of a host is public.
#[derive(Debug)]
struct NotPublic(IpAddr);

impl fmt::Display for NotPublic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not a public address", self.0)
    }
}

impl std::error::Error for NotPublic {}

/// Messages of some errors contain the address of the request; they are replaced.
fn failure(error: Error, host: &str) -> HttpError {
    let host = host.to_owned();
    let problem = match error {
        Error::Timeout(_) => return HttpError::Timeout { host },
        Error::Io(error) if error.kind() == io::ErrorKind::TimedOut => {
            return HttpError::Timeout { host };
        }
        Error::BadUri(_) | Error::Http(_) => return HttpError::Address,
        Error::Other(error) => match error.downcast::<NotPublic>() {
            Ok(address) => return HttpError::NotPublic { host, address: address.0 },
            Err(error) => error.to_string(),
        },
        Error::Io(error) => error.to_string(),
        error => error.to_string(),
    };
    HttpError::Connection { host, problem }
}

fn parse(url: &str) -> Result<Uri, HttpError> {
    let uri: Uri = url.parse().map_err(|_| HttpError::Address)?;
    let is_web = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
    if is_web { Ok(uri) } else { Err(HttpError::Address) }
}

/// Whether two addresses have the same scheme, host and port.
fn has_same_origin(one: &Uri, other: &Uri) -> bool {
    let origin = |uri: &Uri| {
        let host = uri.host().unwrap_or_default().to_ascii_lowercase();
        let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        (uri.scheme_str().map(str::to_owned), host, uri.port_u16().unwrap_or(default))
    };
    origin(one) == origin(other)
}

/// The address that `location` refers to on a page at `base`.
fn joined(base: &Uri, location: &str) -> Result<Uri, HttpError> {
    let scheme = base.scheme_str().unwrap_or("https");
    let location = location.split('#').next().unwrap_or_default();
    if location.contains("://") && !location.starts_with('/') {
        return parse(location);
    }
    if location.starts_with("//") {
        return parse(&format!("{scheme}:{location}"));
    }
    let site =
        format!("{scheme}://{}", base.authority().map_or("", |authority| authority.as_str()));
    if location.starts_with('/') {
        return parse(&format!("{site}{location}"));
    }
    let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    match location.strip_prefix('?') {
        Some(query) => parse(&format!("{site}{}?{query}", base.path())),
        None => parse(&format!("{site}{folder}/{location}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_is_relative_to_the_address_that_sent_it() {
        let base = parse("https://hub.co:81/a/b?c=d").unwrap();
        for (location, expected) in [
            ("https://cdn.co/x?y=z#part", "https://cdn.co/x?y=z"),
            ("//cdn.co/x", "https://cdn.co/x"),
            ("/x?u=http://y", "https://hub.co:81/x?u=http://y"),
            ("x", "https://hub.co:81/a/x"),
            ("?page=2", "https://hub.co:81/a/b?page=2"),
        ] {
            assert_eq!(joined(&base, location).unwrap().to_string(), expected, "{location}");
        }
        for wrong in ["file:///etc/passwd", "ftp://a/b", "gopher://a/", "http://"] {
            assert!(joined(&base, wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_body_that_arrives_byte_by_byte_is_cut_off_and_a_fast_one_is_not() {
        struct Drip(Duration);
        impl Read for Drip {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                std::thread::sleep(self.0);
                Ok(if self.0.is_zero() { buffer.len() } else { 1 })
            }
        }
        let body = |wait| Body {
            host: "hub.co".to_owned(),
            reader: Drip(Duration::from_millis(wait)).take(1 << 20),
            started: Instant::now(),
            received: 0,
            grace: Duration::from_millis(200),
        };
        let read = |wait| io::copy(&mut body(wait), &mut io::sink());
        let slow = read(5).unwrap_err();
        assert!(matches!(HttpError::lost(&slow, "hub.co"), HttpError::Timeout { .. }), "{slow}");
        assert_eq!(read(0).unwrap(), 1 << 20);
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same =
            |one: &str, other: &str| has_same_origin(&parse(one).unwrap(), &parse(other).unwrap());
        assert!(same("https://hub.co/a", "https://HUB.co:443/b"));
        assert!(!same("https://hub.co/a", "http://hub.co/a"));
        assert!(!same("http://hub.co/a", "http://hub.co:81/a"));
        assert!(!same("https://hub.co/a", "https://hub.co.evil/a"));
    }
}
