//! One step of a run, and what is recorded about it.

use super::super::audit::audit;
use super::super::config::OnNonFinite;
use super::super::datasets::{by_dataset, count, metric_keys};
use super::super::error::TrainError;
use super::super::experts::StepChoices;
use super::super::rejects::write_rejects;
use super::super::sample_log::StepSamples;
use super::super::step_result::StepResult;
use super::{Observer, ReadyStep, Trainer};
use crate::checkpoint::FolderLayout;
use crate::data::StepData;
use crate::metrics::{RankMetrics, RankValues, StepMetrics, peak_memory_bytes};
use crate::ops::gpu_memory;
use std::time::Instant;

/// Number of rows that a warning about a step names.
const NAMED_ROWS: usize = 3;

impl Trainer {
    pub(super) fn step(
        &mut self,
        ready: ReadyStep,
        asked: Instant,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let data_wait_s = asked.elapsed().as_secs_f64();
        let ReadyStep { data, prepared, has_images } = ready;
        let step = self.parts.state.step + 1;
        let lr = self.parts.steps.schedule.lr(step);
        write_rejects(self.parts.logs.rejects.as_mut(), step, &data.rejected)?;
        let launched = self.parts.runner.launch(prepared, lr, step)?;
        self.look_ahead();
        let parts = &mut self.parts;
        let own_samples = data.own_samples();
        let mut result = parts.runner.finish(&launched, &own_samples)?;
        let step_time_s = asked.elapsed().as_secs_f64();
        let sequence = parts.runner.ranks.sequence();
        let own_tokens: u64 = own_samples.iter().map(|size| u64::from(size.num_tokens)).sum();
        let device_memory = gpu_memory(&parts.runner.device);
        let values = RankValues {
            data_wait_s,
            tokens_per_s: own_tokens as f64 / sequence.size as f64 / step_time_s,
            peak_memory_bytes: peak_memory_bytes(),
            peak_device_bytes: device_memory.map(|memory| [memory.peak, memory.reserved]),
        };
        let ranks = result.gather(&data.owners, values, &parts.runner.ranks)?;
        let rows = self.log_samples(step, &result)?;
        self.judge(&mut result, &rows, step)?;
        // In the first step of an adapter, `A` has no gradient because `B` is zero.
        let is_first_of_adapter =
            step == 1 && self.parts.checkpoints.layout == FolderLayout::Adapter;
        let is_audited = !is_first_of_adapter && result.problem.is_none();
        if is_audited && self.audit.is_due(has_images) {
            audit(&self.parts.runner, &result.squares, step, has_images);
        }
        self.record(data, &result, step_time_s, values, ranks, observer)?;
        self.squares = result.squares;
        Ok(())
    }

    /// Writes the samples of a step to `samples.jsonl`; returns the rows with the highest losses.
    fn log_samples(&mut self, step: u64, result: &StepResult) -> Result<Vec<String>, TrainError> {
        if !self.is_first() {
            return Ok(Vec::new());
        }
        let samples = StepSamples::new(step, &*self.parts.data.reader, &result.samples);
        if let Some(file) = &mut self.parts.logs.samples {
            file.write(&samples)?;
        }
        let worst = samples.worst(NAMED_ROWS).into_iter();
        Ok(worst.map(|index| samples.rows[index].clone()).collect())
    }

    /// Decides whether the run continues after a step whose loss or gradient is not finite, and
    /// warns about values far outside of their recent range.
    fn judge(
        &mut self,
        result: &mut StepResult,
        rows: &[String],
        step: u64,
    ) -> Result<(), TrainError> {
        let is_first = self.is_first();
        let parts = &mut self.parts;
        let rows = rows.join(", ");
        if let Some(problem) = &result.problem {
            let in_a_row = parts.state.health.skip();
            let stops = parts.steps.on_non_finite == OnNonFinite::Stop
                || in_a_row > parts.steps.max_skipped;
            match (is_first, stops) {
                (true, true) => {
                    tracing::error!(step, rows, "the rows with the highest losses of this step");
                }
                (true, false) => tracing::warn!(step, rows, in_a_row, "skipped a step: {problem}"),
                (false, _) => {}
            }
            return result.problem.take_if(|_| stops).map_or(Ok(()), Err);
        }
        let spikes = parts.state.health.add(result.loss, result.grad_norm);
        if !is_first {
            return Ok(());
        }
        for spike in spikes {
            let (value, usual) = (spike.value as f32, spike.usual as f32);
            tracing::warn!(
                step,
                %value,
                %usual,
                rows,
                "spike: {} is far above its usual range",
                spike.name
            );
        }
        if let Some(found) = parts.state.health.divergence().filter(|found| found.is_new) {
            let (first, now) = (found.first as f32, found.now as f32);
            tracing::warn!(
                step,
                %first,
                %now,
                "for 100 steps, the mean of the recent losses has been above the loss of the first \
                 steps: the run diverges. Lower `optim.lr`, or raise `optim.warmup_steps`"
            );
        }
        Ok(())
    }

    fn record(
        &mut self,
        data: StepData,
        result: &StepResult,
        step_time_s: f64,
        values: RankValues,
        ranks: Option<RankMetrics>,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let parts = &mut self.parts;
        let (state, counts) = (&mut parts.state, result.counts);
        state.step += 1;
        state.targets_seen += counts.num_targets;
        state.tokens_seen += data.num_tokens as u64;
        state.samples_seen += data.num_samples as u64;
        let names = &parts.data.dataset_names;
        let sets = by_dataset(names.len(), &result.samples);
        count(&mut state.datasets_seen, names, &sets);
        state.data = data.state;
        let rejected = parts.data.rejected_texts.with_rows(&state.data);
        let saves = self.saves.take_times();
        let metrics = StepMetrics {
            step: state.step,
            epoch: data.epoch,
            loss: result.loss,
            grad_norm: result.grad_norm,
            skipped: result.problem.is_some(),
            lr: parts.steps.schedule.lr(state.step),
            num_tokens: data.num_tokens as u64,
            num_target_tokens: counts.num_targets,
            target_weight: counts.target_weight,
            num_samples: data.num_samples as u64,
            fill: data.fill,
            step_time_s,
            data_wait_s: values.data_wait_s,
            // A number in each row: readers that infer columns from the first rows fail if only
            // later rows have one.
            save_hold_s: Some(saves.hold_s.unwrap_or(0.0)),
            save_s: Some(saves.save_s.unwrap_or(0.0)),
            tokens_per_s: data.num_tokens as f64 / step_time_s,
            peak_memory_bytes: values.peak_memory_bytes,
            peak_device_memory_bytes: values.peak_device_bytes.map(|[peak, _]| peak),
            peak_device_reserved_bytes: values.peak_device_bytes.map(|[_, reserved]| reserved),
            predicted_memory_bytes: parts.steps.predicted_memory_bytes,
            rejected: rejected.total(),
            rejected_by_reason: rejected.by_reason,
            rejected_by_file: rejected.by_file,
            ranks,
            experts: result.choices.as_ref().map(StepChoices::metrics).unwrap_or_default(),
            datasets: metric_keys(names, &sets),
        };
        if let Some(file) = &mut parts.logs.metrics {
            file.write(&metrics)?;
        }
        observer.step(&metrics, parts.state.total_steps);
        Ok(())
    }
}
