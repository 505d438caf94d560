//! Property test of the loader with random rows, limits, truncation, workers and stops: each row
//! occurs exactly once per epoch, no pack exceeds its limit, no image or video is truncated, and
//! the plan predicts the number of steps.

use super::harness::property;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use trainer::batch::{EncodedSample, PaddingSide};
use trainer::data::{CachedRows, DatasetRows};
use trainer::data::{
    DataState, DatasetConfig, DatasetShare, Encoder, ImageConfig, KeptEnd, Length, Loader,
    LoaderOptions, OnError, Order, Overlong, PackRules, Packing, PackingStrategy, Rmpad, RowOrder,
    RowReader, StepData, Truncation, TruncationRule, plan,
};

pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// An encoder with which images have one or more visual tokens.
pub(crate) fn encoder() -> Arc<Encoder> {
    static ENCODER: OnceLock<Arc<Encoder>> = OnceLock::new();
    let image = ImageConfig { min_pixels: Some(1024), ..ImageConfig::default() };
    let new = || Arc::new(Encoder::from_folder(&golden("models/small-tied"), &image).unwrap());
    ENCODER.get_or_init(new).clone()
}

#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) rows: Vec<Value>,
    max_length: Option<u32>,
    truncation: Truncation,
    packing_length: u32,
    strategy: PackingStrategy,
    overlong: Overlong,
    pub(crate) order: RowOrder,
    pub(crate) seed: u64,
    pub(crate) workers: usize,
    batch_size: usize,
    pub(crate) stop: prop::sample::Index,
}

fn any_row() -> impl Strategy<Value = Value> {
    let words =
        prop::sample::select(vec!["moon", "a b c", "one two three four", "?", "\n", "0123456789"]);
    let part = prop_oneof![
        3 => words.clone().prop_map(|text| json!({"type": "text", "text": text})),
        1 => prop::sample::select(vec!["exact_moon_96x64.png", "exact_moon_64x64.png", "no.png"])
            .prop_map(|name| json!({"type": "image", "image": name})),
        1 => (2usize..4).prop_map(|n| json!({"type": "video", "video": vec!["exact_moon_64x64.png"; n]})),
    ];
    let turns = prop::collection::vec((prop::collection::vec(part, 1..4), words), 1..3);
    turns.prop_map(|turns| {
        let turn = |(question, answer)| {
            [
                json!({"role": "user", "content": question}),
                json!({"role": "assistant", "content": answer}),
            ]
        };
        json!({"messages": turns.into_iter().flat_map(turn).collect::<Vec<_>>()})
    })
}

pub(crate) fn any_case() -> impl Strategy<Value = Case> {
    let truncation =
        prop::sample::select(vec![Truncation::Delete, Truncation::Left, Truncation::Right]);
    let strategy =
        prop::sample::select(vec![PackingStrategy::Sequential, PackingStrategy::BestFit]);
    let overlong = prop::sample::select(vec![Overlong::Reject, Overlong::Alone]);
    let order = prop::sample::select(vec![RowOrder::File, RowOrder::Shuffled]);
    let rows = prop::collection::vec(any_row(), 1..9);
    let limits = (prop::option::of(8u32..50), truncation, 20u32..80, strategy, overlong);
    (rows, limits, order, 0u64..5, 1usize..4, 1usize..3, any::<prop::sample::Index>()).prop_map(
        |(
            rows,
            (max_length, truncation, packing_length, strategy, overlong),
            order,
            seed,
            workers,
            batch_size,
            stop,
        )| Case {
            rows,
            max_length,
            truncation,
            packing_length,
            strategy,
            overlong,
            order,
            seed,
            workers,
            batch_size,
            stop,
        },
    )
}

impl Case {
    pub(crate) fn cut(&self) -> Option<TruncationRule> {
        let keep = match self.truncation {
            Truncation::Left => KeptEnd::End,
            Truncation::Right => KeptEnd::Beginning,
            _ => return None,
        };
        self.max_length
            .and_then(NonZeroU32::new)
            .map(|max_length| TruncationRule { max_length, keep })
    }

    pub(crate) fn options(&self, workers: usize) -> LoaderOptions {
        let size = |n| NonZeroUsize::new(n).unwrap();
        LoaderOptions {
            packing: Packing::On {
                length: NonZeroU32::new(self.packing_length).unwrap(),
                strategy: self.strategy,
                overlong: self.overlong,
            },
            pack_rules: PackRules {
                window: size(100),
                max_patches: None,
                patch_bytes: encoder().image_processor().patch_bytes(),
                balanced_step: None,
            },
            max_length: self.max_length.and_then(NonZeroU32::new),
            truncation: self.truncation,
            batch_size: size(self.batch_size),
            gradient_accumulation_steps: size(1),
            workers: size(workers),
            pad_id: 0,
            merge_size: encoder().merge_size(),
            rmpad: Rmpad::Unpad,
            side: PaddingSide::Right,
            epochs: NonZeroU64::new(2),
            on_error: OnError::Skip,
            max_rejected: 1.0,
            slow_row: Duration::from_secs(10),
        }
    }

    fn order(&self, rows: &DatasetRows) -> Order {
        let share = DatasetShare { rows: self.rows.len() as u64, weight: 1.0 };
        Order::new(&[share], self.order, self.seed, rows.fingerprint()).unwrap()
    }
}

pub(crate) fn steps(loader: &mut Loader) -> Result<Vec<StepData>, String> {
    std::iter::from_fn(|| loader.next_step())
        .map(|step| step.map_err(|error| error.to_string()))
        .collect()
}

/// Token ids of each sample, and how often the sample occurs.
fn samples(steps: &[StepData]) -> BTreeMap<Vec<u32>, u32> {
    let mut seen = BTreeMap::new();
    for batch in steps.iter().flat_map(|step| &step.micro_batches) {
        for segment in batch.cu_seqlens.segments() {
            *seen.entry(batch.input_ids[segment].to_vec()).or_default() += 1;
        }
    }
    seen
}

fn check(case: &Case, folder: &Path) -> Result<(), TestCaseError> {
    let path = folder.join("rows.jsonl");
    let text = case.rows.iter().map(Value::to_string).collect::<Vec<_>>().join("\n");
    File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
    let set = DatasetConfig { image_root: Some(golden("data/images")), ..DatasetConfig::new(path) };
    let rows = Arc::new(DatasetRows::open(&[set], encoder()).unwrap().truncated(case.cut()));
    let options = case.options(case.workers);

    // The result of encoding each row alone.
    let mut expected: BTreeMap<Vec<u32>, u32> = BTreeMap::new();
    let mut refused = Vec::new();
    for row in rows.rows() {
        let read = rows.read(row);
        prop_assert_eq!(rows.length(row), read.as_ref().map(Length::of).map_err(Clone::clone));
        let checked = read.and_then(|sample| {
            options.check_length(Length::of(&sample), || rows.id(row)).map(|()| sample)
        });
        match checked {
            Ok(sample) => {
                prop_assert!(case.max_length.is_none_or(|most| sample.len() <= most as usize));
                prop_assert!(sample.num_targets() > 0);
                let images = rows.sample(row).unwrap().unwrap().media.len();
                prop_assert_eq!(sample.media.len(), images);
                let visual: usize =
                    sample.media.iter().map(|patches| patches.num_patches() / 4).sum();
                prop_assert_eq!(sample.vision_rows.len(), visual);
                let parts = |sample: &EncodedSample| {
                    let text = encoder().decode_with_specials(&sample.input_ids).unwrap();
                    ["<|vision_start|>", "<|vision_end|>", " seconds>"]
                        .map(|part| text.matches(part).count())
                };
                let whole = encoder().encode(&rows.sample(row).unwrap().unwrap()).unwrap();
                prop_assert_eq!(parts(&sample), parts(&whole));
                *expected.entry(sample.input_ids).or_default() += 2; // in two epochs
            }
            Err(rejection) => refused.extend([rejection.clone(), rejection]),
        }
    }

    let (cached, _) = CachedRows::update(rows.clone(), &folder.join("cache"), &|_| ()).unwrap();
    let reader: Arc<dyn RowReader> = Arc::new(cached);
    let planned = plan(&reader, &case.order(&rows), &options, 2, &|_, _| ());
    let from = |workers, state| {
        Loader::start(rows.clone(), case.order(&rows), case.options(workers), state)
    };
    let found = steps(&mut from(case.workers, DataState::default()));
    let Ok(found) = found else {
        prop_assert!(expected.is_empty(), "{:?}", found);
        prop_assert_eq!(planned.map_err(|error| error.to_string()).err(), found.err());
        return Ok(());
    };
    prop_assert_eq!(samples(&found), expected);
    let mut reported: Vec<_> = found.iter().flat_map(|step| step.rejected.clone()).collect();
    reported.sort_by_key(|rejection| rejection.row);
    prop_assert_eq!(&reported, &refused);
    let last = &found.last().unwrap().state;
    let by_file: u64 = last.rejected_by_file.values().flat_map(BTreeMap::values).sum();
    prop_assert_eq!(by_file, refused.len() as u64);
    let planned = planned.unwrap();
    prop_assert_eq!(
        (planned.steps, planned.rows_read),
        (found.len() as u64, 2 * case.rows.len() as u64)
    );
    for batch in found.iter().flat_map(|step| &step.micro_batches) {
        let limit = case.batch_size * case.packing_length as usize;
        prop_assert!(batch.num_tokens <= limit || case.overlong == Overlong::Alone);
    }
    prop_assert!(steps(&mut from(case.workers % 3 + 1, DataState::default())).unwrap() == found);
    let stop = case.stop.index(found.len());
    let resumed = steps(&mut from(case.workers, found[stop].state.clone())).unwrap();
    prop_assert!(resumed == found[stop + 1..]);
    Ok(())
}

#[test]
fn rows_limits_truncation_workers_and_stops_never_lose_double_or_tear_a_sample() {
    let folder = tempfile::tempdir().unwrap();
    property(1000, &any_case(), |case| check(&case, folder.path()));
}
