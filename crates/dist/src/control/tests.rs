use super::*;
use rendezvous::Address;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

const LONG: Duration = Duration::from_mins(1);
/// For tests that wait until it is over.
const SHORT: Duration = Duration::from_secs(2);

fn place(rank: usize, world: usize) -> Launched {
    Launched { local_world: Some(world), ..Launched::of_test(rank, world) }
}

/// Connects ranks as threads and calls `f` on each of them.
fn joined<T: Send>(world: usize, f: impl Fn(Joined) -> T + Sync) -> Vec<T> {
    joined_through(world, &|_, port| port, f)
}

/// As [`joined`]. Ranks connect to the port that `through` returns for them and the port of rank 0.
fn joined_through<T: Send>(
    world: usize,
    through: &(impl Fn(usize, u16) -> u16 + Sync),
    f: impl Fn(Joined) -> T + Sync,
) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = |rank| Address { host: "127.0.0.1".to_owned(), port: through(rank, port) };
    let join = |rank| match rank {
        0 => rendezvous::first(&listener, &place(0, world), LONG),
        _ => rendezvous::other(&address(rank), &place(rank, world), LONG),
    };
    let (join, f) = (&join, &f);
    thread::scope(|scope| {
        let start = |rank| scope.spawn(move || f(join(rank).unwrap()));
        let ranks: Vec<_> = (0..world).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Calls `f` on each rank, with the errors that end the rank.
fn on_ranks<T: Send>(
    world: usize,
    timeout: Duration,
    f: impl Fn(Connections, Receiver<DistError>) -> T + Sync,
) -> Vec<T> {
    joined(world, |joined| {
        let (connections, failures) = started(joined, timeout);
        f(connections, failures)
    })
}

fn started(joined: Joined, timeout: Duration) -> (Connections, Receiver<DistError>) {
    let (failed, failures) = channel();
    let failed = Mutex::new(failed);
    let on_failure = move |error: &DistError| {
        let _ = failed.lock().unwrap().send(error.clone()); // fails if the test is over
    };
    (assemble(joined, timeout, on_failure).unwrap(), failures)
}

/// Runs `test` for rank 0 and for another rank, at the same time because it waits.
fn for_both(test: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        scope.spawn(|| test(0));
        scope.spawn(|| test(2));
    });
}

/// The error that ends a rank.
fn failure(failures: &Receiver<DistError>) -> DistError {
    failures.recv_timeout(LONG).unwrap()
}

#[test]
fn channels_keep_the_order_and_the_bytes_of_messages_of_every_size() {
    let sizes = [0, 1, 3_000_000, 0, 17, 70_000];
    let message = |rank: usize, call: usize| {
        let len = sizes[(call + rank) % sizes.len()];
        (0..len).map(|at| (at * 31 + rank * 7 + call) as u8).collect::<Vec<_>>()
    };
    let world = 3;
    on_ranks(world, LONG, |mut ranks, failures| {
        let rank = ranks.rank.rank;
        for call in 0..2 * sizes.len() {
            let expected: Vec<_> = (0..world).map(|rank| message(rank, call)).collect();
            assert!(ranks.data.all_gather(message(rank, call)).unwrap() == expected, "{call}");
            assert!(ranks.step.all_gather(message(rank, call)).unwrap() == expected, "{call}");
        }
        let own = vec![rank as u8; 128];
        assert_eq!(ranks.step.message_of_first(own).unwrap(), [0; 128]);
        ranks.monitor.finish();
        assert!(failures.try_recv().is_err());
    });
}

#[test]
fn a_channel_is_quick() {
    let begin = Instant::now();
    on_ranks(4, LONG, |mut ranks, _failures| {
        for _ in 0..200 {
            ranks.step.all_gather(vec![0; 64]).unwrap();
        }
        ranks.monitor.finish();
    });
    // 0.03 s on an idle machine; 8 s if small messages waited to be sent together
    assert!(begin.elapsed() < Duration::from_secs(6), "{:?}", begin.elapsed());
}

#[test]
fn ranks_finish_together_and_quietly() {
    let finished = on_ranks(3, LONG, |ranks, failures| {
        if ranks.rank.rank == 1 {
            thread::sleep(Duration::from_millis(300)); // longer work than the others
        }
        let before = Instant::now();
        ranks.monitor.finish();
        let after = Instant::now();
        drop(ranks);
        assert_eq!(failures.iter().count(), 0);
        (before, after)
    });
    let last = finished.iter().map(|(before, _)| *before).max().unwrap();
    assert!(finished.iter().all(|(_, after)| *after >= last), "{finished:?}");
}

#[test]
fn a_stop_that_one_rank_requests_reaches_all() {
    for_both(|asked| {
        let is_known = on_ranks(3, LONG, |ranks, _failures| {
            if ranks.rank.rank == asked {
                ranks.monitor.pass_on(Arc::new(AtomicBool::new(true)));
            }
            let begin = Instant::now();
            while !ranks.monitor.is_stop_requested() && begin.elapsed() < LONG {
                thread::sleep(Duration::from_millis(20));
            }
            let is_known = ranks.monitor.is_stop_requested();
            ranks.monitor.finish();
            is_known
        });
        assert_eq!(is_known, [true; 3]);
    });
    let nobody = on_ranks(2, LONG, |ranks, _failures| {
        thread::sleep(Duration::from_millis(100));
        let is_known = ranks.monitor.is_stop_requested();
        ranks.monitor.finish();
        is_known
    });
    assert_eq!(nobody, [false; 2]);
}

#[test]
fn a_rank_that_ends_early_is_named_on_all_others() {
    for_both(|ends| {
        let errors = on_ranks(3, LONG, |mut ranks, failures| {
            ranks.monitor.report("step 7");
            ranks.step.all_gather(Vec::new()).unwrap();
            if ranks.rank.rank == ends {
                thread::sleep(Duration::from_millis(1200)); // two heartbeats
                return None;
            }
            let of_channel = ranks.step.all_gather(Vec::new()).unwrap_err();
            assert_eq!(of_channel, failure(&failures));
            assert_eq!(ranks.data.all_gather(Vec::new()).unwrap_err(), of_channel);
            Some(of_channel.to_string())
        });
        let expected = format!("rank {ends} was lost: its connection was closed; its last work");
        for error in errors.into_iter().flatten() {
            assert!(error.starts_with(&expected) && error.contains("`step 7`"), "{error}");
        }
    });
}

#[test]
fn an_error_of_one_rank_ends_all_others_with_its_message() {
    for fails in [0, 1] {
        on_ranks(3, LONG, |mut ranks, failures| {
            if ranks.rank.rank == fails {
                ranks.monitor.fail("no memory");
                drop(ranks);
                assert_eq!(failures.iter().count(), 0);
                return;
            }
            let message = "no memory".to_owned();
            let expected = DistError::Failed { rank: fails, message };
            assert_eq!(ranks.step.all_gather(Vec::new()).unwrap_err(), expected);
            assert_eq!(failure(&failures), expected);
            ranks.monitor.finish(); // returns at once
        });
    }
}

#[test]
fn the_rank_for_which_the_others_wait_too_long_is_named() {
    for_both(|hangs| {
        let begin = Instant::now();
        let errors = on_ranks(3, SHORT, |mut ranks, failures| {
            ranks.monitor.report("step 4");
            ranks.step.all_gather(Vec::new()).unwrap();
            if ranks.rank.rank == hangs {
                thread::sleep(Duration::from_millis(300));
                ranks.monitor.report("step 5: backward"); // later than the others begin to wait
            } else {
                ranks.monitor.report("step 5: sums");
                let error = ranks.step.all_gather(Vec::new()).unwrap_err();
                assert!(matches!(error, DistError::Hung { .. }), "{error}");
            }
            failure(&failures).to_string()
        });
        let expected = format!("no progress for 2 s in `step 5: backward` on rank {hangs}");
        assert_eq!(errors, [(); 3].map(|()| expected.clone()));
        assert!(begin.elapsed() < SHORT + Duration::from_secs(5), "{:?}", begin.elapsed());
    });
}

#[test]
fn a_rank_that_sends_no_heartbeats_is_lost() {
    for_both(|silent| {
        let begin = Instant::now();
        let is_over = std::sync::Barrier::new(3);
        joined(3, |joined| {
            if joined.rank.rank == silent {
                is_over.wait(); // its connections stay open
                return;
            }
            let (_ranks, failures) = started(joined, SHORT);
            let error = failure(&failures).to_string();
            let expected = format!("rank {silent} was lost: no heartbeat for ");
            assert!(error.starts_with(&expected), "{error}");
            is_over.wait();
        });
        assert!(begin.elapsed() < SHORT + Duration::from_secs(5), "{:?}", begin.elapsed());
    });
}

/// Forwards connections to `port` until the network is cut: from then on nothing arrives, and no
/// connection is closed. Returns its own port.
fn network(port: u16, is_cut: &Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    let is_cut = Arc::clone(is_cut);
    thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            let far = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let ways = [(&near, &far), (&far, &near)].map(|(from, to)| {
                (from.try_clone().unwrap(), to.try_clone().unwrap(), Arc::clone(&is_cut))
            });
            for (mut from, mut to, is_cut) in ways {
                thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        while is_cut.load(Ordering::Relaxed) {
                            thread::park();
                        }
                        if to.write_all(&bytes[..count]).is_err() {
                            return;
                        }
                    }
                });
            }
        }
    });
    own
}

#[test]
fn a_rank_that_loses_its_network_ends_the_job_in_time_and_is_named() {
    let is_cut = Arc::new(AtomicBool::new(false));
    let all_work = std::sync::Barrier::new(3);
    let through = |rank: usize, port: u16| if rank == 1 { network(port, &is_cut) } else { port };
    let errors = joined_through(3, &through, |joined| {
        let (mut ranks, failures) = started(joined, SHORT);
        // for longer than the time without a heartbeat that ends the job
        for _ in 0..5 {
            ranks.monitor.report("step 4");
            ranks.step.all_gather(Vec::new()).unwrap();
            thread::sleep(SHORT / 4);
        }
        assert_eq!(failures.try_recv().ok(), None);
        ranks.monitor.report("step 5");
        ranks.step.all_gather(Vec::new()).unwrap();
        all_work.wait();
        is_cut.store(true, Ordering::Relaxed);
        let cut = Instant::now();
        ranks.monitor.report("step 5: sums");
        let of_channel = ranks.step.all_gather(Vec::new()).unwrap_err();
        assert_eq!(of_channel, failure(&failures));
        assert!(cut.elapsed() < SHORT + Duration::from_secs(5), "{:?}", cut.elapsed());
        of_channel.to_string()
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let lost = usize::from(rank != 1);
        let expected = format!("rank {lost} was lost: no heartbeat for ");
        assert!(error.starts_with(&expected) && error.contains("`step "), "{rank}: {error}");
    }
}

#[test]
fn a_closed_channel_returns_at_once_and_the_run_continues() {
    on_ranks(2, LONG, |mut ranks, failures| {
        let close = ranks.data.closer();
        if ranks.rank.rank == 0 {
            let mut data = ranks.data;
            let waiting = thread::spawn(move || (data.all_gather(Vec::new()), data));
            thread::sleep(Duration::from_millis(50));
            close();
            let (error, mut data) = waiting.join().unwrap();
            assert_eq!(error.unwrap_err(), DistError::Closed);
            assert_eq!(data.all_gather(Vec::new()).unwrap_err(), DistError::Closed);
            ranks.step.all_gather(Vec::new()).unwrap();
        } else {
            ranks.step.all_gather(Vec::new()).unwrap();
            let error = ranks.data.all_gather(Vec::new()).unwrap_err();
            assert!(matches!(error, DistError::Lost { rank: 0, .. }), "{error}");
        }
        ranks.monitor.finish();
        assert!(failures.try_recv().is_err());
    });
}

#[test]
fn a_single_rank_needs_no_connection() {
    let config = Distributed::default();
    let mut ranks = connect(&place(0, 1), &config, |_| {}).unwrap();
    assert_eq!(ranks.rank, Rank::ALONE);
    assert_eq!(ranks.step.all_gather(vec![3]).unwrap(), [[3]]);
    ranks.monitor.finish();
}

#[test]
fn ranks_connect_by_config_and_launcher_alone() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = Distributed { port: Some(port), ..Distributed::default() };
    thread::scope(|scope| {
        for rank in 0..2 {
            let config = &config;
            scope.spawn(move || {
                let ranks = connect(&place(rank, 2), config, |_| {}).unwrap();
                assert_eq!(ranks.rank, Rank { rank, world: 2, local_rank: rank, local_world: 2 });
                assert_eq!(ranks.hosts.len(), 2);
                ranks.monitor.finish();
            });
        }
    });
}

#[test]
fn another_number_of_ranks_than_the_config_requires_is_an_error() {
    let processes = Processes::Count(NonZeroUsize::new(4).unwrap());
    let config = Distributed { processes, ..Distributed::default() };
    let error = connect(&place(0, 2), &config, |_| {}).map(|_| ()).unwrap_err();
    let message = "`distributed.processes` is `4`, but TRAINER_RANK has started 2";
    assert_eq!(error.to_string(), message);
}

/// Sums that wait for a rank that never comes.
struct Stuck;

impl Collective for Stuck {
    fn start_sum(&self, _: Vec<Tensor>) -> Result<Ticket, DistError> {
        Ok(Ticket(1))
    }

    fn start_reduce(&self, _: Reduce) -> Result<Ticket, DistError> {
        Ok(Ticket(1))
    }

    fn start_gather(&self, _: Gather) -> Result<Ticket, DistError> {
        Ok(Ticket(1))
    }

    fn start_exchange(&self, _: super::Exchange) -> Result<Ticket, DistError> {
        Ok(Ticket(1))
    }

    fn wait_for(&self, _: Ticket) -> Result<(), DistError> {
        self.wait()
    }

    fn wait(&self) -> Result<(), DistError> {
        thread::sleep(SHORT + Duration::from_secs(3));
        Ok(())
    }
}

#[test]
fn a_rank_that_waits_for_its_sums_is_not_to_blame() {
    let errors = on_ranks(2, SHORT, |ranks, failures| {
        let group = ranks.group(2, Arc::new(Stuck), None);
        group.monitor.report("step 4: backward");
        if group.rank.is_first() {
            thread::sleep(Duration::from_millis(100));
            group.monitor.report("step 4: backward"); // a little later than the other rank
        } else {
            thread::spawn(move || group.sums.wait());
        }
        failure(&failures)
    });
    let expected = DistError::Hung { ranks: vec![0], work: "step 4: backward".into(), seconds: 2 };
    assert_eq!(errors, [expected.clone(), expected]);
}
