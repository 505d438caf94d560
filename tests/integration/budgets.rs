//! How long the worst row takes that the budgets of a row allow. No clock rejects a row
//! (docs/dev/decisions/0021-counted-budgets.md), so the counted budgets must bound the time.

use super::encoding::{assistant, encode, encoder, row, rows, user};
use super::harness::write;
use super::images::bmp;
use fault::Fault;
use serde_json::{Value, json};
use std::time::Instant;
use trainer::data::RowFile;

/// Rows near the limits on turns, bytes or tokens, divided by `part`. Their texts are of the kinds that
/// take a tokenizer or a template the longest.
fn worst(part: usize) -> [(&'static str, Value); 5] {
    let (turns, bytes) = (100_000 / part, (4 << 20) / part - 1000);
    let exchange = |question: Value, answer: Value| [question, answer];
    let call = json!({
        "role": "assistant", "content": "",
        "tool_calls": [{"function": {"name": "look", "arguments": {"at": "x".repeat(99), "of": vec![1; 20]}}}],
    });
    let result = json!({"role": "tool", "content": "r".repeat(50)});
    let calls =
        (0..turns / 12).flat_map(|_| [user("q"), call.clone(), result.clone(), assistant("a")]);
    let short = (0..turns / 2).flat_map(|_| exchange(user("a"), assistant("b")));
    let letters: String = (0..bytes as u32)
        .map(|at| char::from(b'!' + (at.wrapping_mul(2_654_435_761) >> 26) as u8))
        .collect();
    [
        ("turns", row(&short.collect::<Vec<_>>())),
        ("tool calls", row(&calls.collect::<Vec<_>>())),
        ("one word", row(&[user("a".repeat(bytes)), assistant("b")])),
        ("an answer of one word", row(&[user("a"), assistant("xq".repeat(bytes / 2))])),
        ("random letters", row(&[user("a"), assistant(letters)])),
    ]
}

/// Seconds to read, render and tokenise a row, the best of `times`, and the reason why it cannot be used.
fn seconds(row: &Value, times: usize) -> (f64, Option<&'static str>) {
    let (_folder, file) = rows(std::slice::from_ref(row));
    let (mut best, mut reason) = (f64::INFINITY, None);
    for _ in 0..times {
        let started = Instant::now();
        let length = file.read(0).and_then(|sample| encoder().length(&sample));
        best = best.min(started.elapsed().as_secs_f64());
        reason = length.err().map(|error| error.reason());
    }
    (best, reason)
}

/// Maximum time of an eighth of the worst row in proportion to ordinary words of the same size. It is
/// 13 times with optimisation. A limit in seconds would fail on a slow machine.
const MOST: f64 = 40.0;

#[test]
fn the_worst_row_takes_few_times_as_long_as_ordinary_words_of_the_same_size() {
    let words = "the worst row that a limit allows, in words ".repeat((4 << 20) / 8 / 44);
    // An eighth of the row is interrupted by other processes less often than the whole.
    let (ordinary, reason) = seconds(&row(&[user(words), assistant("b")]), 5);
    assert_eq!(reason, None);
    for (what, row) in worst(8) {
        let (found, reason) = seconds(&row, 5);
        println!("{what}: {found:.3} s, {:.1} times", found / ordinary);
        assert!(found < MOST * ordinary, "{what}: {found:.2} s, ordinary words {ordinary:.2} s");
        assert_eq!(reason, None, "{what}: the whole row is tokenised");
    }
    if cfg!(debug_assertions) {
        return; // minutes
    }
    for (what, row) in worst(1) {
        let (found, reason) = seconds(&row, 1);
        println!("{what}, whole: {found:.3} s, {:.1} times an eighth", found / ordinary);
        assert!(found < 24.0 * MOST * ordinary, "{what}: {found:.2} s");
        // the only bounds that these rows are near to
        let bounds = [None, Some("row_too_large"), Some("too_many_tokens"), Some("template")];
        assert!(bounds.contains(&reason), "{what}: {reason:?}");
    }
}

/// A BMP of 2^26 pixels without its pixels.
pub(crate) fn header_of_large_image() -> Vec<u8> {
    let mut header = bmp(64, 64)[..54].to_vec();
    for side in [18..22, 22..26] {
        header[side].copy_from_slice(&8_192u32.to_le_bytes());
    }
    header
}

/// Decoding takes time for each pixel, also if the image becomes small.
#[test]
fn the_pixels_of_a_row_are_counted_before_any_is_decoded() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("large.bmp"), &header_of_large_image());
    let sample = |media: Value, placeholders: String| {
        let mut row = row(&[user(placeholders), assistant("b")]);
        row.as_object_mut().unwrap().extend(media.as_object().unwrap().clone());
        let path = folder.path().join("rows.jsonl");
        write(&path, format!("{row}\n").as_bytes());
        RowFile::open(&path, None).unwrap().read(0).unwrap()
    };
    let images =
        |count| sample(json!({"images": vec!["large.bmp"; count]}), "<image>".repeat(count));
    let frames =
        |count| sample(json!({"videos": [vec!["large.bmp"; count]]}), "<video>".to_owned());
    for sample in [images(64), frames(64)] {
        assert!(encoder().length(&sample).is_ok());
        // no pixels follow the header
        assert_ne!(encoder().encode_prompt(&sample).unwrap_err().reason(), "media_too_large");
    }
    let errors = [images(65), frames(66)].map(|sample| {
        [encoder().length(&sample).unwrap_err(), encoder().encode_prompt(&sample).unwrap_err()]
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.reason(), "media_too_large");
        let text = error.to_string();
        assert!(
            text.contains("pixels in its images and videos, expected at most 4294967296"),
            "{text}"
        );
        let hint = error.hint().unwrap();
        assert!(hint.contains("scale its images down") && hint.contains("`data.video.max_frames`"));
    }
    let small = json!({"type": "image", "image": "images/exact_moon_64x64.png"});
    assert!(encode(row(&[user(vec![small]), assistant("b")])).is_ok());
}
