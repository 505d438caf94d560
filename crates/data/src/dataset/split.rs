//! `data.eval_share`, `eval_rows` and `eval_group`: the rows of the training data that are held out
//! for evaluation.
//!
//! Rows that belong together form a group: rows with the same content, and by `eval_group` rows with
//! a common image or `id`, also of different data sets. The groups are taken in the order of a hash
//! of the seed and of their contents. So the split depends neither on the order of the rows nor on
//! the paths of the files, and a row that is added moves few others.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::path::{Component, Path};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use settings::Choice;
use sha2::{Digest, Sha256};

use crate::row::{Rejection, TransientRowError};
use crate::source::{RowFile, SourceError};
use batch::{MediaSource, Medium, Sample, VideoRef};

/// Which rows stay together when rows are held out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum EvalGroup {
    /// Rows with the same content.
    #[default]
    Rows,
    /// Also rows with a common image or video, by its path, address or bytes.
    Images,
    /// Also rows with the same value of the key `id`.
    Id,
}

/// The number of rows that are held out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SplitSize {
    /// A share of the rows of each data set.
    Share(f64),
    /// A number of rows of all data sets together, in proportion to their rows.
    Rows(NonZeroU64),
}

/// How rows are held out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvalSplit {
    /// How many rows are held out.
    pub size: SplitSize,
    /// Which rows stay together.
    pub group: EvalGroup,
    /// Seed of the draw.
    pub seed: u64,
}

/// A hash of what rows have in common: their content, an image or an `id`.
type RowKey = [u8; 16];

/// The rows of each data set that are held out, in ascending order: at least one of each, and not
/// all.
pub(super) fn held_out(files: &[&RowFile], split: EvalSplit) -> Result<Vec<Vec<u32>>, SourceError> {
    let budgets = budgets(files, split.size)?;
    let rows: Vec<(usize, u32)> = (0..files.len())
        .flat_map(|set| (0..files[set].len() as u32).map(move |row| (set, row)))
        .collect();
    let keys = |(set, row): &(usize, u32)| keys(files[*set], *row as usize, split.group);
    let keys = rows.par_iter().map(keys).collect::<Result<Vec<_>, _>>()?;
    if split.group != EvalGroup::Rows && keys.iter().all(|keys| keys.len() == 1) {
        let lacking = match split.group {
            EvalGroup::Images => "images or videos",
            EvalGroup::Rows | EvalGroup::Id => "a text or a number under the key `id`",
        };
        return Err(SourceError::NoGroups { group: split.group.name(), lacking });
    }
    let mut held = vec![Vec::new(); files.len()];
    for group in groups(&keys, split.seed) {
        let of_set = |set| group.iter().filter(|row| rows[**row].0 == set).count();
        if (0..files.len()).all(|set| held[set].len() + of_set(set) <= budgets[set]) {
            for row in group {
                held[rows[row].0].push(rows[row].1);
            }
        }
    }
    for (set, held) in held.iter_mut().enumerate() {
        if held.is_empty() {
            let why = "every group of rows that stay together is larger";
            return Err(not_split(files[set], budgets[set], why));
        }
        held.sort_unstable();
    }
    Ok(held)
}

fn not_split(file: &RowFile, held_out: usize, why: &'static str) -> SourceError {
    SourceError::NotSplit { path: file.path().to_owned(), rows: file.len(), held_out, why }
}

/// The maximum number of rows to hold out of each data set.
fn budgets(files: &[&RowFile], size: SplitSize) -> Result<Vec<usize>, SourceError> {
    let total: usize = files.iter().map(|file| file.len()).sum();
    let (mut before, mut budgets) = (0, Vec::new());
    for file in files {
        let end = before + file.len();
        let budget = match size {
            SplitSize::Share(share) => (share * file.len() as f64).round(),
            SplitSize::Rows(rows) => {
                // The differences of all data sets add up to the number of rows.
                let of_first = |first: usize| rows.get() as f64 * first as f64 / total as f64;
                of_first(end).round() - of_first(before).round()
            }
        };
        let budget = (budget as usize).max(1);
        if budget >= file.len() {
            return Err(not_split(file, budget, "at least one row must remain to train on"));
        }
        budgets.push(budget);
        before = end;
    }
    Ok(budgets)
}

/// The keys of a row. A row that cannot be parsed has only that of its content.
fn keys(file: &RowFile, row: usize, group: EvalGroup) -> Result<Vec<RowKey>, SourceError> {
    let content = TransientRowError::or_read(Rejection::of, || file.content(row));
    let content = match content.map_err(|error| SourceError::Transient(Box::new(error)))? {
        Ok(content) => content,
        Err(error) => return Ok(vec![key(b"unreadable", error.to_string().as_bytes())]),
    };
    let mut keys = vec![key(b"row", &content.hash())];
    match group {
        EvalGroup::Rows => {}
        EvalGroup::Images => keys.extend(file.parse(row, content).iter().flat_map(media_keys)),
        EvalGroup::Id => keys.extend(RowFile::id_in(content).map(|id| key(b"id", id.as_bytes()))),
    }
    Ok(keys)
}

fn media_keys(sample: &Sample) -> Vec<RowKey> {
    let of_image = |source: &MediaSource| match source {
        MediaSource::File { root, path } => file_key(root, path),
        MediaSource::DataUri(uri) => key(b"uri", uri.as_bytes()),
        MediaSource::Url(url) => key(b"url", url.as_bytes()),
        MediaSource::Bytes(bytes) => key(b"bytes", bytes),
    };
    let of_medium = |medium: &Medium| match medium {
        Medium::Image(image) => vec![of_image(&image.source)],
        Medium::Video(VideoRef::Frames { frames, .. }) => {
            frames.iter().map(|frame| of_image(&frame.source)).collect()
        }
        Medium::Video(VideoRef::File { root, path, .. }) => vec![file_key(root, path)],
    };
    sample.media.iter().flat_map(of_medium).collect()
}

/// The key of a file, whatever the spelling of its path.
fn file_key(root: &Path, path: &Path) -> RowKey {
    let mut parts: Vec<Component<'_>> = Vec::new();
    let joined = root.join(path);
    let joined = std::path::absolute(&joined).unwrap_or(joined);
    for part in joined.components() {
        match (part, parts.last()) {
            (Component::CurDir, _) => {}
            (Component::ParentDir, Some(Component::Normal(_))) => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    let path: std::path::PathBuf = parts.iter().collect();
    key(b"file", path.as_os_str().as_encoded_bytes())
}

fn key(kind: &[u8], bytes: &[u8]) -> RowKey {
    let hash = Sha256::new().chain_update(kind).chain_update([0]).chain_update(bytes).finalize();
    let mut key = RowKey::default();
    key.copy_from_slice(&hash[..size_of::<RowKey>()]);
    key
}

/// The groups of rows with a common key, in the order in which they are drawn. The first key of a
/// row is that of its content.
fn groups(keys: &[Vec<RowKey>], seed: u64) -> Vec<Vec<usize>> {
    let mut parents: Vec<usize> = (0..keys.len()).collect();
    let mut first_with: HashMap<RowKey, usize> = HashMap::with_capacity(keys.len());
    for (row, keys) in keys.iter().enumerate() {
        for key in keys {
            let other = *first_with.entry(*key).or_insert(row);
            let (of_row, of_other) = (root(&mut parents, row), root(&mut parents, other));
            parents[of_row.max(of_other)] = of_row.min(of_other);
        }
    }
    let mut groups: HashMap<usize, (RowKey, Vec<usize>)> = HashMap::new();
    for (row, keys) in keys.iter().enumerate() {
        let group = groups.entry(root(&mut parents, row)).or_insert((keys[0], Vec::new()));
        group.0 = group.0.min(keys[0]);
        group.1.push(row);
    }
    // Hashed once for each group: the least of many hashes would draw large groups first.
    let drawn = |(least, rows): (RowKey, Vec<usize>)| (key(&seed.to_le_bytes(), &least), rows);
    let mut groups: Vec<(RowKey, Vec<usize>)> = groups.into_values().map(drawn).collect();
    groups.sort_unstable();
    groups.into_iter().map(|(_, rows)| rows).collect()
}

/// The first row of the group of `row`. Halves the path to it.
fn root(parents: &mut [usize], mut row: usize) -> usize {
    while parents[row] != row {
        parents[row] = parents[parents[row]];
        row = parents[row];
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;
    use std::fs;

    /// A row: the number of its text, its images, and its `id`.
    type Row = (u8, Vec<u8>, Option<u8>);

    fn json_of((text, images, id): &Row) -> Value {
        let spelled = |(place, image): (usize, &u8)| match (place + usize::from(*text)) % 3 {
            0 => format!("{image}.png"),
            1 => format!("./{image}.png"),
            _ => format!("folder/../{image}.png"),
        };
        let images: Vec<String> = images.iter().enumerate().map(spelled).collect();
        let marks = "<image>".repeat(images.len());
        let user = json!({"role": "user", "content": format!("{marks}{text}")});
        let answer = json!({"role": "assistant", "content": "yes"});
        let mut row = json!({"messages": [user, answer], "images": images});
        if let Some(id) = id {
            row["id"] = json!(id.to_string());
        }
        row
    }

    fn write(folder: &Path, sets: &[Vec<Row>]) -> Vec<RowFile> {
        let open = |(number, rows): (usize, &Vec<Row>)| {
            let path = folder.join(format!("{number}.jsonl"));
            let lines: Vec<String> = rows.iter().map(|row| json_of(row).to_string()).collect();
            fs::write(&path, lines.join("\n")).unwrap();
            RowFile::open(&path, Some(folder)).unwrap()
        };
        sets.iter().enumerate().map(open).collect()
    }

    fn split(files: &[RowFile], split: EvalSplit) -> Result<Vec<Vec<u32>>, SourceError> {
        held_out(&files.iter().collect::<Vec<_>>(), split)
    }

    fn rows() -> impl Strategy<Value = Vec<Vec<Row>>> {
        let images = prop::collection::vec(0u8..60, 0..3);
        let row = (0u8..40, images, prop::option::of(0u8..30));
        prop::collection::vec(prop::collection::vec(row, 2..40), 1..4)
    }

    fn groups() -> impl Strategy<Value = EvalGroup> {
        prop::sample::select(vec![EvalGroup::Rows, EvalGroup::Images, EvalGroup::Id])
    }

    fn sizes() -> impl Strategy<Value = SplitSize> {
        let rows = (1u64..30).prop_map(|rows| SplitSize::Rows(NonZeroU64::new(rows).unwrap()));
        prop_oneof![(0.01f64..0.6).prop_map(SplitSize::Share), rows]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn no_row_image_or_id_is_on_both_sides(
            sets in rows(), group in groups(), size in sizes(), seed in 0u64..3
        ) {
            let folder = tempfile::tempdir().unwrap();
            let files = write(folder.path(), &sets);
            let Ok(held) = split(&files, EvalSplit { size, group, seed }) else { return Ok(()) };
            let of_side = |is_held: bool| {
                let sides = sets.iter().zip(&held).flat_map(move |(rows, held)| {
                    (0u32..).zip(rows).filter(move |(row, _)| held.contains(row) == is_held)
                });
                sides.map(|(_, row)| row).collect::<Vec<&Row>>()
            };
            let [train, eval] = [false, true].map(of_side);
            for (set, held) in sets.iter().zip(&held) {
                prop_assert!(!held.is_empty() && held.len() < set.len());
                prop_assert!(held.is_sorted());
            }
            let contents = |side: &[&Row]| -> BTreeSet<String> {
                side.iter().map(|row| json_of(row).to_string()).collect()
            };
            prop_assert!(contents(&train).is_disjoint(&contents(&eval)));
            let images = |side: &[&Row]| -> BTreeSet<u8> {
                side.iter().flat_map(|row| row.1.clone()).collect()
            };
            if group == EvalGroup::Images {
                prop_assert!(images(&train).is_disjoint(&images(&eval)));
            }
            let ids = |side: &[&Row]| side.iter().filter_map(|row| row.2).collect::<BTreeSet<u8>>();
            if group == EvalGroup::Id {
                prop_assert!(ids(&train).is_disjoint(&ids(&eval)));
            }
            // No more rows than the size, except for one row of each small data set.
            let most = |set: &Vec<Row>| match size {
                SplitSize::Share(share) => (share * set.len() as f64).round().max(1.0) as usize,
                SplitSize::Rows(rows) => rows.get() as usize,
            };
            prop_assert!(sets.iter().zip(&held).all(|(set, held)| held.len() <= most(set)));
        }

        /// The same rows are held out if the rows of the file have another order.
        #[test]
        fn the_split_does_not_depend_on_the_order_of_the_rows(
            rows in prop::collection::vec((0u8..200, prop::collection::vec(0u8..60, 0..2), Just(None)), 4..60),
            group in groups(), seed in 0u64..3
        ) {
            let folder = tempfile::tempdir().unwrap();
            let reversed: Vec<Row> = rows.iter().rev().cloned().collect();
            let size = SplitSize::Share(0.3);
            let held = |rows: &Vec<Row>| {
                let files = write(folder.path(), std::slice::from_ref(rows));
                let held = split(&files, EvalSplit { size, group, seed }).ok()?.remove(0);
                let mut held: Vec<Row> =
                    held.into_iter().map(|row| rows[row as usize].clone()).collect();
                held.sort_unstable();
                Some(held)
            };
            prop_assert_eq!(held(&rows), held(&reversed));
        }
    }

    fn distinct(rows: u8) -> Vec<Row> {
        (0..rows).map(|row| (row, vec![row], Some(row))).collect()
    }

    #[test]
    fn a_share_and_a_number_of_rows_are_exact_for_distinct_rows() {
        let folder = tempfile::tempdir().unwrap();
        let files = write(folder.path(), &[distinct(30), distinct(100)[30..].to_vec()]);
        let of =
            |size, seed| split(&files, EvalSplit { size, group: EvalGroup::Images, seed }).unwrap();
        let sizes = |held: &[Vec<u32>]| held.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes(&of(SplitSize::Share(0.1), 1)), [3, 7]);
        // three of ten rows belong to the first data set
        let rows = |rows| SplitSize::Rows(NonZeroU64::new(rows).unwrap());
        assert_eq!(sizes(&of(rows(5), 1)), [2, 3]);
        assert_eq!(sizes(&of(rows(50), 1)), [15, 35]);
        assert_eq!(of(rows(5), 1), of(rows(5), 1));
        assert_ne!(of(rows(50), 1), of(rows(50), 2));
    }

    /// Half of the rows are in groups of ten, and the draw prefers neither half.
    #[test]
    fn large_groups_are_drawn_as_often_as_small_ones() {
        let folder = tempfile::tempdir().unwrap();
        let large = (0..50u8).flat_map(|image| (0..10).map(move |row| (row, vec![image], None)));
        let small = (0..500).map(|row| ((row % 250) as u8, vec![], Some((row / 250) as u8)));
        let files = write(folder.path(), &[large.chain(small).collect()]);
        let size = SplitSize::Share(0.2);
        let of_large = |seed| {
            let split = EvalSplit { size, group: EvalGroup::Images, seed };
            let held = held_out(&[&files[0]], split).unwrap().remove(0);
            assert_eq!(held.len(), 200);
            held.into_iter().filter(|row| *row < 500).count()
        };
        let drawn: usize = (0..20).map(of_large).sum();
        assert!((1600..2400).contains(&drawn), "{drawn} of 4000 rows are in large groups");
    }

    #[test]
    fn an_image_is_one_file_whatever_the_spelling_of_its_path() {
        let (root, here) = (Path::new("images"), std::env::current_dir().unwrap());
        let of = |path: &Path| file_key(root, path);
        let absolute = of(&here.join("images/a.png"));
        for path in ["a.png", "./a.png", "b/../a.png"] {
            assert_eq!(of(Path::new(path)), absolute, "{path}");
        }
        assert_ne!(of(Path::new("b/a.png")), absolute);
    }

    #[test]
    fn a_group_that_no_row_has_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let rows: Vec<Row> = (0..9).map(|row| (row, vec![], None)).collect();
        let files = write(folder.path(), &[rows]);
        for (group, name, lacking) in [
            (EvalGroup::Images, "images", "images or videos"),
            (EvalGroup::Id, "id", "the key `id`"),
        ] {
            let size = SplitSize::Share(0.3);
            let error = split(&files, EvalSplit { size, group, seed: 1 }).unwrap_err().to_string();
            assert!(error.contains(&format!("`data.eval_group` is `{name}`")), "{error}");
            assert!(error.ends_with(lacking), "{error}");
        }
    }

    #[test]
    fn a_data_set_that_cannot_be_split_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let same: Vec<Row> = (0..9).map(|row| (row, vec![0], None)).collect();
        let files = write(folder.path(), &[same, distinct(1)]);
        let of = |files: &[RowFile], share| {
            let size = SplitSize::Share(share);
            let result = split(files, EvalSplit { size, group: EvalGroup::Images, seed: 1 });
            result.unwrap_err().to_string()
        };
        let message = of(&files[..1], 0.3);
        assert!(message.contains("hold out 3 of the 9 rows of") && message.contains("0.jsonl"));
        assert!(message.ends_with("every group of rows that stay together is larger"), "{message}");
        let message = of(&files[1..], 0.3);
        assert!(message.ends_with("at least one row must remain to train on"), "{message}");
    }
}
