//! What the ranks do for a sum, computed from sizes only, so that all of them do the same.

use super::super::Rank;
use std::ops::Range;

/// Sizes in elements that decide how tensors are summed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Smaller tensors are copied into a buffer, so that many of them are summed at once.
    pub(super) small: usize,
    /// Length of the buffer.
    pub(super) buffer: usize,
    /// Maximum number of elements that are summed at once.
    pub(super) part: usize,
}

impl Sizes {
    /// 4 MiB and 64 MiB: messages that use the bandwidth of NVLink, and little memory for buffers.
    pub(super) const USUAL: Self = Self { small: 1 << 20, buffer: 1 << 24, part: 1 << 24 };
}

/// Elements that are summed at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// A range of tensor `0`, summed in place.
    Range(usize, Range<usize>),
    /// These tensors, one after the other in the buffer.
    Small(Vec<usize>),
}

/// Divides tensors with `lens` elements into pieces.
pub(super) fn pieces(lens: &[usize], sizes: Sizes) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut small, mut filled) = (Vec::new(), 0);
    for (tensor, &len) in lens.iter().enumerate().filter(|(_, len)| **len > 0) {
        if len >= sizes.small {
            let starts = (0..len).step_by(sizes.part);
            let range = |start: usize| start..len.min(start.saturating_add(sizes.part));
            pieces.extend(starts.map(|start| Piece::Range(tensor, range(start))));
            continue;
        }
        if filled + len > sizes.buffer {
            pieces.push(Piece::Small(std::mem::take(&mut small)));
            filled = 0;
        }
        small.push(tensor);
        filled += len;
    }
    if !small.is_empty() {
        pieces.push(Piece::Small(small));
    }
    pieces
}

/// Shares start at multiples of 64 elements (256 bytes), as GPUs read memory fastest.
const ALIGNMENT: usize = 64;

/// The share of member `of` in `len` elements that `members` ranks sum.
pub(super) fn share(len: usize, members: usize, of: usize) -> Range<usize> {
    let each = len.div_ceil(members).next_multiple_of(ALIGNMENT);
    len.min(each * of)..len.min(each * (of + 1))
}

/// Ranks that exchange shares. Each sums one share.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Level {
    pub(super) members: Vec<usize>,
    /// Index of this rank in `members`.
    pub(super) own: usize,
    pub(super) tree: Tree,
}

/// The levels in which `rank` sums: first within its node, then one rank of each node, so that
/// nodes exchange each sum once. `ranks` has the places of all ranks.
///
/// The tree over all ranks contains a tree for each node only if the number of nodes is a power of
/// two and all have the same number of ranks, in order. Otherwise there is one level for all.
pub(super) fn levels(rank: Rank, ranks: &[Rank]) -> Vec<Level> {
    let Rank { rank: own, world, local_world, .. } = rank;
    let in_order = |(index, rank): (usize, &Rank)| {
        rank.local_world == local_world && rank.local_rank == index % local_world
    };
    let level = |members: Vec<usize>, own| Level { tree: Tree::new(members.len()), members, own };
    let alike = world % local_world == 0 && ranks.iter().enumerate().all(in_order);
    let nodes = world / local_world;
    if !alike || !nodes.is_power_of_two() {
        return vec![level((0..world).collect(), own)];
    }
    let (node, local) = (own / local_world, own % local_world);
    let within = level((0..local_world).map(|local| node * local_world + local).collect(), local);
    let across = level((0..nodes).map(|node| node * local_world + local).collect(), node);
    [within, across].into_iter().filter(|level| level.members.len() > 1).collect()
}

/// The ranks of the shard group of `rank`, and the ranks at the same place of all shard groups.
pub(super) fn groups(rank: Rank, shard_group: usize) -> (Level, Level) {
    let (group, place) = (rank.rank / shard_group, rank.rank % shard_group);
    let level = |members: Vec<usize>, own| Level { tree: Tree::new(members.len()), members, own };
    let first = group * shard_group;
    (
        level((first..first + shard_group).collect(), place),
        level((place..rank.world).step_by(shard_group).collect(), group),
    )
}

/// The order in which the values of `parts` ranks are added: the sum of the first half plus the sum
/// of the second half, each computed in the same way.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tree {
    /// Position of each part in the buffer.
    pub(super) position: Vec<usize>,
    /// `(to, from, count)`: adds the parts at positions `from..from + count` to those at
    /// `to..to + count`. The sum of all is then at position 0.
    pub(super) adds: Vec<(usize, usize, usize)>,
}

impl Tree {
    /// The positions are such that one addition covers a level of the tree, if `parts` is a power
    /// of two.
    fn new(parts: usize) -> Self {
        let mut levels = Vec::new();
        let order = add_up(0..parts, &mut levels);
        let mut position = vec![0; parts];
        for (at, part) in order.into_iter().enumerate() {
            position[part] = at;
        }
        let mut adds: Vec<(usize, usize, usize)> = Vec::new();
        for level in levels {
            let mut pairs: Vec<(usize, usize)> =
                level.into_iter().map(|(to, from)| (position[to], position[from])).collect();
            pairs.sort_unstable();
            let first = adds.len();
            for (to, from) in pairs {
                match adds[first..].last_mut() {
                    Some((start, other, count))
                        if *start + *count == to && *other + *count == from =>
                    {
                        *count += 1;
                    }
                    _ => adds.push((to, from, 1)),
                }
            }
        }
        Self { position, adds }
    }
}

/// Appends the pairs of parts to add for the sum of `parts`, by height in the tree, and returns the
/// order of the parts in the buffer.
fn add_up(parts: Range<usize>, levels: &mut Vec<Vec<(usize, usize)>>) -> Vec<usize> {
    if parts.len() < 2 {
        return parts.collect();
    }
    let middle = parts.start + parts.len() / 2;
    let (mut below, mut beside) = (Vec::new(), Vec::new());
    let left = add_up(parts.start..middle, &mut below);
    let right = add_up(middle..parts.end, &mut beside);
    below.resize(below.len().max(beside.len()), Vec::new());
    for (level, pairs) in below.iter_mut().zip(beside) {
        level.extend(pairs);
    }
    below.push(vec![(parts.start, middle)]);
    *levels = below;
    // alternating, so that the first halves of all pairs are next to each other
    let longest = left.len().max(right.len());
    (0..longest).flat_map(|at| [left.get(at), right.get(at)]).flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(parts: Range<usize>) -> String {
        if parts.len() < 2 {
            return parts.start.to_string();
        }
        let middle = parts.start + parts.len() / 2;
        format!("({} + {})", tree(parts.start..middle), tree(middle..parts.end))
    }

    fn ranks(world: usize, local_world: usize) -> Vec<Rank> {
        let place = |rank| Rank { rank, world, local_rank: rank % local_world, local_world };
        (0..world).map(place).collect()
    }

    #[test]
    fn parts_are_added_in_the_order_of_the_tree() {
        for parts in 1..40 {
            let Tree { position, adds } = Tree::new(parts);
            let mut buffer = vec![String::new(); parts];
            for (part, &at) in position.iter().enumerate() {
                buffer[at] = part.to_string();
            }
            for (to, from, count) in adds {
                assert!(to + count <= from, "an addition reads what it writes");
                for at in 0..count {
                    buffer[to + at] = format!("({} + {})", buffer[to + at], buffer[from + at]);
                }
            }
            assert_eq!(buffer[0], tree(0..parts));
        }
    }

    #[test]
    fn a_power_of_two_of_parts_needs_one_addition_for_each_level_of_the_tree() {
        for (parts, adds) in [(1, 0), (2, 1), (8, 3), (64, 6), (512, 9)] {
            assert_eq!(Tree::new(parts).adds.len(), adds);
        }
    }

    #[test]
    fn shares_cover_all_elements_once() {
        for len in [0, 1, 63, 64, 65, 1000, 100_003] {
            for members in 1..9 {
                let ends = (0..members).scan(0, |end, of| {
                    let share = share(len, members, of);
                    assert_eq!(share.start, *end);
                    *end = share.end;
                    Some(*end)
                });
                assert_eq!(ends.last(), Some(len));
            }
        }
    }

    #[test]
    fn ranks_sum_within_their_node_first_if_the_nodes_are_alike() {
        let of = |rank: usize, world, local_world| {
            let ranks = ranks(world, local_world);
            let members = |level: Level| (level.members, level.own);
            levels(ranks[rank], &ranks).into_iter().map(members).collect::<Vec<_>>()
        };
        assert_eq!(of(5, 8, 4), [(vec![4, 5, 6, 7], 1), (vec![1, 5], 1)]);
        assert_eq!(of(5, 6, 3), [(vec![3, 4, 5], 2), (vec![2, 5], 1)]);
        assert_eq!(of(1, 3, 3), [(vec![0, 1, 2], 1)]);
        assert_eq!(of(3, 4, 1), [(vec![0, 1, 2, 3], 3)]);
        assert_eq!(of(0, 1, 1), []);
        // three nodes: the tree over all ranks does not contain their trees
        assert_eq!(of(5, 6, 2), [((0..6).collect(), 5)]);
    }

    #[test]
    fn shard_groups_have_neighbouring_ranks_and_their_places_are_a_multiple_apart() {
        let of = |rank, shard_group| {
            let (group, across) = groups(ranks(6, 6)[rank], shard_group);
            [(group.members, group.own), (across.members, across.own)]
        };
        assert_eq!(of(4, 2), [(vec![4, 5], 0), (vec![0, 2, 4], 2)]);
        assert_eq!(of(4, 3), [(vec![3, 4, 5], 1), (vec![1, 4], 1)]);
        assert_eq!(of(4, 1), [(vec![4], 0), ((0..6).collect(), 4)]);
    }

    #[test]
    fn ranks_on_different_nodes_sum_in_one_level_if_the_nodes_differ() {
        let mut uneven = ranks(4, 2);
        for (rank, local_rank) in [(1, 1), (2, 2), (3, 0)] {
            let local_world = if rank == 3 { 1 } else { 3 };
            uneven[rank] = Rank { local_rank, local_world, ..uneven[rank] };
        }
        uneven[0].local_world = 3;
        for rank in &uneven {
            let levels = levels(*rank, &uneven);
            assert_eq!(levels.len(), 1, "rank {}", rank.rank);
            assert_eq!(levels[0].members, [0, 1, 2, 3]);
        }
    }

    #[test]
    fn small_tensors_share_pieces_and_large_ones_are_cut() {
        let sizes = Sizes { small: 4, buffer: 8, part: 8 };
        let found = pieces(&[3, 0, 17, 3, 2, 1, 4], sizes);
        let small = |tensors: &[usize]| Piece::Small(tensors.to_vec());
        let range = |tensor, start, end| Piece::Range(tensor, start..end);
        assert_eq!(
            found,
            [range(2, 0, 8), range(2, 8, 16), range(2, 16, 17), small(&[0, 3, 4]), range(6, 0, 4)]
                .into_iter()
                .chain([small(&[5])])
                .collect::<Vec<_>>()
        );
    }
}
