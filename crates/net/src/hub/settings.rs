//! Settings of the hub, from the environment variables that huggingface_hub also reads.

use super::error::HubError;
use crate::http::Token;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Where the hub and its cache are, and how it is accessed.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// Address of the hub, without a slash at the end: `HF_ENDPOINT`.
    pub(super) endpoint: String,
    /// Folder of the cache: `HF_HUB_CACHE`, `HF_HOME/hub` or `~/.cache/huggingface/hub`.
    pub(super) cache: PathBuf,
    /// `HF_TOKEN`, or the content of the file that `hf auth login` writes.
    pub(super) token: Option<Token>,
    /// `HF_HUB_OFFLINE`: no request is made.
    pub(super) offline: bool,
    /// Maximum time without a received byte: `HF_HUB_DOWNLOAD_TIMEOUT` in seconds.
    pub(super) timeout: Duration,
}

const ENDPOINT: &str = "https://huggingface.co";
const TIMEOUT: Duration = Duration::from_secs(10);

impl Settings {
    pub(super) fn from_env() -> Result<Self, HubError> {
        Self::read(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        let folder = |name: &str| variable(name).map(PathBuf::from);
        let home =
            || folder("HOME").or_else(|| folder("USERPROFILE")).map(|home| home.join(".cache"));
        let hf_home = folder("HF_HOME")
            .or_else(|| Some(folder("XDG_CACHE_HOME").or_else(home)?.join("huggingface")));
        let cache = folder("HF_HUB_CACHE").or_else(|| Some(hf_home.as_ref()?.join("hub")));
        let token_file =
            || folder("HF_TOKEN_PATH").or_else(|| Some(hf_home.as_ref()?.join("token")));
        let token = text("HF_TOKEN").or_else(|| files::read_to_string(token_file()?).ok());
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        let token = token.map(|token| Token::new(&token).ok_or(HubError::Token)).transpose()?;
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            return Err(HubError::Endpoint { endpoint });
        }
        let is_true =
            |text: String| ["1", "on", "yes", "true"].contains(&text.to_lowercase().as_str());
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: cache.ok_or(HubError::NoCache)?,
            token,
            offline: text("HF_HUB_OFFLINE").is_some_and(is_true),
            timeout: text("HF_HUB_DOWNLOAD_TIMEOUT")
                .and_then(|text| Duration::try_from_secs_f64(text.parse().ok()?).ok())
                .filter(|timeout| !timeout.is_zero())
                .unwrap_or(TIMEOUT),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, HubError> {
        Settings::read(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name)?;
            Some(found.1.into())
        })
    }

    #[test]
    fn folders_follow_the_variables_of_huggingface_hub() {
        for (variables, expected) in [
            (&[("HOME", "/h")][..], "/h/.cache/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "/hf")], "/hf/hub"),
            (&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")], "/c"),
        ] {
            assert_eq!(read(variables).unwrap().cache, PathBuf::from(expected), "{variables:?}");
        }
        assert!(matches!(read(&[]), Err(HubError::NoCache)));
    }

    #[test]
    fn the_token_comes_from_the_variable_or_the_file_and_is_not_printed() {
        let home = tempfile::tempdir().unwrap();
        let hf_home = ("HF_HOME", home.path().to_str().unwrap());
        assert_eq!(read(&[hf_home]).unwrap().token, None);
        let mut file = std::fs::File::create(home.path().join("token")).unwrap();
        file.write_all(b"hf_of_file\n").unwrap();
        let settings = read(&[hf_home]).unwrap();
        assert_eq!(settings.token, Token::new("hf_of_file"));
        assert!(!format!("{settings:?}").contains("hf_of_file"));
        let settings = read(&[hf_home, ("HF_TOKEN", " hf_of_variable ")]).unwrap();
        assert_eq!(settings.token, Token::new("hf_of_variable"));
        let error = read(&[hf_home, ("HF_TOKEN", "hf_a\nhf_b")]).unwrap_err();
        assert!(!error.to_string().contains("hf_"), "{error}");
    }

    #[test]
    fn offline_mode_and_endpoint_are_read() {
        let home = ("HF_HOME", "/hf");
        let settings = read(&[home]).unwrap();
        assert_eq!((settings.endpoint.as_str(), settings.offline), (ENDPOINT, false));
        for (value, offline) in [("1", true), ("True", true), ("0", false), ("off", false)] {
            assert_eq!(
                read(&[home, ("HF_HUB_OFFLINE", value)]).unwrap().offline,
                offline,
                "{value}"
            );
        }
        let settings = read(&[home, ("HF_ENDPOINT", "http://mirror/hf/")]).unwrap();
        assert_eq!(settings.endpoint, "http://mirror/hf");
        assert!(read(&[home, ("HF_ENDPOINT", "mirror")]).is_err());
    }
}
