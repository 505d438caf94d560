//! Made-up rows for the tests of the loader and the plan.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use crate::config::{OnError, Truncation};
use crate::dataset::RowReader;
use crate::dataset::order::{DatasetShare, Order, RowOrder};
use crate::loader::LoaderOptions;
use crate::loader::steps::Rmpad;
use crate::packing::{Overlong, PackRules, Packing, PackingStrategy, StepPacks};
use crate::row::{Length, Rejection, SampleIndex};
use batch::{EncodedSample, MediumKind, PaddingSide, Patches, SampleId};

/// The behaviour of a made-up row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// A sample with this number of tokens.
    Text(usize),
    /// An image of two tokens, then this number of tokens.
    Image(usize),
    /// A row that is rejected.
    Broken,
    /// [`Kind::Image`] that is found broken by decoding.
    BrokenPixels(usize),
    /// [`Kind::Image`] that is one token longer than its measured length.
    Grown(usize),
    /// [`Kind::Image`] of one token that takes a while to decode.
    SlowPixels(Duration),
    /// [`Kind::Image`] of one token that panics when it is decoded.
    PanicPixels,
    /// A row that takes a while.
    Slow(Duration),
    Panic,
}

/// A single data set of made-up rows. The first id of each sample is its row.
pub(crate) struct TestReader(pub(crate) Vec<Kind>);

impl TestReader {
    fn rejection(&self, row: SampleIndex) -> Rejection {
        Rejection::new(&self.id(row), "broken", "the row is broken".to_owned())
    }
}

impl RowReader for TestReader {
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection> {
        let (vision, text) = match self.0[row.row as usize] {
            Kind::Text(tokens) => (0, tokens),
            Kind::Image(tokens) => (2, tokens),
            Kind::Grown(tokens) => (2, tokens + 1),
            Kind::SlowPixels(duration) => {
                std::thread::sleep(duration);
                (2, 1)
            }
            Kind::Broken | Kind::BrokenPixels(_) => return Err(self.rejection(row)),
            Kind::Slow(duration) => {
                std::thread::sleep(duration);
                (0, 1)
            }
            Kind::Panic | Kind::PanicPixels => panic!("made-up panic"),
        };
        let patches = Patches {
            pixel_values: vec![row.row as f32; 8 * 3],
            grid_thw: [1, 2, 4],
            kind: MediumKind::Image,
            continues_medium: false,
        };
        Ok(sample(self.id(row), vision + text, row.row, &vec![patches; vision / 2]))
    }

    fn length(&self, row: SampleIndex) -> Result<Length, Rejection> {
        match self.0[row.row as usize] {
            Kind::Image(tokens) | Kind::BrokenPixels(tokens) | Kind::Grown(tokens) => {
                Ok(Length { tokens: 2 + tokens, pixel_bytes: 8 * 3 * 4 })
            }
            Kind::SlowPixels(_) | Kind::PanicPixels => {
                Ok(Length { tokens: 3, pixel_bytes: 8 * 3 * 4 })
            }
            _ => self.read(row).map(|sample| Length::of(&sample)),
        }
    }

    fn id(&self, row: SampleIndex) -> SampleId {
        SampleId { file: Arc::from(Path::new("made-up.jsonl")), line: u64::from(row.row) + 1 }
    }
}

/// A sample whose ids count up from `first` modulo 5, beginning with `first` itself; each image of
/// `[1, 2, 4]` patches fills two tokens.
pub(crate) fn sample(id: SampleId, tokens: usize, first: u32, media: &[Patches]) -> EncodedSample {
    let mut input_ids: Vec<u32> = (first..).take(tokens).map(|id| id % 5).collect();
    if let Some(id) = input_ids.first_mut() {
        *id = first;
    }
    EncodedSample {
        weights: None,
        id,
        labels: input_ids
            .iter()
            .map(|id| if id % 2 == 0 { i64::from(*id) } else { -100 })
            .collect(),
        position_ids: (0..tokens as u32).map(|position| [position, position + 1, 7]).collect(),
        segment_starts: Vec::new(),
        vision_rows: (0..2 * media.len() as u32).collect(),
        media: media.to_vec(),
        input_ids,
    }
}

pub(crate) fn order(rows: usize, row_order: RowOrder) -> Order {
    let share = DatasetShare { rows: rows as u64, weight: 1.0 };
    Order::new(&[share], row_order, 5, [1; 32]).unwrap()
}

/// Packs of 64 tokens, two packs a micro-batch, two micro-batches a step, one epoch, two workers.
pub(crate) fn options(strategy: PackingStrategy) -> LoaderOptions {
    let length = const { NonZeroU32::new(64).unwrap() };
    let two = const { NonZeroUsize::new(2).unwrap() };
    LoaderOptions {
        packing: Packing::On { length, strategy, overlong: Overlong::Reject },
        pack_rules: PackRules {
            window: const { NonZeroUsize::new(200).unwrap() },
            max_patches: None,
            patch_bytes: const { NonZeroU64::new(3 * 4).unwrap() },
            balanced_step: None,
        },
        max_length: None,
        truncation: Truncation::Delete,
        batch_size: two,
        gradient_accumulation_steps: two,
        workers: two,
        pad_id: 0,
        merge_size: const { NonZeroU32::new(2).unwrap() },
        rmpad: Rmpad::Unpad,
        side: PaddingSide::Right,
        epochs: NonZeroU64::new(1),
        on_error: OnError::Skip,
        max_rejected: 1.0,
        slow_row: Duration::from_secs(10),
    }
}

/// Enough rows for more than two windows, of any kind that neither waits nor panics nor changes.
pub(crate) fn any_rows() -> impl Strategy<Value = Vec<Kind>> {
    rows_of(any_kind(2))
}

/// [`any_rows`] without broken pixels.
pub(crate) fn any_readable_rows() -> impl Strategy<Value = Vec<Kind>> {
    rows_of(any_kind(0))
}

/// `broken` of ten rows have broken pixels.
fn any_kind(broken: u32) -> BoxedStrategy<Kind> {
    let whole = prop_oneof![
        6 => (1usize..30).prop_map(Kind::Text),
        2 => (0usize..20).prop_map(Kind::Image),
        1 => Just(Kind::Broken),
        1 => Just(Kind::Text(65)),
    ];
    match broken {
        0 => whole.boxed(),
        _ => prop_oneof![
            10 - broken => whole,
            broken => (0usize..20).prop_map(Kind::BrokenPixels),
        ]
        .boxed(),
    }
}

fn rows_of(kind: impl Strategy<Value = Kind> + Clone) -> impl Strategy<Value = Vec<Kind>> {
    prop_oneof![prop::collection::vec(kind.clone(), 1..12), prop::collection::vec(kind, 500..600)]
        .prop_filter("no usable row", |rows| {
            let usable = |kind: &Kind| {
                !matches!(kind, Kind::Broken | Kind::BrokenPixels(_) | Kind::Text(65))
            };
            rows.iter().any(usable)
        })
}

/// Two epochs of any packing and step size.
pub(crate) fn any_options() -> impl Strategy<Value = LoaderOptions> {
    let packing = prop_oneof![
        Just(Packing::Off),
        Just(options(PackingStrategy::Sequential).packing),
        Just(options(PackingStrategy::BestFit).packing),
        Just(Packing::On {
            length: NonZeroU32::new(40).unwrap(),
            strategy: PackingStrategy::BestFit,
            overlong: Overlong::Alone,
        }),
    ];
    let rules = (1usize..300, prop::option::of(8u32..40), any::<bool>());
    let max_rejected = prop_oneof![3 => Just(1.0), 1 => 0.0..0.5];
    let sizes = (1usize..5, 1usize..4, 1usize..5);
    (packing, rules, sizes, any::<bool>(), any::<bool>(), max_rejected).prop_map(
        |(
            packing,
            rules,
            (batch_size, accumulation, workers),
            keep_padding,
            limited,
            max_rejected,
        )| {
            LoaderOptions {
                max_rejected,
                packing,
                pack_rules: PackRules {
                    window: NonZeroUsize::new(rules.0).unwrap(),
                    max_patches: rules.1.and_then(NonZeroU32::new),
                    balanced_step: rules.2.then_some(StepPacks {
                        micro_batches: NonZeroUsize::new(accumulation).unwrap(),
                        batch_size: NonZeroUsize::new(batch_size).unwrap(),
                    }),
                    ..options(PackingStrategy::BestFit).pack_rules
                },
                batch_size: NonZeroUsize::new(batch_size).unwrap(),
                gradient_accumulation_steps: NonZeroUsize::new(accumulation).unwrap(),
                workers: NonZeroUsize::new(workers).unwrap(),
                rmpad: if keep_padding { Rmpad::KeepPadding } else { Rmpad::Unpad },
                max_length: if limited { NonZeroU32::new(50) } else { None },
                epochs: NonZeroU64::new(2),
                ..options(PackingStrategy::BestFit)
            }
        },
    )
}
