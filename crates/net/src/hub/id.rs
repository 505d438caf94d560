//! Names of repositories and files on the hub.

use crate::http::host;
use std::fmt::Write as _;

/// Kind of a repository on the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

impl RepoKind {
    /// The plural in lower case, as in the hub's addresses and cache folders.
    fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }
}

/// A revision of a repository on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    /// Model or data set.
    pub kind: RepoKind,
    /// `owner/name`.
    pub id: String,
    /// Branch, tag or commit; `main` by default.
    pub revision: String,
}

/// Scheme of data sets in configs.
pub(super) const DATASETS: &str = "hf://datasets/";
/// Branch that the hub uses if no revision is given.
const MAIN: &str = "main";

impl Repo {
    /// Parses `owner/name` or `owner/name@revision`.
    pub fn model(text: &str) -> Option<Self> {
        let (id, revision) = text.split_once('@').unwrap_or((text, MAIN));
        let repo = Self { kind: RepoKind::Model, id: id.into(), revision: revision.into() };
        repo.is_valid().then_some(repo)
    }

    /// Parses `hf://datasets/owner/name/path` or `hf://datasets/owner/name@revision/path`. Returns
    /// the repository and the path inside it.
    pub fn dataset_file(text: &str) -> Option<(Self, String)> {
        let mut parts = text.strip_prefix(DATASETS)?.splitn(3, '/');
        let (owner, name) = (parts.next()?, parts.next()?);
        let file = parts.next().unwrap_or_default().trim_end_matches('/');
        let (name, revision) = name.split_once('@').unwrap_or((name, MAIN));
        // The hub's own short form of the branch with converted files.
        let revision = match revision {
            "~parquet" => "refs/convert/parquet".to_owned(),
            revision => revision.replace("%2F", "/"),
        };
        let repo = Self { kind: RepoKind::Dataset, id: format!("{owner}/{name}"), revision };
        (repo.is_valid() && is_relative(file)).then(|| (repo, file.to_owned()))
    }

    /// Whether the revision is a commit, as in the name of a model that a run has stored.
    pub fn is_at_commit(&self) -> bool {
        is_commit(&self.revision)
    }

    fn is_valid(&self) -> bool {
        let is_name = |name: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !name.is_empty() && !name.starts_with('.') && name.chars().all(is_plain)
        };
        let mut parts = self.id.split('/');
        let named = parts.next().is_some_and(is_name) && parts.next().is_some_and(is_name);
        let is_revision = !self.revision.is_empty() && self.revision.split('/').all(is_name);
        named && parts.next().is_none() && is_revision
    }

    /// Name of its folder in the cache.
    pub(super) fn folder(&self) -> String {
        format!("{}--{}", self.kind.plural(), self.id.replace('/', "--"))
    }

    /// Address of the list of files, below the endpoint.
    pub(super) fn list_path(&self) -> String {
        format!("api/{}/{}/revision/{}", self.kind.plural(), self.id, encode(&self.revision, ""))
    }

    /// Address of the page that shows the repository and its licence.
    pub(super) fn page(&self, endpoint: &str) -> String {
        let (scheme, _) = endpoint.split_once("://").unwrap_or(("https", ""));
        let (_, path) = endpoint.split_once(host(endpoint)).unwrap_or_default();
        format!("{scheme}://{}{path}/{}{}", host(endpoint), self.prefix(), self.id)
    }

    /// Address of a file at `commit`, below the endpoint.
    pub(super) fn file_path(&self, commit: &str, file: &str) -> String {
        format!("{}{}/resolve/{commit}/{}", self.prefix(), self.id, encode(file, "/"))
    }

    fn prefix(&self) -> &'static str {
        match self.kind {
            RepoKind::Model => "",
            RepoKind::Dataset => "datasets/",
        }
    }
}

/// How error messages name the repository.
impl std::fmt::Display for Repo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.id)?;
        if self.revision == MAIN { Ok(()) } else { write!(f, "@{}", self.revision) }
    }
}

/// Whether a revision is the full hash of a commit.
pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.chars().all(|c| c.is_ascii_hexdigit())
}

/// Whether `path` stays inside the folder that it is relative to.
pub(super) fn is_relative(path: &str) -> bool {
    !path.contains('\\')
        && (path.is_empty() || path.split('/').all(|part| !["", ".", ".."].contains(&part)))
}

/// Percent-encodes all bytes but unreserved ones and those in `keep`.
fn encode(text: &str, keep: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || "-_.~".contains(c) || keep.contains(c) {
            encoded.push(c);
        } else {
            let _ = write!(encoded, "%{byte:02X}"); // writing to a String cannot fail
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_id_has_an_owner_a_name_and_perhaps_a_revision() {
        let repo = Repo::model("Qwen/Qwen3-VL-2B-Instruct").unwrap();
        assert_eq!(
            (repo.id.as_str(), repo.revision.as_str()),
            ("Qwen/Qwen3-VL-2B-Instruct", "main")
        );
        assert_eq!(repo.list_path(), "api/models/Qwen/Qwen3-VL-2B-Instruct/revision/main");
        let repo = Repo::model("a/b@refs/pr/1").unwrap();
        assert_eq!(repo.list_path(), "api/models/a/b/revision/refs%2Fpr%2F1");
        assert_eq!(repo.to_string(), "a/b@refs/pr/1");
        assert_eq!(repo.folder(), "models--a--b");
        for wrong in [
            "", "a", "a/", "/a", "./a", "../a", "a/b/c", "a/b@", "a/b@../c", "a b/c", "a/..",
            "a/b?c",
        ] {
            assert_eq!(Repo::model(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_data_file_is_named_by_repository_and_path() {
        let parse = Repo::dataset_file;
        let (repo, file) = parse("hf://datasets/o/n@v1.0/data/train 0.parquet").unwrap();
        assert_eq!((repo.id.as_str(), repo.revision.as_str()), ("o/n", "v1.0"));
        assert_eq!(file, "data/train 0.parquet");
        assert_eq!(repo.folder(), "datasets--o--n");
        assert_eq!(repo.file_path("abc", &file), "datasets/o/n/resolve/abc/data/train%200.parquet");
        let (repo, _) = parse("hf://datasets/o/n@~parquet/a").unwrap();
        assert_eq!(repo.revision, "refs/convert/parquet");
        assert_eq!(parse("hf://datasets/o/n").unwrap().1, "");
        for wrong in [
            "hf://o/n/a.parquet",
            "hf://datasets/o",
            "hf://datasets/o/n/../a",
            "hf://datasets/o/n//a",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        assert_eq!(parse("data/rows.jsonl"), None);
    }
}
