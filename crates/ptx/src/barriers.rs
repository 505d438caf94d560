//! Barriers: those of a block, and those in shared memory whose phases copies of boxes end.

use crate::fault::Fault;
use crate::order::{Known, Stamp};
use std::collections::BTreeMap;

/// A barrier of a block (`bar`).
#[derive(Debug, Default)]
pub(crate) struct Barrier {
    expected: u64,
    arrived: u64,
    known: Known,
    /// Warps that wait.
    waiting: Vec<usize>,
}

impl Barrier {
    /// A warp arrives. Returns the warps that may go on, and what they know then, if it is the last.
    pub(crate) fn arrive(
        &mut self,
        (id, expected): (u64, u64),
        warp: usize,
        waits: bool,
        released: &Known,
    ) -> Result<Option<(Vec<usize>, Known)>, Fault> {
        let is_open = self.arrived > 0;
        self.arrived += 32;
        if (is_open && self.expected != expected) || self.arrived > expected || expected % 32 != 0 {
            return Err(Fault::BarrierCount { id, expected, found: self.arrived });
        }
        self.expected = expected;
        self.known.join(released);
        if waits {
            self.waiting.push(warp);
        }
        if self.arrived < expected {
            return Ok(None);
        }
        let Self { known, waiting, .. } = std::mem::take(self);
        Ok(Some((waiting, known)))
    }

    /// Whether warps have arrived and others have not.
    pub(crate) fn is_open(&self) -> bool {
        self.arrived > 0
    }
}

/// A barrier in shared memory (`mbarrier`, section 9.7.13.15).
#[derive(Debug)]
pub(crate) struct MemoryBarrier {
    /// Its unit in stamps.
    unit: u16,
    /// Number of arrivals of a phase.
    count: i64,
    /// Arrivals that the present phase still expects, and bytes of copies.
    pending: i64,
    pending_bytes: i64,
    /// Number of the present phase, from 0.
    phase: u32,
    /// What the present phase, and those before, release.
    known: Known,
    released: Known,
}

impl MemoryBarrier {
    /// Whether the phase with this parity has ended.
    pub(crate) fn has_ended(&self, parity: bool) -> bool {
        (self.phase % 2 == 1) != parity
    }

    pub(crate) fn released(&self) -> &Known {
        &self.released
    }

    /// A stamp of a copy of a box whose bytes belong to the present phase.
    pub(crate) fn stamp(&self) -> Stamp {
        Stamp { unit: self.unit, epoch: self.phase + 1, lanes: 1 }
    }

    /// Arrivals, with bytes that the phase expects besides, or bytes that have arrived.
    fn receive(&mut self, arrivals: i64, bytes: i64, known: &Known) -> Result<(), &'static str> {
        self.known.join(known);
        self.pending -= arrivals;
        self.pending_bytes += bytes;
        if self.pending < 0 {
            return Err("more arrivals");
        }
        // bytes may arrive before the arrival that expects them, up to 2^20 - 1 (section 9.7.13.15.5)
        if self.pending_bytes.abs() >= 1 << 20 {
            return Err("more bytes");
        }
        if self.pending == 0 && self.pending_bytes < 0 {
            return Err("more bytes");
        }
        if self.pending == 0 && self.pending_bytes == 0 {
            self.phase += 1;
            self.pending = self.count;
            self.known.add(Stamp { unit: self.unit, epoch: self.phase + 1, lanes: 0 });
            self.released = self.known.clone();
        }
        Ok(())
    }

    /// Whether bytes are expected that no copy has brought.
    pub(crate) fn expects_bytes(&self) -> bool {
        self.pending_bytes != 0
    }
}

/// The barriers in the shared memory of a block, by their addresses.
#[derive(Debug, Default)]
pub(crate) struct MemoryBarriers {
    all: BTreeMap<u64, MemoryBarrier>,
    num_units: u16,
}

impl MemoryBarriers {
    /// `num_warps`: units before those of barriers.
    pub(crate) fn new(num_warps: usize) -> Self {
        Self { all: BTreeMap::new(), num_units: num_warps as u16 }
    }

    pub(crate) fn init(&mut self, at: u64, count: i64) {
        let unit = self.num_units;
        self.num_units += 1;
        let (known, released) = (Known::default(), Known::default());
        let barrier = MemoryBarrier {
            unit,
            count,
            pending: count,
            pending_bytes: 0,
            phase: 0,
            known,
            released,
        };
        self.all.insert(at, barrier);
    }

    pub(crate) fn at(&self, at: u64) -> Result<&MemoryBarrier, Fault> {
        self.all.get(&at).ok_or(Fault::NoMemoryBarrier { at })
    }

    pub(crate) fn receive(
        &mut self,
        at: u64,
        arrivals: i64,
        bytes: i64,
        known: &Known,
    ) -> Result<(), Fault> {
        let barrier = self.all.get_mut(&at).ok_or(Fault::NoMemoryBarrier { at })?;
        let received = barrier.receive(arrivals, bytes, known);
        received.map_err(|what| Fault::MemoryBarrierCount { at, what })
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &MemoryBarrier> {
        self.all.values()
    }
}
