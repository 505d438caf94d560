//! The model below an adapter: checkpoints of the adapter do not contain it.

use super::super::error::{RunError, SetupError};
use super::super::inputs::{open_for_run, param_groups};
use super::super::load_model::{LoadedModel, OpenModel, check_experts, trainable};
use super::super::model_files::TOKENIZER;
use super::super::new_tokens::check_start;
use super::super::stored_weights::{load_stored, stored_elsewhere, weight_storage};
use super::{AdapterError, OpenAdapter};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config::RunConfig;
use crate::files;
use crate::train::{BaseModel, ModelSection, Quantize, StoredWeights, Weights};
use candle_core::Device;
use std::io::ErrorKind;
use std::path::Path;

/// Name of the file that says which model an adapter of this program was trained on.
const STATE: &str = "trainer_state.json";

/// Opens the model of a run with its adapter, and returns what checkpoints say of the model. With a
/// checkpoint in `found`, its values are loaded: those of the model itself if there is no adapter.
pub(in crate::run) fn open_run_model(
    config: &RunConfig,
    found: Option<&Checkpoint>,
    device: &Device,
) -> Result<(OpenModel, Option<BaseModel>), RunError> {
    let mut section = config.model.clone();
    let Some(adapter) = &config.adapter else {
        if let Some(found) = found {
            // its vocabulary has the new tokens
            section = ModelSection {
                path: found.dir.clone(),
                weights: Weights::Pretrained,
                add_tokens: Vec::new(),
                add_special_tokens: Vec::new(),
                ..section
            };
        }
        let open = open_for_run(&section, config.seed, device)?;
        check_experts(config, &open)?;
        return Ok((open, None));
    };
    let open = open_for_run(&section, config.seed, device)?;
    check_experts(config, &open)?;
    let base = BaseModel {
        path: config.portable().model.path.display().to_string(),
        digest: open.digest()?,
        quantize: adapter.quantize,
        contents: None,
    };
    if let Some(found) = found
        && let Some(trained_on) = base_of(&found.state)
    {
        check_base(&found.dir, &trained_on, &open, &base.digest)?;
    }
    if let (Some(folder), None) = (&adapter.start_from, found) {
        check_start(&section, &open, folder)?;
    }
    let open = open.with_adapter(|specs| {
        let mut open = match found {
            Some(found) => OpenAdapter::resumed(adapter, &found.dir, specs, config.seed),
            None => OpenAdapter::new(adapter, specs, config.seed),
        }?;
        open.peft.base_model_name_or_path = Some(base.path.clone());
        Ok(open)
    })?;
    Ok((open, Some(base)))
}

/// Adds the adapter in `folder` to a model. If the folder is from this program, the model must be
/// that of its training.
pub(in crate::run) fn read_adapter(open: OpenModel, folder: &Path) -> Result<OpenModel, RunError> {
    let trained_on = trained_on(folder)?;
    if let Some(trained_on) = &trained_on {
        check_base(folder, trained_on, &open, &open.digest()?)?;
    } else if let Some(what) = open.differs_from_copy(folder) {
        // the rows of the adapter would be those of other tokens
        if open.vocabulary.is_some() && what == TOKENIZER {
            return Err(SetupError::from(AdapterError::Tokens { folder: folder.to_owned() }).into());
        }
        tracing::warn!(
            adapter = %folder.display(),
            "the adapter's folder has a copy of {what} that differs from that of the model, which is \
             used"
        );
    }
    let quantize = trained_on.map_or(Quantize::None, |base| base.quantize);
    Ok(open
        .with_adapter(|specs| Ok(OpenAdapter { quantize, ..OpenAdapter::read(folder, specs)? }))?)
}

/// The model on which the adapter in `folder` was trained; `None` if the folder does not say it.
pub(in crate::run) fn trained_on(folder: &Path) -> Result<Option<BaseModel>, RunError> {
    let path = folder.join(STATE);
    match files::read(&path) {
        Ok(text) => {
            let state = serde_json::from_slice(&text)
                .map_err(|source| RunError::State { folder: folder.to_owned(), source })?;
            Ok(base_of(&state))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CheckpointError::Read { path, source }.into()),
    }
}

fn base_of(state: &serde_json::Value) -> Option<BaseModel> {
    serde_json::from_value(state["base"].clone()).ok()
}

const WEIGHTS: &str = "weights differ from those";

/// Compares the model, which has the digest `digest`, with that of the training of the adapter in
/// `folder`.
fn check_base(
    folder: &Path,
    trained_on: &BaseModel,
    open: &OpenModel,
    digest: &str,
) -> Result<(), RunError> {
    let differs = match &trained_on.contents {
        _ if trained_on.digest != digest => WEIGHTS.to_owned(),
        None => return Ok(()),
        Some(before) => {
            let now = open.contents(Some(before))?;
            if now.config != before.config {
                "`config.json` differs from that".to_owned()
            } else if now.weights != before.weights {
                WEIGHTS.to_owned()
            } else if let Some(what) = open.differs_from_copy(folder) {
                format!("{what} differs from that")
            } else {
                return Ok(());
            }
        }
    };
    Err(super::super::SetupError::from(AdapterError::OtherBase {
        folder: folder.to_owned(),
        trained_on: trained_on.path.clone(),
        base: open.folder().to_owned(),
        differs,
    })
    .into())
}

/// Reads the model at `section`, and the adapter in `adapter`. If the folder has no weights, the
/// error names the config key.
pub(crate) fn load_for_run(
    section: &ModelSection,
    adapter: Option<&Path>,
    seed: u64,
    device: &Device,
) -> Result<LoadedModel, RunError> {
    Ok(open_with_adapter(section, adapter, seed, device)?.load(device)?)
}

/// As [`load_for_run`], for generation: weights that the folder has in `bf16` stay in `bf16`.
pub(crate) fn load_to_generate(
    section: &ModelSection,
    adapter: Option<&Path>,
    device: &Device,
) -> Result<LoadedModel, RunError> {
    let open = open_with_adapter(section, adapter, 0, device)?;
    Ok(open.with_stored_dtype(device).load(device)?)
}

fn open_with_adapter(
    section: &ModelSection,
    adapter: Option<&Path>,
    seed: u64,
    device: &Device,
) -> Result<OpenModel, RunError> {
    let open = open_for_run(section, seed, device)?;
    let open = match adapter {
        Some(folder) => read_adapter(open, folder)?,
        None => open,
    };
    if open.adapter.as_ref().is_some_and(|adapter| adapter.quantize == Quantize::Nf4) {
        tracing::info!(
            "linear layers and experts are rounded to NF4, as in the training of the adapter"
        );
    }
    Ok(open)
}

/// Loads the model of a config with its adapter, and its weights as the config stores them.
pub(crate) fn load_with_adapter(
    config: &RunConfig,
    device: &Device,
) -> Result<(LoadedModel, Option<StoredWeights>), RunError> {
    let (open, _) = open_run_model(config, None, device)?;
    let trainable = trainable(&param_groups(config, &open)?);
    let open = open.split_weights()?;
    let storage = weight_storage(config, device);
    let is_stored = stored_elsewhere(&open, &trainable, storage);
    load_stored(open, &is_stored, storage, device)
}
