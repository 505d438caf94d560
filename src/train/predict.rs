//! Answers of the model to held-out rows.

use super::config::GenerateConfig;
use super::generate::{GenerateOptions, Group};
use super::ranks::Ranks;
use super::scores::Score;
use super::weights::RankWeights;
use crate::batch::EncodedSample;
use crate::data::{DatasetRows, Rejection, RowReader, SampleError, SampleIndex, TransientRowError};
use crate::models::Model;
use crate::train::TrainError;
use candle_core::Device;
use candle_transformers::generation::Sampling;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;

/// The greedy answer to the turns of a chat before its last answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The row's own `id`; `None` if it has none.
    pub id: Option<String>,
    /// `file:line`.
    pub row: String,
    /// The last answer of the row.
    pub expected: String,
    pub answered: String,
    /// Whether the answer is complete: not cut at the maximum number of tokens.
    pub ended: bool,
    pub num_media: usize,
}

/// A line of `predictions.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct StepPrediction {
    /// Number of optimizer steps so far.
    step: u64,
    #[serde(flatten)]
    prediction: Prediction,
    #[serde(flatten)]
    scores: BTreeMap<String, Option<f64>>,
}

type RowAnswer = Result<Option<Prediction>, SampleError>;

/// What a [`Prediction`] needs of its row.
struct Question {
    row: SampleIndex,
    expected: String,
    num_media: usize,
}

pub struct Predictor<'a> {
    pub rows: &'a DatasetRows,
    /// Length and scores of answers.
    pub config: &'a GenerateConfig,
    pub model: &'a Model,
    pub device: &'a Device,
    /// The ranks that share the rows.
    pub ranks: &'a Ranks,
    /// How the weights are divided among the ranks.
    pub weights: &'a RankWeights,
}

impl Predictor<'_> {
    /// Answers a row; `None` for a row of a corpus, which has no answer. This rank must have all
    /// weights.
    pub fn answer(&self, row: SampleIndex) -> Result<Option<Prediction>, TrainError> {
        let answers = self.answers(&[row], &mut |_| ControlFlow::Continue(()))?;
        let answer = answers.and_then(|mut answers| answers.pop()).transpose();
        Ok(answer.map_err(|error| TrainError::Sample(Box::new(error)))?.flatten())
    }

    /// Answers rows, `eval.generate.batch` at the same time: `None` for a row of a corpus, and the
    /// reason why a row cannot be used. Calls `between` with the number of rows that are done,
    /// after each token. Returns `None` if it breaks.
    fn answers(
        &self,
        rows: &[SampleIndex],
        between: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Option<Vec<RowAnswer>>, TrainError> {
        let options = GenerateOptions {
            max_new_tokens: self.config.max_new_tokens.get().saturating_add(1), // see `prediction`
            sampling: Sampling::ArgMax,
            seed: 0,
            stop_ids: self.rows.encoder().stop_ids().to_vec(),
        };
        let mut group = Group::new(self.model, self.device, &options, self.config.batch);
        let mut waiting = rows.iter().copied().enumerate();
        let mut answers: BTreeMap<usize, RowAnswer> = BTreeMap::new();
        while between(answers.len()).is_continue() {
            if group.has_room()
                && let Some((at, row)) = waiting.next()
            {
                match TransientRowError::or_read(Rejection::of, || self.question(row))? {
                    Ok(Some((question, prompt))) => {
                        self.weights.inference(self.ranks, |pass| {
                            group.begin((at, question), prompt, pass)
                        })?;
                    }
                    unanswered => {
                        answers.insert(at, unanswered.map(|_| None));
                    }
                }
            } else if group.is_empty() {
                return Ok(Some(answers.into_values().collect()));
            } else {
                for ((at, question), ids) in
                    self.weights.inference(self.ranks, |pass| group.step(pass))?
                {
                    answers.insert(at, Ok(Some(self.prediction(question, ids)?)));
                }
            }
        }
        Ok(None)
    }

    /// The prompt of a row; `None` for a row of a corpus.
    fn question(&self, row: SampleIndex) -> Result<Option<(Question, EncodedSample)>, SampleError> {
        let Some(sample) = self.rows.sample(row) else { return Ok(None) };
        let (prompt, expected) = self.rows.encoder().encode_prompt(&sample?)?;
        Ok(Some((Question { row, expected, num_media: prompt.num_media() }, prompt)))
    }

    /// `ids` has one more token than `max_new_tokens` if the answer does not end after that number.
    fn prediction(&self, question: Question, mut ids: Vec<u32>) -> Result<Prediction, TrainError> {
        let Question { row, expected, num_media } = question;
        let most = self.config.max_new_tokens.get();
        let ended = ids.len() <= most;
        ids.truncate(most);
        let answered =
            self.rows.encoder().decode_with_specials(&ids).map_err(candle_core::Error::wrap)?;
        Ok(Prediction {
            id: self.rows.own_id(row),
            row: self.rows.id(row).to_string(),
            ended,
            num_media,
            expected,
            answered,
        })
    }

    /// The scores of `eval.generate.metrics`; `None` if there is nothing to compare.
    pub fn scores(&self, prediction: &Prediction) -> BTreeMap<String, Option<f64>> {
        let Prediction { expected, answered, .. } = prediction;
        let score = |score: &Score| (score.name().to_owned(), score.of(expected, answered));
        self.config.metrics.iter().map(score).collect()
    }

    /// The lines of answers in `predictions.jsonl`.
    pub(super) fn lines(&self, step: u64, answers: Vec<Prediction>) -> Vec<StepPrediction> {
        let line = |prediction| {
            let scores = self.scores(&prediction);
            StepPrediction { step, prediction, scores }
        };
        answers.into_iter().map(line).collect()
    }

    /// Answers all chats, or the first `rows` of them, which the ranks share; rows that cannot be
    /// used are left out. If `stop` returns `true` on a rank, all return `None`.
    pub fn run_until(
        &self,
        stop: &dyn Fn() -> bool,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Option<Vec<Prediction>>, TrainError> {
        let rows: Vec<SampleIndex> = self.chats().collect();
        let (ranks, rank) = (self.ranks, self.ranks.rank());
        let own: Vec<SampleIndex> =
            rows.iter().copied().skip(rank.rank).step_by(rank.world).collect();
        let mut num_shown = 0;
        let own = self.answers(&own, &mut |done| {
            if done > num_shown {
                num_shown = done;
                progress(rows.len().min(done * rank.world), rows.len());
            }
            ranks.report("answering eval rows");
            if stop() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        self.weights.take_part(ranks)?; // another rank may have longer answers
        if ranks.gather(own.is_none())?.contains(&true) {
            return Ok(None);
        }
        // The evaluation reports rows that cannot be used.
        let own: Vec<Option<Prediction>> =
            own.into_iter().flatten().map(|answer| answer.ok().flatten()).collect();
        let mut of_ranks: Vec<_> = ranks.gather(own)?.into_iter().map(Vec::into_iter).collect();
        let all = (0..rows.len()).filter_map(|index| of_ranks[index % rank.world].next().flatten());
        Ok(Some(all.collect()))
    }

    /// The chats that are answered.
    fn chats(&self) -> impl Iterator<Item = SampleIndex> + '_ {
        let is_chat = |row: &SampleIndex| self.rows.sets()[row.dataset as usize].corpus().is_none();
        let most = self.config.rows.map_or(usize::MAX, NonZeroUsize::get);
        self.rows.rows().filter(is_chat).take(most)
    }

    pub fn num_chats(&self) -> usize {
        self.chats().count()
    }

    /// Number of answers, and the mean of each score over the rows that have it.
    pub fn means(&self, answers: &[Prediction]) -> BTreeMap<String, Value> {
        let mut means = BTreeMap::from([("num_answers".to_owned(), answers.len().into())]);
        for score in &self.config.metrics {
            let values: Vec<f64> =
                answers.iter().filter_map(|a| score.of(&a.expected, &a.answered)).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let mean = (!values.is_empty()).then_some(mean);
            means.insert(score.name().to_owned(), mean.into());
        }
        means
    }
}
