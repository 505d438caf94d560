//! The valid name that a misspelt one looks like.

/// The closest of `valid` to `name`, if it is close enough to be what was meant: at most a third of
/// the letters differ, swapped neighbours counted once, or one is the beginning of the other.
pub(super) fn nearest<'a>(name: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = normal(name);
    let scored =
        valid.into_iter().map(|candidate| (distance(&name, &normal(candidate)), candidate));
    let (distance, candidate) = scored.min_by_key(|&(distance, _)| distance)?;
    let length = name.len().max(candidate.len());
    let is_beginning = name.len() >= 3 && {
        let candidate = normal(candidate);
        candidate.starts_with(&name) || name.starts_with(&candidate)
    };
    (distance * 3 <= length.max(3) || is_beginning).then_some(candidate)
}

fn normal(name: &str) -> Vec<char> {
    name.chars().flat_map(char::to_lowercase).map(|c| if c == '-' { '_' } else { c }).collect()
}

/// Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut before = vec![0; b.len() + 1]; // row i - 2
    let mut above: Vec<usize> = (0..=b.len()).collect(); // row i - 1
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = above[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replaced.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_key_finds_the_right_one() {
        let valid = ["packing", "packing_length", "packing_strategy", "lr", "max_steps", "epochs"];
        for (misspelt, meant) in [
            ("packing_lenght", Some("packing_length")),
            ("packingLength", Some("packing_length")),
            ("packing-length", Some("packing_length")),
            ("pack", Some("packing")),
            ("Lr", Some("lr")),
            ("rl", Some("lr")),
            ("epoch", Some("epochs")),
            ("max_step", Some("max_steps")),
            ("warmup", None),
            ("x", None),
        ] {
            assert_eq!(nearest(misspelt, valid), meant, "{misspelt}");
        }
        assert_eq!(nearest("lr", []), None);
    }

    #[test]
    fn the_distance_counts_edits() {
        let distance = |a: &str, b: &str| super::distance(&normal(a), &normal(b));
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("ab", "ba"), 1);
        assert_eq!(distance("same", "same"), 0);
    }
}
