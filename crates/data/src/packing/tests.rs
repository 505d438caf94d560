//! Properties of the packer and its packing efficiency.

use std::time::Instant;

use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};

use super::*;

fn on(length: u32, strategy: PackingStrategy) -> Packing {
    let length = NonZeroU32::new(length).unwrap();
    Packing::On { length, strategy, overlong: Overlong::Alone }
}

/// Steps of micro-batches of one pack.
fn step_of(packs: usize) -> Option<StepPacks> {
    let micro_batches = NonZeroUsize::new(packs)?;
    Some(StepPacks { micro_batches, batch_size: NonZeroUsize::MIN })
}

/// Rules with this window, one byte per patch, no limit on patches and no balanced steps.
fn rules(window: usize) -> PackRules {
    PackRules {
        window: NonZeroUsize::new(window).unwrap(),
        max_patches: None,
        patch_bytes: NonZeroU64::MIN,
        balanced_step: None,
    }
}

fn item(position: usize, tokens: usize) -> Item<()> {
    let length = Length { tokens, pixel_bytes: 0 };
    Item { position: position as u64, length, value: () }
}

fn pack(packing: Packing, lengths: &[usize]) -> Vec<Vec<Item<()>>> {
    pack_by(packing, rules(256), lengths)
}

fn pack_by(packing: Packing, rules: PackRules, lengths: &[usize]) -> Vec<Vec<Item<()>>> {
    let mut packer = Packer::new(packing, rules, Vec::new());
    let items = lengths.iter().enumerate().map(|(position, tokens)| item(position, *tokens));
    let mut packs: Vec<_> = items.flat_map(|item| packer.push(item)).collect();
    packs.extend(packer.finish());
    assert_eq!(packer.held().count(), 0);
    packs
}

fn positions(packs: &[Vec<Item<()>>]) -> Vec<Vec<u64>> {
    packs.iter().map(|pack| pack.iter().map(|item| item.position).collect()).collect()
}

fn tokens(pack: &[Item<()>]) -> usize {
    pack.iter().map(|item| item.length.tokens).sum()
}

#[test]
fn with_packing_off_each_pack_holds_one_sample() {
    assert_eq!(positions(&pack(Packing::Off, &[3, 9, 1])), [[0], [1], [2]]);
}

#[test]
fn sequential_closes_a_pack_when_the_next_sample_does_not_fit() {
    let packs = pack(on(10, PackingStrategy::Sequential), &[4, 6, 1, 10, 3, 12, 2]);
    assert_eq!(positions(&packs), [vec![0, 1], vec![2], vec![3], vec![4], vec![5], vec![6]]);
}

#[test]
fn best_fit_joins_samples_that_are_not_adjacent() {
    let packs = pack(on(10, PackingStrategy::BestFit), &[6, 7, 3, 4, 12, 9]);
    assert_eq!(positions(&packs), [vec![0, 3], vec![1, 2], vec![4], vec![5]]);
}

/// Returns names and synthetic lengths of `num` samples for three kinds of data: `vl`, chats with
/// images of every size; `text`, chats without images; `hires`, where most rows have a large image.
fn mixes(num: usize) -> [(&'static str, Vec<usize>); 3] {
    let lengths = |mean: f64, spread: f64| {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let median = mean / (spread * spread / 2.0).exp();
        let distribution = LogNormal::new(median.ln(), spread).unwrap();
        let mut length = || (distribution.sample(&mut rng) as usize).clamp(16, 8192);
        (0..num).map(|_| length()).collect()
    };
    [("vl", lengths(1320.0, 1.0)), ("text", lengths(630.0, 1.0)), ("hires", lengths(3450.0, 0.3))]
}

/// Packing efficiency: the share of the token capacity that is used.
fn fill(packs: &[Vec<Item<()>>], length: u32) -> f64 {
    packs.iter().map(|pack| tokens(pack)).sum::<usize>() as f64
        / (packs.len() * length as usize) as f64
}

/// Ratio of the mean to the largest cost in each group of `group` consecutive packs, averaged.
fn evenness(packs: &[Vec<Item<()>>], group: usize) -> f64 {
    let cost = |pack: &Vec<Item<()>>| {
        let sizes = pack.iter().map(|item| Capacity { tokens: item.length.tokens, patches: 0 });
        cost(sizes) as f64
    };
    let groups = packs.chunks_exact(group).map(|packs| {
        let costs = || packs.iter().map(cost);
        costs().sum::<f64>() / group as f64 / costs().fold(0.0, f64::max)
    });
    groups.clone().sum::<f64>() / groups.count() as f64
}

#[test]
fn best_fit_fills_packs_and_beats_sequential() {
    for ((name, lengths), least) in mixes(20_000).into_iter().zip([0.998, 0.998, 0.965]) {
        let packing = |strategy| on(8192, strategy);
        let best_fit =
            fill(&pack_by(packing(PackingStrategy::BestFit), rules(1000), &lengths), 8192);
        let sequential = fill(&pack(packing(PackingStrategy::Sequential), &lengths), 8192);
        assert!(
            best_fit >= least && sequential < 0.95,
            "{name}: best_fit {best_fit:.4}, sequential {sequential:.4}"
        );
    }
}

#[test]
fn balanced_steps_have_packs_of_similar_cost_and_are_not_sorted_by_cost() {
    let [(_, lengths), ..] = mixes(20_000);
    let packing = on(8192, PackingStrategy::BestFit);
    let plain = pack_by(packing, rules(1000), &lengths);
    let balanced_step = step_of(8);
    let balanced = pack_by(packing, PackRules { balanced_step, ..rules(1000) }, &lengths);
    assert!(evenness(&plain, 8) < 0.96, "{}", evenness(&plain, 8));
    assert!(evenness(&balanced, 8) > 0.985, "{}", evenness(&balanced, 8));
    assert!(fill(&balanced, 8192) > 0.998);
    let mut seen = positions(&balanced).concat();
    seen.sort_unstable();
    assert_eq!(seen, (0..lengths.len() as u64).collect::<Vec<_>>());
    // unsorted: about half of the steps have more samples than the step before
    let samples: Vec<usize> =
        balanced.chunks(8).map(|step| step.iter().map(Vec::len).sum()).collect();
    let rising = samples.windows(2).filter(|two| two[0] < two[1]).count() as f64;
    assert!((rising / samples.len() as f64 - 0.5).abs() < 0.1, "{rising} of {}", samples.len());
}

/// Ranks take turns.
#[test]
fn ranks_that_share_balanced_steps_have_similar_cost() {
    for (name, lengths) in mixes(200_000) {
        for (world, packs) in [(2, 4), (4, 8), (8, 16)] {
            let balanced_step = step_of(packs);
            let rules = PackRules { balanced_step, ..rules(1000) };
            let all = pack_by(on(8192, PackingStrategy::BestFit), rules, &lengths);
            let cost = |pack: &[Item<()>]| -> f64 {
                let tokens = pack.iter().map(|item| item.length.tokens as f64);
                tokens.map(|tokens| tokens * (1.0 + tokens / 24_000.0)).sum()
            };
            let (mut slowest, mut mean) = (0.0, 0.0);
            for step in all.chunks_exact(packs) {
                let of_rank = |rank: usize| step.iter().skip(rank).step_by(world);
                let ranks: Vec<f64> =
                    (0..world).map(|rank| of_rank(rank).map(|pack| cost(pack)).sum()).collect();
                slowest += ranks.iter().copied().fold(0.0, f64::max);
                mean += ranks.iter().sum::<f64>() / world as f64;
            }
            let ratio = slowest / mean;
            assert!(ratio < 1.01, "{name}, {world} ranks: slowest over mean is {ratio:.4}");
        }
    }
}

#[test]
fn packs_have_at_most_the_allowed_number_of_patches() {
    let max_patches = NonZeroU32::new(10);
    for strategy in [PackingStrategy::Sequential, PackingStrategy::BestFit] {
        let mut packer =
            Packer::new(on(100, strategy), PackRules { max_patches, ..rules(7) }, Vec::new());
        let mut packs = Vec::new();
        for (position, pixel_bytes) in [6, 6, 0, 4, 12, 0, 3, 3, 3, 3].into_iter().enumerate() {
            let length = Length { tokens: 9, pixel_bytes };
            packs.extend(packer.push(Item { position: position as u64, length, value: () }));
        }
        packs.extend(packer.finish());
        assert_eq!(packs.iter().map(Vec::len).sum::<usize>(), 10);
        for pack in &packs {
            let patches: u64 = pack.iter().map(|item| item.length.pixel_bytes).sum();
            assert!(patches <= 10 || pack.len() == 1, "{strategy:?}: {packs:?}");
        }
    }
}

/// A quadratic packer takes 16 times as long for each length.
#[test]
fn the_time_of_a_length_does_not_grow_with_their_number() {
    let time = |lengths: &[usize]| {
        let began = Instant::now();
        let packs = pack_by(on(8192, PackingStrategy::BestFit), rules(1000), lengths);
        assert!(fill(&packs, 8192) > 0.965);
        began.elapsed().as_secs_f64() / lengths.len() as f64
    };
    for (name, lengths) in mixes(400_000) {
        let [few, all] = [&lengths[..25_000], &lengths].map(time);
        assert!(all < 6.0 * few, "{name}: {few} s for one of 25,000 lengths, {all} s of 400,000");
    }
}

/// Prints the packing efficiencies of `docs/dev/performance.md`, and others.
#[test]
#[ignore = "prints a table"]
fn fill_of_synthetic_lengths() {
    for (name, lengths) in mixes(40_000) {
        for length in [8192, 16384, 32768] {
            let rate =
                |strategy, rules| fill(&pack_by(on(length, strategy), rules, &lengths), length);
            let best_fit = |window| rate(PackingStrategy::BestFit, rules(window));
            let balanced = PackRules { balanced_step: step_of(8), ..rules(1000) };
            let plain = pack_by(on(length, PackingStrategy::BestFit), rules(1000), &lengths);
            let even = pack_by(on(length, PackingStrategy::BestFit), balanced, &lengths);
            eprintln!(
                "| {name} | {length} | {:.3} | {:.4} | {:.4} | {:.4} | {:.4} | {:.4} | {:.3} | {:.3} |",
                rate(PackingStrategy::Sequential, rules(1)),
                best_fit(32),
                best_fit(256),
                best_fit(1000),
                best_fit(40_000),
                fill(&even, length),
                evenness(&plain, 8),
                evenness(&even, 8),
            );
        }
    }
    for (name, lengths) in mixes(1_000_000) {
        let began = Instant::now();
        let packs = pack_by(on(8192, PackingStrategy::BestFit), rules(1000), &lengths).len();
        eprintln!("{name}: 1,000,000 lengths in {packs} packs of 8,192: {:?}", began.elapsed());
    }
}

#[test]
fn packs_of_a_window_are_not_sorted_by_length() {
    let lengths: Vec<usize> = (0..255).map(|i| 1 + (i * 97) % 256).collect();
    let packs = pack(on(400, PackingStrategy::BestFit), &lengths);
    let (first, second) = packs.split_at(packs.len() / 2);
    let mean_len =
        |packs: &[Vec<_>]| packs.iter().map(Vec::len).sum::<usize>() as f64 / packs.len() as f64;
    let (first, second) = (mean_len(first), mean_len(second));
    assert!((first / second - 1.0).abs() < 0.25, "samples a pack: {first}, then {second}");
}

proptest! {
    #[test]
    fn every_sample_is_in_one_pack_and_no_pack_exceeds_the_limit(
        lengths in prop::collection::vec(1usize..40, 0..700),
        limit in 1u32..60,
        best_fit in any::<bool>(),
    ) {
        let strategy =
            if best_fit { PackingStrategy::BestFit } else { PackingStrategy::Sequential };
        let packs = pack(on(limit, strategy), &lengths);
        for pack in &packs {
            prop_assert!(tokens(pack) <= limit as usize || pack.len() == 1);
            prop_assert!(pack.is_sorted_by_key(|item| item.position));
        }
        let mut seen = positions(&packs).concat();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..lengths.len() as u64).collect::<Vec<_>>());
    }

    #[test]
    fn a_packer_restored_from_pending_positions_returns_the_same_packs(
        lengths in prop::collection::vec(1usize..40, 300..900),
        best_fit in any::<bool>(),
        step in 0usize..9,
    ) {
        let strategy =
            if best_fit { PackingStrategy::BestFit } else { PackingStrategy::Sequential };
        let packing = on(64, strategy);
        let rules = PackRules { balanced_step: step_of(step), ..rules(100) };
        let mut packer = Packer::new(packing, rules, Vec::new());
        let packer_of = |held: &[u64]| {
            let pending = held.iter().map(|p| item(*p as usize, lengths[*p as usize])).collect();
            Packer::new(packing, rules, pending)
        };
        let mut resumed = packer_of(&[]);
        for (position, tokens) in lengths.iter().enumerate() {
            let packs = packer.push(item(position, *tokens));
            prop_assert_eq!(&resumed.push(item(position, *tokens)), &packs);
            if !packs.is_empty() {
                let held: Vec<_> = packer.held().collect();
                resumed = packer_of(&held);
            }
        }
        prop_assert_eq!(packer.finish(), resumed.finish());
    }
}
