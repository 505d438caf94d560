use super::*;
use crate::frame::{self, Inbox};
use crate::launcher::Launched;
use hello::{Answer, Hello, MAGIC, MAX_ANSWER};
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

type Result<T> = std::result::Result<T, ConnectError>;

/// Runs rank 0 of `world` and, as soon as it listens, `others`.
fn with_first<T: Send>(
    world: usize,
    timeout: Duration,
    others: impl FnOnce(Address) -> T + Send,
) -> (Result<Joined>, T) {
    let (listener, address) = listener();
    thread::scope(|scope| {
        let first = scope.spawn(move || first(&listener, &Launched::of_test(0, world), timeout));
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
    frame::append(&mut bytes, &[MAGIC.as_slice(), &json].concat());
    bytes
}

/// What rank 0 answers, or the reason why it does not.
fn answer(stream: &TcpStream) -> std::result::Result<Answer, String> {
    let deadline = Instant::now() + LONG;
    let message = hello::receive(stream, &mut Inbox::new(MAX_ANSWER), deadline);
    Ok(serde_json::from_slice(&message.map_err(|hello::Incomplete(problem)| problem)?).unwrap())
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
    let expected: Vec<_> =
        (1..world).map(|rank| Rank { rank, world, local_rank: rank, local_world: 64 }).collect();
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
    let lanes = |joined: Joined| [joined.data, joined.step, joined.monitor];
    let others: Vec<_> = others.into_iter().map(|joined| lanes(joined.unwrap())).collect();
    for (lane, streams) in lanes(first).iter().enumerate() {
        for (rank, stream) in streams.iter().enumerate() {
            let far = &others[rank][lane][0];
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
        (stranger(|place| Launched { world: 3, ..place }), "it counts 3 ranks, rank 0 counts 2"),
        (stranger(|place| Launched { rank: 0, ..place }), "its rank is 0, expected 1 to 1"),
        (stranger(|place| Launched { rank: 2, ..place }), "its rank is 2, expected 1 to 1"),
    ];
    let (joined, others) = with_first(2, LONG, |address| {
        for (place, expected) in &cases {
            let error = other(&address, place, LONG).map(|_| ()).unwrap_err();
            assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
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
        frame::append(&mut bytes, message);
        bytes
    };
    let hello = serde_json::to_value(Hello::new(&Launched::of_test(1, 2))).unwrap();
    let mut old = hello.clone();
    old["version"] = "0.0.9".into();
    let with_magic = |json: String| framed(&[MAGIC.as_slice(), json.as_bytes()].concat());
    let noise: Vec<u8> = (0..200u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (joined, others) = with_first(2, LONG, |address| {
        for (bytes, expected) in [
            (noise, "it does not send a hello: its length is"),
            (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), "it does not send a hello: its length"),
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
