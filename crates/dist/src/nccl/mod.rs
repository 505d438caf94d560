//! Sums over ranks with NCCL, for tensors on GPUs.
//!
//! NCCL is loaded at run time, so that a binary with CUDA starts without it. Sums run on a stream
//! of their own, at the same time as the computation. `plan` computes from sizes what all ranks do,
//! `sums` starts it, and `library` has NCCL's functions, turns its results into errors, and has the
//! order of the two streams. The tests run on host memory, with a stand-in for NCCL
//! (`tests/fixtures/nccl`).

mod library;
mod plan;
mod sums;
#[cfg(test)]
mod tests;

use super::{Channel, Collective, DistError, Exchange, Gather, Rank, Reduce, Ticket, gather};
use candle_core::{Device, Tensor};
use library::{Communicator, Library, Streams, UniqueId};
use plan::Sizes;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use sums::{Sums, Way};

/// How [`Nccl`] works.
#[derive(Debug, Clone)]
pub struct NcclOptions {
    /// The library, as a path or as a name that the system's loader finds.
    pub library: PathBuf,
    /// Number of ranks of a shard group, which divides the number of ranks.
    pub shard_group: usize,
    /// Adds the values of the ranks in the order that [`HostCollective`](super::HostCollective)
    /// uses, so that the result does not depend on the number of ranks. Otherwise NCCL chooses the
    /// order.
    pub exact: bool,
    /// Maximum time to connect to the other ranks, and to wait for the last sums.
    pub timeout: Duration,
}

/// Sums tensors on GPUs with NCCL, one GPU per rank. Results have the same bits on all ranks.
///
/// An error ends the communicator: this rank's GPU stops waiting for others, and all later calls
/// return the same error. So does dropping it without [`Collective::finish`].
pub struct Nccl {
    communicator: Arc<Communicator>,
    timeout: Duration,
    /// Moved out, and never freed, if the communication stream may still use the buffers at the
    /// end.
    sums: Option<Mutex<Sums>>,
}

/// What each rank sends to all others before it joins the communicator.
#[derive(Serialize, Deserialize)]
struct NcclHello {
    /// Rank, world, rank on the node, ranks on the node.
    place: [usize; 4],
    /// The version of NCCL, or why this rank cannot join.
    version: Result<i32, String>,
    /// From rank 0: the id of the communicator.
    id: Vec<u8>,
}

impl Nccl {
    /// Usual value of [`NcclOptions::library`].
    pub const LIBRARY: &str = "libnccl.so.2";

    /// Joins all ranks that call this, each with a GPU of its own. A rank that cannot join ends the
    /// attempt for all.
    pub fn connect(
        rank: Rank,
        channel: &mut dyn Channel,
        device: &Device,
        options: &NcclOptions,
    ) -> Result<Self, DistError> {
        let streams = open_streams(device).map_err(|error| DistError::Collective {
            operation: "creating a stream for NCCL",
            problem: error.to_string(),
        });
        let opened = streams.and_then(|streams| Ok((streams, Library::load(&options.library)?)));
        Self::join(rank, channel, device, options, Sizes::USUAL, opened)
    }

    fn join(
        rank: Rank,
        channel: &mut dyn Channel,
        device: &Device,
        options: &NcclOptions,
        sizes: Sizes,
        opened: Result<(Box<dyn Streams>, Library), DistError>,
    ) -> Result<Self, DistError> {
        let prepared = opened.and_then(|(streams, library)| {
            let id = if rank.is_first() { new_id(&library)? } else { Vec::new() };
            Ok((streams, library, id))
        });
        let (version, id) = match &prepared {
            Ok((_, library, id)) => (Ok(library.version()), id.clone()),
            Err(error) => (Err(error.to_string()), Vec::new()),
        };
        let Rank { rank: own, world, local_rank, local_world } = rank;
        let hello = NcclHello { place: [own, world, local_rank, local_world], version, id };
        let hellos = gather(channel, &hello)?;
        let (streams, library, _) = prepared?;
        let (ranks, id) = agree(&hellos)?;
        let on_device = |error: candle_core::Error| DistError::Collective {
            operation: "allocating buffers for sums over ranks",
            problem: error.to_string(),
        };
        streams.bind().map_err(on_device)?;
        let communicator = Arc::new(Communicator::join(library, rank, id, options.timeout)?);
        let exact = || Way::Exact(plan::levels(rank, &ranks));
        let way = if options.exact { exact() } else { Way::Fast };
        let groups = plan::groups(rank, options.shard_group);
        let sums = Sums::new(Arc::clone(&communicator), streams, device, sizes, way, groups);
        let sums = sums.map_err(|error| {
            communicator.abort();
            on_device(error)
        })?;
        let sums = Some(Mutex::new(sums));
        Ok(Self { communicator, timeout: options.timeout, sums })
    }

    /// Ends all sums of this rank at once, with wrong results, and makes later calls return
    /// [`DistError::Closed`]. Works from any thread, also while another one waits in a call.
    pub fn abort(&self) {
        self.communicator.abort();
    }

    /// Returns an error if a running sum has failed, for example because another rank was lost.
    pub fn check(&self) -> Result<(), DistError> {
        self.communicator.check()
    }

    fn sums(&self) -> MutexGuard<'_, Sums> {
        let sums = self.sums.as_ref().expect("taken only on drop");
        sums.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective for Nccl {
    fn start_sum(&self, tensors: Vec<Tensor>) -> Result<Ticket, DistError> {
        self.sums().start(tensors)
    }

    fn start_reduce(&self, reduce: Reduce) -> Result<Ticket, DistError> {
        self.sums().start_reduce(reduce)
    }

    fn start_gather(&self, gather: Gather) -> Result<Ticket, DistError> {
        self.sums().start_gather(gather)
    }

    fn start_exchange(&self, exchange: Exchange) -> Result<Ticket, DistError> {
        self.sums().start_exchange(exchange)
    }

    fn wait_for(&self, ticket: Ticket) -> Result<(), DistError> {
        self.sums().wait_for(ticket)
    }

    fn wait(&self) -> Result<(), DistError> {
        self.sums().wait()
    }

    fn error(&self) -> Option<DistError> {
        self.check().err()
    }

    fn finish(&self) -> Result<(), DistError> {
        let sums = self.sums();
        let check = || self.communicator.check();
        if !until_complete(&sums, self.timeout, check)? {
            let problem = format!("not complete after {} s", self.timeout.as_secs_f64());
            return Err(self.communicator.failed("the last sums over ranks", &problem));
        }
        self.communicator.close()
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let Some(sums) = self.sums.take() else { return };
        let sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.communicator.abort(); // nothing to do after `finish`
        // The operations end now. If they do not, their memory must not be used by others.
        if !until_complete(&sums, Duration::from_secs(1), || Ok(())).unwrap_or_default() {
            std::mem::forget(sums);
        }
    }
}

/// Waits until all sums are complete, or `check` fails. Returns whether they are complete.
fn until_complete(
    sums: &Sums,
    timeout: Duration,
    check: impl Fn() -> Result<(), DistError>,
) -> Result<bool, DistError> {
    let begin = Instant::now();
    while !sums.are_complete()? {
        if begin.elapsed() > timeout {
            return Ok(false);
        }
        check()?;
        thread::sleep(Duration::from_millis(1));
    }
    Ok(true)
}

fn new_id(library: &Library) -> Result<Vec<u8>, DistError> {
    let failed =
        |code| DistError::Collective { operation: "ncclGetUniqueId", problem: library.text(code) };
    Ok(library.unique_id().map_err(failed)?.0.to_vec())
}

/// Returns the places of all ranks and the id of the communicator, if all ranks can join it.
fn agree(hellos: &[NcclHello]) -> Result<(Vec<Rank>, UniqueId), DistError> {
    let mut versions = Vec::new();
    let mut ranks = Vec::new();
    for (rank, hello) in hellos.iter().enumerate() {
        match &hello.version {
            Ok(version) => versions.push(*version),
            Err(message) => return Err(DistError::Failed { rank, message: message.clone() }),
        }
        let [rank, world, local_rank, local_world] = hello.place;
        ranks.push(Rank { rank, world, local_rank, local_world });
    }
    if let Some(other) = versions.iter().position(|version| *version != versions[0]) {
        let (first, second) = (versions[0], versions[other]);
        return Err(DistError::Collective {
            operation: "joining the ranks",
            problem: format!(
                "rank 0 has NCCL {first}, rank {other} has NCCL {second}: install the same version \
                 on all nodes"
            ),
        });
    }
    let id = hellos[0].id.as_slice().try_into().map_err(|_| DistError::Message {
        rank: 0,
        problem: format!("the id of NCCL has {} bytes, expected 128", hellos[0].id.len()),
    })?;
    Ok((ranks, UniqueId(id)))
}

#[cfg(feature = "cuda")]
fn open_streams(device: &Device) -> candle_core::Result<Box<dyn Streams>> {
    Ok(Box::new(kernels::SideStream::new(device)?))
}

#[cfg(not(feature = "cuda"))]
fn open_streams(_: &Device) -> candle_core::Result<Box<dyn Streams>> {
    candle_core::bail!("this build has no CUDA support, which NCCL needs")
}
