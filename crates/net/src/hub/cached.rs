//! Names of paths in the cache.

use super::id::{DATASETS, RepoKind, is_commit};
use std::fs;
use std::path::{Path, PathBuf};

/// A model folder, or a file or folder of a data set, in the cache.
#[derive(Debug)]
pub struct Cached {
    path: PathBuf,
    kind: RepoKind,
    /// `owner/name`.
    id: String,
    commit: String,
    /// Path inside the repository of a data set.
    file: String,
}

impl Cached {
    /// Returns `None` for a path outside of a cache.
    pub fn of(path: &Path) -> Option<Self> {
        let (before, inside) = path.to_str()?.split_once("/snapshots/")?;
        let (kind, id) = before.rsplit('/').next()?.split_once("--")?;
        let (commit, file) = inside.split_once('/').unwrap_or((inside, ""));
        let kind = match (kind, file) {
            _ if !is_commit(commit) => return None,
            ("models", "") => RepoKind::Model,
            ("datasets", _) => RepoKind::Dataset,
            _ => return None,
        };
        Some(Self {
            path: path.to_owned(),
            kind,
            id: id.replacen("--", "/", 1),
            commit: commit.to_owned(),
            file: file.to_owned(),
        })
    }

    /// The name in a config, with the commit.
    pub fn name(&self) -> String {
        let Self { id, commit, file, .. } = self;
        match self.kind {
            RepoKind::Model => format!("{id}@{commit}"),
            RepoKind::Dataset => format!("{DATASETS}{id}@{commit}/{file}"),
        }
    }

    /// The name, and the tags of those files of a model that `is_used` selects. It stays the same
    /// when a commit changes only other files, such as the page of the model.
    pub fn identity(&self, is_used: impl Fn(&str) -> bool) -> String {
        let Self { id, file, .. } = self;
        if self.kind == RepoKind::Dataset {
            return format!("{DATASETS}{id}/{file}"); // the content of data is checked elsewhere
        }
        let tag = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok().filter(|name| is_used(name))?;
            let blob = fs::read_link(entry.path()).ok()?;
            Some(format!("{name}:{}", blob.file_name()?.to_str()?))
        };
        let entries = fs::read_dir(&self.path).into_iter().flatten();
        let mut tags: Vec<String> = entries.filter_map(|entry| tag(entry.ok()?)).collect();
        if tags.is_empty() {
            return self.name(); // a file system without links
        }
        tags.sort();
        format!("{id} {}", tags.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::super::id::Repo;
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn a_path_in_the_cache_has_a_name_with_its_commit() {
        let of = |path: &str| Cached::of(Path::new(&path.replace("COMMIT", COMMIT)));
        let model = of("c/hub/models--o--n-1/snapshots/COMMIT").unwrap().name();
        assert_eq!(model, format!("o/n-1@{COMMIT}"));
        assert_eq!(Repo::model(&model).unwrap().id, "o/n-1");
        let file = of("/c/datasets--o--n/snapshots/COMMIT/d/a.jsonl").unwrap().name();
        let (repo, inside) = Repo::dataset_file(&file).unwrap();
        assert_eq!((repo.id.as_str(), repo.revision.as_str()), ("o/n", COMMIT));
        assert_eq!(inside, "d/a.jsonl");
        for other in ["models/n", "models--o--n/snapshots/main", "x/snapshots/COMMIT", "a/COMMIT"] {
            assert!(of(other).is_none(), "{other}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn the_identity_of_a_model_depends_on_the_files_that_are_used() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let identity = |commit: &str, links: &[(&str, &str)]| {
            let path = folder.path().join("models--o--n/snapshots").join(commit);
            fs::create_dir_all(&path).unwrap();
            for (name, blob) in links {
                symlink(format!("../../blobs/{blob}"), path.join(name)).unwrap();
            }
            Cached::of(&path).unwrap().identity(|name| name != "README.md")
        };
        let commits = ["1", "2", "3"].map(|digit| digit.repeat(40));
        let first = identity(&commits[0], &[("config.json", "c1"), ("model.safetensors", "m1")]);
        let page = [("README.md", "r2"), ("config.json", "c1"), ("model.safetensors", "m1")];
        assert_eq!(identity(&commits[1], &page), first);
        let weights = [("config.json", "c1"), ("model.safetensors", "m2")];
        assert_ne!(identity(&commits[2], &weights), first);
    }
}
