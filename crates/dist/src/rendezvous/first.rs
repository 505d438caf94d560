//! Rank 0 waits until all other ranks have connected.

use super::Joined;
use super::hello::{
    self, Answer, Hello, Incomplete, MAGIC, MAX_HELLO, Machine, Purpose, local_place, missing,
};
use crate::Rank;
use crate::frame::{self, Inbox, is_closed};
use crate::launcher::Launched;
use ranks::ConnectError;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;

/// Time in which a connection has to send its hello.
const HELLO: Duration = Duration::from_secs(10);
/// Number of connections that wait to be accepted.
#[cfg(unix)]
const QUEUE: i32 = 4096;
/// Time in which the other end has to read the last message.
const CLOSE: Duration = Duration::from_secs(1);

/// Waits for the connections of all other ranks, for at most `timeout`. No rank returns from its
/// call before all are there. Connections that belong to another job are refused.
pub(crate) fn first(
    listener: &TcpListener,
    place: &Launched,
    timeout: Duration,
) -> Result<Joined, ConnectError> {
    let failed = |error: std::io::Error| {
        let address = listener.local_addr().map_or_else(|_| "?".to_owned(), |at| at.to_string());
        ConnectError::Listen { address, problem: error.to_string() }
    };
    listener.set_nonblocking(true).map_err(failed)?;
    // The standard library's queue has 128 places; a connection that finds none is tried again
    // after a second.
    #[cfg(unix)]
    rustix::net::listen(listener, QUEUE).map_err(|error| failed(error.into()))?;
    let begin = Instant::now();
    let own = Hello::new(place);
    let slots = (1..place.world).map(|_| None).collect();
    let table = Arc::new(Mutex::new(Some(Table { own, slots })));
    let max_handshakes = 4 * place.world + 64; // three are usual for each rank
    loop {
        while let Ok((stream, from)) = listener.accept() {
            if Arc::strong_count(&table) <= max_handshakes {
                let table = Arc::clone(&table);
                thread::spawn(move || handshake(stream, from, &table));
            }
        }
        let mut entries = lock(&table);
        let is_late = begin.elapsed() >= timeout;
        let absent = entries.as_mut().map(|entries| entries.absent(is_late)).unwrap_or_default();
        if absent.is_empty() || is_late {
            let all = entries.take().map(|entries| entries.slots).unwrap_or_default();
            drop(entries);
            if absent.is_empty() {
                return Ok(welcome(all.into_iter().flatten().collect(), place));
            }
            return Err(leave(&all, absent, place.world, timeout.as_secs()));
        }
        drop(entries);
        let is_start = begin.elapsed() < Duration::from_secs(5);
        thread::sleep(Duration::from_millis(if is_start { 2 } else { 20 }));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The ranks that have connected; `None` when rank 0 no longer waits.
type Shared = Mutex<Option<Table>>;

struct Table {
    own: Hello,
    /// From rank 1 on.
    slots: Vec<Option<Slot>>,
}

struct Slot {
    process: u64,
    machine: Machine,
    /// A connection for each of [`Purpose::ALL`].
    streams: [Option<TcpStream>; 3],
}

impl Slot {
    fn has_ended(&self) -> bool {
        self.streams.iter().flatten().any(is_closed)
    }
}

impl Table {
    /// The reason why a process is not a rank of this job.
    fn refusal(&self, hello: &Hello) -> Option<String> {
        let Hello { version, job, world, .. } = &self.own;
        Some(if hello.version != *version {
            format!("its version is {}, rank 0 has version {version}", hello.version)
        } else if hello.job != *job {
            format!("its job is `{}`, the job of rank 0 is `{job}`", hello.job)
        } else if hello.world != *world {
            format!("it counts {} ranks, rank 0 counts {world}", hello.world)
        } else if hello.rank == 0 || hello.rank >= *world {
            format!("its rank is {}, expected 1 to {}", hello.rank, world - 1)
        } else {
            return None;
        })
    }

    /// Adds a connection, or returns it with the reason of its refusal.
    fn enter(&mut self, hello: Hello, stream: TcpStream) -> Result<(), (TcpStream, String)> {
        if let Some(reason) = self.refusal(&hello) {
            return Err((stream, reason));
        }
        let Hello { rank, process, machine, purpose, .. } = hello;
        let slot = &mut self.slots[rank - 1];
        if slot.as_ref().is_some_and(|slot| slot.process != process) {
            if slot.as_ref().is_some_and(|slot| !slot.has_ended()) {
                return Err((stream, format!("another process is rank {rank} already")));
            }
            *slot = None;
        }
        let slot =
            slot.get_or_insert_with(|| Slot { process, machine, streams: [None, None, None] });
        slot.streams[purpose as usize] = Some(stream);
        Ok(())
    }

    /// The ranks that have not connected. With `check`, or if no other rank is absent, also those
    /// that have ended since.
    fn absent(&mut self, check: bool) -> Vec<usize> {
        let is_absent = |slot: &Option<Slot>| {
            slot.as_ref().is_none_or(|slot| slot.streams.iter().any(Option::is_none))
        };
        if check || !self.slots.iter().any(is_absent) {
            for slot in &mut self.slots {
                if slot.as_ref().is_some_and(Slot::has_ended) {
                    *slot = None;
                }
            }
        }
        let absent = (1..).zip(&self.slots).filter(|(_, slot)| is_absent(slot));
        absent.map(|(rank, _)| rank).collect()
    }
}

/// Reads the hello of a connection, and enters or rejects it.
fn handshake(stream: TcpStream, from: SocketAddr, table: &Shared) {
    let read = || {
        // Accepted connections do not block on some systems, because the listener does not.
        stream.set_nonblocking(false).map_err(|error| Incomplete(error.to_string()))?;
        stream.set_nodelay(true).map_err(|error| Incomplete(error.to_string()))?;
        hello::receive(&stream, &mut Inbox::new(MAX_HELLO), Instant::now() + HELLO)
    };
    let parse = |bytes: Vec<u8>| serde_json::from_slice(bytes.strip_prefix(MAGIC)?).ok();
    let (stream, reason) = match read().map(parse) {
        Ok(Some(hello)) => match lock(table).as_mut().map(|table| table.enter(hello, stream)) {
            None | Some(Ok(())) => return,
            Some(Err(refused)) => refused,
        },
        Ok(None) => (stream, "it does not send the hello of a rank".to_owned()),
        Err(Incomplete(problem)) => (stream, format!("it does not send a hello: {problem}")),
    };
    warn!("rank 0 has refused a connection from {from}: {reason}");
    answer(&stream, &Answer::Refused(reason));
    frame::close(&[&stream], CLOSE);
}

/// Errors show up later, when the connection is used.
fn answer(stream: &TcpStream, answer: &Answer) {
    let message = serde_json::to_vec(answer).expect("plain values");
    let _ = frame::send(stream, &message);
}

fn welcome(slots: Vec<Slot>, place: &Launched) -> Joined {
    let others = slots.iter().map(|slot| slot.machine.clone());
    let machines: Vec<Machine> = std::iter::once(Machine::this()).chain(others).collect();
    let all = Answer::Welcome(machines.clone());
    let mut lanes = Purpose::ALL.map(|_| Vec::with_capacity(slots.len()));
    for slot in slots {
        for (lane, stream) in lanes.iter_mut().zip(slot.streams.into_iter().flatten()) {
            answer(&stream, &all);
            lane.push(stream);
        }
    }
    let [data, step, monitor] = lanes;
    let hosts = machines.iter().map(|machine| machine.name.clone()).collect();
    Joined { rank: rank(place, &machines), hosts, data, step, monitor }
}

/// The place of this process. What its launcher does not set follows from the machines of all
/// ranks.
pub(super) fn rank(place: &Launched, machines: &[Machine]) -> Rank {
    let (local_rank, local_world) = local_place(machines, place.rank);
    let known = place.local_rank.zip(place.local_world);
    let (local_rank, local_world) = known.unwrap_or((local_rank, local_world));
    Rank { rank: place.rank, world: place.world, local_rank, local_world }
}

/// Ends all ranks that have connected, because others did not.
fn leave(slots: &[Option<Slot>], ranks: Vec<usize>, world: usize, seconds: u64) -> ConnectError {
    let present: Vec<&TcpStream> =
        slots.iter().flatten().flat_map(|slot| slot.streams.iter().flatten()).collect();
    for stream in &present {
        answer(stream, &Answer::Missing { ranks: ranks.clone(), seconds });
    }
    frame::close(&present, CLOSE);
    missing(ranks, world, seconds)
}
