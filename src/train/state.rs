//! What a checkpoint says besides tensors: together with weights and moments, all of resume.

use super::datasets::DatasetCounts;
use crate::data::DataState;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Contents of `trainer_state.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Version of this layout.
    pub version: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Steps until the data ends; absent when it is repeated until `max_steps`.
    pub planned: Option<Planned>,
    /// Supervised targets seen.
    pub targets_seen: u64,
    /// Tokens seen, padding not counted.
    pub tokens_seen: u64,
    /// Samples seen.
    pub samples_seen: u64,
    /// The same by data set.
    #[serde(default)]
    pub datasets_seen: BTreeMap<String, DatasetCounts>,
    /// Hash of the settings that decide what is learned: a resumed run must have the same.
    pub fingerprint: String,
    /// Hash of the training files.
    pub data_fingerprint: String,
    /// Where the loader stands; order and shuffle are functions of it and the seed.
    pub data: DataState,
}

/// What measuring every row once has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// For this many epochs.
    pub epochs: u64,
    /// There are this many optimizer steps.
    pub steps: u64,
}

impl TrainState {
    /// Version written by this program.
    pub const VERSION: u32 = 1;
}
