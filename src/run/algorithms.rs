//! The config key `model.algorithms`: a table of the algorithms of products on a GPU.

use super::error::{MEASURE, RunError};
use crate::config::RunConfig;
use crate::data::Encoder;
use crate::files;
use crate::ops::{AlgorithmTable, OtherProducts, matmul_library, set_algorithms};
use candle_core::Device;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the table among the inputs of a step.
const TABLE: &str = "table of `model.algorithms`";

/// Reads a table, and returns it with its text.
pub fn read_table(file: &Path) -> Result<(AlgorithmTable, String), RunError> {
    let path = || file.to_owned();
    let text = files::read_to_string(file)
        .map_err(|problem| RunError::AlgorithmsFile { file: path(), problem })?;
    let table = AlgorithmTable::parse(&text)
        .map_err(|problem| RunError::Algorithms { file: path(), problem })?;
    Ok((table, text))
}

/// Reads the table of a config with its text, if it has one.
pub(crate) fn read_algorithms(
    config: &RunConfig,
) -> Result<Option<(AlgorithmTable, String)>, RunError> {
    config.model.algorithms.as_deref().map(read_table).transpose()
}

/// Digests of what the steps read besides rows and weights, each with a name for messages.
/// `algorithms` is what [`read_algorithms`] returned.
pub(super) fn input_digests(
    algorithms: Option<&(AlgorithmTable, String)>,
    encoder: &Encoder,
) -> BTreeMap<String, String> {
    let mut digests = encoder.digests();
    if let Some((_, text)) = algorithms {
        digests.insert(TABLE.to_owned(), format!("{:x}", Sha256::digest(text.as_bytes())));
    }
    digests
}

/// Sets the algorithms of the products on `device` to those of the config's table, or else to those
/// that cuBLASLt chooses. Warns if the table belongs to another GPU or another version of cuBLASLt.
/// `algorithms` is what [`read_algorithms`] returned.
pub(crate) fn use_algorithms(
    config: &RunConfig,
    algorithms: Option<&(AlgorithmTable, String)>,
    device: &Device,
) -> Result<(), RunError> {
    let mut entries = Vec::new();
    if let (Some((table, _)), Some(file)) = (algorithms, &config.model.algorithms)
        && let Some(library) = matmul_library(device)?
    {
        let (file, products) = (file.display(), table.products.len());
        if let Some(problem) = table.mismatch(&library) {
            tracing::warn!(
                "the table `{file}` is not used: {problem}. cuBLASLt chooses the algorithms; \
                 {MEASURE}"
            );
        } else {
            tracing::info!(%file, products, "algorithms");
            entries.clone_from(&table.products);
        }
    }
    set_algorithms(entries, OtherProducts::FirstChoice);
    Ok(())
}
