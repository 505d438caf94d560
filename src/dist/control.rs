//! Connects a process that a launcher has started to the other ranks.

use super::config::{Distributed, Processes};
use super::heartbeat::TcpMonitor;
use super::launcher::Launched;
use super::rendezvous::{self, ConnectError, Joined};
use super::tcp_lane::{TcpLane, Waits};
use super::watch::Watch;
use super::{DistError, Lane, Monitor, Rank};
use std::sync::Arc;
use std::time::Duration;

/// The connections of a rank: everything of a [`super::Group`] except the sums.
pub struct Connections {
    /// The place of this rank.
    pub rank: Rank,
    /// Names of the machines of all ranks.
    pub hosts: Vec<String>,
    /// For the loader.
    pub data: Box<dyn Lane>,
    /// For the thread that trains. Before training, the engine of the sums uses it too.
    pub step: Box<dyn Lane>,
    /// Watches all ranks.
    pub monitor: Arc<dyn Monitor>,
}

/// Connects to all other ranks and starts the monitor. Waits for ranks that have not started yet,
/// for at most `distributed.timeout_s`.
///
/// If later a rank is lost, hangs or fails, `on_failure` runs on every rank, on the thread of its
/// monitor; it may end the process. Then all calls of the lanes return the same error. It does not
/// run on a rank that has called [`Monitor::fail`].
pub fn connect(
    place: &Launched,
    config: &Distributed,
    on_failure: impl Fn(&DistError) + Send + Sync + 'static,
) -> Result<Connections, DistError> {
    let (launcher, world) = (place.launcher, place.world);
    match config.processes {
        Processes::Count(count) if count.get() != world => {
            let expected = count.get();
            return Err(ConnectError::Processes { expected, launcher, world }.into());
        }
        _ => {}
    }
    let timeout = config.timeout();
    let joined = if world == 1 {
        Joined::alone()
    } else if place.rank == 0 {
        rendezvous::first(&rendezvous::listen(place, config)?, place, timeout)?
    } else {
        rendezvous::other(&rendezvous::of_first(place, config)?, place, timeout)?
    };
    assemble(joined, timeout, on_failure)
}

/// Starts the lanes and the monitor on connections.
fn assemble(
    joined: Joined,
    timeout: Duration,
    on_failure: impl Fn(&DistError) + Send + Sync + 'static,
) -> Result<Connections, DistError> {
    let Joined { rank, hosts, data, step, monitor } = joined;
    let watch = Arc::new(Watch::new());
    let place = (rank.rank, rank.world);
    let data = Box::new(TcpLane::new(place, data, Waits::Ignore, &watch)?);
    let step = Box::new(TcpLane::new(place, step, Waits::Count, &watch)?);
    let on_failure = Box::new(on_failure);
    let monitor = TcpMonitor::start(rank.rank, monitor, timeout, &watch, on_failure)?;
    Ok(Connections { rank, hosts, data, step, monitor: Arc::new(monitor) })
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
