//! Which accesses are ordered before which: vector clocks of warps, with the lanes of a warp apart.
//!
//! The clock of a warp is its *epoch*. It advances when all threads of the warp synchronise, so
//! accesses of an earlier epoch are ordered before everything that any of its threads does. Within an
//! epoch, only accesses of the same thread are ordered. Barriers in shared memory are units with a
//! clock too: their epoch is the number of the phase in which copies of boxes arrive.

/// An access: a warp or a barrier, its epoch, and the lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) unit: u16,
    pub(crate) epoch: u32,
    pub(crate) lanes: u32,
}

/// Accesses of a unit that are ordered before: those of epochs below `epoch`, and those of `lanes` in
/// `epoch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Seen {
    epoch: u32,
    lanes: u32,
}

/// What is ordered before the next access of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Known(Vec<Seen>);

impl Known {
    /// Whether an access is ordered before.
    pub(crate) fn has(&self, stamp: Stamp) -> bool {
        let seen = self.0.get(usize::from(stamp.unit)).copied().unwrap_or_default();
        stamp.epoch < seen.epoch || (stamp.epoch == seen.epoch && stamp.lanes & !seen.lanes == 0)
    }

    /// Adds the accesses of `lanes` of a unit in `epoch`, and all of earlier epochs.
    pub(crate) fn add(&mut self, Stamp { unit, epoch, lanes }: Stamp) {
        let unit = usize::from(unit);
        if self.0.len() <= unit {
            self.0.resize(unit + 1, Seen::default());
        }
        let seen = &mut self.0[unit];
        if epoch > seen.epoch {
            *seen = Seen { epoch, lanes };
        } else if epoch == seen.epoch {
            seen.lanes |= lanes;
        }
    }

    /// Adds all that `other` has.
    pub(crate) fn join(&mut self, other: &Self) {
        for (unit, Seen { epoch, lanes }) in other.0.iter().enumerate() {
            self.add(Stamp { unit: unit as u16, epoch: *epoch, lanes: *lanes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_epochs_and_own_lanes_are_ordered() {
        let stamp = |epoch, lanes| Stamp { unit: 3, epoch, lanes };
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
}
