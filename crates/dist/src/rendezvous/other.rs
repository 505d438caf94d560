//! The ranks from 1 on connect to rank 0.

use super::Joined;
use super::address::Address;
use super::first::rank;
use super::hello::{self, Answer, Hello, Incomplete, MAGIC, MAX_ANSWER, Purpose, missing};
use crate::frame::{self, Inbox};
use crate::launcher::Launched;
use ranks::ConnectError;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

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
) -> Result<Joined, ConnectError> {
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
                return Err(ConnectError::Refused { address: address.to_string(), reason });
            }
            Ok((Answer::Welcome(_), _)) => {
                let reason = "it counts another number of ranks".to_owned();
                return Err(ConnectError::Refused { address: address.to_string(), reason });
            }
            Err(problem) if Instant::now() + pause >= deadline => {
                let (address, seconds) = (address.to_string(), timeout.as_secs());
                return Err(ConnectError::Unreachable { address, seconds, problem });
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
        frame::send(&stream, &[MAGIC.as_slice(), &json].concat())?;
        Ok::<_, String>(stream)
    };
    let [data, step, monitor] = Purpose::ALL.map(open);
    let streams = [data?, step?, monitor?];
    let mut last = None;
    for stream in &streams {
        let received = hello::receive(stream, &mut Inbox::new(MAX_ANSWER), deadline + LAST_ANSWER);
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
