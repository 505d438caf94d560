//! Models and data files of the Hugging Face hub.
//!
//! The cache, the environment variables and the token are those of huggingface_hub: what one of
//! them downloads, the other finds.

mod cache;
mod cached;
mod download;
mod error;
mod id;
mod settings;

pub use cached::Cached;
pub use error::HubError;
pub use id::{Repo, RepoKind};

use super::http::{Client, Limits, Reach};
use cache::RepoCache;
use download::{Access, Missing, RETRIES};
use id::is_commit;
use settings::Settings;
use std::cell::Cell;
use std::path::{Path, PathBuf};

/// The hub, and its cache on this machine.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
}

/// The files of a repository that are needed.
pub trait Selection {
    /// Chooses from the paths of all files. An error ends the download.
    fn choose(&self, repo: &Repo, all: &[String]) -> Result<Vec<String>, HubError>;

    /// Describes a needed file that the folder lacks; `None` if it has all. Called if the list of
    /// the files is not known, because another program downloaded them.
    fn lacks(&self, folder: &Path) -> Option<String>;
}

/// Reports the progress of a download: receives the total number of bytes, and returns a function
/// that receives the number of bytes done.
pub type Begin<'a> = &'a dyn Fn(u64) -> Box<dyn Fn(u64) + 'a>;

impl Hub {
    /// Reads `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN` (or the file that `hf auth login`
    /// writes), `HF_HUB_OFFLINE` and `HF_HUB_DOWNLOAD_TIMEOUT`.
    pub fn from_env() -> Result<Self, HubError> {
        Ok(Self { settings: Settings::from_env()? })
    }

    /// Returns the folder in the cache with the selected files, after downloading those that are
    /// missing.
    ///
    /// If the hub cannot be reached, the files of the last download are used, with a warning.
    pub fn fetch(
        &self,
        repo: &Repo,
        selection: &dyn Selection,
        begin: Begin<'_>,
    ) -> Result<PathBuf, HubError> {
        let Settings { offline, cache, .. } = &self.settings;
        let repo_cache = RepoCache::new(cache, repo);
        let commit = repo_cache.commit(&repo.revision);
        let lacks = commit.as_ref().map(|commit| lacks(&repo_cache, commit, repo, selection));
        let complete = commit.filter(|_| lacks == Some(None)).map(|it| repo_cache.snapshot(&it));
        // The files of a commit never change.
        if let Some(folder) = complete.as_ref().filter(|_| *offline || is_commit(&repo.revision)) {
            return Ok(folder.clone());
        }
        let not_cached = |reason| HubError::NotCached {
            repo: repo.clone(),
            cache: cache.clone(),
            what: lacks.clone().flatten().unwrap_or_else(|| format!("`{repo}`")),
            reason,
        };
        if *offline {
            return Err(not_cached("`HF_HUB_OFFLINE` is set"));
        }
        // Without a connection, a command must not wait for files that it has.
        let retries = if complete.is_some() { 1 } else { RETRIES };
        match self.download(repo, &repo_cache, selection, begin, retries) {
            Err(error) if error.is_not_built() && complete.is_none() => {
                Err(not_cached("this build cannot download it"))
            }
            Err(error) => match complete.filter(|_| error.is_temporary()) {
                Some(folder) => {
                    tracing::warn!(%repo, folder = %folder.display(), "{error}; using the files in the cache");
                    Ok(folder)
                }
                None => Err(error),
            },
            done => done,
        }
    }

    fn download(
        &self,
        repo: &Repo,
        cache: &RepoCache,
        selection: &dyn Selection,
        begin: Begin<'_>,
        retries: u32,
    ) -> Result<PathBuf, HubError> {
        let Settings { endpoint, token, timeout, .. } = &self.settings;
        let client = Client::new(Reach::Any, Limits { idle: *timeout, total: None });
        let client = client.map_err(|source| HubError::Http { what: repo.to_string(), source })?;
        let access = Access { client: &client, endpoint, token: token.as_ref(), repo };
        let (commit, names) = access.list(retries)?;
        let folder = cache.snapshot(&commit);
        cache.set_list(&commit, &names)?;
        let mut names = selection.choose(repo, &names)?;
        names.retain(|name| !folder.join(name).exists());
        let missing = names.iter().map(|name| access.metadata(&commit, name));
        let missing = missing.collect::<Result<Vec<Missing>, _>>()?;
        if !missing.is_empty() {
            let total = missing.iter().map(|file| file.bytes).sum();
            tracing::info!(%repo, files = missing.len(), bytes = total, "downloading into the hub's cache");
            let progress = begin(total);
            let before = Cell::new(0);
            for file in &missing {
                access.download(cache, &commit, file, &|done| progress(before.get() + done))?;
                before.set(before.get() + file.bytes);
            }
        }
        cache.set_commit(&repo.revision, &commit)?;
        Ok(folder)
    }
}

/// Describes a selected file of a commit that the cache lacks; `None` if it has all.
fn lacks(
    cache: &RepoCache,
    commit: &str,
    repo: &Repo,
    selection: &dyn Selection,
) -> Option<String> {
    let folder = cache.snapshot(commit);
    let chosen = cache.list(commit).and_then(|names| selection.choose(repo, &names).ok());
    let Some(names) = chosen else { return selection.lacks(&folder) };
    let missing = names.into_iter().find(|name| !folder.join(name).exists())?;
    Some(format!("`{missing}`"))
}
