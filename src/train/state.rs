//! The training state in a checkpoint, except for tensors. A resumed run reads it together with the
//! weights and the moments.

use super::adapter::Quantize;
use super::best::EvalHistory;
use super::datasets::DatasetCounts;
use super::health::Health;
use crate::data::{DataState, MediaDigests};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Version of the file's layout.
    pub version: u32,
    /// Number of optimizer steps done.
    pub step: u64,
    pub total_steps: u64,
    /// Number of steps until the data ends; `None` if it is repeated until `max_steps`.
    pub planned: Option<Planned>,
    /// Number of supervised targets so far.
    pub targets_seen: u64,
    /// Number of tokens so far, without padding.
    pub tokens_seen: u64,
    /// Number of samples so far.
    pub samples_seen: u64,
    /// Counts of each data set so far, by its name.
    pub datasets_seen: BTreeMap<String, DatasetCounts>,
    /// Hash of the settings that change the result of training. A resumed run must have the same.
    pub fingerprint: String,
    /// Hash of the training files.
    pub data_fingerprint: String,
    /// What the warnings about the next steps depend on.
    pub health: Health,
    /// Digests of the other inputs of a step: tokenizer, chat template, processor.
    pub inputs: BTreeMap<String, String>,
    /// The media files at the first start, if the length caches had all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media: Option<MediaDigests>,
    /// The model, if an adapter is trained: the checkpoint does not contain it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseModel>,
    /// What later evaluations are compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evals: Option<EvalHistory>,
    /// Position of the loader. Order and shuffle depend only on it and the seed.
    pub data: DataState,
}

/// The model that an adapter was trained on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseModel {
    /// `model.path`, or the id on the hub.
    pub path: String,
    /// Digest of names and shapes, and of some values of each tensor.
    pub digest: String,
    /// How its linear layers were stored.
    pub quantize: Quantize,
    /// Digests of everything that a step computes with, which the first rank of a new run reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contents: Option<BaseContents>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseContents {
    /// Of `config.json`, without the fields that name its origin and its dtype.
    pub config: String,
    /// Of every byte of the tensors, or the seed of random weights.
    pub weights: String,
    /// Of the sizes and times of the files whose bytes `weights` is about.
    pub stamps: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    pub epochs: u64,
    /// Number of optimizer steps of these epochs.
    pub steps: u64,
}

impl TrainState {
    /// The version that this program writes.
    pub const VERSION: u32 = 1;
}
