//! Limits of single images and videos.

use fault::Fault;
use serde_json::{Value, json};
use trainer::data::{Length, RowReader};

use super::encoding::{assistant, encode, user};
use super::length_cache::{self, assert_as_measured, max_tokens};

/// An image of 96 x 64 pixels.
const MOON: &str = "images/exact_moon_96x64.png";

fn part(mut part: Value, limits: &Value) -> Value {
    part.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
    json!({"messages": [user(vec![part, json!({"type": "text", "text": "?"})]), assistant("A.")]})
}

fn image(limits: &Value) -> Value {
    part(json!({"type": "image", "image": MOON}), limits)
}

fn video(frames: usize, limits: &Value) -> Value {
    part(json!({"type": "video", "video": vec![MOON; frames]}), limits)
}

/// `[height, width]` in pixels after resizing, from the patches.
fn size(row: Value) -> [u32; 2] {
    let [_, height, width] = encode(row).unwrap().media[0].grid_thw;
    [height, width].map(|patches| patches * 16)
}

#[test]
fn limits_of_an_image_decide_its_size() {
    for (limits, expected) in [
        (json!({}), [64, 96]),
        (json!({"max_pixels": 4096}), [32, 64]),
        (json!({"max_pixels": "4096"}), [32, 64]),
        (json!({"min_pixels": 10000}), [96, 128]),
        (json!({"min_pixels": 1024, "max_pixels": 2048}), [32, 32]),
        (json!({"resized_height": 100, "resized_width": 50}), [96, 64]),
        (json!({"resized_height": 320, "resized_width": 320, "max_pixels": 1024}), [320, 320]),
        // below the minimum of the model folder
        (json!({"max_pixels": 1024}), [32, 32]),
    ] {
        assert_eq!(size(image(&limits)), expected, "{limits}");
    }
}

#[test]
fn limits_are_read_in_every_place_of_an_image() {
    let limits = json!({"max_pixels": 4096});
    let listed = |entry: Value, placeholder: Value| json!({"messages": [user(vec![placeholder]), assistant("A.")], "images": [entry]});
    let limited = |key: &str| json!({key: MOON, "max_pixels": 4096});
    let text = json!({"type": "text", "text": "<image>"});
    let empty = json!({"type": "image", "max_pixels": 4096});
    for row in [
        part(json!({"type": "image_url", "image_url": limited("url")}), &json!({})),
        part(json!({"type": "image", "image": [MOON]}), &limits),
        part(json!({"type": "image_url", "image_url": {"url": MOON}}), &limits),
        listed(limited("path"), text.clone()),
        listed(limited("url"), text.clone()),
        listed(limited("image"), text),
        listed(json!(MOON), empty),
    ] {
        assert_eq!(size(row.clone()), [32, 64], "{row}");
    }
}

#[test]
fn impossible_limits_reject_the_row() {
    for (row, expected) in [
        (image(&json!({"max_pixels": 0})), "wrong_type"),
        (image(&json!({"max_pixels": 1.5})), "wrong_type"),
        (image(&json!({"max_pixels": "many"})), "wrong_type"),
        (image(&json!({"min_pixels": 5000, "max_pixels": 4000})), "wrong_type"),
        (image(&json!({"min_pixels": 1e12})), "wrong_type"),
        (image(&json!({"resized_height": 64})), "missing_key"),
        (image(&json!({"resized_height": 1, "resized_width": 999})), "image_aspect_ratio"),
        (video(4, &json!({"video_start": 2.0})), "video_empty_range"),
        (video(4, &json!({"video_start": 0.1, "video_end": 0.4})), "video_empty_range"),
        (video(4, &json!({"video_end": 0.4})), "video_too_short"),
        (video(4, &json!({"video_start": 1.0, "video_end": 1.0})), "wrong_type"),
        (video(4, &json!({"video_start": -1})), "wrong_type"),
        (video(4, &json!({"video_end": "end"})), "wrong_type"),
        (video(4, &json!({"resized_height": 64})), "missing_key"),
        (video(4, &json!({"resized_height": 1, "resized_width": 999})), "video_aspect_ratio"),
        (video(4, &json!({"nframes": 2, "fps": 1})), "not_supported"),
        (video(4, &json!({"nframes": 2, "sample_fps": 1})), "not_supported"),
        (video(4, &json!({"fps": 2, "sample_fps": 1})), "not_supported"),
        (video(4, &json!({"sample_fps": 0})), "wrong_type"),
        (video(4, &json!({"min_frames": 3, "max_frames": 2})), "wrong_type"),
        (
            part(
                json!({"type": "video", "video": [{"image": MOON, "max_pixels": 9}, MOON]}),
                &json!({}),
            ),
            "not_supported",
        ),
    ] {
        assert_eq!(encode(row.clone()).unwrap_err().reason(), expected, "{row}");
    }
}

#[test]
fn settings_of_a_video_decide_its_frames_and_their_size() {
    for (limits, expected) in [
        (json!({}), [4, 4, 6]),
        (json!({"nframes": 4}), [2, 4, 6]),
        (json!({"num_frames": 5}), [3, 4, 6]),
        (json!({"nframes": 100}), [4, 4, 6]),
        (json!({"max_frames": 2}), [1, 4, 6]),
        (json!({"fps": 2, "min_frames": 6}), [4, 4, 6]),
        (json!({"fps": 8, "min_frames": 6}), [3, 4, 6]),
        // frames sampled at this rate are all used
        (json!({"sample_fps": 4}), [4, 4, 6]),
        (json!({"sample_fps": 0.5, "raw_fps": 30}), [4, 4, 6]),
        (json!({"raw_fps": 4}), [2, 4, 6]),
        (json!({"max_pixels": 4096}), [4, 2, 4]),
        (json!({"total_pixels": 8 * 4096}), [4, 2, 4]),
        (json!({"nframes": 2, "max_pixels": 4096}), [1, 2, 4]),
        (json!({"min_pixels": 10000}), [4, 6, 8]),
        (json!({"resized_height": 100, "resized_width": 50}), [4, 6, 4]),
        (json!({"resized_height": 320, "resized_width": 320, "max_pixels": 1024}), [4, 20, 20]),
        // a list without `fps` has 2 frames per second, as `data.video.fps`
        (json!({"video_start": 1.0}), [3, 4, 6]),
        (json!({"video_start": "1.1", "video_end": 2.9}), [2, 4, 6]),
        (json!({"video_end": 1.5}), [2, 4, 6]),
        (json!({"video_end": 1e9}), [4, 4, 6]),
        (json!({"video_start": 1.0, "nframes": 2}), [1, 4, 6]),
        (json!({"video_start": 0.5, "fps": 8}), [2, 4, 6]),
    ] {
        let encoded = encode(video(8, &limits)).unwrap();
        assert_eq!(encoded.media[0].grid_thw, expected, "{limits}");
    }
}

/// The cache stores the limits of a row, so that its lengths hold for other limits of the config too.
#[test]
fn cached_lengths_of_rows_with_limits_are_those_of_their_samples() {
    let limited = |limits: Value| {
        let mut part = json!({"type": "image", "image": "a.png"});
        part.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        json!({"messages": [user(vec![part, json!({"type": "image", "image": "b.png"})]), assistant("A.")]})
    };
    let place = length_cache::Place::new(&[
        limited(json!({"max_pixels": 4096})),
        limited(json!({"min_pixels": 20000})),
        limited(json!({"min_pixels": 2048, "max_pixels": 3000})),
        limited(json!({"resized_height": 200, "resized_width": 90})),
        limited(json!({})),
    ]);
    let mut lengths = Vec::new();
    for (measured, tokens) in [(5, 6), (0, 2), (0, 100)] {
        let encoder = length_cache::encoder(&max_tokens(tokens));
        let (cached, work) = place.update(&encoder);
        assert_eq!(work.measured, measured);
        let rows = place.rows(&encoder);
        assert_as_measured(&cached, &rows);
        let of = |row| Length::of(&rows.read(row).unwrap());
        assert!(rows.rows().all(|row| cached.length(row).unwrap() == of(row)));
        lengths.push(rows.rows().map(of).collect::<Vec<_>>());
    }
    assert_ne!(lengths[0], lengths[1]);
}
