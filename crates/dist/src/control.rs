//! Connects a process that a launcher has started to the other ranks.

use super::config::{Distributed, Processes};
use super::heartbeat::TcpMonitor;
use super::launcher::Launched;
use super::rank_state::{RankState, Waits};
use super::rendezvous::{self, Joined};
use super::tcp::TcpChannel;
use super::{
    Channel, Collective, DistError, Exchange, Gather, Group, Monitor, Rank, Reduce, Ticket,
};
use candle_core::{Device, Tensor};
use std::sync::Arc;
use std::time::Duration;

/// The connections of a rank: everything of a [`super::Group`] except the sums.
pub struct Connections {
    /// The place of this rank.
    pub rank: Rank,
    /// Names of the machines of all ranks.
    pub hosts: Vec<String>,
    /// For the loader.
    pub data: Box<dyn Channel>,
    /// For the thread that trains. Before training, the engine of the sums uses it too.
    pub step: Box<dyn Channel>,
    /// Watches all ranks.
    pub monitor: Arc<dyn Monitor>,
    rank_state: Arc<RankState>,
}

impl Connections {
    /// Completes the group with an engine for the sums, and the device on which it needs them. A
    /// rank that waits for its sums counts as waiting for other ranks.
    pub fn group(
        self,
        shard_group: usize,
        sums: Arc<dyn Collective>,
        device: Option<Device>,
    ) -> Group {
        let Self { rank, hosts: _, data, step, monitor, rank_state } = self;
        let sums = Arc::new(WatchedSums { sums, rank_state });
        Group { rank, data, step, shard_group, sums, device, monitor }
    }
}

struct WatchedSums {
    sums: Arc<dyn Collective>,
    rank_state: Arc<RankState>,
}

impl Collective for WatchedSums {
    fn start_sum(&self, tensors: Vec<Tensor>) -> Result<Ticket, DistError> {
        self.sums.start_sum(tensors)
    }

    fn start_reduce(&self, reduce: Reduce) -> Result<Ticket, DistError> {
        self.sums.start_reduce(reduce)
    }

    fn start_gather(&self, gather: Gather) -> Result<Ticket, DistError> {
        self.sums.start_gather(gather)
    }

    fn start_exchange(&self, exchange: Exchange) -> Result<Ticket, DistError> {
        self.sums.start_exchange(exchange)
    }

    fn error(&self) -> Option<DistError> {
        self.sums.error()
    }

    fn wait_for(&self, ticket: Ticket) -> Result<(), DistError> {
        self.rank_state.while_waiting(Waits::Rank, || self.sums.wait_for(ticket))
    }

    fn wait(&self) -> Result<(), DistError> {
        self.rank_state.while_waiting(Waits::Rank, || self.sums.wait())
    }

    fn finish(&self) -> Result<(), DistError> {
        self.rank_state.while_waiting(Waits::Rank, || self.sums.finish())
    }
}

/// Connects to all other ranks and starts the monitor. Waits for ranks that have not started yet,
/// for at most `distributed.timeout_s`.
///
/// If later a rank is lost, hangs or fails, `on_failure` runs on every rank, on the thread of its
/// monitor; it may end the process. Then all calls of the channels return the same error. It does
/// not run on a rank that has called [`Monitor::fail`].
pub fn connect(
    place: &Launched,
    config: &Distributed,
    on_failure: impl Fn(&DistError) + Send + Sync + 'static,
) -> Result<Connections, DistError> {
    let (launcher, world) = (place.launcher, place.world);
    match config.processes {
        Processes::Count(count) if count.get() != world => {
            let expected = count.get();
            return Err(DistError::Processes { expected, launcher, world });
        }
        _ => {}
    }
    let timeout = config.timeout();
    let joined = if world == 1 {
        Joined::alone()
    } else if place.rank == 0 {
        let listener = rendezvous::listen(place, config)?;
        let at = listener.local_addr().ok();
        if let Some(warning) = at.and_then(|at| rendezvous::open_to_others(place, at)) {
            tracing::warn!("{warning}");
        }
        rendezvous::first(&listener, place, timeout)?
    } else {
        rendezvous::other(&rendezvous::of_first(place, config)?, place, timeout)?
    };
    assemble(joined, timeout, on_failure)
}

/// Starts the channels and the monitor on connections.
fn assemble(
    joined: Joined,
    timeout: Duration,
    on_failure: impl Fn(&DistError) + Send + Sync + 'static,
) -> Result<Connections, DistError> {
    let Joined { rank, hosts, data, step, monitor } = joined;
    let rank_state = Arc::new(RankState::new());
    let place = (rank.rank, rank.world);
    let data = Box::new(TcpChannel::new(place, data, Waits::Loader, &rank_state)?);
    let step = Box::new(TcpChannel::new(place, step, Waits::Rank, &rank_state)?);
    let on_failure = Box::new(on_failure);
    let monitor = TcpMonitor::start(rank.rank, monitor, timeout, &rank_state, on_failure)?;
    Ok(Connections { rank, hosts, data, step, monitor: Arc::new(monitor), rank_state })
}

#[cfg(test)]
mod tests;
