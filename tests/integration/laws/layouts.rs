//! Packing, padding, splitting into micro-batches and the order of samples do not change results.

use super::oracle::Oracle;
use super::{
    Backend, IMAGE_TOKEN, SHAPES, Shape, Subject, Tolerance, Weights, assert_close,
    assert_each_close, backends, packed, pad, samples, target_weight, weighted, wide,
};
use crate::harness::device;
use candle_core::DType;
use trainer::batch::{Batch, EncodedSample, IGNORE_INDEX, PaddingSide, VarlenBatch};
use trainer::loss::Targets;
use trainer::models::RecomputePolicy;

/// Whether padding is removed after collation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Padding {
    Removed,
    Kept,
}

impl Padding {
    const BOTH: [Self; 2] = [Self::Removed, Self::Kept];

    fn stream(self, batch: Batch) -> VarlenBatch {
        match self {
            Self::Removed => batch.unpad().unwrap(),
            Self::Kept => batch.keep_padding().unwrap(),
        }
    }
}

/// The nll of each target, and the gradients, of a step of several micro-batches.
struct Step {
    nll: Vec<f32>,
    grads: Vec<Vec<f32>>,
}

fn step(subject: &Subject, micro_batches: &[VarlenBatch]) -> Step {
    let total = micro_batches.iter().map(target_weight).sum();
    let grads = subject.buffers(|_| true);
    let nll = micro_batches
        .iter()
        .flat_map(|batch| subject.accumulate(batch, total, RecomputePolicy::CHEAP, &grads).nll);
    Step { nll: nll.collect(), grads: subject.values(&grads) }
}

/// Asserts that every nll and every gradient is equal except for rounding.
fn assert_same(subject: &Subject, what: &str, found: &Step, expected: &Step) {
    assert_each_close(what, &found.nll, &expected.nll, Tolerance::LAYOUT);
    let expected: Vec<_> = expected.grads.iter().map(|grad| wide(grad)).collect();
    subject.assert_gradients(what, &found.grads, &expected, subject.summed());
}

fn alone(samples: &[EncodedSample]) -> Vec<VarlenBatch> {
    samples.iter().map(|sample| packed(std::slice::from_ref(sample))).collect()
}

#[test]
fn packed_padded_and_alone_are_the_same() {
    assert_every_layout_is_the_same(&samples());
}

#[test]
fn packed_padded_and_alone_are_the_same_if_tokens_have_weights() {
    assert_every_layout_is_the_same(&weighted(samples()));
}

#[test]
fn a_weight_of_two_trains_like_the_sample_twice() {
    let weights = Weights::random(Shape::Tied, 73);
    let subject = Subject::new(&weights, Backend::Flash);
    let all = samples();
    let twice: Vec<_> = [&all[..], &all[1..2]].concat();
    let mut doubled = all.clone();
    doubled[1].weights = Some(vec![2.0; all[1].len()]);
    let (twice, doubled) = (step(&subject, &alone(&twice)), step(&subject, &alone(&doubled)));
    let expected: Vec<_> = twice.grads.iter().map(|grad| wide(grad)).collect();
    subject.assert_gradients("weight 2", &doubled.grads, &expected, Tolerance::SUMMED);
}

fn assert_every_layout_is_the_same(all: &[EncodedSample]) {
    let rows: [(&str, Vec<&[EncodedSample]>); 3] = [
        ("one row", vec![all]),
        ("a row each", all.chunks(1).collect()),
        ("uneven rows", vec![&all[..1], &all[1..3], &all[3..]]),
    ];
    for shape in SHAPES {
        let weights = Weights::random(shape, 70);
        let reference = Subject::new(&weights, Backend::Flash);
        let expected = step(&reference, &alone(all));
        for &backend in backends() {
            let subject = Subject::new(&weights, backend);
            for (layout, rows) in &rows {
                for side in [PaddingSide::Left, PaddingSide::Right] {
                    for padding in Padding::BOTH {
                        let what =
                            format!("{shape:?}, {backend:?}, {layout}, {side:?}, {padding:?}");
                        let batch = padding.stream(pad(rows, 0, side));
                        assert_same(&subject, &what, &step(&subject, &[batch]), &expected);
                    }
                }
            }
        }
    }
}

/// Concatenates documents into one sample, like a window of a corpus. Positions restart in each.
fn window(documents: &[EncodedSample]) -> EncodedSample {
    let mut window = documents[0].clone();
    for document in &documents[1..] {
        window.segment_starts.push(window.len() as u32);
        window.input_ids.extend(&document.input_ids);
        window.labels.extend(&document.labels);
        window.position_ids.extend(&document.position_ids);
    }
    window
}

#[test]
fn documents_of_a_window_are_as_if_alone_and_as_under_the_dense_mask() {
    use super::{Piece::Text, sample};
    // The third window ends with the first token of a document, which has no target.
    let windows = [vec![5, 2, 7], vec![9], vec![2, 3, 1], vec![6, 4]];
    let documents: Vec<Vec<EncodedSample>> = (0..)
        .zip(&windows)
        .map(|(window, lengths)| {
            let document = |(at, length): (u64, &usize)| sample(10 * window + at, &[Text(*length)]);
            (0..).zip(lengths).map(document).collect()
        })
        .collect();
    let windows: Vec<EncodedSample> = documents.iter().map(|window| self::window(window)).collect();
    // A document of one token has no target, so it does not contribute to a step.
    let documents: Vec<_> = documents.concat().into_iter().filter(|d| d.len() > 1).collect();
    for shape in SHAPES {
        let weights = Weights::random(shape, 77);
        let expected = step(&Subject::new(&weights, Backend::Flash), &alone(&documents));
        for &backend in backends() {
            let subject = Subject::new(&weights, backend);
            let rows: [Vec<&[EncodedSample]>; 3] =
                [vec![&windows], windows.chunks(1).collect(), vec![&windows[..2], &windows[2..]]];
            for (rows, padding) in rows.iter().flat_map(|r| Padding::BOTH.map(|p| (r, p))) {
                let batch = padding.stream(pad(rows, 0, PaddingSide::Right));
                let what = format!("{shape:?}, {backend:?}, {} rows, {padding:?}", rows.len());
                assert_same(&subject, &what, &step(&subject, &[batch]), &expected);
            }
        }
        // Check of the test: if documents attend to each other, losses differ.
        let mut joined = windows.clone();
        for window in &mut joined {
            for at in std::mem::take(&mut window.segment_starts) {
                window.labels[at as usize] = IGNORE_INDEX;
            }
            let positions = (0..).zip(&mut window.position_ids);
            positions.for_each(|(at, position)| *position = [at; 3]);
        }
        let subject = Subject::new(&weights, Backend::Flash);
        let found = step(&subject, &alone(&joined)).nll;
        assert_eq!(found.len(), expected.nll.len());
        let off = found.iter().zip(&expected.nll).map(|(x, y)| (x - y).abs());
        assert!(off.fold(0.0, f32::max) > 1e-2);
    }
}

#[test]
fn padded_batches_agree_with_the_oracle() {
    let all = samples();
    let weights = Weights::random(Shape::Untied, 71);
    let oracle = Oracle::new(&weights);
    let batch = packed(&all);
    let expected = oracle.losses(&batch).unwrap();
    let grads = oracle.gradients(&batch).unwrap();
    let rows: Vec<&[EncodedSample]> = all.chunks(1).collect();
    for &backend in backends() {
        let subject = Subject::new(&weights, backend);
        let batch = pad(&rows, 0, PaddingSide::Left).keep_padding().unwrap();
        let found = step(&subject, &[batch]);
        assert_close("nll", &wide(&found.nll), &expected, Tolerance::ORACLE);
        subject.assert_gradients("padded", &found.grads, &grads, Tolerance::ORACLE_GRADIENT);
    }
}

#[test]
fn the_pad_id_may_be_a_token_of_the_text_or_of_an_image() {
    let all = samples();
    let rows: Vec<&[EncodedSample]> = all.chunks(1).collect();
    let in_text = all[0].input_ids[4];
    let subject = Subject::new(&Weights::random(Shape::Tied, 72), Backend::Flash);
    for side in [PaddingSide::Left, PaddingSide::Right] {
        for padding in Padding::BOTH {
            let [expected, others @ ..] = [0, in_text, IMAGE_TOKEN]
                .map(|pad_id| step(&subject, &[padding.stream(pad(&rows, pad_id, side))]));
            for other in others {
                assert_eq!(other.nll, expected.nll, "{side:?}, {padding:?}");
                // A GPU adds the gradients of an id in another order if the id has other rows.
                let is_same = other.grads == expected.grads;
                assert!(is_same || !device().is_cpu(), "{side:?}, {padding:?}");
                assert_same(&subject, "another pad id", &other, &expected);
            }
        }
    }
}

#[test]
fn splitting_a_step_into_micro_batches_changes_nothing() {
    for (shape, all) in
        [(Shape::Tied, samples()), (Shape::Untied, samples()), (Shape::Tied, weighted(samples()))]
    {
        let subject = Subject::new(&Weights::random(shape, 73), Backend::Flash);
        let whole = step(&subject, &[packed(&all)]);
        for split in 1..all.len() {
            let (first, second) = all.split_at(split);
            let found = step(&subject, &[packed(first), packed(second)]);
            assert_same(&subject, &format!("split at {split}"), &found, &whole);
        }
        assert_same(&subject, "one by one", &step(&subject, &alone(&all)), &whole);
    }
}

/// On CPUs, a sum over tokens is one chain, which the next micro-batch continues, and padding adds 0
/// to it. A weight that is both embedding and head has two sums, so their order depends on the
/// micro-batches.
#[test]
fn packing_padding_and_micro_batches_change_no_bit_on_a_cpu() {
    if !device().is_cpu() {
        return;
    }
    let all = weighted(samples());
    let rows: Vec<&[EncodedSample]> = all.chunks(1).collect();
    let uneven = [&all[..1], &all[1..3], &all[3..]];
    let padded = |rows: &[_], side, padding: Padding| vec![padding.stream(pad(rows, 0, side))];
    for (shape, dtype) in SHAPES.into_iter().flat_map(|s| [(s, DType::F32), (s, DType::BF16)]) {
        let subject = Subject::in_dtype(&Weights::random(shape, 78), Backend::Flash, dtype);
        let whole = step(&subject, &[packed(&all)]);
        for (layout, micro_batches) in [
            ("one by one", alone(&all)),
            ("2 and 3", vec![packed(&all[..2]), packed(&all[2..])]),
            ("a row each", padded(&rows, PaddingSide::Right, Padding::Removed)),
            ("padding on the right", padded(&rows, PaddingSide::Right, Padding::Kept)),
            (
                "uneven rows with padding on the left",
                padded(&uneven, PaddingSide::Left, Padding::Kept),
            ),
        ] {
            let found = step(&subject, &micro_batches);
            assert_eq!(found.nll, whole.nll, "{shape:?}, {dtype:?}, {layout}: losses");
            let differ: Vec<&str> =
                (subject.specs.iter().zip(found.grads.iter().zip(&whole.grads)))
                    .filter(|(spec, (found, whole))| {
                        let is_head = spec.name == subject.model.lm_head().name();
                        let has_two_sums = is_head && spec.name.contains("embed_tokens");
                        found != whole && !(has_two_sums && micro_batches.len() > 1)
                    })
                    .map(|(spec, _)| spec.name.as_str())
                    .collect();
            assert!(differ.is_empty(), "{shape:?}, {dtype:?}, {layout}: gradients of {differ:?}");
        }
    }
}

#[test]
fn the_order_of_samples_in_a_pack_changes_nothing() {
    let all = samples();
    let subject = Subject::new(&Weights::random(Shape::Tied, 74), Backend::Flash);
    let whole = step(&subject, &[packed(&all)]);
    let counts: Vec<usize> = all.iter().map(EncodedSample::num_targets).collect();
    for order in [[4, 3, 2, 1, 0], [1, 3, 0, 4, 2], [2, 0, 4, 3, 1]] {
        let permuted: Vec<EncodedSample> = order.iter().map(|at| all[*at].clone()).collect();
        let found = step(&subject, &[packed(&permuted)]);
        let mut by_sample = vec![Vec::new(); all.len()];
        let mut rest = found.nll.as_slice();
        for at in order {
            let (nll, after) = rest.split_at(counts[at]);
            (by_sample[at], rest) = (nll.to_vec(), after);
        }
        let found = Step { nll: by_sample.concat(), grads: found.grads };
        assert_same(&subject, &format!("{order:?}"), &found, &whole);
    }
}

#[test]
fn targets_never_cross_samples() {
    let mut all = samples();
    for sample in &mut all {
        sample.labels = sample.input_ids.iter().map(|id| i64::from(*id)).collect();
    }
    let rows: Vec<&[EncodedSample]> = all.chunks(1).collect();
    let expected: usize = all.iter().map(EncodedSample::num_targets).sum();
    for side in [PaddingSide::Left, PaddingSide::Right] {
        for padding in Padding::BOTH {
            for rows in [rows.clone(), vec![&all]] {
                let batch = padding.stream(pad(&rows, 3, side));
                let targets = Targets::of(&batch);
                assert_eq!(targets.len(), expected);
                for (row, id) in targets.rows.iter().zip(&targets.ids) {
                    let row = *row as usize;
                    let mut segments = batch.cu_seqlens.segments();
                    assert!(segments.any(|s| s.contains(&row) && s.contains(&(row + 1))));
                    assert_eq!(*id, batch.input_ids[row + 1]);
                }
            }
        }
    }
}

#[test]
fn the_label_of_a_samples_first_token_is_not_a_target() {
    let mut all = samples();
    let subject = Subject::new(&Weights::random(Shape::Tied, 75), Backend::Flash);
    for sample in &mut all {
        sample.labels[0] = IGNORE_INDEX;
    }
    let silent = step(&subject, &[packed(&all)]);
    for sample in &mut all {
        sample.labels[0] = 11;
    }
    let labelled = step(&subject, &[packed(&all)]);
    assert_eq!(labelled.nll, silent.nll);
    assert!(labelled.grads == silent.grads);
}

#[test]
fn shifting_the_positions_of_a_sample_does_not_change_its_losses() {
    let all = samples();
    for shape in SHAPES {
        let weights = Weights::random(shape, 76);
        let subject = Subject::new(&weights, Backend::Flash);
        let (expected, _) = subject.run(&packed(&all));
        let mut shifted = all.clone();
        for (by, sample) in [5, 40, 17, 90, 23].into_iter().zip(&mut shifted) {
            sample.position_ids.iter_mut().flatten().for_each(|position| *position += by);
        }
        let (found, _) = subject.run(&packed(&shifted));
        assert_each_close("shifted", &found.nll, &expected.nll, Tolerance::SHIFT);
        // Check of the test: shifting a part of the sample on one axis changes the losses.
        let axis = if weights.config.text.mrope.is_some() { 2 } else { 0 };
        shifted[1].position_ids.iter_mut().skip(4).for_each(|position| position[axis] += 1);
        let (other, _) = subject.run(&packed(&shifted));
        let off = other.nll.iter().zip(&expected.nll).map(|(x, y)| (x - y).abs());
        assert!(off.fold(0.0, f32::max) > 1e-3);
    }
}

/// The loss does not depend on a shift, as the test above shows, so this test compares position
/// ids.
#[test]
fn positions_start_at_zero_in_every_segment() {
    let all = samples();
    let rows: Vec<&[EncodedSample]> = all.chunks(1).collect();
    let own: Vec<[u32; 3]> = all.iter().flat_map(|sample| sample.position_ids.clone()).collect();
    for side in [PaddingSide::Left, PaddingSide::Right] {
        for rows in [rows.clone(), vec![&all], vec![&all[..1], &all[1..]]] {
            for padding in Padding::BOTH {
                let batch = padding.stream(pad(&rows, 0, side));
                for segment in batch.cu_seqlens.segments() {
                    assert_eq!(batch.position_ids[segment.start], [0; 3]);
                }
            }
            assert_eq!(pad(&rows, 0, side).unpad().unwrap().position_ids, own);
        }
    }
}
