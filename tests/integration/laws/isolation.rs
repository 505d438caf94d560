//! Causality and isolation: a token depends only on itself and on earlier tokens of its sample, and
//! frames do not attend to each other in the vision encoder.

use super::{
    Backend, IMAGE_TOKEN, Image, SHAPES, Shape, Subject, Text, VOCABULARY, Video, Weights,
    backends, device, packed, sample, samples,
};
use std::ops::Range;
use trainer::batch::{CuSeqlens, VarlenBatch};

/// Asserts that all rows of `changed` differ and that all other rows are bit-identical.
fn assert_changed(
    what: &str,
    before: &[Vec<f32>],
    after: &[Vec<f32>],
    changed: impl Fn(usize) -> bool,
) {
    assert_eq!(before.len(), after.len(), "{what}");
    for (row, (before, after)) in before.iter().zip(after).enumerate() {
        let differs = before != after;
        match (changed(row), differs) {
            (true, false) => panic!("{what}: row {row} should change and does not"),
            (false, true) => panic!("{what}: row {row} changes and should not"),
            _ => {}
        }
    }
}

/// Another text token.
fn other_id(id: u32) -> u32 {
    let next = (id + 1) % VOCABULARY;
    if next == IMAGE_TOKEN { next + 1 } else { next }
}

fn segment_of(batch: &VarlenBatch, row: usize) -> Range<usize> {
    batch.cu_seqlens.segments().find(|segment| segment.contains(&row)).unwrap()
}

/// Token rows of each frame of each image, in order.
fn frames(batch: &VarlenBatch) -> Vec<Range<usize>> {
    let (mut frames, mut next) = (Vec::new(), 0);
    for [t, h, w] in batch.media.iter().map(|media| media.grid_thw) {
        for _ in 0..t {
            let tokens = (h * w / 4) as usize;
            let first = batch.vision_rows[next] as usize;
            frames.push(first..first + tokens); // the tokens of a frame are contiguous
            next += tokens;
        }
    }
    frames
}

/// The batch with one pixel value changed.
fn with_other_pixel(batch: &VarlenBatch, media: usize, frame: usize, patch: usize) -> VarlenBatch {
    let mut other = batch.clone();
    let media = &mut other.media[media];
    let [_, h, w] = media.grid_thw.map(|n| n as usize);
    let patch_values = media.pixel_values.len() / media.num_patches();
    media.pixel_values[(frame * h * w + patch) * patch_values + 5] += 0.5;
    other
}

/// With windows, patches that are too large were cut and then computed.
#[test]
fn patches_of_another_size_than_that_of_the_vision_encoder_are_refused() {
    for shape in SHAPES {
        let subject = Subject::new(&Weights::random(shape, 71), Backend::Flash);
        let mut batch = subject.own(packed(&samples()));
        let last = batch.media.last_mut().unwrap();
        let patches = last.num_patches();
        last.pixel_values.resize(last.pixel_values.len() + patches, 0.0); // one value more for each
        let error = subject.model.upload(batch, subject.model.dtype(), &device()).err();
        let error = error.unwrap().to_string();
        assert!(error.contains(&format!("{patches} patches have")), "{shape:?}: {error}");
    }
}

#[test]
fn a_token_changes_itself_and_the_later_ones_of_its_sample_and_nothing_else() {
    for shape in SHAPES {
        for &backend in backends() {
            let subject = Subject::new(&Weights::random(shape, 50), backend);
            let batch = packed(&samples());
            let before = subject.hidden(&batch);
            for row in 0..batch.input_ids.len() {
                let mut other = batch.clone();
                other.input_ids[row] = other_id(other.input_ids[row]);
                let segment = segment_of(&batch, row);
                // The id of an image token has no effect: features replace its embedding.
                let seen = !batch.vision_rows.contains(&(row as u32));
                let what = format!("{backend:?}, token {row}");
                assert_changed(&what, &before, &subject.hidden(&other), |i| {
                    seen && (row..segment.end).contains(&i)
                });
            }
        }
    }
}

/// The state of linear attention and the window of its convolution start from zero in each sample. Other
/// code bases carried them over to the next sample of a pack. This test shows that the laws find it.
#[test]
fn without_boundaries_linear_attention_mixes_samples() {
    let weights = Weights::random(Shape::Hybrid, 55).without_text_attention();
    let subject = Subject::new(&weights, Backend::Flash);
    let batch = packed(&[sample(63, &[Text(6)]), sample(64, &[Text(7)])]);
    let mut leaking = batch.clone();
    leaking.cu_seqlens = CuSeqlens::from_lengths(&[13]).unwrap();
    let change_of_the_second = |batch: &VarlenBatch| {
        let mut other = batch.clone();
        other.input_ids[0] = other_id(other.input_ids[0]);
        let (before, after) = (subject.hidden(batch), subject.hidden(&other));
        let change = |row: usize| before[row].iter().zip(&after[row]).map(|(x, y)| (x - y).abs());
        (6..13).flat_map(change).fold(0.0, f32::max)
    };
    assert_eq!(change_of_the_second(&batch), 0.0);
    assert!(change_of_the_second(&leaking) > 1e-2);
}

#[test]
fn a_position_changes_nothing_before_it_and_no_other_sample() {
    for &backend in backends() {
        let subject = Subject::new(&Weights::random(Shape::Tied, 51), backend);
        let batch = packed(&samples());
        let before = subject.hidden(&batch);
        for segment in batch.cu_seqlens.segments() {
            // The first token attends only to itself, so that its rotation cancels except for
            // rounding.
            for (row, axis) in
                (segment.start + 1..segment.end).flat_map(|row| (0..3).map(move |axis| (row, axis)))
            {
                let mut other = batch.clone();
                other.position_ids[row][axis] += 3;
                let what = format!("{backend:?}, position {row}, axis {axis}");
                assert_changed(&what, &before, &subject.hidden(&other), |i| {
                    (row..segment.end).contains(&i)
                });
            }
        }
    }
}

#[test]
fn another_samples_text_and_pixels_change_no_bit() {
    for shape in SHAPES {
        for &backend in backends() {
            let subject = Subject::new(&Weights::random(shape, 52), backend);
            let all = samples();
            let batch = packed(&all);
            let before = subject.hidden(&batch);
            for (index, segment) in batch.cu_seqlens.segments().enumerate() {
                let mut others = all.clone();
                let changed = &mut others[index];
                for (id, label) in changed.input_ids.iter_mut().zip(&mut changed.labels) {
                    if *id != IMAGE_TOKEN {
                        *id = other_id(*id);
                        *label = i64::from(*id);
                    }
                }
                for media in &mut changed.media {
                    for value in &mut media.pixel_values {
                        *value = 0.3 - *value;
                    }
                }
                let what = format!("{backend:?}, sample {index}");
                let after = subject.hidden(&packed(&others));
                assert_changed(&what, &before, &after, |i| segment.contains(&i));
            }
        }
    }
}

#[test]
fn a_pixel_changes_its_sample_from_the_first_token_of_its_frame() {
    for shape in SHAPES {
        for &backend in backends() {
            let subject = Subject::new(&Weights::random(shape, 53), backend);
            let batch = packed(&samples());
            let before = subject.hidden(&batch);
            let grids = batch.media.iter().map(|media| media.grid_thw);
            let of_media = grids.enumerate().flat_map(|(media, [t, h, w])| {
                (0..t as usize).map(move |time| (media, time, (h * w) as usize))
            });
            for ((media, time, patches), frame) in of_media.zip(frames(&batch)) {
                let end = segment_of(&batch, frame.start).end;
                for patch in [0, patches - 1] {
                    let other = with_other_pixel(&batch, media, time, patch);
                    let what = format!("{backend:?}, medium {media}, frame {time}, patch {patch}");
                    // Attention is full inside a frame, so all of its tokens change.
                    assert_changed(&what, &before, &subject.hidden(&other), |i| {
                        (frame.start..end).contains(&i)
                    });
                }
            }
        }
    }
}

/// A model without attention between tokens of the decoder, to test the vision encoder alone.
fn vision_only(backend: Backend) -> Subject {
    Subject::new(&Weights::random(Shape::Tied, 54).without_text_attention(), backend)
}

#[test]
fn frames_and_images_do_not_mix_in_the_vision_encoder() {
    let clip = sample(60, &[Text(2), Video([2, 4, 2]), Text(1), Image([1, 2, 4]), Text(3)]);
    let still = sample(61, &[Image([3, 2, 2]), Text(2)]);
    let batch = packed(&[clip, still]);
    for &backend in backends() {
        let subject = vision_only(backend);
        let before = subject.hidden(&batch);
        let mut frames = frames(&batch).into_iter();
        for (media, patches) in batch.media.iter().enumerate() {
            let [t, h, w] = patches.grid_thw;
            for frame in 0..t as usize {
                let rows = frames.next().unwrap();
                for patch in 0..(h * w) as usize {
                    let other = with_other_pixel(&batch, media, frame, patch);
                    let what = format!("{backend:?}, image {media}, frame {frame}, patch {patch}");
                    assert_changed(&what, &before, &subject.hidden(&other), |i| rows.contains(&i));
                }
            }
        }
    }
}

#[test]
fn equal_frames_have_equal_features_at_every_position() {
    let mut clip = sample(62, &[Text(1), Image([2, 4, 2]), Text(2), Image([1, 4, 2]), Text(1)]);
    let frame = clip.media[1].pixel_values.clone();
    clip.media[0].pixel_values = [frame.clone(), frame].concat();
    let batch = packed(&[clip]);
    for &backend in backends() {
        let hidden = vision_only(backend).hidden(&batch);
        let [first, second, alone] = frames(&batch).try_into().unwrap();
        assert_eq!(hidden[first], hidden[alone.clone()]);
        assert_eq!(hidden[second], hidden[alone]);
    }
}
