//! Ranks that compute one micro-batch together, each a part of its tokens, get the results of one rank.

use super::{
    Backend, Image, ModelConfig, Shape, Subject, Text, Tolerance, Video, Weights,
    assert_each_close, backends, host, packed, sample, samples, wide,
};
use std::num::NonZeroU32;
use std::thread;
use trainer::batch::{EncodedSample, IGNORE_INDEX, VarlenBatch};
use trainer::dist::{Group, SequenceExchange, threads};
use trainer::loss::{Targets, loss_and_gradient};
use trainer::models::{LLM, MERGER, RecomputePolicy, VISION};
use trainer::nn::{MixerSpec, ParamSpec};
use trainer::tape::{Pass, Recompute};

type Pick = fn(&ParamSpec) -> bool;

/// The nll of the own targets, and the gradient of every trained parameter.
type Part = (Vec<f32>, Vec<Option<Vec<f32>>>);

/// Computes the part of one rank.
fn part(
    weights: &Weights,
    (whole, backend): (&VarlenBatch, Backend),
    group: &Group,
    recompute: RecomputePolicy,
    pick: Pick,
) -> Part {
    let sequence = group.rank.in_sequence(group.rank.world);
    let subject = Subject::new(weights, backend);
    let exchange = SequenceExchange::new(group.sums.clone(), sequence);
    let targets = Targets::of(whole);
    let weight = targets.weight();
    let whole = whole.clone().at_least(sequence.size);
    let tokens = sequence.part(whole.input_ids.len());
    let (targets, _) = targets.part(&tokens);
    let batch = whole.part(tokens, NonZeroU32::new(2).unwrap());
    let input = subject.upload(&batch).unwrap();
    let grads = subject.buffers(pick);
    let pass = Pass { exchange: Some(&exchange), ..Pass::training(&grads) };
    let (hidden, tape) = subject.model.forward(&input, recompute, &pass).unwrap();
    assert_eq!(hidden.dim(0).unwrap(), batch.input_ids.len());
    let head = subject.model.lm_head();
    let loss = loss_and_gradient(&hidden, head, &targets, weight, &pass).unwrap();
    let (nll, d_hidden) = match loss {
        Some(loss) => (host(&loss.nll), loss.d_hidden),
        None => (Vec::new(), hidden.zeros_like().unwrap()),
    };
    subject.model.backward(tape, d_hidden, &input, &pass).unwrap();
    let grads = (0..subject.specs.len()).map(|index| grads.get(index).map(host)).collect();
    (nll, grads)
}

/// Asserts that `size` ranks together have the losses and gradients of one.
fn assert_split(
    what: &str,
    weights: &Weights,
    (batch, backend): (&VarlenBatch, Backend),
    size: usize,
    recompute: Recompute,
    pick: Pick,
) {
    let subject = Subject::new(weights, backend);
    let recompute = RecomputePolicy { vision: recompute, llm: recompute };
    let (expected, grads) = subject.run(batch);
    let parts: Vec<Part> = thread::scope(|scope| {
        let groups = threads(size).unwrap().into_iter();
        let ranks: Vec<_> = groups
            .map(|group| {
                scope.spawn(move || part(weights, (batch, backend), &group, recompute, pick))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let nll: Vec<f32> = parts.iter().flat_map(|(nll, _)| nll.iter().copied()).collect();
    assert_each_close(what, &nll, &expected.nll, Tolerance::PATH);
    for (index, (spec, expected)) in subject.specs.iter().zip(&grads).enumerate() {
        if !pick(spec) {
            continue;
        }
        let mut sum = vec![0f64; expected.len()];
        for (_, grads) in &parts {
            let grad = wide(grads[index].as_ref().unwrap());
            sum.iter_mut().zip(grad).for_each(|(sum, value)| *sum += value);
        }
        let name = format!("{what}, {size} ranks: gradient of `{}`", spec.name);
        super::assert_close(&name, &sum, &wide(expected), Tolerance::SUMMED);
    }
}

/// A model whose heads 2 and 4 ranks can share.
fn four_heads(seed: u64) -> Weights {
    four_heads_of(Shape::Tied, seed)
}

fn four_heads_of(shape: Shape, seed: u64) -> Weights {
    let set_heads = |config: &mut ModelConfig| {
        config.text.num_key_value_heads = 4;
        for layer in &mut config.text.layers {
            if let MixerSpec::LinearAttention(sizes) = &mut layer.mixer {
                (sizes.num_key_heads, sizes.num_value_heads) = (4, 8);
            }
        }
    };
    Weights::with_config(set_heads, shape, seed)
}

#[test]
fn ranks_that_share_the_tokens_of_a_micro_batch_get_every_gradient() {
    let batch = packed(&samples());
    for &backend in backends() {
        let few = Weights::random(Shape::Tied, 50); // 2 key-value heads
        assert_split("few heads", &few, (&batch, backend), 2, Recompute::Cheap, |_| true);
        for size in [2, 4] {
            let weights = four_heads(51);
            assert_split("packed", &weights, (&batch, backend), size, Recompute::Stage, |_| true);
            // The text has a window in one layer.
            let weights = four_heads_of(Shape::Untied, 60);
            assert_split("untied", &weights, (&batch, backend), size, Recompute::Stage, |_| true);
            let weights = four_heads_of(Shape::Windowed, 58);
            assert_split("windows", &weights, (&batch, backend), size, Recompute::Cheap, |_| true);
            let weights = four_heads_of(Shape::EarlyMerger, 61);
            assert_split("merged", &weights, (&batch, backend), size, Recompute::Stage, |_| true);
            let weights = four_heads_of(Shape::Experts, 57);
            assert_split("experts", &weights, (&batch, backend), size, Recompute::Stage, |_| true);
            let weights = four_heads_of(Shape::SharedExpert, 56);
            assert_split("shared", &weights, (&batch, backend), size, Recompute::Cheap, |_| true);
            let weights = four_heads_of(Shape::Hybrid, 59);
            for recompute in [Recompute::Cheap, Recompute::Stage] {
                assert_split("hybrid", &weights, (&batch, backend), size, recompute, |_| true);
            }
        }
    }
}

#[test]
fn a_boundary_may_lie_inside_an_image_or_a_video() {
    let weights = four_heads(52);
    let image = sample(60, &[Text(2), Image([1, 4, 6]), Text(3)]); // 11 tokens: 0..2, ..5, ..8, ..11
    let video = sample(61, &[Text(1), Image([3, 2, 4]), Text(4)]); // 3 frames of 2 tokens
    let mixed = sample(62, &[Video([2, 2, 4]), Text(7)]);
    let visible = packed(std::slice::from_ref(&image)).vision_rows;
    assert!(visible.contains(&4) && visible.contains(&5), "{visible:?}");
    for samples in [vec![image.clone()], vec![video.clone()], vec![mixed, video, image]] {
        for size in [2, 4] {
            let batch = packed(&samples);
            assert_split(
                "image",
                &weights,
                (&batch, Backend::Flash),
                size,
                Recompute::Cheap,
                |_| true,
            );
        }
    }
}

#[test]
fn a_part_without_targets_or_with_padding_only_passes_gradients_on() {
    let weights = four_heads(53);
    let mut late = packed(&[sample(63, &[Text(2), Image([1, 4, 4]), Text(9)])]);
    late.labels[..11].fill(IGNORE_INDEX); // of 15: the targets of 2 ranks of 4
    let tiny = packed(&[sample(64, &[Text(3)])]);
    for batch in [&late, &tiny] {
        assert!(!Targets::of(batch).is_empty());
        assert_split("targets", &weights, (batch, Backend::Flash), 4, Recompute::Cheap, |_| true);
    }
}

#[test]
fn ranks_agree_on_the_layers_of_backward_if_only_one_of_them_has_images() {
    let of: fn(&[EncodedSample]) -> VarlenBatch = packed;
    let batch = of(&[sample(65, &[Image([1, 4, 4]), Text(12)]), sample(66, &[Text(6)])]);
    let picks: [(&str, Pick); 5] = [
        ("vision", |spec| spec.component == VISION),
        ("merger", |spec| spec.component == MERGER),
        ("llm", |spec| spec.component == LLM),
        ("layer 2", |spec| spec.name.contains("layers.2.")),
        ("embedding", |spec| spec.name.contains("embed_tokens")),
    ];
    for shape in [Shape::Tied, Shape::Untied] {
        let weights = Weights::with_config(|config| config.text.num_key_value_heads = 4, shape, 54);
        for (name, pick) in picks {
            assert_split(name, &weights, (&batch, Backend::Flash), 4, Recompute::Cheap, pick);
        }
    }
}
