//! Checks how often rows are read, and how many of them are in memory.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::tests::collect;
use super::*;
use crate::dataset::order::RowOrder;
use crate::loader::test_reader::{Kind, TestReader, options, order};
use crate::packing::{PackRules, PackingStrategy};
use batch::SampleId;

/// Counts the calls for each row.
#[derive(Default)]
struct Calls {
    rows: Vec<Kind>,
    measured: [AtomicUsize; 9],
    read: [AtomicUsize; 9],
}

impl RowReader for Calls {
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection> {
        panic!("row {row:?} is read whatever its length is")
    }

    fn length(&self, row: SampleIndex) -> Result<Length, Rejection> {
        self.measured[row.row as usize].fetch_add(1, Ordering::SeqCst);
        TestReader(self.rows.clone()).length(row)
    }

    fn read_of_length(&self, row: SampleIndex, length: Length) -> Result<EncodedSample, Rejection> {
        self.read[row.row as usize].fetch_add(1, Ordering::SeqCst);
        TestReader(self.rows.clone()).read_of_length(row, length)
    }

    fn id(&self, row: SampleIndex) -> SampleId {
        TestReader(Vec::new()).id(row)
    }
}

#[test]
fn a_loader_measures_each_row_once_and_reads_each_usable_row_once() {
    let rows = [Kind::Text(9), Kind::Image(3), Kind::Broken].repeat(3);
    let reader = Arc::new(Calls { rows, ..Calls::default() });
    let options = options(PackingStrategy::BestFit);
    let order = order(9, RowOrder::Shuffled);
    let steps = collect(Loader::start(reader.clone(), order, options, DataState::default()));
    assert_eq!(steps.iter().map(|step| step.num_samples).sum::<usize>(), 6);
    let counts = |calls: &[AtomicUsize]| -> Vec<usize> {
        calls.iter().map(|calls| calls.load(Ordering::SeqCst)).collect()
    };
    assert_eq!(counts(&reader.measured), [1; 9]);
    assert_eq!(counts(&reader.read), [1, 1, 0].repeat(3));
}

/// Counts the images that are decoded.
struct Counting(TestReader, AtomicUsize);

impl RowReader for Counting {
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection> {
        self.1.fetch_add(1, Ordering::SeqCst);
        let mut sample = self.0.read(row)?;
        sample.media[0].pixel_values = vec![0.0; 4 << 20]; // 16 MiB, as measured
        Ok(sample)
    }

    fn length(&self, row: SampleIndex) -> Result<Length, Rejection> {
        let length = self.0.length(row)?;
        Ok(Length { pixel_bytes: 16 << 20, ..length })
    }

    fn id(&self, row: SampleIndex) -> SampleId {
        self.0.id(row)
    }
}

/// A window of a thousand images of 16 MiB: its pixels would take 16 GiB.
#[test]
fn a_window_is_packed_without_its_pixels() {
    let rows = (0..1000).map(|row| Kind::Image(1 + row * 7919 % 29)).collect();
    let reader = Arc::new(Counting(TestReader(rows), AtomicUsize::new(0)));
    let options = LoaderOptions {
        batch_size: NonZeroUsize::MIN,
        gradient_accumulation_steps: NonZeroUsize::MIN,
        pack_rules: PackRules {
            window: NonZeroUsize::new(1000).unwrap(),
            ..options(PackingStrategy::BestFit).pack_rules
        },
        ..options(PackingStrategy::BestFit)
    };
    let order = order(1000, RowOrder::Shuffled);
    let mut loader = Loader::start(reader.clone(), order, options, DataState::default());
    let step = loader.next_step().unwrap().unwrap();
    assert_eq!(step.fill, 1.0);
    std::thread::sleep(Duration::from_millis(200));
    // 16 images (256 MiB) ahead, one row per worker, and four steps in progress
    let read = reader.1.load(Ordering::SeqCst);
    assert!(read <= 16 + 2 + 4 * 20, "{read} images decoded for a step of {}", step.num_samples);
}
