use super::super::datasets::metric_keys;
use super::super::error::TrainError;
use super::super::eval::Evaluator;
use super::super::predict::Predictor;
use super::super::rejects::write_rejects;
use super::super::step::StepRunner;
use super::Observer;
use super::Trainer;
use crate::metrics::EvalMetrics;
use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Trainer {
    /// Scores the eval rows, at most once per step. A signal ends it without a result; then this
    /// returns `false` on all ranks.
    pub(super) fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        let step = self.parts.state.step;
        if self.parts.evaluation.rows.is_none() || self.evaluated_at == Some(step) {
            return Ok(true);
        }
        if self.ranks().rank().world > 1 {
            // A thread alone completes the checkpoint during the evaluation, ranks do not.
            self.finish_save()?;
        }
        let parts = &mut self.parts;
        let Some(rows) = parts.evaluation.rows.as_ref() else { return Ok(true) };
        let started = Instant::now();
        let total = rows.num_rows();
        let evaluator = Evaluator {
            rows,
            max_tokens: parts.evaluation.max_tokens,
            dtype: parts.runner.dtype,
            device: &parts.runner.device,
            ranks: &parts.runner.ranks,
            weights: &parts.runner.weights,
        };
        let watch = RefCell::new(observer);
        let ranks = &parts.runner.ranks;
        let stop = || parts.stop.load(Ordering::Relaxed) || ranks.is_stop_requested();
        let report = evaluator
            .run_until(&parts.runner.model, &stop, &|done| {
                watch.borrow_mut().evaluating(done, total);
            })
            .map_err(TrainError::in_evaluation)?;
        let Some(report) = report else { return Ok(false) };
        if self.evaluated_at.is_none() && !self.resumed {
            for rejection in &report.rejected {
                tracing::warn!(row = %rejection.message, "cannot score an eval row");
            }
            write_rejects(parts.logs.rejects.as_mut(), step, &report.rejected)?;
        }
        let answers = parts.evaluation.config.generate.as_ref().map(|config| {
            let StepRunner { model, device, ranks, weights, .. } = &parts.runner;
            let predictor = Predictor { rows, config, model, device, ranks, weights };
            let each = |done, total| watch.borrow_mut().evaluating(done, total);
            let answers = predictor.run_until(&stop, &each).map_err(TrainError::in_evaluation)?;
            let both =
                |answers: Vec<_>| (predictor.means(&answers), predictor.lines(step, answers));
            Ok::<_, TrainError>(answers.map(both))
        });
        let answers = match answers.transpose()? {
            Some(None) => return Ok(false),
            answers => answers.flatten(),
        };
        self.evaluated_at = Some(step);
        if report.samples.is_empty() {
            // The loss of no rows would be 0, like a perfect loss.
            tracing::warn!(
                step,
                "no row to evaluate on can be scored: this evaluation has no result"
            );
            return Ok(true);
        }
        let time_s = started.elapsed().as_secs_f64();
        let num_samples = report.samples.len() as u64;
        let mut metrics =
            EvalMetrics::new(step, report.loss(), report.num_targets(), num_samples, time_s)
                .with_accuracy(report.accuracy())
                .with_datasets(metric_keys(rows.names(), &report.by_dataset(rows.names().len())));
        let observer = watch.into_inner();
        if let Some((means, lines)) = answers {
            metrics.answers = means;
            if let Some(file) = &mut parts.logs.predictions {
                lines.iter().try_for_each(|line| file.write(line))?;
            }
        }
        // Before the row: a run that was killed here evaluates again.
        self.compare(&mut metrics)?;
        if let Some(file) = &mut self.parts.logs.evals {
            file.write(&metrics)?;
        }
        observer.evaluated(&metrics);
        self.last_eval = Some(report);
        Ok(true)
    }
}
