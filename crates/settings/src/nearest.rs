//! The valid name that is closest to a misspelt one.

use strsim::osa_distance;

/// The closest of `valid` to `name`, if it is close enough to be meant: at most a third of the
/// letters differ, or one is the beginning of the other.
pub fn nearest<'a>(name: &str, valid: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = normal(name);
    let scored =
        valid.into_iter().map(|candidate| (osa_distance(&name, &normal(candidate)), candidate));
    let (distance, candidate) = scored.min_by_key(|&(distance, _)| distance)?;
    let length = name.chars().count().max(candidate.len());
    let is_beginning = name.chars().count() >= 3 && {
        let candidate = normal(candidate);
        candidate.starts_with(&name) || name.starts_with(&candidate)
    };
    (distance * 3 <= length.max(3) || is_beginning).then_some(candidate)
}

/// In lower case, with `_` for `-`.
fn normal(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
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
}
