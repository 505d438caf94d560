//! What a run trained, how, and with which result, for its page, its model card and the end of `sft`.

use super::folder::RunFolder;
use super::series::Series;
use crate::config::RunConfig;
use crate::data::dataset_names;
use crate::train::{AdapterKind, Quantize};
use chrono::DateTime;
use indicatif::HumanCount;
use serde_json::Value;

/// Number of steps at the start and at the end whose mean loss is compared.
const ENDS: usize = 10;

/// The main numbers of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Number of steps that `metrics.jsonl` has, and the last one.
    pub steps: u64,
    pub last_step: u64,
    /// Number of rows trained, each as often as it was.
    pub rows: u64,
    /// Number of tokens, and of supervised ones.
    pub tokens: u64,
    pub targets: u64,
    /// Seconds of the steps, with their waits for data and checkpoints.
    pub seconds: f64,
    /// Mean loss of the first and of the last steps, and their number; `None` without finite losses.
    pub loss: Option<(f64, f64, usize)>,
    /// Step and loss of the last evaluation, and of that with the lowest loss.
    pub eval: Option<[(u64, f64); 2]>,
    /// Number of rejected rows, and the reasons with theirs.
    pub rejected: u64,
    pub reasons: Vec<(String, u64)>,
    /// Number of rows of the data files that are truncated to `data.max_length`.
    pub truncated: u64,
    /// Number of steps that changed no weight.
    pub skipped: u64,
}

impl RunFolder {
    pub fn outcome(&self) -> Outcome {
        let sum = |key: &str| self.train(key).map_or(0.0, Series::sum);
        let losses: Vec<f64> = self.train("loss").into_iter().flat_map(Series::finite).collect();
        let ends = ENDS.min(losses.len().div_ceil(2));
        let mean = |values: &[f64]| values.iter().sum::<f64>() / ends as f64;
        let evals = self.eval.get("loss").map_or(&[][..], |of| &of.0[..]);
        let mut evals = evals.iter().copied().filter(|(_, loss)| loss.is_finite());
        let best = evals.clone().min_by(|a, b| a.1.total_cmp(&b.1));
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        let reasons = self.last["rejected_by_reason"].as_object().into_iter().flatten();
        let sets = self.start().and_then(|start| start["data"].as_array());
        Outcome {
            steps: self.train("step").map_or(0, |steps| steps.0.len() as u64),
            last_step: count(&self.last["step"]),
            rows: sum("num_samples") as u64,
            tokens: sum("num_tokens") as u64,
            targets: sum("num_target_tokens") as u64,
            seconds: sum("step_time_s") + sum("save_hold_s"),
            loss: (ends > 0)
                .then(|| (mean(&losses[..ends]), mean(&losses[losses.len() - ends..]), ends)),
            eval: evals.next_back().zip(best).map(|(last, best)| [last, best]),
            rejected: count(&self.last["rejected"]),
            reasons: reasons.map(|(reason, rows)| (reason.clone(), count(rows))).collect(),
            truncated: sets.into_iter().flatten().map(|set| count(&set["truncated"])).sum(),
            skipped: self.skipped.len() as u64,
        }
    }

    /// The starts since the last one at step 0: earlier ones trained no step.
    fn starts(&self) -> &[Value] {
        let first = self.starts.iter().rposition(|start| start["after_step"] == 0);
        &self.starts[first.unwrap_or(0)..]
    }

    /// The first start, which has counted the rows that are truncated.
    fn start(&self) -> Option<&Value> {
        self.starts().first()
    }

    /// The model, with the numbers of its parameters.
    pub(super) fn model(&self) -> Option<String> {
        let path = self.config.as_ref().ok()?.model.path.display();
        let count = |key: &str| self.start()?[key].as_u64().map(thousands);
        Some(match (count("parameters"), count("trained")) {
            (Some(all), Some(trained)) => format!("{path}: {all} parameters, {trained} trained"),
            _ => path.to_string(),
        })
    }

    /// Each data set with its rows in the file, and how much of it was trained.
    pub(super) fn data(&self) -> Option<String> {
        let config = self.config.as_ref().ok()?;
        let alone = config.data.train.len() == 1;
        let starts = self.start().and_then(|start| start["data"].as_array());
        let trained = |what: &str, name: &str| {
            let key = if alone { what.to_owned() } else { format!("{what}/{name}") };
            self.train(&key).map_or(0.0, Series::sum) as u64
        };
        let text = |(index, name): (usize, String)| {
            let rows = starts.and_then(|sets| sets.get(index)?["rows"].as_u64());
            let of = rows.map_or_else(String::new, |rows| format!("{} rows, ", thousands(rows)));
            let [rows, tokens] =
                ["num_samples", "num_tokens"].map(|what| thousands(trained(what, &name)));
            format!("{name}: {of}trained on {rows} rows with {tokens} tokens")
        };
        let names = dataset_names(&config.data.train).into_iter().enumerate();
        Some(names.map(text).collect::<Vec<_>>().join("; "))
    }

    /// The machine of each start, as long as it differs from that of the start before.
    pub(super) fn machine(&self) -> Option<String> {
        let text = |start: &Value| {
            let machine = start["machine"].as_str()?;
            Some(match start["world"].as_u64() {
                Some(world) if world > 1 => format!("{world} processes, each on {machine}"),
                _ => machine.to_owned(),
            })
        };
        let mut machines: Vec<String> = self.starts().iter().filter_map(text).collect();
        machines.dedup();
        (!machines.is_empty()).then(|| machines.join("; then "))
    }

    /// Time of the first start.
    pub(super) fn started(&self) -> Option<String> {
        let time = DateTime::from_timestamp(self.start()?["time"].as_i64()?, 0)?;
        Some(time.format("%Y-%m-%d %H:%M UTC").to_string())
    }

    /// Seconds of training per 1,000 tokens.
    pub(super) fn time_per_1000(&self) -> Option<f64> {
        let of = self.outcome();
        (of.tokens > 0).then(|| 1000.0 * of.seconds / of.tokens as f64)
    }

    /// The price of the training, and of 1,000 tokens.
    pub(super) fn cost(&self) -> Option<[f64; 2]> {
        let per_second = self.price_per_hour? / 3600.0;
        Some([per_second * self.outcome().seconds, per_second * self.time_per_1000()?])
    }
}

/// What is trained: the model or an adapter, with the settings that name the method.
pub(super) fn method(config: &RunConfig) -> String {
    let Some(adapter) = &config.adapter else {
        return match config.model.freeze.as_slice() {
            [] => "full fine-tuning".to_owned(),
            frozen => format!("full fine-tuning, frozen: {}", frozen.join(", ")),
        };
    };
    let kind = match adapter.kind {
        AdapterKind::Lora => "LoRA",
        AdapterKind::Dora => "DoRA",
    };
    let (letter, weights) = match adapter.quantize {
        Quantize::None => ("", ""),
        Quantize::Nf4 => ("Q", ", weights of the model in 4 bits"),
    };
    let (rank, alpha, parts) = (adapter.rank, adapter.alpha, adapter.parts.join(", "));
    format!("{letter}{kind}, rank {rank}, alpha {alpha}, in {parts}{weights}")
}

/// Seconds as hours, minutes and seconds, the two largest of them.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, _) => format!("{seconds:.1} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

/// A number with commas between groups of three digits.
pub fn thousands(number: u64) -> String {
    HumanCount(number).to_string()
}
