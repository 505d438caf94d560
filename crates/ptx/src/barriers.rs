//! Barriers: those of a block, and those in shared memory whose phases copies of boxes end.

use crate::fault::Fault;
use crate::order::{Known, Stamp};
use std::collections::BTreeMap;

/// A barrier of a block (PTX ISA, `bar`).
#[derive(Debug, Default)]
pub(crate) struct Barrier {
    expected: u64,
    /// Warps that have arrived, and those of them that wait.
    arrived: Vec<usize>,
    waiting: Vec<usize>,
    known: Known,
}

const BARRIERS: u64 = 16;

impl Barrier {
    /// A warp arrives. Returns the warps that may go on, and what they know then, if it is the last.
    pub(crate) fn arrive(
        &mut self,
        (id, expected): (u64, u64),
        warp: usize,
        waits: bool,
        released: &Known,
    ) -> Result<Option<(Vec<usize>, Known)>, Fault> {
        if id >= BARRIERS {
            return Err(Fault::BarrierId { id, end: BARRIERS });
        }
        // it may not arrive before all others have for the last time
        if self.arrived.contains(&warp) {
            return Err(Fault::ArrivesAgain { id, warp });
        }
        let is_open = self.is_open();
        self.arrived.push(warp);
        let found = 32 * self.arrived.len() as u64;
        if (is_open && self.expected != expected) || found > expected || expected % 32 != 0 {
            return Err(Fault::BarrierCount { id, expected, found });
        }
        self.expected = expected;
        self.known.join(released);
        if waits {
            self.waiting.push(warp);
        }
        if found < expected {
            return Ok(None);
        }
        let Self { known, waiting, .. } = std::mem::take(self);
        Ok(Some((waiting, known)))
    }

    /// Whether warps have arrived and others have not.
    pub(crate) fn is_open(&self) -> bool {
        !self.arrived.is_empty()
    }
}

/// A barrier in shared memory (PTX ISA, `mbarrier`).
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
    /// Whether a thread has waited for the phase before.
    is_waited_for: bool,
    /// Whether copies have brought bytes in the present phase, and in phases before it for which no
    /// thread has waited.
    has_copies: bool,
    has_unseen_copies: bool,
    /// What the present phase, and those before, release.
    known: Known,
    released: Known,
}

impl MemoryBarrier {
    /// Whether the phase with this parity has ended.
    pub(crate) fn has_ended(&self, parity: bool) -> bool {
        (self.phase % 2 == 1) != parity
    }

    /// A thread has waited for the phase before. Returns what that one and those before released.
    pub(crate) fn wait(&mut self) -> &Known {
        self.is_waited_for = true;
        self.has_unseen_copies = false;
        &self.released
    }

    /// A stamp of a copy of a box whose bytes belong to the present phase.
    pub(crate) fn stamp(&self) -> Stamp {
        Stamp { unit: self.unit, epoch: self.phase + 1, releases: 0, lanes: 1 }
    }

    /// Arrivals, with bytes that the phase expects besides, or bytes that have arrived.
    fn receive(&mut self, arrivals: i64, bytes: i64, known: &Known) -> Result<(), &'static str> {
        self.known.join(known);
        self.pending -= arrivals;
        self.pending_bytes += bytes;
        self.has_copies |= bytes < 0;
        if self.pending < 0 {
            return Err("more arrivals");
        }
        // PTX ISA, "Contents of the mbarrier object": bytes may arrive before the arrival that expects
        // them, up to 2^20 - 1
        if self.pending_bytes.abs() >= 1 << 20 {
            return Err("more bytes");
        }
        if self.pending == 0 && self.pending_bytes < 0 {
            return Err("more bytes");
        }
        if self.pending == 0 && self.pending_bytes == 0 {
            self.phase += 1;
            self.pending = self.count;
            self.known.add(Stamp { lanes: 0, ..self.stamp() });
            self.is_waited_for = false;
            self.has_unseen_copies |= std::mem::take(&mut self.has_copies);
            self.released = self.known.clone();
        }
        Ok(())
    }

    /// Whether copies have brought bytes without a thread that waited for them: they might arrive
    /// after the end of the block.
    pub(crate) fn has_unseen_copies(&self) -> bool {
        self.has_copies || self.has_unseen_copies
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
    /// `num_units`: units before those of barriers.
    pub(crate) fn new(num_units: usize) -> Self {
        Self { all: BTreeMap::new(), num_units: num_units as u16 }
    }

    /// Initialises a barrier. PTX ISA, "Contents of the mbarrier object": a phase has 1 to 2^20 - 1
    /// arrivals.
    pub(crate) fn init(&mut self, at: u64, count: i64) -> Result<(), Fault> {
        if !(1..1 << 20).contains(&count) {
            return Err(Fault::ArrivalCount { count, end: 1 << 20 });
        }
        let unit = self.num_units;
        self.num_units += 1;
        let (known, released) = (Known::default(), Known::default());
        let barrier = MemoryBarrier {
            unit,
            count,
            pending: count,
            pending_bytes: 0,
            phase: 0,
            is_waited_for: true,
            has_copies: false,
            has_unseen_copies: false,
            known,
            released,
        };
        self.all.insert(at, barrier);
        Ok(())
    }

    pub(crate) fn at(&self, at: u64) -> Result<&MemoryBarrier, Fault> {
        self.all.get(&at).ok_or(Fault::NoMemoryBarrier { at })
    }

    pub(crate) fn at_mut(&mut self, at: u64) -> Result<&mut MemoryBarrier, Fault> {
        self.all.get_mut(&at).ok_or(Fault::NoMemoryBarrier { at })
    }

    pub(crate) fn receive(
        &mut self,
        at: u64,
        arrivals: i64,
        bytes: i64,
        known: &Known,
    ) -> Result<(), Fault> {
        let barrier = self.at_mut(at)?;
        // PTX ISA, "Phase of the mbarrier object"
        if arrivals > 0 && !barrier.is_waited_for {
            return Err(Fault::NotWaitedFor { at });
        }
        let received = barrier.receive(arrivals, bytes, known);
        received.map_err(|what| Fault::MemoryBarrierCount { at, what })
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &MemoryBarrier> {
        self.all.values()
    }
}
