use proptest::prelude::*;

use super::*;

fn any_entry() -> impl Strategy<Value = RowEntry> {
    let file = (any::<u64>(), any::<i64>(), any::<u32>(), "[a-z/]{0,9}").prop_map(
        |(bytes, mtime_ns, crc, path)| ImageFile {
            path,
            stamp: ImageStamp { bytes, mtime_ns },
            crc,
        },
    );
    let side = || 1..=u32::MAX;
    let size = (side(), side(), any::<u32>(), any::<u32>()).prop_map(|(h, w, min, max)| {
        let [min_pixels, max_pixels] = [min, max].map(NonZeroU32::new);
        ImageSize { pixels: [h, w], limits: AreaLimits { min_pixels, max_pixels } }
    });
    let image = (size, prop::option::of(file.clone()));
    let media = (prop::collection::vec(image, 0..4), prop::collection::vec(file, 0..3));
    let ends = prop::option::of((0usize..9, 0usize..9));
    let counts = (0usize..99, 0usize..9, 0usize..99, 0usize..99);
    let measured = (counts, ends, media, any::<u32>()).prop_map(
        |(counts, ends, (images, videos), video_patches)| {
            let (text_tokens, media_tokens, text_before_media, num_targets) = counts;
            let text =
                TokenCounts { text_tokens, media_tokens, text_before_media, num_targets, ends };
            let (sizes, images): (Vec<_>, _) = images.into_iter().unzip();
            let sizes = sizes.into();
            let measured = Measured { text, sizes, video_patches };
            Outcome::Measured { measured, images, videos }
        },
    );
    let rejected = ("[a-z_]{1,9}", ".{0,9}")
        .prop_map(|(reason, message)| Outcome::Rejected { reason, message });
    (any::<u64>(), any::<u64>(), any::<[u8; HASH_BYTES]>(), prop_oneof![measured, rejected])
        .prop_map(|(line, offset, hash, outcome)| RowEntry { line, offset, hash, outcome })
}

proptest! {
    #[test]
    fn entries_come_back_as_they_were(entries in prop::collection::vec(any_entry(), 0..20)) {
        let lengths = |measured: &Measured| [measured.text.text_tokens + 5, measured.sizes.len()];
        let rows = RowBatch::from_entries(&entries, lengths).unwrap();
        let again = RowBatch::from_batch(&rows.to_batch().unwrap()).unwrap();
        let found: Vec<_> = (0..again.len()).map(|row| again.entry(row)).collect();
        prop_assert_eq!(&found, &entries);
        let doubled = again.with_lengths(|measured| [2 * lengths(measured)[0], 3]);
        let batch = doubled.to_batch().unwrap();
        let length: UInt32Array = column(&batch, "length").unwrap();
        for (row, entry) in entries.iter().enumerate() {
            let expected = match &entry.outcome {
                Outcome::Measured { measured, .. } => Some(2 * lengths(measured)[0] as u32),
                Outcome::Rejected { .. } => None,
            };
            prop_assert_eq!(length.is_valid(row).then(|| length.value(row)), expected);
        }
    }
}
