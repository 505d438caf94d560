//! Answers of the model to held-out rows.

use super::config::GenerateConfig;
use super::eval::EvalError;
use super::generate::{GenerateOptions, generate};
use super::ranks::Ranks;
use super::scores::Score;
use crate::data::{JsonlRows, RowReader, SampleError, SampleIndex};
use crate::models::Model;
use candle_core::Device;
use candle_transformers::generation::Sampling;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;

/// The greedy answer to the turns of a chat before its last answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The row's own `id`; `None` if it has none.
    pub id: Option<String>,
    /// `file:line`.
    pub row: String,
    /// The last answer of the row.
    pub expected: String,
    /// The answer of the model.
    pub answered: String,
    /// Whether the answer is complete: not cut at the maximum number of tokens.
    pub ended: bool,
    /// Number of images and videos of the prompt.
    pub num_media: usize,
    /// The scores of `eval.generate.metrics`; `None` if there is nothing to compare.
    #[serde(flatten, skip_deserializing)]
    pub scores: BTreeMap<String, Option<f64>>,
}

/// A line of `predictions.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct StepPrediction<'a> {
    /// Number of optimizer steps so far.
    pub step: u64,
    /// The answer.
    #[serde(flatten)]
    pub prediction: &'a Prediction,
}

/// The reason why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum PredictError {
    /// The row cannot be used.
    #[error(transparent)]
    Row(#[from] SampleError),
    /// An op failed.
    #[error(transparent)]
    Eval(#[from] EvalError),
}

/// Answers rows. The model has all its weights on this rank.
pub struct Predictor<'a> {
    /// The rows to answer.
    pub rows: &'a JsonlRows,
    /// Length and scores of answers.
    pub config: &'a GenerateConfig,
    /// The model.
    pub model: &'a dyn Model,
    /// Device of the model.
    pub device: &'a Device,
}

impl Predictor<'_> {
    /// Answers a row; `None` for a row of a corpus, which has no answer.
    pub fn answer(&self, row: SampleIndex) -> Result<Option<Prediction>, PredictError> {
        let Some(sample) = self.rows.sample(row) else { return Ok(None) };
        let encoder = self.rows.encoder();
        let (prompt, expected) = encoder.encode_prompt(&sample?)?;
        let most = self.config.max_new_tokens.get();
        let options = GenerateOptions {
            max_new_tokens: most.saturating_add(1), // does the answer end after the maximum length?
            sampling: Sampling::ArgMax,
            seed: 0,
            stop_ids: encoder.stop_ids().to_vec(),
        };
        let num_media = prompt.media.len();
        let mut ids = generate(self.model, prompt, &options, self.device)?;
        let ended = ids.len() <= most;
        ids.truncate(most);
        let decoded = encoder.decode(&ids);
        let answered = decoded.map_err(|error| EvalError::from(candle_core::Error::wrap(error)))?;
        Ok(Some(Prediction {
            id: self.rows.own_id(row),
            row: self.rows.id(row).to_string(),
            ended,
            num_media,
            scores: self.scores(&expected, &answered),
            expected,
            answered,
        }))
    }

    fn scores(&self, expected: &str, answered: &str) -> BTreeMap<String, Option<f64>> {
        let score = |score: &Score| (score.name().to_owned(), score.of(expected, answered));
        self.config.metrics.iter().map(score).collect()
    }

    /// Answers all chats, or the first `rows` of them, which the ranks share; rows that cannot be used
    /// are left out. If `stop` returns `true` on a rank, all return `None`.
    pub fn run_until(
        &self,
        ranks: &Ranks,
        stop: &dyn Fn() -> bool,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Option<Vec<Prediction>>, EvalError> {
        let rows: Vec<SampleIndex> = self.chats().collect();
        let rank = ranks.rank();
        let mut own = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            if index % rank.world != rank.rank {
                continue;
            }
            if stop() {
                break;
            }
            ranks.report("answering eval rows");
            match self.answer(*row) {
                Ok(answer) => own.push(answer),
                Err(PredictError::Row(_)) => own.push(None), // the evaluation reports it
                Err(PredictError::Eval(error)) => return Err(error),
            }
            progress(index + 1, rows.len());
        }
        if ranks.gather(stop())?.contains(&true) {
            return Ok(None);
        }
        let mut of_ranks: Vec<_> = ranks.gather(own)?.into_iter().map(Vec::into_iter).collect();
        let all = (0..rows.len()).filter_map(|index| of_ranks[index % rank.world].next().flatten());
        let mut all: Vec<Prediction> = all.collect();
        for answer in &mut all {
            answer.scores = self.scores(&answer.expected, &answer.answered); // not from JSON
        }
        Ok(Some(all))
    }

    /// The chats that are answered.
    fn chats(&self) -> impl Iterator<Item = SampleIndex> + '_ {
        let is_chat = |row: &SampleIndex| self.rows.sets()[row.dataset as usize].corpus().is_none();
        let most = self.config.rows.map_or(usize::MAX, NonZeroUsize::get);
        self.rows.rows().filter(is_chat).take(most)
    }

    /// Number of chats that are answered.
    pub fn num_chats(&self) -> usize {
        self.chats().count()
    }

    /// Number of answers, and the mean of each score over the rows that have it.
    pub fn means(&self, answers: &[Prediction]) -> BTreeMap<String, Value> {
        let mut means = BTreeMap::from([("num_answers".to_owned(), answers.len().into())]);
        for score in &self.config.metrics {
            let values: Vec<f64> =
                answers.iter().filter_map(|answer| answer.scores[score.name()]).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let mean = (!values.is_empty()).then_some(mean);
            means.insert(score.name().to_owned(), mean.into());
        }
        means
    }
}
