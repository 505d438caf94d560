//! The messages of the monitors, and the decision from the heartbeats of all ranks whether one is
//! lost or hangs.

use crate::{DistError, tcp};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Maximum number of bytes of a message.
pub(super) const MAX: usize = 1 << 20;
/// Maximum number of characters of a report or error message; more are cut off.
const MAX_TEXT: usize = 1 << 14;

/// A message between the monitors of rank 0 and another rank.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    /// Sent at a fixed interval: the current work of the sender.
    Heartbeat {
        work: String,
        waits: bool,
        /// The loader of the sender waits for the loaders of other ranks.
        loader_waits: bool,
        /// Time since the sender last made progress.
        age_ms: u64,
        /// A request to stop has reached the sender.
        stop: bool,
    },
    /// To rank 0: the sender fails with an error.
    Fail(String),
    /// To rank 0: the sender has finished its work.
    Finish,
    /// From rank 0: all ranks have finished.
    AllFinished,
    /// From rank 0: all ranks end with an error.
    End(End),
}

/// An error that ends all ranks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum End {
    Lost { rank: usize, problem: String },
    Failed { rank: usize, message: String },
    Hung { ranks: Vec<usize>, work: String, seconds: u64 },
}

impl Message {
    /// A connection that cannot be written is found when it is read.
    pub(super) fn send(&self, stream: &TcpStream) {
        let bytes = serde_json::to_vec(self).expect("plain values");
        let _ = tcp::send(stream, &bytes);
    }
}

/// The beginning of a text.
pub(super) fn cut(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}

impl From<End> for DistError {
    fn from(end: End) -> Self {
        match end {
            End::Lost { rank, problem } => Self::Lost { rank, problem },
            End::Failed { rank, message } => Self::Failed { rank, message },
            End::Hung { ranks, work, seconds } => Self::Hung { ranks, work, seconds },
        }
    }
}

/// What rank 0 has received from a rank.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) last_beat: Instant,
    pub(super) work: String,
    pub(super) waits: bool,
    pub(super) loader_waits: bool,
    /// Time of its last progress.
    pub(super) since: Instant,
    pub(super) is_finished: bool,
}

/// Returns an error if a rank has sent no heartbeat for longer than `timeout`, or makes no progress
/// for longer than that.
///
/// A rank that waits for others is not to blame as long as another rank works. If all wait, or if
/// several ranks make no progress, the ranks that are behind the others are named.
pub(super) fn judge(ranks: &[Seen], now: Instant, timeout: Duration) -> Option<End> {
    let age = |time: Instant| now.saturating_duration_since(time);
    let is_over = |time: Instant| age(time) > timeout;
    let lost = |rank: usize, seen: &Seen| {
        let (seconds, work) = (age(seen.last_beat).as_secs(), &seen.work);
        let problem = format!("no heartbeat for {seconds} s; its last work is `{work}`");
        Some(End::Lost { rank, problem })
    };
    let unfinished = || ranks.iter().enumerate().filter(|(_, seen)| !seen.is_finished);
    if let Some((rank, seen)) = unfinished().min_by_key(|(_, seen)| seen.last_beat)
        && is_over(seen.last_beat)
    {
        return lost(rank, seen);
    }
    let works = |(_, seen): &(usize, &Seen)| !seen.waits;
    let is_hung = |(_, seen): &(usize, &Seen)| is_over(seen.since);
    let hung: Vec<(usize, &Seen)> = if unfinished().any(|rank| works(&rank)) {
        unfinished().filter(works).filter(is_hung).collect()
    } else if unfinished().all(|rank| is_hung(&rank)) {
        unfinished().collect()
    } else {
        Vec::new()
    };
    let behind = behind(hung);
    // A process that was stopped made its last progress before its last heartbeat.
    if let Some((rank, seen)) = behind.iter().find(|(_, seen)| age(seen.last_beat) > timeout / 2) {
        return lost(*rank, seen);
    }
    let (seconds, work) = (timeout.as_secs(), behind.first()?.1.work.clone());
    Some(End::Hung { ranks: behind.into_iter().map(|(rank, _)| rank).collect(), work, seconds })
}

/// Of ranks without progress, those that are behind: whose loader is the one that others wait for,
/// else in an earlier step, else in work that fewer ranks do, else the one that has made no
/// progress for the longest time.
fn behind(mut hung: Vec<(usize, &Seen)>) -> Vec<(usize, &Seen)> {
    if hung.iter().any(|(_, seen)| !seen.loader_waits) {
        hung.retain(|(_, seen)| !seen.loader_waits);
    }
    let step = |(_, seen): &(usize, &Seen)| number(&seen.work);
    let steps: Option<Vec<u64>> = hung.iter().map(step).collect();
    if let Some(first) = steps.and_then(|steps| steps.into_iter().min()) {
        hung.retain(|rank| step(rank) == Some(first));
    }
    let mut groups: BTreeMap<&str, Vec<(usize, &Seen)>> = BTreeMap::new();
    for rank in hung {
        groups.entry(&rank.1.work).or_default().push(rank);
    }
    let since = |group: &[(usize, &Seen)]| group.iter().map(|(_, seen)| seen.since).min();
    let key = |group: &Vec<(usize, &Seen)>| (group.len(), since(group));
    groups.into_values().min_by_key(key).unwrap_or_default()
}

/// The first number in a text: 12 in `step 12: backward`.
fn number(text: &str) -> Option<u64> {
    let digits = text.split(|c: char| !c.is_ascii_digit()).find(|digits| !digits.is_empty())?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_mins(5);
    const NONE: [usize; 0] = [];

    /// A rank, with the seconds since its last heartbeat and since its last progress. Work that
    /// begins with `wait` waits for other ranks; if it ends with `data`, its loader waits.
    fn seen(now: Instant, last_beat: u64, since: u64, work: &str) -> Seen {
        let before = |seconds| now.checked_sub(Duration::from_secs(seconds)).unwrap();
        let (last_beat, since) = (before(last_beat), before(since));
        let (waits, loader_waits) = (work.starts_with("wait"), work.ends_with("data"));
        Seen {
            last_beat,
            work: work.to_owned(),
            waits,
            loader_waits,
            since,
            is_finished: work == "finished",
        }
    }

    /// The ranks that are named, of ranks `(last_beat, since, work)`.
    fn named(ranks: &[(u64, u64, &str)]) -> Vec<usize> {
        let now = Instant::now() + Duration::from_secs(1000);
        let ranks: Vec<Seen> = ranks
            .iter()
            .map(|(last_beat, since, work)| seen(now, *last_beat, *since, work))
            .collect();
        match judge(&ranks, now, TIMEOUT) {
            None => Vec::new(),
            Some(End::Lost { rank, .. }) => vec![rank],
            Some(End::Hung { ranks, .. }) => ranks,
            Some(End::Failed { .. }) => unreachable!("only ranks fail"),
        }
    }

    #[test]
    fn a_rank_without_heartbeats_is_lost() {
        assert_eq!(named(&[(0, 1, "step 3"), (300, 300, "step 3")]), NONE);
        assert_eq!(named(&[(0, 1, "step 3"), (301, 301, "step 3"), (0, 299, "step 3")]), [1]);
        // the others have waited for it as long
        assert_eq!(named(&[(0, 305, "wait 4"), (302, 306, "step 3"), (0, 305, "wait 4")]), [1]);
    }

    #[test]
    fn a_stopped_rank_is_lost_although_its_last_progress_is_older_than_its_last_heartbeat() {
        let now = Instant::now() + Duration::from_secs(1000);
        let wait = seen(now, 0, 302, "wait for step 3");
        let end = judge(&[wait.clone(), seen(now, 299, 301, "step 3")], now, TIMEOUT);
        assert!(matches!(end, Some(End::Lost { rank: 1, .. })), "{end:?}");
        let end = judge(&[wait, seen(now, 1, 301, "step 3")], now, TIMEOUT);
        assert!(matches!(end, Some(End::Hung { .. })), "{end:?}");
    }

    #[test]
    fn a_rank_without_progress_is_named_and_not_the_ranks_that_wait_for_it() {
        let wait = (0, 400, "wait for step 12");
        assert_eq!(named(&[wait, (0, 301, "step 12: backward"), wait]), [1]);
        assert_eq!(named(&[wait, (0, 299, "step 12: backward"), wait]), NONE);
        // it may also do the work that the others report, a little later
        assert_eq!(named(&[(0, 400, "wait for 8"), (0, 301, "step 9")]), [1]);
    }

    #[test]
    fn ranks_wait_as_long_as_another_rank_makes_progress() {
        assert_eq!(named(&[(0, 5, "evaluation"), (0, 5000, "wait for step 12")]), NONE);
        assert_eq!(named(&[(0, 301, "evaluation"), (0, 5000, "wait for step 12")]), [0]);
    }

    #[test]
    fn of_ranks_that_all_wait_those_that_are_behind_are_named() {
        let wait = (0, 400, "wait for step 12");
        assert_eq!(named(&[wait, wait, (0, 301, "wait for step 11"), wait]), [2]);
        assert_eq!(named(&[wait, wait, wait]), [0, 1, 2]);
        assert_eq!(named(&[wait, (0, 301, "wait for the rows of 12"), wait]), [1]);
        assert_eq!(named(&[wait, (0, 299, "wait for step 12"), wait]), NONE);
    }

    #[test]
    fn of_ranks_that_do_not_report_waiting_those_that_are_behind_are_named() {
        let sum = (0, 310, "step 12: sums");
        assert_eq!(named(&[sum, sum, (0, 305, "step 12: forward"), sum]), [2]);
        assert_eq!(named(&[sum, sum, (0, 305, "step 11: sums"), sum]), [2]);
        assert_eq!(named(&[(0, 310, "step 12: forward"), sum, sum]), [0]);
        // one each: the rank that stopped first
        assert_eq!(named(&[(0, 312, "step 12: forward"), sum]), [0]);
        assert_eq!(named(&[(0, 306, "b"), (0, 307, "a"), (0, 305, "c")]), [1]);
    }

    #[test]
    fn the_rank_is_named_whose_loader_the_others_wait_for() {
        let data = (0, 310, "step 12, data");
        assert_eq!(named(&[data, data, (0, 305, "step 12"), data]), [2]);
        assert_eq!(named(&[(0, 310, "wait for step 12"), (0, 305, "step 12, data")]), [1]);
        assert_eq!(named(&[data, data]), [0, 1]);
    }

    #[test]
    fn a_rank_that_has_finished_is_not_judged() {
        assert_eq!(named(&[(0, 5, "step 3"), (400, 400, "finished")]), NONE);
        assert_eq!(named(&[(0, 301, "step 3"), (400, 400, "finished")]), [0]);
        assert_eq!(named(&[(0, 301, "finished"), (0, 400, "finished")]), NONE);
    }
}
