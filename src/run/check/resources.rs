//! Memory, disk space and `output_dir`, before a run uses them.

use super::super::error::RunError;
use super::super::memory::{Load, ModelShape, RunMemory, advice};
use super::super::output_dir::check_unused;
use super::super::plan::DataPlan;
use super::super::resume::changes;
use super::{CheckReport, Finding, Note, Topic};
use crate::checkpoint::{CheckpointConfig, Checkpointer};
use crate::config::RunConfig;
use crate::dist::Processes;
use crate::metrics::memory_text;
use crate::ops::memory_advice;
use crate::train::DeviceChoice;
use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

const GIB: f64 = 1_073_741_824.0;

/// `data` is the size of the run, if it is known.
pub(super) fn check(config: &RunConfig, data: Option<&DataPlan>, report: &mut CheckReport) {
    // Otherwise the model folder cannot be used, which is reported with it.
    let Ok(mut need) = Need::of(config) else { return };
    if let Some(data) = data
        && let Err(error) = need.use_packs(data)
    {
        return report.error(Topic::Memory, error);
    }
    need.check_memory(config, data.is_some(), report);
    need.check_disk(config, report);
}

/// Peak memory of a rank, predicted from the shape of its model, in bytes.
pub(crate) fn predicted_memory(config: &RunConfig) -> Result<f64, RunError> {
    Ok(Need::of(config)?.memory)
}

/// Bytes of host memory for the copies from which checkpoints are written, over all ranks.
pub(crate) fn copy_of_checkpoint(config: &RunConfig) -> Result<f64, RunError> {
    Ok(ModelShape::read(config)?.copy_bytes(config))
}

/// Memory and disk space that a run needs.
pub(super) struct Need {
    /// Peak memory of the process, or of the GPU, in bytes.
    memory: f64,
    /// Bytes of a checkpoint.
    checkpoint: f64,
    /// Bytes of the copy from which a checkpoint is written.
    copy: f64,
    /// The run. Its packs are full ones until `use_packs` sets those of the plan.
    pub(super) run: RunMemory,
    /// Its model.
    pub(super) shape: ModelShape,
    /// Number of steps, if it is known.
    steps: Option<u64>,
}

impl Need {
    /// Predicts the needs of a rank from the shape of its model, for full packs.
    pub(super) fn of(config: &RunConfig) -> Result<Self, RunError> {
        let shape = ModelShape::read(config)?;
        let world = match config.distributed.processes {
            Processes::Auto => 1,
            Processes::Count(ranks) => ranks.get(),
        };
        let run = RunMemory::before_data(&shape, config, world);
        let memory = run.bytes(&shape)?;
        let (checkpoint, copy) = (shape.checkpoint_bytes(config), shape.copy_bytes(config));
        let steps = config.train.max_steps.map(NonZeroU64::get);
        Ok(Self { memory, checkpoint, copy, run, shape, steps })
    }

    /// Predicts the memory of the largest packs of the run.
    fn use_packs(&mut self, data: &DataPlan) -> Result<(), RunError> {
        self.run.load = Load::of(&self.shape, &data.plan, data.targets)?;
        self.memory = self.run.bytes(&self.shape)?;
        self.steps = Some(data.steps);
        Ok(())
    }

    fn check_memory(&self, config: &RunConfig, has_packs: bool, report: &mut CheckReport) {
        let need = memory_text(self.memory);
        let copy = match self.copy {
            copy if copy > 0.0 => format!(
                ", and {} of host memory for a copy while a checkpoint is written",
                memory_text(copy)
            ),
            _ => String::new(),
        };
        let is_gpu = matches!(self.run.config.device, DeviceChoice::Cuda(_));
        let of = if is_gpu { " of GPU memory" } else { "" };
        let packs = if has_packs { "its largest pack" } else { "full packs, which are assumed" };
        match self.memory_lack(config) {
            None => report.fact(Topic::Memory, format!("about {need}{of} for {packs}{copy}")),
            Some([_, free]) => {
                let free = memory_text(free);
                let text = format!("about {need}{of} are needed for {packs}, {free} are free");
                let hint = self.run.savings().ok().and_then(|savings| advice(&savings));
                let hint = hint.unwrap_or_else(memory_advice);
                report.add(Topic::Memory, Finding::Problem(Note::new(text, &hint)));
            }
        }
    }

    /// The bytes that are needed and those that are free on the disk of `output_dir`, if they do
    /// not suffice.
    fn disk_lack(&self, config: &RunConfig) -> Option<[f64; 2]> {
        let free = free_bytes(&config.output_dir).ok()?;
        let checkpoints = num_checkpoints(&config.checkpoint, self.steps) as f64;
        // `best`, and the next one: weights without an optimizer, twice
        let best = if config.checkpoint.best.is_some() { 1.0 } else { 0.0 };
        // A run that is not resumed moves the earlier checkpoints aside, where they stay.
        let is_resumed = changes(config, &config.output_dir).is_empty();
        let own = folder_bytes(&config.output_dir.join("checkpoints")) as f64;
        let own = if is_resumed { own } else { 0.0 };
        let need = (checkpoints + best) * self.checkpoint;
        (need > free + own).then_some([need, free + own])
    }

    /// The bytes that are needed and those that are free, if the memory does not suffice.
    pub(super) fn memory_lack(&self, config: &RunConfig) -> Option<[f64; 2]> {
        let free = config.device.free_memory()?;
        (self.memory > free).then_some([self.memory, free])
    }

    fn check_disk(&self, config: &RunConfig, report: &mut CheckReport) {
        let each = self.checkpoint / GIB;
        let Some([need, free]) = self.disk_lack(config) else {
            return report.fact(Topic::Disk, format!("a checkpoint has about {each:.2} GiB"));
        };
        let (need, free) = (need / GIB, free / GIB);
        let text = format!(
            "checkpoints of {each:.2} GiB need {need:.2} GiB on the disk of `{}`, {free:.2} GiB are free",
            config.output_dir.display()
        );
        report.add(Topic::Disk, Finding::Problem(Note::new(text, LESS_DISK)));
    }
}

/// The number of checkpoints that are on the disk at the same time. `steps` is the length of the run;
/// if it is not known, the run writes two or more.
fn num_checkpoints(config: &CheckpointConfig, steps: Option<u64>) -> u64 {
    let CheckpointConfig { every_steps, keep, .. } = config;
    // the next one is complete before the oldest is removed
    let kept = keep.get() as u64 + 1;
    match *every_steps {
        0 => 1,
        every => kept.min(steps.map_or(2, |steps| steps.div_ceil(every))),
    }
}

/// Warns if the checkpoints of a run of `steps` steps exceed what is free. `u64::MAX` means that the
/// number of steps is not known.
pub(in crate::run) fn warn_about_disk(config: &RunConfig, steps: u64) {
    let steps = Some(steps).filter(|steps| *steps != u64::MAX);
    let Ok(need) = Need::of(config) else { return }; // loading the model reported the error
    let gib = |bytes: f64| format!("{:.2}", bytes / GIB);
    if let Some([need, free]) = (Need { steps, ..need }).disk_lack(config) {
        let (need, free) = (gib(need), gib(free));
        tracing::warn!(
            need,
            free,
            "the disk of `output_dir` lacks space (GiB) for the checkpoints: {LESS_DISK}"
        );
    }
}

/// Settings that need less space.
const LESS_DISK: &str = "free space, lower `checkpoint.keep`, or set `output_dir` to another disk";

impl ModelShape {
    /// Bytes of a checkpoint: saved weights and the state of the optimizer.
    fn checkpoint_bytes(&self, config: &RunConfig) -> f64 {
        let [parameters, trained] = self.num_parameters();
        let saved = if config.adapter.is_some() { trained } else { parameters };
        let element = config.model.precision.dtype().size_in_bytes() as f64;
        saved * element + trained * self.state_bytes(config)
    }

    /// Bytes of host memory for the copy from which a checkpoint is written in the background, over
    /// all ranks.
    pub fn copy_bytes(&self, config: &RunConfig) -> f64 {
        if !config.checkpoint.background || config.checkpoint.every_steps == 0 {
            return 0.0;
        }
        let [_, trained] = self.num_parameters();
        let element = config.model.precision.dtype().size_in_bytes() as f64;
        trained * (element + self.state_bytes(config))
    }
}

/// The folder itself, or the nearest one above it that exists.
fn existing(folder: &Path) -> PathBuf {
    let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let found = absolute.ancestors().find(|folder| folder.exists());
    found.unwrap_or(Path::new("/")).to_owned()
}

/// Bytes that this user may still write to the disk of `folder`.
fn free_bytes(folder: &Path) -> io::Result<f64> {
    let disk = rustix::fs::statvfs(existing(folder))?;
    Ok(disk.f_bavail as f64 * disk.f_frsize as f64)
}

/// Bytes of the files in the folders of `folder`.
fn folder_bytes(folder: &Path) -> u64 {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries(folder).flat_map(|entry| entries(&entry.path()).collect::<Vec<_>>());
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}

/// Whether the run may write to `output_dir`, and what is in it.
pub(super) fn check_output(config: &RunConfig, report: &mut CheckReport) {
    let folder = &config.output_dir;
    let exists = existing(folder);
    let problem = |text: String| {
        Finding::Problem(Note::new(text, "set `output_dir` to a folder that you may write to"))
    };
    if !exists.is_dir() {
        let text = format!("`{}` is a file, not a folder", exists.display());
        return report.add(Topic::Output, problem(text));
    }
    if let Err(error) = rustix::fs::access(&exists, rustix::fs::Access::WRITE_OK) {
        let text = format!("cannot write to `{}`: {}", exists.display(), io::Error::from(error));
        return report.add(Topic::Output, problem(text));
    }
    if let Err(error) = check_unused(folder) {
        report.error(Topic::Output, error);
    }
    let steps = Checkpointer::new(folder, &config.checkpoint).steps().unwrap_or_default();
    let text = match steps.last() {
        Some(step) => format!("has a run with a checkpoint of step {step}"),
        None => "has no checkpoint: the run starts at step 0".to_owned(),
    };
    report.fact(Topic::Output, format!("`{}` {text}", folder.display()));
    for change in changes(config, folder) {
        let text = format!("the run in `output_dir` would not be resumed: {change}");
        let hint = "restore the value to resume it; its files are moved to `previous-N` otherwise";
        report.add(Topic::Output, Finding::Warning(Note::new(text, hint)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;

    #[test]
    fn the_disk_of_a_folder_that_does_not_exist_yet_is_that_of_its_parent() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("not/there");
        assert_eq!(existing(&below), folder.path());
        assert!(free_bytes(&below).unwrap() > 0.0);
    }

    #[test]
    fn checkpoints_are_those_that_the_run_writes() {
        let number = |every_steps, keep, steps| {
            let keep = NonZeroUsize::new(keep).unwrap();
            num_checkpoints(&CheckpointConfig { every_steps, keep, ..Default::default() }, steps)
        };
        assert_eq!(number(500, 1_000_000, Some(411)), 1, "only the last one");
        assert_eq!(number(500, 1_000_000, Some(1001)), 3, "two, and the last one");
        assert_eq!(number(500, 2, Some(100_000)), 3, "the next one before the oldest is removed");
        assert_eq!(number(500, 1, None), 2);
        assert_eq!(number(500, 1_000_000, None), 2, "the length of the run is not known");
        assert_eq!(number(0, 3, Some(1000)), 1);
    }

    #[test]
    fn the_files_of_checkpoints_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let step = folder.path().join("step-00000001");
        fs::create_dir(&step).unwrap();
        for name in ["one", "two"] {
            fs::File::create(step.join(name)).unwrap().set_len(1000).unwrap();
        }
        assert_eq!(folder_bytes(folder.path()), 2000);
        assert_eq!(folder_bytes(&folder.path().join("none")), 0);
    }
}
