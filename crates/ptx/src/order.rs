//! Which accesses are ordered before which: vector clocks of warps, with the lanes of a warp apart.
//!
//! The clock of a warp is its *epoch*. It advances when all threads of the warp synchronise, so
//! accesses of an earlier epoch are ordered before everything that any of its threads does. Within an
//! epoch, only accesses of the same thread are ordered. A thread may release its accesses within an
//! epoch, for example by an arrival at a barrier in shared memory; the number of releases separates
//! its earlier accesses from later ones, which nothing has released yet.
//!
//! Asynchronous accesses have units of their own. The unit of a barrier in shared memory has the copies
//! of boxes; its epoch is the number of the phase in which they arrive. The unit of the products of a
//! warp has their reads of shared memory; its epoch is the number of the group, which ends when the warp
//! waits for it.

/// An access: its unit, its epoch, the number of releases in it before, and the lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) unit: u16,
    pub(crate) epoch: u32,
    pub(crate) releases: u32,
    pub(crate) lanes: u32,
}

/// Unit of a stamp that no access has.
pub(crate) const NO_ACCESS: Stamp = Stamp { unit: u16::MAX, epoch: 0, releases: 0, lanes: 0 };

impl Stamp {
    /// Names the thread or the asynchronous operation in a block of `num_warps`.
    pub(crate) fn describe(self, num_warps: usize) -> String {
        let unit = usize::from(self.unit);
        if unit < num_warps {
            format!("thread {}", 32 * unit + self.lanes.trailing_zeros() as usize)
        } else {
            "an asynchronous operation".to_owned()
        }
    }
}

/// An access that takes place now, and what is ordered before it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct By<'a> {
    pub(crate) stamp: Stamp,
    /// Of the warp, and in addition of the thread.
    pub(crate) known: [&'a Known; 2],
    /// Whether the access is asynchronous: then others of its unit have no order either.
    pub(crate) is_async: bool,
}

impl By<'_> {
    /// Whether another access is ordered before.
    pub(crate) fn follows(&self, other: Stamp) -> bool {
        let Stamp { unit, epoch, lanes, .. } = self.stamp;
        let is_own = !self.is_async
            && other.unit == unit
            && (other.epoch < epoch || (other.epoch == epoch && other.lanes & !lanes == 0));
        other.unit == NO_ACCESS.unit || is_own || self.known.iter().any(|known| known.has(other))
    }
}

/// Accesses of a unit that are ordered before: all of those of epochs below `epoch`, and in `epoch`
/// those of `lanes` up to a number of releases.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Seen {
    epoch: u32,
    /// Numbers of releases and lanes.
    lanes: Vec<(u32, u32)>,
}

impl Seen {
    /// Those of `lanes` that were seen up to this number of releases.
    fn lanes(&self, releases: u32) -> u32 {
        let later = self.lanes.iter().filter(|(seen, _)| *seen >= releases);
        later.fold(0, |all, (_, lanes)| all | lanes)
    }

    fn add(&mut self, epoch: u32, releases: u32, lanes: u32) {
        if epoch > self.epoch {
            self.epoch = epoch;
            self.lanes.clear();
        }
        if epoch == self.epoch && lanes & !self.lanes(releases) != 0 {
            // earlier entries of these lanes add nothing
            for entry in self.lanes.iter_mut().filter(|(seen, _)| *seen <= releases) {
                entry.1 &= !lanes;
            }
            self.lanes.retain(|(_, lanes)| *lanes != 0);
            self.lanes.push((releases, lanes));
        }
    }
}

/// What is ordered before the next access of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Known(Vec<Seen>);

/// Nothing is ordered before.
pub(crate) static NOTHING: Known = Known(Vec::new());

impl Known {
    /// Whether an access is ordered before.
    pub(crate) fn has(&self, stamp: Stamp) -> bool {
        let Some(seen) = self.0.get(usize::from(stamp.unit)) else { return false };
        stamp.epoch < seen.epoch
            || (stamp.epoch == seen.epoch && stamp.lanes & !seen.lanes(stamp.releases) == 0)
    }

    /// Adds the accesses of `lanes` of a unit in `epoch` up to its number of releases, and all of
    /// earlier epochs.
    pub(crate) fn add(&mut self, Stamp { unit, epoch, releases, lanes }: Stamp) {
        self.seen(usize::from(unit)).add(epoch, releases, lanes);
    }

    fn seen(&mut self, unit: usize) -> &mut Seen {
        if self.0.len() <= unit {
            self.0.resize(unit + 1, Seen::default());
        }
        &mut self.0[unit]
    }

    /// Adds all that `other` has.
    pub(crate) fn join(&mut self, other: &Self) {
        for (unit, Seen { epoch, lanes }) in other.0.iter().enumerate() {
            let seen = self.seen(unit);
            seen.add(*epoch, 0, 0);
            for (releases, lanes) in lanes {
                seen.add(*epoch, *releases, *lanes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_epochs_and_own_lanes_are_ordered() {
        let stamp = |epoch, lanes| Stamp { unit: 3, epoch, releases: 0, lanes };
        let mut known = Known::default();
        assert!(!known.has(stamp(1, 1)));
        known.add(stamp(5, 0b01));
        assert!(known.has(stamp(4, u32::MAX)), "an earlier epoch");
        assert!(known.has(stamp(5, 0b01)) && !known.has(stamp(5, 0b11)), "lanes of this epoch");
        assert!(!known.has(stamp(6, 0b01)));
        let mut other = Known::default();
        other.add(stamp(5, 0b10));
        other.join(&known);
        assert!(other.has(stamp(5, 0b11)));
        other.add(stamp(4, 0b100));
        assert!(!other.has(stamp(5, 0b100)), "an earlier epoch adds nothing");
        other.add(stamp(7, 0));
        assert!(other.has(stamp(6, u32::MAX)) && !other.has(stamp(7, 1)));
    }

    #[test]
    fn accesses_after_a_release_are_not_ordered_by_it() {
        let stamp = |releases, lanes| Stamp { unit: 0, epoch: 5, releases, lanes };
        let mut known = Known::default();
        known.add(stamp(2, 0b01));
        assert!(known.has(stamp(1, 0b01)) && known.has(stamp(2, 0b01)));
        assert!(!known.has(stamp(3, 0b01)), "after the release");
        let mut other = Known::default();
        other.add(stamp(1, 0b11));
        other.join(&known);
        assert!(other.has(stamp(1, 0b11)) && other.has(stamp(2, 0b01)));
        assert!(!other.has(stamp(2, 0b11)), "the second lane released less");
        other.add(stamp(4, 0b11));
        assert_eq!(other.0[0].lanes, [(4, 0b11)]);
    }
}
