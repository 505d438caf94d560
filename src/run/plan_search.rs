//! Finds the settings with which a run fits into a given memory.

use super::error::RunError;
use super::estimate::ModelShape;
use super::plan_memory::RunMemory;
use super::sequence::check_world;
use crate::dist::Shard;

/// Lengths of packs are multiples of this number of tokens.
const STEP: u32 = 256;
/// Maximum length of a pack that is tried.
const MAX_LENGTH: u32 = 1 << 20;

/// A change of the config with which the run fits.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// What was searched.
    pub name: &'static str,
    /// Values for `--set`, and the predicted bytes; `None` if no value suffices.
    pub found: Option<(Vec<String>, f64)>,
}

/// The largest `packing_length`, the cheapest `recompute` and the fewest ranks with which the run
/// needs at most `memory` bytes, each with the other settings of the config; if one of them does
/// not suffice, also all of them together. There are at most `ranks` ranks.
pub fn search(need: &RunMemory, memory: f64, ranks: usize) -> Result<Vec<Fit>, RunError> {
    let search = Search { need, shape: &ModelShape::read(&need.config)?, memory };
    let mut fits = Vec::new();
    let packs = need.config.data.packing;
    if packs {
        let found = search.longest(need)?;
        let found = found.map(|(length, bytes)| (vec![packing(length)], bytes));
        fits.push(Fit { name: "largest packing_length", found });
    }
    let found = search.recompute()?;
    fits.push(Fit { name: "cheapest recompute", found });
    if ranks > 1 {
        let found = search.shards(ranks)?;
        fits.push(Fit { name: "fewest shards", found });
    }
    if packs && fits.iter().any(|fit| fit.found.is_none()) {
        fits.push(Fit { name: "all together", found: search.together(ranks)? });
    }
    Ok(fits)
}

struct Search<'a> {
    need: &'a RunMemory,
    shape: &'a ModelShape,
    memory: f64,
}

impl Search<'_> {
    /// The bytes of a run, if it fits.
    fn fits(&self, need: &RunMemory) -> Result<Option<f64>, RunError> {
        let bytes = need.bytes(self.shape)?;
        Ok((bytes <= self.memory).then_some(bytes))
    }

    /// The longest pack, by bisection: memory grows with the length.
    fn longest(&self, need: &RunMemory) -> Result<Option<(u32, f64)>, RunError> {
        let (mut low, mut high, mut found) = (0, MAX_LENGTH / STEP + 1, None);
        while high - low > 1 {
            let middle = u32::midpoint(low, high);
            match self.fits(&need.with_packing_length(middle * STEP))? {
                Some(bytes) => (low, found) = (middle, Some((middle * STEP, bytes))),
                None => high = middle,
            }
        }
        Ok(found)
    }

    fn recompute(&self) -> Result<Option<(Vec<String>, f64)>, RunError> {
        if let Some(bytes) = self.fits(self.need)? {
            return Ok(Some((Vec::new(), bytes)));
        }
        for (setting, changed) in self.need.with_recompute() {
            if let Some(bytes) = self.fits(&changed)? {
                return Ok(Some((vec![setting], bytes)));
            }
        }
        Ok(None)
    }

    /// Numbers of ranks that share a step evenly, and what they divide; the fewest first.
    fn divisions(&self, ranks: usize) -> impl Iterator<Item = (usize, Shard)> {
        let config = &self.need.config;
        let worlds = (1..=ranks).filter(|world| check_world(config, *world).is_ok());
        let divides = config.optim.kind.divides_state();
        worlds.flat_map(move |world| {
            let shards = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Full];
            let shards = shards
                .into_iter()
                .filter(move |shard| *shard == Shard::None || (divides && world > 1));
            shards.map(move |shard| (world, shard))
        })
    }

    fn shards(&self, ranks: usize) -> Result<Option<(Vec<String>, f64)>, RunError> {
        for (world, shard) in self.divisions(ranks) {
            if let Some(bytes) = self.fits(&self.need.on_ranks(world, shard))? {
                return Ok(Some((processes(world, shard), bytes)));
            }
        }
        Ok(None)
    }

    /// The longest pack with the most recomputation and the most shards.
    fn together(&self, ranks: usize) -> Result<Option<(Vec<String>, f64)>, RunError> {
        let (world, shard) = self.divisions(ranks).last().unwrap_or((1, Shard::None));
        let mut settings = if world > 1 { processes(world, shard) } else { Vec::new() };
        let mut need = self.need.on_ranks(world, shard);
        if let Some((setting, changed)) = need.with_recompute().pop() {
            settings.push(setting);
            need = changed;
        }
        Ok(self.longest(&need)?.map(|(length, bytes)| {
            settings.push(packing(length));
            (settings, bytes)
        }))
    }
}

fn packing(length: u32) -> String {
    format!("data.packing_length={length}")
}

fn processes(world: usize, shard: Shard) -> Vec<String> {
    vec![format!("distributed.processes={world}"), format!("distributed.shard={}", shard.name())]
}
