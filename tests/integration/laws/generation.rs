//! Generation computes the same hidden states with its cache as training does for whole samples.

use super::{
    Backend, Image, SHAPES, Subject, Text, Tolerance, Weights, assert_close, packed, sample, wide,
};
use crate::harness::device;
use candle_core::Tensor;
use trainer::batch::EncodedSample;

/// The first `tokens` tokens of a sample, with the first `images` images.
fn prefix(whole: &EncodedSample, tokens: usize, images: usize) -> EncodedSample {
    let vision_rows = whole.vision_rows.iter().copied().filter(|row| (*row as usize) < tokens);
    EncodedSample {
        id: whole.id.clone(),
        input_ids: whole.input_ids[..tokens].to_vec(),
        labels: whole.labels[..tokens].to_vec(),
        weights: None,
        position_ids: whole.position_ids[..tokens].to_vec(),
        vision_rows: vision_rows.collect(),
        media: whole.media[..images].to_vec(),
    }
}

fn assert_row(what: &str, found: &Tensor, expected: &[f32]) {
    assert_eq!(found.dims(), [1, expected.len()]);
    let found: Vec<f32> = found.flatten_all().unwrap().to_vec1().unwrap();
    assert_close(what, &wide(&found), &wide(expected), Tolerance::PATH);
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
            let start = packed(&[prefix(&whole, prompt, images)]);
            let (last, mut cache) = subject.model.prefill(start, &device()).unwrap();
            assert_row(&format!("prompt of {prompt}"), &last, &rows[prompt - 1]);
            let next_image = whole.vision_rows.iter().find(|row| **row as usize >= prompt);
            let end = next_image.map_or(whole.len(), |row| *row as usize);
            for (at, row) in rows.iter().enumerate().take(end).skip(prompt) {
                let id = whole.input_ids[at];
                let hidden = subject.model.extend(id, &mut cache, &device()).unwrap();
                assert_row(&format!("token {at} after {prompt}"), &hidden, row);
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
            let start = packed(&[prefix(&whole, start, images)]);
            let tokens = start.input_ids.len();
            let (_, mut cache) = subject.model.prefill(start, &device()).unwrap();
            // Other tokens of an answer, which the next prompt does not have.
            for id in [5, 9] {
                subject.model.extend(id, &mut cache, &device()).unwrap();
            }
            cache.truncate(tokens);
            let all = packed(std::slice::from_ref(&whole));
            let last = subject.model.prefill_rest(all, &mut cache, &device()).unwrap();
            assert_eq!(cache.num_tokens(), whole.len());
            assert_row(&format!("after {tokens} tokens"), &last, &rows[whole.len() - 1]);
        }
    }
}

#[test]
fn a_cache_belongs_to_its_own_prompt() {
    let subject = Subject::new(&Weights::random(SHAPES[1], 82), Backend::Flash);
    let prompts = [sample(83, &[Text(4)]), sample(84, &[Image([1, 4, 2]), Text(2)])];
    let mut caches = prompts
        .clone()
        .map(|prompt| subject.model.prefill(packed(&[prompt]), &device()).unwrap().1);
    // Alternating between the two caches, compared with one after the other.
    let mut in_turns = [vec![], vec![]];
    for id in [5, 9, 2] {
        for (cache, hidden) in caches.iter_mut().zip(&mut in_turns) {
            hidden.push(super::host(&subject.model.extend(id, cache, &device()).unwrap()));
        }
    }
    for (prompt, in_turns) in prompts.into_iter().zip(in_turns) {
        let (_, mut cache) = subject.model.prefill(packed(&[prompt]), &device()).unwrap();
        let alone = [5, 9, 2]
            .map(|id| super::host(&subject.model.extend(id, &mut cache, &device()).unwrap()));
        assert_eq!(in_turns, alone);
    }
}
