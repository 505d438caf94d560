//! Predicts the peak memory of a run, and finds the settings that reduce it.

use super::error::RunError;
use super::estimate::ModelShape;
use super::inputs::check;
use crate::config::RunConfig;
use crate::data::Plan;
use crate::dist::Shard;
use crate::metrics::{MemoryParts, MicroBatchSizes, memory_text};
use crate::optim::{Kind, Master, Moments};
use crate::train::{AdapterConfig, DeviceChoice, Offload, Precision, Quantize, RecomputeChoice};
use std::num::{NonZeroU32, NonZeroUsize};

/// Memory of a GPU that CUDA, the libraries and NCCL use: an assumption.
pub const RESERVED: f64 = 1_073_741_824.0;
/// Settings that save less than this fraction of the peak are left out.
const LEAST_SAVING: f64 = 0.02;
/// Number of settings in a hint.
const NUM_SETTINGS: usize = 3;
/// Of several settings of one kind, the cheapest that saves this fraction of the most is named.
const ENOUGH: f64 = 0.75;

/// The sizes of the micro-batches of a run that can need the most memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Load(Vec<MicroBatchSizes>);

impl Load {
    /// Full packs, of whose tokens the fraction `images` are of images, and `targets` are
    /// supervised.
    pub fn full(shape: &ModelShape, config: &RunConfig, fractions: (f64, f64)) -> Self {
        Self(vec![shape.full_micro_batch(config, fractions)])
    }

    /// The largest micro-batches of a plan, of whose tokens the fraction `targets` are supervised.
    pub fn of(shape: &ModelShape, plan: &Plan, targets: f64) -> Result<Self, RunError> {
        let patch_bytes = 4.0 * shape.patch_values()?;
        let patches = |bytes: u64| if patch_bytes > 0.0 { bytes as f64 / patch_bytes } else { 0.0 };
        let step_patches = patches(plan.step_pixel_bytes);
        let samples = plan.samples as f64 / plan.steps.max(1) as f64;
        Ok(Self(Vec::from(plan.largest.map(|size| MicroBatchSizes {
            tokens: size.tokens as f64,
            targets: size.tokens as f64 * targets,
            patches: patches(size.pixel_bytes),
            step_patches,
            sample_patches: step_patches / samples.max(1.0),
        }))))
    }

    /// These micro-batches with `factor` times as many tokens and patches.
    fn scaled(&self, factor: f64) -> Self {
        let scale = |sizes: &MicroBatchSizes| MicroBatchSizes {
            tokens: factor * sizes.tokens,
            targets: factor * sizes.targets,
            patches: factor * sizes.patches,
            step_patches: factor * sizes.step_patches,
            ..*sizes
        };
        Self(self.0.iter().map(scale).collect())
    }

    /// The sizes.
    pub fn sizes(&self) -> &[MicroBatchSizes] {
        &self.0
    }

    /// The largest number of tokens of a micro-batch.
    pub fn tokens(&self) -> f64 {
        self.0.iter().map(|sizes| sizes.tokens).fold(0.0, f64::max)
    }

    /// The largest number of patches of a micro-batch.
    pub fn patches(&self) -> f64 {
        self.0.iter().map(|sizes| sizes.patches).fold(0.0, f64::max)
    }
}

/// A run whose memory is predicted. `device` of the config is the CPU or a GPU, and is not `auto`.
#[derive(Debug, Clone)]
pub struct RunMemory {
    /// The config.
    pub config: RunConfig,
    /// Its largest micro-batches.
    pub load: Load,
    /// Number of ranks.
    pub world: usize,
}

impl RunMemory {
    /// The parts of the peak memory of a rank.
    pub fn parts(&self, shape: &ModelShape) -> Result<MemoryParts, RunError> {
        let distributed = &self.config.distributed;
        let shard = if self.world == 1 { Shard::None } else { distributed.shard };
        let exact = distributed.exact.holds(self.on_cpu());
        let mut most = MemoryParts::default();
        for sizes in &self.load.0 {
            let choice = (shard, self.world);
            let estimate = shape.estimate(&self.config, self.world, choice, sizes, exact)?;
            if self.bytes_of(&estimate.parts) > self.bytes_of(&most) {
                most = estimate.parts;
            }
        }
        Ok(most)
    }

    /// The peak memory of a rank: of its process, or of its GPU with what CUDA needs.
    pub fn bytes(&self, shape: &ModelShape) -> Result<f64, RunError> {
        self.parts(shape).map(|parts| self.bytes_of(&parts))
    }

    /// The memory that counts on the device.
    pub fn bytes_of(&self, parts: &MemoryParts) -> f64 {
        if self.on_cpu() { parts.process() } else { parts.device() + RESERVED }
    }

    fn on_cpu(&self) -> bool {
        self.config.device == DeviceChoice::Cpu
    }

    /// The settings that reduce the memory most, in the order of their cost.
    pub fn savings(&self) -> Result<Vec<Saving>, RunError> {
        let now = self.bytes(&ModelShape::read(&self.config)?)?;
        let mut found: Vec<(usize, Saving)> = Vec::new();
        for (cost, settings) in self.settings().into_iter().enumerate() {
            let tried: Vec<Saving> =
                settings.into_iter().filter_map(|setting| saving(setting, now)).collect();
            let most = tried.iter().map(|saving| saving.bytes).fold(0.0, f64::max);
            let enough = |saving: &Saving| saving.bytes >= ENOUGH * most;
            let chosen = tried.into_iter().find(|saving| enough(saving));
            found.extend(chosen.map(|saving| (cost, saving)));
        }
        found.retain(|(_, saving)| saving.bytes >= LEAST_SAVING * now);
        found.sort_by(|(_, one), (_, other)| other.bytes.total_cmp(&one.bytes));
        found.truncate(NUM_SETTINGS);
        found.sort_by_key(|(cost, _)| *cost);
        Ok(found.into_iter().map(|(_, saving)| saving).collect())
    }

    /// This run with a change.
    fn with(&self, setting: impl Into<String>, change: impl FnOnce(&mut Self)) -> (String, Self) {
        let mut changed = self.clone();
        change(&mut changed);
        (setting.into(), changed)
    }

    /// Settings with which the run may need less memory, the cheapest first. Those that are similar
    /// are in one list.
    fn settings(&self) -> Vec<Vec<(String, Self)>> {
        let mut all = self.exact_settings();
        let config = &self.config;
        let optim = &config.optim;
        let mut moments = Vec::new();
        if optim.kind == Kind::Adamw && optim.moments == Moments::F32 {
            moments.push(
                self.with("optim.moments=bf16", |to| to.config.optim.moments = Moments::Bf16),
            );
            moments.push(
                self.with("optim.kind=adamw_8bit", |to| to.config.optim.kind = Kind::Adamw8bit),
            );
        }
        all.push(moments);
        if config.model.precision == Precision::Bf16 && optim.master == Master::F32 {
            let setting =
                self.with("optim.master=none", |to| to.config.optim.master = Master::None);
            all.push(vec![setting]);
        }
        if config.data.packing && config.data.packing_length.get() >= 512 {
            let half = config.data.packing_length.get() / 2;
            all.push(vec![self.with(format!("data.packing_length={half}"), |to| {
                to.config.data.packing_length = NonZeroU32::MIN.saturating_add(half - 1);
                // packs that are shorter than this stay as they are
                let most = f64::from(half) * to.config.train.batch_size.get() as f64;
                to.load = to.load.scaled((most / to.load.tokens()).min(1.0));
            })]);
        }
        if config.model.precision == Precision::F32 {
            all.push(vec![self.with("model.precision=bf16", |to| {
                to.config.model.precision = Precision::Bf16;
            })]);
        }
        if optim.kind != Kind::Adafactor {
            all.push(vec![self.with("optim.kind=adafactor", |to| {
                to.config.optim.kind = Kind::Adafactor;
                to.config.optim.moments = Moments::F32;
            })]);
        }
        all.push(match &config.adapter {
            None => vec![self.with("adapter={}", |to| {
                to.config.adapter = Some(AdapterConfig::default());
            })],
            Some(adapter) if adapter.quantize == Quantize::None => {
                vec![self.with("adapter.quantize=nf4", |to| {
                    let adapter = to.config.adapter.iter_mut();
                    adapter.for_each(|adapter| adapter.quantize = Quantize::Nf4);
                })]
            }
            Some(_) => Vec::new(),
        });
        all
    }

    /// Settings that change only the time of a step, and rounding.
    fn exact_settings(&self) -> Vec<Vec<(String, Self)>> {
        let config = &self.config;
        let mut all = Vec::new();
        let (rows, slots) =
            (config.train.batch_size.get(), config.train.gradient_accumulation_steps.get());
        if rows.is_multiple_of(2) {
            let text = format!(
                "train.batch_size={}`, `train.gradient_accumulation_steps={}",
                rows / 2,
                slots * 2
            );
            all.push(vec![self.with(text, |to| {
                let number = |n: usize| NonZeroUsize::MIN.saturating_add(n - 1);
                to.config.train.batch_size = number(rows / 2);
                to.config.train.gradient_accumulation_steps = number(slots * 2);
                to.load = to.load.scaled(0.5);
            })]);
        }
        let shards = [Shard::Optimizer, Shard::Gradients, Shard::Full];
        let more = shards.into_iter().filter(|shard| {
            self.world > 1 && config.optim.kind.divides_state() && *shard > config.distributed.shard
        });
        let with_shard = |shard: Shard| {
            self.with(format!("distributed.shard={}", shard.name()), |to| {
                to.config.distributed.shard = shard;
            })
        };
        all.push(more.map(with_shard).collect());
        if !self.on_cpu() && config.model.offload == Offload::None {
            all.push(vec![self.with("model.offload=frozen", |to| {
                to.config.model.offload = Offload::Frozen;
            })]);
        }
        all.push(self.with_recompute());
        if !self.on_cpu() && config.optim.moments == Moments::F32 {
            all.push(vec![self.with("optim.moments=host", |to| {
                to.config.optim.moments = Moments::Host;
            })]);
        }
        all
    }

    /// This run with each value of `model.recompute` that recomputes more, the cheapest first.
    pub(super) fn with_recompute(&self) -> Vec<(String, Self)> {
        let with = |choice: &RecomputeChoice| {
            self.with(format!("model.recompute={}", choice.name()), |to| {
                to.config.model.recompute = *choice;
            })
        };
        self.config.model.recompute.more().iter().map(with).collect()
    }

    /// This run on `world` ranks that divide `shard`.
    pub(super) fn on_ranks(&self, world: usize, shard: Shard) -> Self {
        let mut changed = self.clone();
        changed.world = world;
        changed.config.distributed.shard = shard;
        changed
    }

    /// This run with another `packing_length`.
    pub(super) fn with_packing_length(&self, length: u32) -> Self {
        let mut changed = self.clone();
        let now = f64::from(self.config.data.packing_length.get());
        let length = NonZeroU32::MIN.saturating_add(length.saturating_sub(1));
        changed.config.data.packing_length = length;
        changed.load = self.load.scaled(f64::from(length.get()) / now);
        changed
    }
}

/// A setting and the memory that it saves.
#[derive(Debug, Clone, PartialEq)]
pub struct Saving {
    /// The key and its value: `model.recompute=full`.
    pub setting: String,
    /// Bytes.
    pub bytes: f64,
}

/// What a setting saves; `None` if the config does not allow it.
fn saving((setting, changed): (String, RunMemory), now: f64) -> Option<Saving> {
    check(&changed.config).ok()?;
    let bytes = changed.bytes(&ModelShape::read(&changed.config).ok()?).ok()?;
    Some(Saving { setting, bytes: now - bytes })
}

/// The settings as a sentence; `None` if there are none.
pub fn advice(savings: &[Saving]) -> Option<String> {
    let each = savings.iter().enumerate().map(|(index, saving)| {
        let saves = if index == 0 { "saves about" } else { "about" };
        format!("`{}` ({saves} {})", saving.setting, memory_text(saving.bytes))
    });
    let each: Vec<String> = each.collect();
    let (last, first) = each.split_last()?;
    let list = match first {
        [] => last.clone(),
        first => format!("{} or {last}", first.join(", ")),
    };
    Some(format!("set {list}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_names_settings_and_what_they_save() {
        let saving = |setting: &str, bytes| Saving { setting: setting.to_owned(), bytes };
        let savings = [saving("model.recompute=full", 3.0 * RESERVED), saving("adapter={}", 3e6)];
        let text =
            "set `model.recompute=full` (saves about 3.00 GiB) or `adapter={}` (about 3 MiB)";
        assert_eq!(advice(&savings).as_deref(), Some(text));
        assert_eq!(advice(&[]), None);
    }
}
