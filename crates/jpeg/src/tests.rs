//! Decoded files against Pillow with libjpeg-turbo (`scripts/golden/jpeg_fixtures.py`), and damaged
//! files.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::SafeTensors;

use super::{JpegError, decode};
use simd::at_each_level;

struct Case {
    name: String,
    file: Vec<u8>,
    size: [usize; 2],
    rgb: Vec<u8>,
}

impl Case {
    fn decode(&self) -> Result<Vec<u8>, JpegError> {
        decode(&self.file, self.size)
    }

    /// Index of the first byte after a scan header.
    fn scan(&self) -> usize {
        let header = self.file.windows(2).position(|bytes| bytes == [0xff, 0xda]).unwrap() + 2;
        header + usize::from(self.file[header + 1])
    }
}

fn cases() -> Vec<Case> {
    let bytes = include_bytes!("../../../tests/golden/jpeg.safetensors");
    let tensors = SafeTensors::deserialize(bytes).unwrap();
    let case = |(key, file): (String, _)| {
        let name = key.strip_suffix("/file")?.to_owned();
        let rgb = tensors.tensor(&format!("{name}/rgb")).unwrap();
        let [height, width, 3] = *rgb.shape() else { panic!("`{name}` has another shape") };
        let file = safetensors::tensor::TensorView::data(&file).to_vec();
        Some(Case { name, file, size: [height, width], rgb: rgb.data().to_vec() })
    };
    let mut cases: Vec<_> = tensors.tensors().into_iter().filter_map(case).collect();
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(cases.len(), 72);
    cases
}

fn case(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}

#[test]
fn every_kind_of_file_decodes_to_the_pixels_of_libjpeg_turbo_at_every_simd_level() {
    for case in cases() {
        for (level, found) in at_each_level(|| case.decode().unwrap()) {
            let differences = found.iter().zip(&case.rgb).map(|(a, b)| a.abs_diff(*b));
            let worst = differences.max().unwrap();
            assert!(found == case.rgb, "{} is {worst} levels off with {level}", case.name);
        }
    }
}

#[test]
fn a_truncated_file_is_an_error() {
    for case in cases() {
        for length in (0..case.file.len()).step_by(1 + case.file.len() / 200) {
            let found = decode(&case.file[..length], case.size);
            assert!(found.is_err(), "{} cut to {length}", case.name);
        }
    }
}

#[test]
fn a_truncated_file_with_an_end_marker_is_an_error_unless_it_has_all_pixels() {
    for case in cases() {
        for length in (case.scan()..case.file.len()).step_by(1 + case.file.len() / 200) {
            let closed = [&case.file[..length], &[0xff, 0xd9]].concat();
            let found = decode(&closed, case.size);
            assert!(
                found.is_err() || found == Ok(case.rgb.clone()),
                "{} cut to {length}",
                case.name
            );
        }
    }
}

#[test]
fn damaged_bytes_never_cause_a_panic() {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    for case in cases() {
        for _ in 0..60 {
            let mut damaged = case.file.clone();
            for _ in 0..rng.random_range(1..4) {
                let at = rng.random_range(0..damaged.len());
                damaged[at] = if rng.random() {
                    rng.random()
                } else {
                    damaged[at] ^ 1 << rng.random_range(0..8)
                };
            }
            if let Ok(pixels) = decode(&damaged, case.size) {
                assert_eq!(pixels.len(), case.rgb.len(), "{}", case.name);
            }
        }
    }
}

#[test]
fn random_scan_data_never_causes_a_panic() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for case in cases() {
        let mut damaged = case.file.clone();
        let scan = case.scan();
        rng.fill(&mut damaged[scan..]);
        damaged.extend([0xff, 0xd9]);
        let _ = decode(&damaged, case.size);
    }
}

#[test]
fn a_missing_restart_interval_is_an_error() {
    let mut case = case("restarts_sequential");
    let marker = |byte| move |bytes: &[u8]| bytes == [0xff, byte];
    let start = case.file.windows(2).position(marker(0xd0)).unwrap();
    let end = case.file.windows(2).position(marker(0xd1)).unwrap();
    case.file.drain(start..end);
    assert_eq!(case.decode(), Err(JpegError::Damaged("a restart marker is missing")));
}

#[test]
fn unsupported_kinds_are_errors_that_name_the_kind() {
    for (marker, expected) in [(0xc3, "lossless"), (0xc5, "hierarchical"), (0xc9, "arithmetic")] {
        let mut case = case("grey_sequential_33x47_q75");
        let frame = case.file.windows(2).position(|bytes| bytes == [0xff, 0xc0]).unwrap();
        case.file[frame + 1] = marker;
        let error = case.decode().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_frame_of_another_size_than_expected_is_an_error() {
    let case = case("grey_sequential_33x47_q75");
    assert!(decode(&case.file, [48, 33]).is_err());
}

#[test]
fn a_large_frame_with_little_data_is_an_error() {
    for name in ["444_sequential_33x47_q75", "444_progressive_33x47_q75"] {
        let mut case = case(name);
        let is_frame = |bytes: &[u8]| matches!(bytes, [0xff, 0xc0 | 0xc2]);
        let frame = case.file.windows(2).position(is_frame).unwrap();
        case.file[frame + 5..frame + 9].copy_from_slice(&[0x40, 0, 0x40, 0]); // 16384 x 16384
        assert_eq!(decode(&case.file, [1 << 14, 1 << 14]), Err(JpegError::Truncated), "{name}");
    }
}
