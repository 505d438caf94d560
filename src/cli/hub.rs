//! Model ids of the Hugging Face hub.

use super::failure::{Exit, Failure};
use std::path::{Path, PathBuf};

/// The folder of a hub id in the hub's cache; downloads the files that are missing.
#[cfg(feature = "hub")]
pub(super) fn resolve(path: &Path) -> anyhow::Result<PathBuf> {
    use crate::checkpoint::COPIED_FILES;
    use anyhow::Context;
    let id = path.to_string_lossy().into_owned();
    let looks_like_id = id.split('/').count() == 2 && !id.starts_with(['.', '/']);
    if !looks_like_id {
        return Err(Failure::new(Exit::Usage, format!("`{id}` is neither a folder nor a hub id"))
            .hint(HINT)
            .into());
    }
    let api = hf_hub::api::sync::Api::new().context("cannot open the hub's cache")?;
    let repo = api.model(id.clone());
    let listed =
        repo.info().with_context(|| format!("cannot list the files of `{id}` on the hub"))?;
    let mut folder = None;
    for file in listed.siblings {
        let name = file.rfilename;
        let carried = COPIED_FILES.contains(&name.as_str()) || name == "config.json";
        if carried || name.contains(".safetensors") {
            let file =
                repo.get(&name).with_context(|| format!("cannot fetch `{name}` of `{id}`"))?;
            folder = file.parent().map(Path::to_owned);
        }
    }
    folder.with_context(|| format!("`{id}` has no files that a model needs"))
}

/// Values that `model.path` may have.
#[cfg(feature = "hub")]
pub(super) const HINT: &str = "give a model folder in the transformers layout, or `owner/name`";
/// Values that `model.path` may have.
#[cfg(not(feature = "hub"))]
pub(super) const HINT: &str =
    "give a folder in the transformers layout; hub ids need a build with `--features hub`";

/// Always fails: this build reads folders only.
#[cfg(not(feature = "hub"))]
pub(super) fn resolve(path: &Path) -> anyhow::Result<PathBuf> {
    let found = if path.exists() { "a file" } else { "nothing" };
    let message = format!("there is {found} at `{}`, expected a model folder", path.display());
    Err(Failure::new(Exit::Usage, message).hint(HINT).into())
}
