//! Video files decoded by FFmpeg, compared with lists of the same frames, and errors of files that
//! are broken, too long or not videos. `scripts/golden/video_files.sh` writes the fixtures.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use crate::harness::{golden, write};
use fault::Fault;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use trainer::batch::EncodedSample;
use trainer::data::{Encoder, ImageConfig, Length, RowFile, SampleError, VideoConfig};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/videos")
}

fn encoder(config: &VideoConfig) -> Encoder {
    encoder_of("small-tied", config)
}

fn encoder_of(model: &str, config: &VideoConfig) -> Encoder {
    let folder = golden("models").join(model);
    Encoder::with_video(&folder, &ImageConfig::default(), config).unwrap()
}

fn encode(root: &Path, video: &Value, config: &VideoConfig) -> Result<EncodedSample, SampleError> {
    encode_with(&encoder(config), root, video)
}

fn encode_with(
    encoder: &Encoder,
    root: &Path,
    video: &Value,
) -> Result<EncodedSample, SampleError> {
    let row = json!({"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "a"}], "videos": [video]});
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    write(&path, format!("{row}\n").as_bytes());
    let file = RowFile::open(&path, Some(root)).unwrap();
    let sample = file.read(0)?;
    let encoded = encoder.encode(&sample)?;
    // The planner computes the same length from the header.
    assert_eq!(encoder.length(&sample)?, Length::of(&encoded));
    Ok(encoded)
}

fn list(name: &str, frames: usize) -> Value {
    let frames: Vec<String> = (0..frames).map(|at| format!("video/{name}_{at}.png")).collect();
    json!({"video": frames, "fps": 4})
}

#[test]
fn a_lossless_video_file_encodes_as_the_list_of_its_frames() {
    for (fps, max_frames) in
        [(None, None), (Some(4.0), None), (Some(4.0), Some(5)), (Some(3.0), None)]
    {
        let config = VideoConfig { fps, max_frames, ..VideoConfig::default() };
        let file = encode(&fixtures(), &json!("pan.mkv"), &config).unwrap();
        let frames = encode(&golden("data"), &list("pan", 8), &config).unwrap();
        assert_eq!(file.input_ids, frames.input_ids, "{config:?}");
        assert_eq!(file.position_ids, frames.position_ids, "{config:?}");
        assert!(file.media == frames.media, "{config:?}");
    }
    let none = VideoConfig::default();
    let asked = encode(&fixtures(), &json!({"video": "pan.mkv", "fps": 4}), &none).unwrap();
    assert_eq!(asked.media[0].grid_thw, [4, 4, 4], "`fps` of the row selects all frames");
}

/// More frames than the file has are repeated.
#[test]
fn a_file_of_minicpm_encodes_as_the_list_of_its_frames() {
    for (fps, frames) in [(None, 2), (Some(4.0), 8), (Some(9.0), 18)] {
        let config = VideoConfig { fps, ..VideoConfig::default() };
        let encoder = encoder_of("small-minicpm", &config);
        let file = encode_with(&encoder, &fixtures(), &json!("pan.mkv")).unwrap();
        let of_list = encode_with(&encoder, &golden("data"), &list("pan", 8)).unwrap();
        assert_eq!(file.media[0].grid_thw[0], frames);
        assert_eq!(file.input_ids, of_list.input_ids, "{config:?}");
        assert!(file.media == of_list.media, "{config:?}");
    }
}

#[test]
fn frames_are_decoded_in_display_order() {
    let config = VideoConfig { fps: Some(4.0), ..VideoConfig::default() };
    let file = encode(&fixtures(), &json!("pan.mp4"), &config).unwrap();
    let frames = encode(&golden("data"), &list("pan", 8), &config).unwrap();
    assert_eq!(file.input_ids, frames.input_ids);
    // H.264 is lossy; another frame would differ much more.
    let pairs = file.media[0].pixel_values.iter().zip(&frames.media[0].pixel_values);
    let mean = pairs.map(|(a, b)| f64::from((a - b).abs())).sum::<f64>()
        / file.media[0].pixel_values.len() as f64;
    assert!(mean * 127.5 < 6.0, "{} levels off on average", mean * 127.5);
}

/// Sets the display matrix of the file to a clockwise rotation by 90 degrees.
fn turned(mut mp4: Vec<u8>) -> Vec<u8> {
    let header = mp4.windows(4).position(|name| name == b"tkhd").unwrap();
    let matrix = header + 4 + 40;
    for (at, value) in [0, 1 << 16, 0, -(1 << 16), 0, 0, 96 << 16, 0, 1 << 30].iter().enumerate() {
        mp4[matrix + 4 * at..][..4].copy_from_slice(&i32::to_be_bytes(*value));
    }
    mp4
}

#[test]
fn a_rotated_video_is_turned_upright() {
    let folder = tempfile::tempdir().unwrap();
    let mp4 = std::fs::read(fixtures().join("tall.mp4")).unwrap();
    write(&folder.path().join("tall.mp4"), &mp4);
    write(&folder.path().join("turned.mp4"), &turned(mp4));
    let config = VideoConfig { fps: Some(4.0), max_frames: Some(4), ..VideoConfig::default() };
    for (name, grid) in [("tall.mp4", [2, 6, 4]), ("turned.mp4", [2, 4, 6])] {
        let file = encode(folder.path(), &json!(name), &config).unwrap();
        assert_eq!(file.media[0].grid_thw, grid);
        let shown = encoder(&config).video_processor().pixels(&file.media[0]);
        assert_eq!(shown.len(), 4);
        for (shown, source) in shown.iter().zip([0, 1, 3, 4]) {
            let mut frame = image::open(golden(&format!("data/video/tall_{source}.png"))).unwrap();
            if name == "turned.mp4" {
                frame = frame.rotate90();
            }
            assert!(shown.rgb == frame.into_rgb8().into_raw(), "{name}, frame {source}");
        }
    }
}

#[test]
fn each_unusable_video_file_is_rejected_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str, bytes: &[u8]| write(&folder.path().join(name), bytes);
    let [mkv, mp4] =
        ["pan.mkv", "pan.mp4"].map(|name| std::fs::read(fixtures().join(name)).unwrap());
    place("pan.mkv", &mkv);
    place("cut.mkv", &mkv[..mkv.len() / 2]);
    place("cut.mp4", &mp4[..mp4.len() / 2]);
    place("empty.mp4", b"");
    place("text.mp4", b"this is only a text, but it is long enough to be probed as a file\n");
    place("list.m3u8", b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:2,\npan.mkv\n#EXT-X-ENDLIST\n");
    place("list.ffconcat", b"ffconcat version 1.0\nfile pan.mkv\n");
    std::fs::create_dir(folder.path().join("folder.mp4")).unwrap();
    let none = VideoConfig::default();
    let hurried = VideoConfig { timeout_s: 1e-9, ..none.clone() };
    let short = VideoConfig { max_source_frames: 7, ..none.clone() };
    for (name, config, reason, message) in [
        ("no.mp4", &none, "video_missing", "`no.mp4` does not exist in"),
        ("../pan.mp4", &none, "video_path_escapes_root", "`../pan.mp4` is outside of"),
        ("folder.mp4", &none, "video_unreadable", "it is not a regular file"),
        ("cut.mkv", &none, "video_broken", "`cut.mkv` is damaged or not a video"),
        ("cut.mp4", &none, "video_broken", "`cut.mp4` is damaged or not a video"),
        ("empty.mp4", &none, "video_broken", "`empty.mp4` is damaged or not a video"),
        ("text.mp4", &none, "video_broken", "`text.mp4` is damaged or not a video"),
        ("list.m3u8", &none, "video_broken", "`list.m3u8` is damaged or not a video"),
        ("list.ffconcat", &none, "video_broken", "`list.ffconcat` is damaged or not a video"),
        ("pan.mkv", &hurried, "video_timeout", "takes longer to load than 0.000000001 s"),
        ("pan.mkv", &short, "video_too_long", "has 8 frames, expected at most 7"),
    ] {
        let error = encode(folder.path(), &json!(name), config).unwrap_err();
        assert_eq!(error.reason(), reason, "{error}");
        assert!(error.to_string().contains(message), "{error}");
        assert!(error.hint().is_some(), "{error}");
    }
    assert!(encode(folder.path(), &json!("pan.mkv"), &none).is_ok());
}

#[test]
fn damaged_bytes_are_rejected_or_decoded_and_never_hang() {
    let folder = tempfile::tempdir().unwrap();
    let config = VideoConfig { timeout_s: 5.0, ..VideoConfig::default() };
    let mut rejected = 0;
    for name in ["pan.mkv", "pan.mp4"] {
        let bytes = std::fs::read(fixtures().join(name)).unwrap();
        for at in (0..bytes.len()).step_by(1 + bytes.len() / 40) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            damaged[at / 2] ^= 0x55;
            write(&folder.path().join(name), &damaged);
            if let Err(error) = encode(folder.path(), &json!(name), &config) {
                assert!(error.reason().starts_with("video_"), "{error}");
                assert_ne!(error.reason(), "video_timeout", "{name} damaged at {at}");
                rejected += 1;
            }
        }
    }
    assert!(rejected > 5, "{rejected}");
}
