//! The rows of a verification, and their packs as the loader of a run makes them.

use super::super::inputs::{DataList, encoder, loader_options, open_data, order};
use super::super::observer::SetupObserver;
use crate::batch::{EncodedSample, SampleId, VarlenBatch};
use crate::config::RunConfig;
use crate::data::{
    DataState, DatasetShare, Length, Loader, LoaderOptions, Order, Rejection, RowOrder, RowReader,
    SampleIndex, first_epoch_packs,
};
use crate::run::RunError;
use std::num::NonZeroU64;
use std::sync::Arc;

/// Rows in memory.
pub(super) struct Rows {
    pub(super) samples: Vec<EncodedSample>,
    /// File and line of each.
    pub(super) labels: Vec<String>,
    /// Number of rejected rows before the last row in use.
    pub(super) rejected: usize,
    /// How a run of the config packs them.
    pub(super) options: LoaderOptions,
}

impl Rows {
    /// Reads the first `num` rows of the first epoch that are not rejected.
    pub(super) fn first(
        config: &RunConfig,
        num: usize,
        observer: &dyn SetupObserver,
    ) -> Result<Self, RunError> {
        let encoder = encoder(config)?;
        let data = open_data(config, DataList::Train, &encoder, observer)?;
        let options = loader_options(config, &encoder);
        let mut rows = Self { samples: Vec::new(), labels: Vec::new(), rejected: 0, options };
        let mut first = String::new();
        for row in order(config, &data)?.epoch(0) {
            if rows.samples.len() == num {
                break;
            }
            let sample = data.read_patiently(row)?.and_then(|sample| {
                options.check_length(Length::of(&sample), || data.id(row)).map(|()| sample)
            });
            match sample {
                Ok(sample) => {
                    rows.labels.push(data.label(row));
                    rows.samples.push(sample);
                }
                Err(rejection) => {
                    tracing::warn!(row = %rejection, "rejected");
                    if rows.rejected == 0 {
                        first = format!(": {rejection}");
                    }
                    rows.rejected += 1;
                }
            }
        }
        if rows.samples.is_empty() {
            return Err(RunError::NoRows { rejected: rows.rejected, first });
        }
        Ok(rows)
    }
}

/// A micro-batch, and the samples in each of its rows.
pub(super) type Batched = (VarlenBatch, Vec<Vec<usize>>);

/// The micro-batches of these samples in one epoch of a run, and the samples in each row of each.
pub(super) fn loaded(
    samples: &[EncodedSample],
    options: &LoaderOptions,
) -> Result<Vec<Batched>, RunError> {
    let options = LoaderOptions { epochs: Some(NonZeroU64::MIN), max_rejected: 1.0, ..*options };
    let share = DatasetShare { rows: samples.len() as u64, weight: 1.0 };
    let order = Order::new(&[share], RowOrder::File, 0, [0; 32])?;
    let reader: Arc<dyn RowReader> = Arc::new(InMemory(samples.to_vec()));
    let packs = first_epoch_packs(&reader, &order, &options, &|_, _| {})?;
    let pack = |pack: &Vec<(SampleIndex, usize)>| -> Vec<usize> {
        pack.iter().map(|(sample, _)| sample.row as usize).collect()
    };
    let packs: Vec<Vec<usize>> = packs.iter().map(pack).collect();
    let mut rows = packs.chunks(options.batch_size.get()).map(<[_]>::to_vec);
    let mut loader = Loader::start(reader, order, options, DataState::default());
    let mut batches = Vec::new();
    while let Some(step) = loader.next_step() {
        batches.extend(step?.micro_batches.into_iter().zip(rows.by_ref()));
    }
    Ok(batches)
}

/// Samples that need not be read.
struct InMemory(Vec<EncodedSample>);

impl RowReader for InMemory {
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection> {
        Ok(self.0[row.row as usize].clone())
    }

    fn length(&self, row: SampleIndex) -> Result<Length, Rejection> {
        Ok(Length::of(&self.0[row.row as usize]))
    }

    fn id(&self, row: SampleIndex) -> SampleId {
        self.0[row.row as usize].id.clone()
    }
}
