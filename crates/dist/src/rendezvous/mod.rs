//! Connects the ranks of a job: rank 0 accepts the connections of all others, which first send
//! their place and what they expect.

mod address;

pub use address::interface_name;
pub(super) use address::{Address, listen, of_first, open_to_others};

use super::Rank;
use crate::launcher::Launched;
use crate::tcp::{self, Arrival, Inbox, is_closed};
use ranks::DistError;
use serde::{Deserialize, Serialize};
use std::hash::{BuildHasher, RandomState};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;

/// The connections of a rank to the others.
pub(super) struct Joined {
    pub(super) rank: Rank,
    /// Names of the machines of all ranks.
    pub(super) hosts: Vec<String>,
    /// The connections for each purpose. Rank 0: one to each other rank, in their order. Others:
    /// one to rank 0.
    pub(super) data: Vec<TcpStream>,
    pub(super) step: Vec<TcpStream>,
    pub(super) monitor: Vec<TcpStream>,
}

impl Joined {
    /// The only rank of a run.
    pub(super) fn alone() -> Self {
        let (data, step, monitor) = (Vec::new(), Vec::new(), Vec::new());
        Self { rank: Rank::ALONE, hosts: vec![Machine::this().name], data, step, monitor }
    }
}

/// First bytes of every connection.
const MAGIC: &[u8; 16] = b"trainer ranks 1\n";
/// Maximum number of bytes of a hello.
const MAX_HELLO: usize = 4096;
/// Maximum number of bytes of an answer, which has the machine names of all ranks.
const MAX_ANSWER: usize = 1 << 24;

/// What a connection is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Purpose {
    Data,
    Step,
    Monitor,
}

impl Purpose {
    const ALL: [Self; 3] = [Self::Data, Self::Step, Self::Monitor];
}

/// The machine of a rank. Containers with different host names count as different machines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Machine {
    /// Its host name.
    name: String,
    /// Distinguishes machines with the same host name.
    boot: String,
}

impl Machine {
    fn this() -> Self {
        let read = |path: &str| files::read_to_string(path).unwrap_or_default().trim().to_owned();
        let name = read("/proc/sys/kernel/hostname");
        Self { name, boot: read("/proc/sys/kernel/random/boot_id") }
    }
}

/// What a rank sends first on each of its connections.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Hello {
    version: String,
    job: String,
    rank: usize,
    world: usize,
    purpose: Purpose,
    /// Distinguishes two processes with the same rank.
    process: u64,
    machine: Machine,
}

impl Hello {
    fn new(place: &Launched) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            job: place.job.clone(),
            rank: place.rank,
            world: place.world,
            purpose: Purpose::Data,
            process: RandomState::new().hash_one(std::process::id()),
            machine: Machine::this(),
        }
    }
}

/// The answer of rank 0 to a hello.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// All ranks are connected; their machines, in the order of the ranks.
    Welcome(Vec<Machine>),
    /// This process is not a rank of the job.
    Refused(String),
    /// Some ranks did not connect in time.
    Missing { ranks: Vec<usize>, seconds: u64 },
}

/// A connection ended before a message was complete.
struct Incomplete(String);

/// Receives a message until `deadline`.
fn receive(
    stream: &TcpStream,
    inbox: &mut Inbox,
    deadline: Instant,
) -> Result<Vec<u8>, Incomplete> {
    loop {
        if let Some(message) = inbox.next().map_err(Incomplete)? {
            return Ok(message);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Incomplete("no answer".to_owned()));
        }
        let limit = left.min(Duration::from_millis(100)).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(limit)).map_err(|error| Incomplete(error.to_string()))?;
        if let Arrival::Closed(problem) = inbox.read(stream) {
            return Err(Incomplete(problem));
        }
    }
}

/// The number of a rank on its machine, and the number of ranks there.
fn local_place(machines: &[Machine], rank: usize) -> (usize, usize) {
    let same = |other: &&Machine| **other == machines[rank];
    (machines[..rank].iter().filter(same).count(), machines.iter().filter(same).count())
}

/// The error of a missing rank.
fn missing(ranks: Vec<usize>, world: usize, seconds: u64) -> DistError {
    DistError::Missing { ranks, world, seconds }
}

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
) -> Result<Joined, DistError> {
    let failed = |error: std::io::Error| {
        let address = listener.local_addr().map_or_else(|_| "?".to_owned(), |at| at.to_string());
        DistError::Listen { address, problem: error.to_string() }
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
type SharedTable = Mutex<Option<Table>>;

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
fn handshake(stream: TcpStream, from: SocketAddr, table: &SharedTable) {
    let read = || {
        // Accepted connections do not block on some systems, because the listener does not.
        stream.set_nonblocking(false).map_err(|error| Incomplete(error.to_string()))?;
        stream.set_nodelay(true).map_err(|error| Incomplete(error.to_string()))?;
        receive(&stream, &mut Inbox::new(MAX_HELLO), Instant::now() + HELLO)
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
    tcp::close(&[&stream], CLOSE);
}

/// Errors show up later, when the connection is used.
fn answer(stream: &TcpStream, answer: &Answer) {
    let message = serde_json::to_vec(answer).expect("plain values");
    let _ = tcp::send(stream, &message);
}

fn welcome(slots: Vec<Slot>, place: &Launched) -> Joined {
    let others = slots.iter().map(|slot| slot.machine.clone());
    let machines: Vec<Machine> = std::iter::once(Machine::this()).chain(others).collect();
    let all = Answer::Welcome(machines.clone());
    let mut channels = Purpose::ALL.map(|_| Vec::with_capacity(slots.len()));
    for slot in slots {
        for (channel, stream) in channels.iter_mut().zip(slot.streams.into_iter().flatten()) {
            answer(&stream, &all);
            channel.push(stream);
        }
    }
    let [data, step, monitor] = channels;
    let hosts = machines.iter().map(|machine| machine.name.clone()).collect();
    Joined { rank: rank(place, &machines), hosts, data, step, monitor }
}

/// The place of this process. What its launcher does not set follows from the machines of all
/// ranks.
fn rank(place: &Launched, machines: &[Machine]) -> Rank {
    let (local_rank, local_world) = local_place(machines, place.rank);
    let known = place.local_rank.zip(place.local_world);
    let (local_rank, local_world) = known.unwrap_or((local_rank, local_world));
    Rank { rank: place.rank, world: place.world, local_rank, local_world }
}

/// Ends all ranks that have connected, because others did not.
fn leave(slots: &[Option<Slot>], ranks: Vec<usize>, world: usize, seconds: u64) -> DistError {
    let present: Vec<&TcpStream> =
        slots.iter().flatten().flat_map(|slot| slot.streams.iter().flatten()).collect();
    for stream in &present {
        answer(stream, &Answer::Missing { ranks: ranks.clone(), seconds });
    }
    tcp::close(&present, CLOSE);
    missing(ranks, world, seconds)
}

/// Maximum time of one attempt to connect.
const CONNECT: Duration = Duration::from_secs(5);
/// Time after the deadline in which rank 0 may still name the missing ranks.
const LAST_ANSWER: Duration = Duration::from_secs(2);
/// Pauses between attempts double from the first to the second.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(500)];

/// Connects to rank 0, which may not have started yet, and waits until all ranks have connected,
/// for at most `timeout`.
pub(crate) fn other(
    address: &Address,
    place: &Launched,
    timeout: Duration,
) -> Result<Joined, DistError> {
    let deadline = Instant::now() + timeout;
    let hello = Hello::new(place);
    let mut pause = PAUSES[0];
    loop {
        match attempt(address, &hello, deadline) {
            Ok((Answer::Welcome(machines), streams)) if machines.len() == place.world => {
                let [data, step, monitor] = streams.map(|stream| vec![stream]);
                let hosts = machines.iter().map(|machine| machine.name.clone()).collect();
                return Ok(Joined { rank: rank(place, &machines), hosts, data, step, monitor });
            }
            Ok((Answer::Missing { ranks, seconds }, _)) => {
                return Err(missing(ranks, place.world, seconds));
            }
            Ok((Answer::Refused(reason), _)) => {
                return Err(DistError::Refused { address: address.to_string(), reason });
            }
            Ok((Answer::Welcome(_), _)) => {
                let reason = "it counts another number of ranks".to_owned();
                return Err(DistError::Refused { address: address.to_string(), reason });
            }
            Err(problem) if Instant::now() + pause >= deadline => {
                let (address, seconds) = (address.to_string(), timeout.as_secs());
                return Err(DistError::Unreachable { address, seconds, problem });
            }
            Err(_) => {} // rank 0 may still start
        }
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSES[1]);
    }
}

/// Opens all connections, and waits for the answer of rank 0.
fn attempt(
    address: &Address,
    hello: &Hello,
    deadline: Instant,
) -> Result<(Answer, [TcpStream; 3]), String> {
    let open = |purpose| {
        let stream = connect(address, deadline)?;
        let json = serde_json::to_vec(&Hello { purpose, ..hello.clone() }).expect("plain values");
        tcp::send(&stream, &[MAGIC.as_slice(), &json].concat())?;
        Ok::<_, String>(stream)
    };
    let [data, step, monitor] = Purpose::ALL.map(open);
    let streams = [data?, step?, monitor?];
    let mut last = None;
    for stream in &streams {
        let received = receive(stream, &mut Inbox::new(MAX_ANSWER), deadline + LAST_ANSWER);
        let message = received.map_err(|Incomplete(problem)| {
            format!("it accepts connections, but does not start the run: {problem}")
        })?;
        let answer = serde_json::from_slice(&message)
            .map_err(|_| "it does not answer as rank 0 of a run".to_owned())?;
        if !matches!(answer, Answer::Welcome(_)) {
            return Ok((answer, streams));
        }
        last = Some(answer);
    }
    Ok((last.expect("three connections"), streams))
}

fn connect(address: &Address, deadline: Instant) -> Result<TcpStream, String> {
    let mut problem = String::new();
    for at in address.resolve()? {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = left.clamp(Duration::from_millis(100), CONNECT);
        let connected = TcpStream::connect_timeout(&at, limit)
            .and_then(|stream| stream.set_nodelay(true).map(|()| stream));
        match connected {
            // A connection to a port that the system may choose for this end can be one to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                "nothing listens there".clone_into(&mut problem);
            }
            Ok(stream) => return Ok(stream),
            Err(error) => problem = error.to_string(),
        }
    }
    Err(problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launcher::Launched;
    use crate::tcp::{self, Inbox};
    use std::io::Write;
    use std::net::TcpListener;
    use std::thread;
    use std::time::{Duration, Instant};

    const LONG: Duration = Duration::from_mins(1);

    fn listener() -> (TcpListener, Address) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, Address { host: "127.0.0.1".to_owned(), port })
    }

    type Result<T> = std::result::Result<T, DistError>;

    /// Runs rank 0 of `world` and, as soon as it listens, `others`.
    fn with_first<T: Send>(
        world: usize,
        timeout: Duration,
        others: impl FnOnce(Address) -> T + Send,
    ) -> (Result<Joined>, T) {
        let (listener, address) = listener();
        thread::scope(|scope| {
            let first =
                scope.spawn(move || first(&listener, &Launched::of_test(0, world), timeout));
            let others = others(address);
            (first.join().unwrap(), others)
        })
    }

    /// Connects ranks as threads.
    fn join(address: &Address, places: &[Launched]) -> Vec<Result<Joined>> {
        thread::scope(|scope| {
            let start = |place| scope.spawn(move || other(address, place, LONG));
            let threads: Vec<_> = places.iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn raw(address: &Address, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect((&address.host[..], address.port)).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    }

    /// The hello of a process, for its first connection.
    fn hello_of(process: u64, rank: usize, world: usize) -> Vec<u8> {
        let json =
            serde_json::to_vec(&Hello { process, ..Hello::new(&Launched::of_test(rank, world)) })
                .unwrap();
        let mut bytes = Vec::new();
        tcp::append(&mut bytes, &[MAGIC.as_slice(), &json].concat());
        bytes
    }

    /// What rank 0 answers, or the reason why it does not.
    fn answer(stream: &TcpStream) -> std::result::Result<Answer, String> {
        let deadline = Instant::now() + LONG;
        let message = receive(stream, &mut Inbox::new(MAX_ANSWER), deadline);
        Ok(serde_json::from_slice(&message.map_err(|Incomplete(problem)| problem)?).unwrap())
    }

    fn refusal(stream: &TcpStream) -> String {
        match answer(stream).unwrap() {
            Answer::Refused(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sixty_four_ranks_connect() {
        let world = 64;
        let begin = Instant::now();
        let places: Vec<_> = (1..world).map(|rank| Launched::of_test(rank, world)).collect();
        let (first, others) = with_first(world, LONG, |address| join(&address, &places));
        let first = first.unwrap();
        assert_eq!([&first.data, &first.step, &first.monitor].map(Vec::len), [63; 3]);
        let ranks: Vec<_> = others.into_iter().map(|joined| joined.unwrap().rank).collect();
        let expected: Vec<_> = (1..world)
            .map(|rank| Rank { rank, world, local_rank: rank, local_world: 64 })
            .collect();
        assert_eq!(ranks, expected);
        // 0.1 s on an idle machine
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    }

    #[test]
    fn connections_belong_to_the_rank_and_purpose_that_both_ends_assume() {
        let (first, others) = with_first(3, LONG, |address| {
            join(&address, &[Launched::of_test(1, 3), Launched::of_test(2, 3)])
        });
        let first = first.unwrap();
        let channels = |joined: Joined| [joined.data, joined.step, joined.monitor];
        let others: Vec<_> = others.into_iter().map(|joined| channels(joined.unwrap())).collect();
        for (channel, streams) in channels(first).iter().enumerate() {
            for (rank, stream) in streams.iter().enumerate() {
                let far = &others[rank][channel][0];
                assert_eq!(stream.peer_addr().unwrap(), far.local_addr().unwrap());
            }
        }
    }

    #[test]
    fn ranks_wait_for_a_rank_0_that_starts_later() {
        let (listener, address) = listener();
        drop(listener); // nothing listens there for a while
        let place_1 = [Launched::of_test(1, 2)];
        let (joined, others) = thread::scope(|scope| {
            let others = scope.spawn(|| join(&address, &place_1));
            thread::sleep(Duration::from_millis(100));
            let listener = TcpListener::bind(("127.0.0.1", address.port)).unwrap();
            (first(&listener, &Launched::of_test(0, 2), LONG), others.join().unwrap())
        });
        assert_eq!(joined.unwrap().rank.world, 2);
        assert_eq!(others[0].as_ref().unwrap().rank.rank, 1);
    }

    #[test]
    fn strangers_are_refused_and_the_run_starts() {
        let stranger = |change: fn(Launched) -> Launched| change(Launched::of_test(1, 2));
        let cases = [
            (
                stranger(|place| Launched { job: "x".into(), ..place }),
                "its job is `x`, the job of rank",
            ),
            (
                stranger(|place| Launched { world: 3, ..place }),
                "it counts 3 ranks, rank 0 counts 2",
            ),
            (stranger(|place| Launched { rank: 0, ..place }), "its rank is 0, expected 1 to 1"),
            (stranger(|place| Launched { rank: 2, ..place }), "its rank is 2, expected 1 to 1"),
        ];
        let (joined, others) = with_first(2, LONG, |address| {
            for (place, expected) in &cases {
                let error = other(&address, place, LONG).map(|_| ()).unwrap_err();
                assert!(matches!(error, DistError::Refused { .. }), "{error}");
                assert!(error.to_string().contains(expected), "{error}");
            }
            join(&address, &[Launched::of_test(1, 2)])
        });
        joined.unwrap();
        assert!(others.iter().all(std::result::Result::is_ok));
    }

    #[test]
    fn bytes_that_are_not_a_hello_are_refused_and_the_run_starts() {
        let framed = |message: &[u8]| {
            let mut bytes = Vec::new();
            tcp::append(&mut bytes, message);
            bytes
        };
        let hello = serde_json::to_value(Hello::new(&Launched::of_test(1, 2))).unwrap();
        let mut old = hello.clone();
        old["version"] = "0.0.9".into();
        let with_magic = |json: String| framed(&[MAGIC.as_slice(), json.as_bytes()].concat());
        let noise: Vec<u8> =
            (0..200u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let (joined, others) = with_first(2, LONG, |address| {
            for (bytes, expected) in [
                (noise, "it does not send a hello: its length is"),
                (
                    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
                    "it does not send a hello: its length",
                ),
                (framed(hello.to_string().as_bytes()), "it does not send the hello of a rank"),
                (with_magic("{}".to_owned()), "it does not send the hello of a rank"),
                (with_magic(old.to_string()), "its version is 0.0.9, rank 0 has version"),
            ] {
                let reason = refusal(&raw(&address, &bytes));
                assert!(reason.starts_with(expected), "{reason}");
            }
            let silent = raw(&address, b"trai"); // does not hold up the others
            let joined = join(&address, &[Launched::of_test(1, 2)]);
            drop(silent);
            joined
        });
        joined.unwrap();
        assert!(others.iter().all(std::result::Result::is_ok));
    }

    #[test]
    fn a_second_process_with_the_same_rank_is_refused_while_the_first_runs() {
        let (joined, others) = with_first(3, LONG, |address| {
            let both = [1, 2].map(|process| raw(&address, &hello_of(process, 1, 3)));
            let refused = loop {
                let is_answered = |stream: &TcpStream| {
                    stream.set_nonblocking(true).unwrap();
                    stream.peek(&mut [0]).is_ok()
                };
                match both.iter().position(is_answered) {
                    Some(index) => break index,
                    None => thread::sleep(Duration::from_millis(5)),
                }
            };
            both[refused].set_nonblocking(false).unwrap();
            assert_eq!(refusal(&both[refused]), "another process is rank 1 already");
            drop(both); // now another process can be rank 1
            join(&address, &[Launched::of_test(1, 3), Launched::of_test(2, 3)])
        });
        joined.unwrap();
        assert!(others.iter().all(std::result::Result::is_ok));
    }

    #[test]
    fn missing_ranks_are_named_on_all_ranks_at_the_deadline() {
        let timeout = Duration::from_secs(1);
        let (joined, others) = with_first(4, timeout, |address| {
            drop(raw(&address, &hello_of(1, 3, 4))); // ends before the others connect
            join(&address, &[Launched::of_test(1, 4)])
        });
        let message = "2 of 4 ranks did not connect within 1 s: [2, 3]";
        assert_eq!(joined.map(|_| ()).unwrap_err().to_string(), message);
        for error in others.into_iter().map(|joined| joined.map(|_| ()).unwrap_err()) {
            assert_eq!(error.to_string(), message);
        }
    }

    #[test]
    fn a_rank_0_that_never_starts_is_an_error_with_its_address() {
        let (listener, address) = listener();
        drop(listener);
        let error = other(&address, &Launched::of_test(1, 2), Duration::from_millis(200))
            .map(|_| ())
            .unwrap_err();
        let message = error.to_string();
        let expected = format!("rank 0 was not found at {address} within 0 s: Connection refused");
        assert!(message.starts_with(&expected), "{message}");
    }

    #[test]
    fn ranks_count_from_0_on_each_machine() {
        let machine = |name: &str, boot: &str| Machine { name: name.into(), boot: boot.into() };
        let machines = [("a", "1"), ("b", "2"), ("a", "1"), ("a", "3")]
            .map(|(name, boot)| machine(name, boot));
        let places: Vec<_> = (0..4).map(|rank| local_place(&machines, rank)).collect();
        assert_eq!(places, [(0, 2), (0, 1), (1, 2), (0, 1)]);
    }
}
