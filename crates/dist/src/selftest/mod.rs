//! Cases that check the connections of ranks: messages, and sums and shares against serial ones.

mod messages;
mod shares;
mod sums;

use super::{DistError, Group, Rank, gather};
use candle_core::Device;
use std::time::{Duration, Instant};

/// Number of cases of [`selftest`].
pub const NUM_CASES: usize = CASES.len();

/// The result of a case, equal on all ranks except for the time.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseResult {
    /// The property that was checked.
    pub name: &'static str,
    /// The first rank that found a difference, and which.
    pub problem: Option<String>,
    /// Time that the case took on this rank.
    pub time: Duration,
    /// A measurement of this rank, such as a rate.
    pub measured: Option<String>,
}

/// Runs all cases. All ranks call this, and each returns whether every case passed on all ranks.
///
/// Sums are made of tensors on `device`, the largest of them with `large` elements. `report`
/// receives each result. The data channel is closed afterwards.
pub fn selftest(
    group: &mut Group,
    device: &Device,
    large: usize,
    mut report: impl FnMut(CaseResult),
) -> Result<bool, DistError> {
    let mut passed = true;
    for (name, case) in CASES {
        group.monitor.report(name);
        let started = Instant::now();
        let mut context = Context { rank: group.rank, group, device, large, measured: None };
        let found = match case(&mut context) {
            Ok(()) => None,
            Err(Problem::Found(problem)) => Some(problem),
            Err(Problem::Dist(error)) => return Err(error),
        };
        let (measured, time) = (context.measured, started.elapsed());
        let problem = agree(group, found.as_deref())?;
        passed &= problem.is_none();
        report(CaseResult { name, problem, time, measured });
    }
    Ok(passed)
}

/// The first problem of all ranks, with the number of the rank.
pub fn agree(group: &mut Group, problem: Option<&str>) -> Result<Option<String>, DistError> {
    let problems = gather(group.step.as_mut(), &problem.map(str::to_owned))?;
    let mut problems = problems.into_iter().enumerate();
    Ok(problems.find_map(|(rank, found)| Some(format!("rank {rank}: {}", found?))))
}

/// Why a case did not pass.
enum Problem {
    Found(String),
    Dist(DistError),
}

impl From<DistError> for Problem {
    fn from(error: DistError) -> Self {
        Self::Dist(error)
    }
}

impl From<candle_core::Error> for Problem {
    fn from(error: candle_core::Error) -> Self {
        Self::Found(error.to_string())
    }
}

type Checked = Result<(), Problem>;

/// Returns the problem that `describe` explains, unless `condition` holds.
fn ensure(condition: bool, describe: impl FnOnce() -> String) -> Checked {
    if condition { Ok(()) } else { Err(Problem::Found(describe())) }
}

/// What a case uses.
struct Context<'a> {
    rank: Rank,
    group: &'a mut Group,
    device: &'a Device,
    large: usize,
    measured: Option<String>,
}

impl Context<'_> {
    /// The first, the middle and the last rank.
    fn some_ranks(&self) -> Vec<usize> {
        let last = self.rank.world - 1;
        let mut ranks = vec![0, last / 2, last];
        ranks.dedup();
        ranks
    }

    /// Waits if this is `rank`, so that the others wait for it.
    fn delay(&self, rank: usize) {
        if self.rank.rank == rank {
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

type Case = fn(&mut Context) -> Checked;

const CASES: [(&str, Case); 23] = [
    ("all ranks run the same version", messages::same_version),
    ("the ranks of a machine have different local ranks", messages::local_ranks),
    ("messages arrive in the order of the ranks", messages::order),
    ("messages of 0 bytes to 1 MB, of another size on each rank", messages::sizes),
    ("1,000 rounds of messages", messages::rounds),
    ("messages on two channels at the same time", messages::two_channels),
    ("messages wait for a slow rank", messages::slow_rank),
    ("a sum of no elements", sums::nothing),
    ("sums of one element and of fewer elements than ranks", sums::few),
    ("sums of odd sizes and of whole parts", sums::odd),
    ("a sum of several tensors of different shapes", sums::several),
    ("100 sums before one wait", sums::without_wait),
    ("sums of values for which the order of additions matters", sums::ordered),
    ("infinities, NaN, signed zeros and subnormal numbers", sums::special),
    ("a sum waits for a slow rank", sums::slow_rank),
    ("sums and messages at the same time", sums::with_messages),
    ("a large sum", sums::large),
    ("shares of sums, of odd sizes and of whole parts", shares::odd),
    ("shares of sums for which the order of additions matters", shares::ordered),
    ("shares of sums that are copied or added", shares::then),
    ("copies of shares in f32, bf16 and u8", shares::gathered),
    ("waits for single calls, with a slow rank", shares::tickets),
    ("a closed channel returns at once", messages::closed),
];

#[cfg(test)]
mod tests {
    use super::super::threads_in_groups;
    use super::*;

    #[test]
    fn all_cases_pass_on_threads() {
        for (world, shard_group) in [(1, 1), (2, 2), (3, 3), (4, 2)] {
            let results = std::thread::scope(|scope| {
                let run = |mut group: Group| {
                    let mut results = Vec::new();
                    let report = |result| results.push(result);
                    let passed = selftest(&mut group, &Device::Cpu, 100_003, report);
                    (passed, results)
                };
                let groups = threads_in_groups(world, shard_group).unwrap().into_iter();
                let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
            });
            for (passed, results) in results {
                let problems: Vec<_> = results.iter().filter_map(|r| r.problem.clone()).collect();
                assert_eq!((passed, problems), (Ok(true), Vec::new()), "{world} / {shard_group}");
                assert_eq!(results.len(), NUM_CASES);
            }
        }
    }
}
