//! Videos of a family that cuts frames into slices as it does images.

use std::fs::{self, File};
use std::io::Write as _;
use std::num::NonZeroU32;

use serde_json::{Value, json};

use super::slice_tests::{IMAGES, bmp, folder, photo, repository, sample, text};
use super::truncate::KeptEnd;
use super::*;
use crate::media::video::VideoMarks;
use crate::row::{SampleCounts, SampleIndex};
use batch::{AreaLimits, FrameRate, VideoLimits, VideoRef};
use fault::Fault;

const VIDEOS: &str = "<|video_pad|>";

/// The small model with this file of settings of videos. Slices have about 112 x 112 pixels.
fn encoder_of(mode: &str, settings: &Value, config: &VideoConfig) -> Result<Encoder, String> {
    let folder = folder(mode, &[]);
    let mut all = json!({"scale_resolution": 112, "downsample_mode": mode});
    all.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    let path = folder.path().join("video_preprocessor_config.json");
    File::create(path).unwrap().write_all(all.to_string().as_bytes()).unwrap();
    let encoder = Encoder::with_video(folder.path(), &ImageConfig::default(), config);
    encoder.map_err(|error| error.to_string())
}

fn encoder(settings: &Value) -> Encoder {
    encoder_of("16x", settings, &VideoConfig::default()).unwrap()
}

/// A list of black frames.
fn video(frames: usize, [height, width]: [u32; 2], rate: Option<f64>) -> Medium {
    let (frames, fps) = (vec![bmp(height, width); frames], rate.map(FrameRate::Video));
    Medium::Video(VideoRef::Frames { frames, fps, limits: VideoLimits::default() })
}

fn row(question: Vec<Part>, media: Vec<Medium>) -> Sample {
    Sample { media, ..sample(question, vec![]) }
}

/// The text of frames with rows of slices, without the number; all have four tokens.
fn frames(count: usize, rows: usize, columns: usize) -> String {
    let pads = VIDEOS.repeat(4);
    let row = format!("<slice>{pads}</slice>").repeat(columns);
    format!("<image>{pads}</image>{}", vec![row; rows].join("\n")).repeat(count)
}

#[test]
fn the_text_has_numbers_of_videos_and_slices_of_each_frame() {
    let parts = vec![Part::Video, text("then"), Part::Image, Part::Video, Part::Image, text("?")];
    let media = vec![
        video(3, [150, 100], None),
        Medium::Image(photo()),
        video(9, [40, 40], Some(4.0)),
        Medium::Image(bmp(30, 30)),
    ];
    let rows = row(parts, media);
    let encoder = encoder(&json!({}));
    let found = encoder.encode(&rows).unwrap();
    let pads = IMAGES.repeat(4);
    let slice = format!("<slice>{pads}</slice>");
    let start = format!(
        "<|im_start|>user\n<image_id>0</image_id>{}\nthen\n\
         <image_id>0</image_id><image>{pads}</image>{slice}{slice}\n\
         <image_id>1</image_id>{}\n<image_id>1</image_id><image>{pads}</image>\n?<|im_end|>\n",
        frames(3, 2, 1),
        frames(3, 0, 0), // 2.25 seconds
    );
    let shown = encoder.decode_with_specials(&found.input_ids).unwrap();
    assert!(shown.starts_with(&start), "{shown}");
    assert_eq!(found.vision_rows.len(), 4 * (3 * 3 + 3 + 3 + 1));
    let positions: Vec<_> = (0..found.input_ids.len() as u32).map(|at| [at; 3]).collect();
    assert_eq!(found.position_ids, positions);

    let grids: Vec<_> =
        found.media.iter().map(|of| (of.grid_thw[0], of.continues_medium)).collect();
    let [frame, slices] = [(1, true), (2, true)];
    let of_video = [(1, false), slices, frame, slices, frame, slices];
    assert_eq!(grids, [&of_video[..], &[(1, false), slices, (3, false), (1, false)]].concat());
    let counts = SampleCounts::of(SampleIndex { dataset: 0, row: 0 }, &found);
    assert_eq!((counts.num_images, counts.num_videos, found.num_media()), (2, 2, 4));
    let (prompt, _) = encoder.encode_prompt(&rows).unwrap();
    assert_eq!(prompt.num_media(), 4);
    let shown = |at: usize| encoder.video_processor().pixels(&found.media[at]).len();
    assert_eq!([0, 1, 8].map(shown), [1, 2, 3]);
    for (at, patches) in found.media.iter().enumerate() {
        let values = patches.num_patches() * encoder.image_processor().patch_values();
        assert_eq!(patches.pixel_values.len(), values, "{at}");
    }
}

/// Lengths, of media too, come from the headers of frames.
#[test]
fn lengths_that_are_measured_are_those_of_encoded_samples() {
    let none = VideoConfig::default;
    let sides = |height, width| [height, width].map(|side| NonZeroU32::new(side).unwrap());
    let limits = VideoLimits::default();
    let a_frame = |max| AreaLimits { max_pixels: NonZeroU32::new(max), ..AreaLimits::default() };
    let of_rows = [
        limits,
        VideoLimits { num_frames: NonZeroU32::new(2), ..limits },
        VideoLimits { resized: Some(sides(333, 77)), ..limits },
        VideoLimits { frame: a_frame(40_000), ..limits },
        VideoLimits { total_pixels: NonZeroU32::new(1), ..limits },
        VideoLimits { start: Some(0.5), end: Some(2.5), ..limits },
    ];
    let mut num_sliced = 0;
    for (mode, settings, config) in [
        ("16x", json!({}), none()),
        ("4x", json!({"max_slice_nums": 4}), none()),
        ("16x", json!({"slice_mode": false}), none()),
        ("16x", json!({"scale_resolution": 60}), VideoConfig { fps: Some(0.7), ..none() }),
        ("16x", json!({"max_num_frames": 2}), VideoConfig { max_pixels: Some(99_999), ..none() }),
    ] {
        let encoder = encoder_of(mode, &settings, &config).unwrap();
        for size in [[3, 600], [150, 301]] {
            for (limits, rate) in of_rows.iter().flat_map(|of| [(of, None), (of, Some(1.9))]) {
                let mut media = vec![video(4, size, rate), Medium::Image(photo())];
                media.push(video(1, [113, 112], None));
                if let Medium::Video(VideoRef::Frames { limits: of, .. }) = &mut media[0] {
                    *of = *limits;
                }
                let parts = vec![text("See"), Part::Video, Part::Image, Part::Video];
                let rows = row(parts, media);
                let found = encoder.encode(&rows).unwrap();
                let at = format!("{mode} {settings} {config:?} {size:?} {limits:?}");
                assert_eq!(encoder.length(&rows).unwrap(), Length::of(&found), "{at}");
                let measured = encoder.measure(&rows).unwrap();
                assert_eq!(encoder.visual_tokens(&measured), found.vision_rows.len(), "{at}");
                num_sliced += usize::from(found.media[1].continues_medium);
            }
        }
    }
    assert!(num_sliced > 20, "{num_sliced}");
}

#[test]
fn frames_have_the_most_slices_with_which_a_video_has_at_most_this_many_pixels() {
    let grids = |config: &VideoConfig, limits: VideoLimits| {
        let encoder = encoder_of("16x", &json!({}), config).unwrap();
        let frames = vec![bmp(300, 300); 2];
        let media = vec![Medium::Video(VideoRef::Frames { frames, fps: None, limits })];
        let found = encoder.encode(&row(vec![Part::Video], media)).unwrap();
        found.media.iter().map(|of| of.grid_thw).collect::<Vec<_>>()
    };
    let (none, of_row) = (VideoConfig::default, VideoLimits::default());
    let area = 112 * 112;
    let whole = [1, 8, 8];
    let nine = [whole, [9, 8, 8], whole, [9, 8, 8]];
    assert_eq!(grids(&none(), of_row), nine);
    let limited = |max| VideoConfig { max_pixels: Some(max), ..none() };
    assert_eq!(grids(&limited(20 * area), of_row), nine);
    let six = grids(&limited(20 * area - 1), of_row);
    assert!((2..9).contains(&six[1][0]), "{six:?}");
    assert_eq!(grids(&limited(1), of_row), [[2, 8, 8]]);
    // limits of the row, of all frames and of a frame
    let total = VideoLimits { total_pixels: NonZeroU32::new(19 * area as u32), ..of_row };
    assert_eq!(grids(&none(), total), six);
    let mut frame = of_row;
    frame.frame.max_pixels = NonZeroU32::new(10 * area as u32 - 1);
    assert_eq!(grids(&none(), frame), six);
}

/// As images with such limits; a size of the row precedes its limits.
#[test]
fn limits_on_pixels_that_frames_cannot_keep_are_refused() {
    let tiles = repository("tests/golden/models/small-internvl");
    let tiles = Encoder::from_folder(&tiles, &ImageConfig::default()).unwrap();
    let encoders = [encoder(&json!({})), tiles];
    let limit = NonZeroU32::new(4096);
    let none = VideoLimits::default();
    let frame = |min_pixels, max_pixels| VideoLimits {
        frame: AreaLimits { min_pixels, max_pixels },
        ..none
    };
    let sized = VideoLimits { resized: Some([limit.unwrap(); 2]), ..frame(limit, limit) };
    for (limits, refused) in [
        (none, [false, false]),
        (frame(limit, None), [true, true]),
        (frame(None, limit), [false, true]),
        (VideoLimits { total_pixels: limit, ..none }, [false, true]),
        (sized, [false, false]),
    ] {
        for (encoder, refused) in encoders.iter().zip(refused) {
            let frames = vec![bmp(20, 20); 2];
            let media = vec![Medium::Video(VideoRef::Frames { frames, fps: None, limits })];
            let row = row(vec![Part::Video], media);
            let (encoded, length) = (encoder.encode(&row).err(), encoder.length(&row).err());
            for fault in [encoded, length] {
                assert_eq!(fault.map(|fault| fault.reason()), refused.then_some("video_pixels"));
            }
        }
    }
}

/// As in transformers, a video of a low rate has frames twice.
#[test]
fn frames_are_those_of_each_second() {
    let count = |config: &VideoConfig, frames, rate, limits: VideoLimits| {
        let encoder = encoder_of("16x", &json!({"max_num_frames": 6}), config).unwrap();
        let (frames, fps) = (vec![bmp(20, 20); frames], Some(FrameRate::Video(rate)));
        let media = vec![Medium::Video(VideoRef::Frames { frames, fps, limits })];
        encoder.encode(&row(vec![Part::Video], media)).unwrap().media[0].grid_thw[0]
    };
    let (none, of_row) = (VideoConfig::default(), VideoLimits::default());
    assert_eq!(count(&none, 9, 4.0, of_row), 3);
    assert_eq!(count(&none, 2, 0.5, of_row), 4);
    assert_eq!(count(&none, 9, 0.5, of_row), 6);
    assert_eq!(count(&VideoConfig { fps: Some(2.0), ..none.clone() }, 9, 4.0, of_row), 5);
    assert_eq!(count(&VideoConfig { min_frames: Some(4), ..none.clone() }, 9, 4.0, of_row), 4);
    assert_eq!(count(&VideoConfig { max_frames: Some(2), ..none.clone() }, 9, 4.0, of_row), 2);
    let number = |number| NonZeroU32::new(number);
    assert_eq!(count(&none, 9, 4.0, VideoLimits { num_frames: number(7), ..of_row }), 7);
    assert_eq!(count(&none, 9, 1.0, VideoLimits { max_frames: number(8), ..of_row }), 8);
}

#[test]
fn truncation_keeps_a_video_with_its_number_and_slices() {
    let encoder = encoder(&json!({}));
    let parts = vec![text("Look: "), Part::Video, text("What is it?")];
    let row = row(parts, vec![video(2, [150, 100], None)]);
    let whole = encoder.encode(&row).unwrap().input_ids;
    let shown = format!("<image_id>0</image_id>{}", frames(2, 2, 1));
    let marked = 3 + 2 * (3 * (4 + 2) + 1);
    let almost = whole.len() as u32 - 1;
    for (keep, max_length) in
        [(KeptEnd::End, marked + 8), (KeptEnd::End, almost), (KeptEnd::Beginning, almost)]
    {
        let max_length = NonZeroU32::new(max_length).unwrap();
        let cut = Some(TruncationRule { max_length, keep });
        let found = encoder.encode_truncated(&row, cut).unwrap();
        assert_eq!(encoder.length_truncated(&row, cut).unwrap(), Length::of(&found));
        assert_eq!(found.input_ids.len(), max_length.get() as usize);
        let text = encoder.decode_with_specials(&found.input_ids).unwrap();
        assert!(text.contains(&shown), "{max_length}: {text}");
    }
}

#[test]
fn settings_that_have_no_effect_and_unknown_forms_are_refused() {
    let none = VideoConfig::default;
    for (settings, config, message) in [
        (json!({"stack_frames": 2}), none(), "`stack_frames` is `2`"),
        (json!({"downsample_mode": "4x"}), none(), "`downsample_mode` is `4x`"),
        (json!({"patch_size": 16}), none(), "`patch_size` is `16`"),
        (json!({"max_slice_nums": 0}), none(), "`max_slice_nums` is `0`"),
        (json!({}), VideoConfig { min_pixels: Some(1), ..none() }, "`data.video.min_pixels`"),
        (json!({}), VideoConfig { max_pixels: Some(0), ..none() }, "`data.video.max_pixels`"),
        (json!({}), VideoConfig { marks: VideoMarks::Flat, ..none() }, "`data.video.marks`"),
        (json!({"max_num_frames": 0}), none(), "`data.video.max_frames` is `0`"),
    ] {
        let error = encoder_of("16x", &settings, &config).err().unwrap();
        assert!(error.contains(message), "{error}");
    }
    // keys of other processors have no effect in transformers
    let other =
        json!({"fps": 9, "min_frames": 9, "max_frames": 1, "merge_size": 3, "stack_frames": 1});
    let found = encoder(&other).encode(&row(vec![Part::Video], vec![video(3, [9, 9], None)]));
    assert_eq!(found.unwrap().media[0].grid_thw, [3, 8, 8]);

    let folder = folder("16x", &[]);
    let path = folder.path().join("config.json");
    let text = fs::read_to_string(&path).unwrap().replace("video_token_id", "no_token_id");
    File::create(path).unwrap().write_all(text.as_bytes()).unwrap();
    let without = Encoder::from_folder(folder.path(), &ImageConfig::default()).unwrap();
    let fault = without.length(&row(vec![Part::Video], vec![video(3, [9, 9], None)])).unwrap_err();
    assert_eq!(fault.reason(), "video_token");

    let long = encoder(&json!({})).length(&row(vec![Part::Video], vec![video(2, [1, 201], None)]));
    assert_eq!(long.unwrap_err().reason(), "video_aspect_ratio");
    // a rate that would repeat frames without end
    let most = VideoLimits { max_frames: NonZeroU32::new(u32::MAX), ..VideoLimits::default() };
    let fps = Some(FrameRate::Video(1e-300));
    let endless = Medium::Video(VideoRef::Frames { frames: vec![bmp(9, 9)], fps, limits: most });
    let fault = encoder(&json!({})).length(&row(vec![Part::Video], vec![endless])).unwrap_err();
    assert_eq!(fault.reason(), "too_many_tokens", "{fault}");
}

/// What decides the text or the size of a video changes the key of caches of lengths.
#[test]
fn keys_of_caches_have_the_settings_of_slices_of_frames() {
    let keys = |settings: Value| {
        let encoder = encoder(&settings);
        (encoder.text_key(), encoder.digests())
    };
    let all = [
        json!({}),
        json!({"max_slice_nums": 4}),
        json!({"scale_resolution": 56}),
        json!({"slice_mode": false}),
        json!({"max_num_frames": 7}),
    ];
    let keys: Vec<_> = all.into_iter().map(keys).collect();
    for (at, one) in keys.iter().enumerate() {
        let is_other = |other: &(_, _)| other.0 != one.0 && other.1 != one.1;
        assert!(keys[..at].iter().all(is_other), "{at}");
    }
}
