//! Generation computes the same hidden states with its cache as training does for whole samples.

use super::{
    Backend, Image, SHAPES, Shape, Subject, Text, Tolerance, Weights, assert_close, packed, sample,
    wide,
};
use crate::harness::device;
use candle_core::Tensor;
use trainer::batch::EncodedSample;
use trainer::models::Cache;
use trainer::tape::Pass;

/// The first `tokens` tokens of a sample, with the first `images` images.
fn prefix(whole: &EncodedSample, tokens: usize, images: usize) -> EncodedSample {
    let vision_rows = whole.vision_rows.iter().copied().filter(|row| (*row as usize) < tokens);
    EncodedSample {
        id: whole.id.clone(),
        input_ids: whole.input_ids[..tokens].to_vec(),
        labels: whole.labels[..tokens].to_vec(),
        weights: None,
        position_ids: whole.position_ids[..tokens].to_vec(),
        segment_starts: Vec::new(),
        vision_rows: vision_rows.collect(),
        media: whole.media[..images].to_vec(),
    }
}

/// With experts, rounding errors also change the weights of the experts.
fn tolerance(shape: Shape) -> Tolerance {
    let has_experts = [Shape::Experts, Shape::SharedExpert].contains(&shape);
    if has_experts { Tolerance::SUMMED_HYBRID } else { Tolerance::PATH }
}

fn assert_row(what: &str, found: &Tensor, expected: &[f32], tolerance: Tolerance) {
    assert_eq!(found.dims(), [1, expected.len()]);
    let found: Vec<f32> = found.flatten_all().unwrap().to_vec1().unwrap();
    assert_close(what, &wide(&found), &wide(expected), tolerance);
}

/// The hidden state of one more token of one sample.
fn extend(subject: &Subject, id: u32, cache: &mut Cache) -> Tensor {
    subject.model.extend(&[id], &mut [cache], 1, &device(), &Pass::default()).unwrap()
}

#[test]
fn hidden_states_from_the_cache_equal_those_of_the_whole_sample() {
    for shape in SHAPES {
        let subject = Subject::new(&Weights::random(shape, 80), Backend::Flash);
        let pieces = [Text(3), Image([1, 4, 6]), Text(2), Image([1, 2, 4]), Text(9)];
        let whole = sample(81, &pieces);
        let rows = subject.hidden(&packed(std::slice::from_ref(&whole)));
        // Prompts that end directly after an image, and later.
        for (prompt, images) in [(3, 0), (9, 1), (11, 1), (13, 2), (14, 2), (20, 2)] {
            let start = subject.own(packed(&[prefix(&whole, prompt, images)]));
            let (last, mut cache) =
                subject.model.prefill(start, &device(), &Pass::default()).unwrap();
            assert_row(&format!("prompt of {prompt}"), &last, &rows[prompt - 1], tolerance(shape));
            let next_image = whole.vision_rows.iter().find(|row| **row as usize >= prompt);
            let end = next_image.map_or(whole.len(), |row| *row as usize);
            for (at, row) in rows.iter().enumerate().take(end).skip(prompt) {
                let id = whole.input_ids[at];
                let hidden = extend(&subject, id, &mut cache);
                assert_row(&format!("token {at} after {prompt}"), &hidden, row, tolerance(shape));
            }
        }
    }
}

#[test]
fn a_prompt_after_its_cached_start_has_the_hidden_state_of_the_whole_prompt() {
    for shape in SHAPES {
        let subject = Subject::new(&Weights::random(shape, 85), Backend::Flash);
        let pieces = [Text(3), Image([1, 4, 6]), Text(2), Image([1, 2, 4]), Text(9)];
        let whole = sample(86, &pieces);
        let rows = subject.hidden(&packed(std::slice::from_ref(&whole)));
        for (start, images) in [(1, 0), (3, 0), (9, 1), (11, 1), (13, 2), (20, 2)] {
            let start = subject.own(packed(&[prefix(&whole, start, images)]));
            let tokens = start.input_ids.len();
            let (_, mut cache) = subject.model.prefill(start, &device(), &Pass::default()).unwrap();
            // Other tokens of an answer, which the next prompt does not have.
            for id in [5, 9] {
                extend(&subject, id, &mut cache);
            }
            cache.truncate(tokens);
            let all = subject.own(packed(std::slice::from_ref(&whole)));
            let last =
                subject.model.prefill_rest(all, &mut cache, &device(), &Pass::default()).unwrap();
            assert_eq!(cache.num_tokens(), whole.len());
            assert_row(
                &format!("after {tokens} tokens"),
                &last,
                &rows[whole.len() - 1],
                tolerance(shape),
            );
        }
    }
}

#[test]
fn a_cache_belongs_to_its_own_prompt() {
    let subject = Subject::new(&Weights::random(SHAPES[1], 82), Backend::Flash);
    let prompts = [sample(83, &[Text(4)]), sample(84, &[Image([1, 4, 2]), Text(2)])];
    let mut caches = prompts.clone().map(|prompt| {
        subject.model.prefill(packed(&[prompt]), &device(), &Pass::default()).unwrap().1
    });
    // Alternating between the two caches, compared with one after the other.
    let mut in_turns = [vec![], vec![]];
    for id in [5, 9, 2] {
        for (cache, hidden) in caches.iter_mut().zip(&mut in_turns) {
            hidden.push(super::host(&extend(&subject, id, cache)));
        }
    }
    for (prompt, in_turns) in prompts.into_iter().zip(in_turns) {
        let (_, mut cache) =
            subject.model.prefill(packed(&[prompt]), &device(), &Pass::default()).unwrap();
        let alone = [5, 9, 2].map(|id| super::host(&extend(&subject, id, &mut cache)));
        assert_eq!(in_turns, alone);
    }
}

/// Logits of each sample after the tokens `ids` of its own, computed in `num_rows` rows.
fn logits(
    subject: &Subject,
    samples: &[&(EncodedSample, [u32; 3])],
    num_rows: usize,
) -> Vec<Vec<f32>> {
    let model = &subject.model;
    let mut caches: Vec<Cache> = samples
        .iter()
        .map(|(prompt, _)| {
            let prompt = subject.own(packed(std::slice::from_ref(prompt)));
            model.prefill(prompt, &device(), &Pass::default())
        })
        .map(|prefilled| prefilled.unwrap().1)
        .collect();
    let mut hidden = None;
    for step in 0..3 {
        let ids: Vec<u32> = samples.iter().map(|(_, ids)| ids[step]).collect();
        let mut caches: Vec<&mut Cache> = caches.iter_mut().collect();
        hidden =
            Some(model.extend(&ids, &mut caches, num_rows, &device(), &Pass::default()).unwrap());
    }
    let head = model.lm_head().tensor().unwrap();
    let logits = trainer::ops::linear(&hidden.unwrap(), &head, None).unwrap(); // [R, V]
    (0..samples.len()).map(|row| super::host(&logits.get(row).unwrap())).collect()
}

#[test]
fn the_logits_of_a_sample_do_not_depend_on_its_place_in_a_group_and_on_the_others() {
    for shape in SHAPES {
        let subject = Subject::new(&Weights::random(shape, 87), Backend::Flash);
        let samples = [
            (sample(88, &[Text(3), Image([1, 4, 2]), Text(2)]), [5, 9, 2]),
            (sample(89, &[Text(1)]), [1, 2, 3]),
            (sample(90, &[Text(70)]), [8, 8, 8]),
            (sample(91, &[Image([1, 2, 4]), Text(4)]), [0, 49, 20]),
        ];
        let [a, b, c, d] = samples.each_ref();
        let alone = logits(&subject, &[a], 1);
        for num_rows in [4, 5, 9] {
            let expected = &logits(&subject, &[a, b, c, d], num_rows)[0];
            let what = format!("{shape:?} in {num_rows} rows");
            assert_close(&what, &wide(expected), &wide(&alone[0]), Tolerance::PATH);
            let groups =
                [vec![a], vec![d, a], vec![a, c], vec![c, b, a], vec![b, d, c, a], vec![a, a]];
            for (at, group) in groups.into_iter().enumerate() {
                for (row, _) in group.iter().enumerate().filter(|(_, own)| own.1 == a.1) {
                    let found = &logits(&subject, &group, num_rows)[row];
                    assert!(found == expected, "{what}: row {row} of group {at}");
                }
            }
        }
    }
}

#[test]
fn more_samples_than_rows_are_refused() {
    let subject = Subject::new(&Weights::random(SHAPES[0], 92), Backend::Flash);
    let (_, mut cache) = subject
        .model
        .prefill(packed(&[sample(93, &[Text(4)])]), &device(), &Pass::default())
        .unwrap();
    for (ids, num_rows) in [(&[1][..], 0), (&[1, 2], 4)] {
        let result =
            subject.model.extend(ids, &mut [&mut cache], num_rows, &device(), &Pass::default());
        assert!(result.is_err(), "{ids:?} in {num_rows} rows");
    }
}
