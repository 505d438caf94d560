//! Every parameter gets the correct gradient, with any choice of recomputed stages and frozen
//! parameters.

use super::oracle::Oracle;
use super::{
    Backend, Image, ModelConfig, Outcome, SHAPES, Shape, Subject, Text, Tolerance, Weights,
    assert_close, backends, host, packed, sample, samples, target_weight, wide,
};
use std::collections::BTreeMap;
use trainer::batch::VarlenBatch;
use trainer::loss::{Targets, scores};
use trainer::models::{LLM, MERGER, RecomputePolicy, VISION};
use trainer::nn::{ExpertFiles, MlpSpec, ParamSpec};
use trainer::tape::{Pass, Recompute};

/// Asserts that all gradients are bit-identical.
fn assert_identical(subject: &Subject, what: &str, found: &[Vec<f32>], expected: &[Vec<f32>]) {
    for ((spec, found), expected) in subject.specs.iter().zip(found).zip(expected) {
        assert!(found == expected, "{what}: the gradient of `{}` differs", spec.name);
    }
}

/// Compares outputs and every gradient with the oracle's. Returns the gradients.
fn assert_agrees(weights: &Weights, batch: &VarlenBatch, backend: Backend) -> Vec<Vec<f32>> {
    let (subject, oracle) = (Subject::new(weights, backend), Oracle::new(weights));
    let (Outcome { hidden, nll }, grads) = subject.run(batch);
    let expected = oracle.hidden(batch).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    assert_close("hidden", &wide(&hidden), &expected, Tolerance::ORACLE);
    assert_close("nll", &wide(&nll), &oracle.losses(batch).unwrap(), Tolerance::ORACLE);
    let loss = nll.iter().map(|nll| f64::from(*nll)).sum::<f64>() / nll.len() as f64;
    assert_close("loss", &[loss], &[oracle.loss(batch).unwrap()], Tolerance::ORACLE);
    let expected = oracle.gradients(batch).unwrap();
    let what = format!("{backend:?}");
    subject.assert_gradients(&what, &grads, &expected, Tolerance::ORACLE_GRADIENT);
    grads
}

#[test]
fn hidden_states_loss_and_every_gradient_are_the_oracles() {
    for shape in SHAPES {
        for &backend in backends() {
            let weights = Weights::random(shape, 10);
            let grads = assert_agrees(&weights, &packed(&samples()), backend);
            for (spec, grad) in weights.specs.iter().zip(&grads) {
                assert!(grad.iter().any(|x| *x != 0.0), "the gradient of `{}` is zero", spec.name);
            }
        }
    }
}

#[test]
fn an_image_of_two_frames_agrees_with_the_oracle() {
    let weights = Weights::random(Shape::Tied, 11);
    let clip = sample(20, &[Text(2), Image([2, 4, 2]), Text(4)]);
    let still = sample(21, &[Image([1, 2, 2]), Text(3)]); // one token, first in its sample
    assert_agrees(&weights, &packed(&[clip, still]), Backend::Flash);
}

#[test]
fn a_batch_of_text_agrees_with_the_oracle_and_gives_the_vision_encoder_no_gradient() {
    for shape in SHAPES {
        for &backend in backends() {
            let weights = Weights::random(shape, 12);
            let batch = packed(&[sample(30, &[Text(7)]), sample(31, &[Text(5)])]);
            let grads = assert_agrees(&weights, &batch, backend);
            for (spec, grad) in weights.specs.iter().zip(&grads) {
                let silent = grad.iter().all(|x| *x == 0.0);
                assert_eq!(silent, spec.component != LLM, "`{}`", spec.name);
            }
        }
    }
}

/// The parameter's name without the number of the block or layer.
fn kind(spec: &ParamSpec) -> String {
    let parts = spec.name.split('.').filter(|part| part.parse::<u32>().is_err());
    parts.collect::<Vec<_>>().join(".")
}

/// Checks the oracle itself: for each kind of parameter, central differences of the loss in `f64`,
/// at the entries with the largest and with the median gradient.
#[test]
fn the_oracles_gradients_are_the_differences_of_its_loss() {
    for shape in SHAPES {
        let weights = Weights::random(shape, 13);
        let oracle = Oracle::new(&weights);
        let batch = packed(&samples()[2..]); // two images, and the shortest sample
        let grads = oracle.gradients(&batch).unwrap();
        // The last parameter of each kind.
        let kinds: BTreeMap<String, usize> =
            weights.specs.iter().enumerate().map(|(at, spec)| (kind(spec), at)).collect();
        let expected = match shape {
            Shape::Tied => 40,
            Shape::Untied => 41,
            // 6 tensors of the deepstack mergers less, 9 of linear attention more.
            Shape::Hybrid => 44,
            // 14 of the decoder, 16 of the encoder; the linear layers of the merger are one kind.
            Shape::Windowed => 30,
            // 6 tensors of SwiGLU less, 4 of the two layers and 3 biases of norms more
            Shape::QuickGelu => 31,
            // 14 of the decoder, 4 of patches, class token and positions, 18 of a block, 6 of the merger
            Shape::ClassToken => 42,
            // 23 of the decoder, 3 of patches and positions, 13 of a block, 13 of the early merger, 2 of
            // the norm after the blocks, 6 of the merger
            Shape::EarlyMerger => 60,
            // the router and two tensors of experts more
            Shape::Experts => 43,
            // Qwen3.5 with a router, two tensors of experts and four of the shared one for an MLP
            Shape::SharedExpert => 48,
        };
        assert_eq!(kinds.len(), expected, "{kinds:?}");
        for (kind, at) in kinds {
            if shape == Shape::Untied && !kind.contains("embed_tokens") && !kind.contains("lm_head")
            {
                continue; // tested with the tied model
            }
            let (name, grad) = (&weights.specs[at].name, &grads[at]);
            let mut order: Vec<usize> = (0..grad.len()).collect();
            order.sort_by(|a, b| grad[*b].abs().total_cmp(&grad[*a].abs()));
            let values = oracle.values(name);
            let loss_at = |entry: usize, step: f64| {
                let mut moved = values.clone();
                moved[entry] += step;
                oracle.set(name, moved);
                oracle.loss(&batch).unwrap()
            };
            let entries = [order[0], order[order.len() / 2]];
            let step = 1e-5;
            let slopes =
                entries.map(|entry| (loss_at(entry, step) - loss_at(entry, -step)) / (2.0 * step));
            oracle.set(name, values.clone());
            let found = entries.map(|entry| grad[entry]);
            // Errors of the differences from curvature and from rounding are 1e-10 each.
            assert!(slopes[0].abs() > 1e-5, "the loss hardly depends on `{name}`");
            assert_close(&format!("`{name}`"), &found, &slopes, Tolerance(1e-5));
        }
    }
}

#[test]
fn both_backends_and_the_forward_without_a_tape_agree() {
    for shape in SHAPES {
        let weights = Weights::random(shape, 14);
        let batch = packed(&samples());
        let subjects = backends().iter().map(|backend| Subject::new(&weights, *backend));
        let found = subjects.map(|subject| (subject.run(&batch), subject));
        let found: Vec<_> = found.collect();
        let ((from_flash, flash_grads), flash) = &found[0];
        let ((from_last, last_grads), _) = found.last().unwrap();
        let expected = wide(&from_last.hidden);
        assert_close("hidden", &wide(&from_flash.hidden), &expected, Tolerance::PATH);
        let expected: Vec<_> = last_grads.iter().map(|grad| wide(grad)).collect();
        flash.assert_gradients("flash", flash_grads, &expected, flash.summed());
        for ((outcome, _), subject) in &found {
            assert_eq!(subject.hidden(&batch).concat(), outcome.hidden);
            let hidden =
                subject.model.hidden(&subject.upload(&batch).unwrap(), &Pass::default()).unwrap();
            let head = subject.model.lm_head();
            let scores = scores(&hidden, head, &Targets::of(&batch), &Pass::default()).unwrap();
            assert_eq!(scores.nll, outcome.nll);
        }
    }
}

#[test]
fn recomputing_gives_the_same_bits() {
    let batch = packed(&samples());
    for &backend in backends() {
        for shape in [Shape::Untied, Shape::Windowed, Shape::Experts] {
            let subject = Subject::new(&Weights::random(shape, 15), backend);
            let (kept, expected) = subject.run(&batch);
            for (vision, llm) in [
                (Recompute::Stage, Recompute::Stage),
                (Recompute::Stage, Recompute::Cheap),
                (Recompute::Cheap, Recompute::Stage),
                (Recompute::Nothing, Recompute::Nothing),
            ] {
                let (policy, grads) = (RecomputePolicy { vision, llm }, subject.buffers(|_| true));
                let outcome = subject.accumulate(&batch, target_weight(&batch), policy, &grads);
                assert_eq!(outcome.hidden, kept.hidden);
                assert_identical(
                    &subject,
                    &format!("{policy:?}"),
                    &subject.values(&grads),
                    &expected,
                );
            }
        }
    }
}

#[test]
fn a_second_backward_doubles_every_gradient() {
    let batch = packed(&samples());
    for shape in SHAPES {
        let subject = Subject::new(&Weights::random(shape, 16), Backend::Flash);
        let (_, once) = subject.run(&batch);
        let grads = subject.buffers(|_| true);
        for _ in 0..2 {
            subject.accumulate(&batch, target_weight(&batch), RecomputePolicy::CHEAP, &grads);
        }
        let double = |grad: &Vec<f32>| grad.iter().map(|x| 2.0 * f64::from(*x)).collect();
        let expected: Vec<Vec<f64>> = once.iter().map(double).collect();
        // The second pass continues the sums of the first one, so it rounds at twice their size.
        subject.assert_gradients("twice", &subject.values(&grads), &expected, Tolerance::SUMMED);
    }
}

/// A choice of parameters.
type Pick = fn(&ParamSpec) -> bool;

/// The model's components, and subsets of parameters at which the backward pass may stop early.
const PICKS: [(&str, Pick); 16] = [
    ("vision", |spec| spec.component == VISION),
    ("merger", |spec| spec.component == MERGER),
    ("llm", |spec| spec.component == LLM),
    ("embedding", |spec| spec.name.contains("embed_tokens")),
    ("head", |spec| spec.name.starts_with("lm_head")),
    ("last norm", |spec| spec.name == "model.language_model.norm.weight"),
    ("decoder layer 0", |spec| spec.name.contains("layers.0.")),
    ("decoder layer 2", |spec| spec.name.contains("layers.2.")),
    ("patch embedding", |spec| spec.name.contains("patch_embed")),
    ("vision positions", |spec| spec.name.contains("pos_embed")),
    ("block 1", |spec| spec.name.contains("blocks.1.")),
    ("deepstack merger 0", |spec| spec.name.contains("deepstack_merger_list.0")),
    ("deepstack merger 1", |spec| spec.name.contains("deepstack_merger_list.1")),
    ("biases and norms", |spec| spec.shape.len() == 1),
    ("router", |spec| spec.name.contains("mlp.gate.")),
    ("experts", |spec| spec.is_experts()),
];

/// Trains only the parameters that `trained` selects. Asserts that they get bit-identical gradients
/// and that the others have no buffer.
fn assert_frozen(
    subject: &Subject,
    batch: &VarlenBatch,
    (what, trained): (&str, &dyn Fn(&ParamSpec) -> bool),
    (unfrozen, expected): (&Outcome, &[Vec<f32>]),
) {
    for recompute in [Recompute::Nothing, Recompute::Cheap, Recompute::Stage] {
        let grads = subject.buffers(trained);
        let policy = RecomputePolicy { vision: recompute, llm: recompute };
        let outcome = subject.accumulate(batch, target_weight(batch), policy, &grads);
        assert_eq!(outcome.nll, unfrozen.nll, "{what}");
        for (index, spec) in subject.specs.iter().enumerate() {
            let name = &spec.name;
            match grads.get(index) {
                Some(grad) => {
                    assert!(trained(spec), "{what}: `{name}` is frozen and has a buffer");
                    assert!(host(grad) == expected[index], "{what}: `{name}` differs");
                }
                None => assert!(!trained(spec), "{what}: `{name}` has no buffer"),
            }
        }
    }
}

#[test]
fn freezing_changes_no_bit_of_the_other_gradients() {
    for shape in SHAPES {
        let subject = Subject::new(&Weights::random(shape, 17), Backend::Flash);
        for batch in [packed(&samples()), packed(&[sample(40, &[Text(6)])])] {
            let (outcome, grads) = subject.run(&batch);
            for (name, pick) in PICKS {
                let expected = (&outcome, grads.as_slice());
                let (only, but) = (format!("only {name}"), format!("all but {name}"));
                assert_frozen(&subject, &batch, (&only, &pick), expected);
                assert_frozen(&subject, &batch, (&but, &|spec| !pick(spec)), expected);
            }
            assert_frozen(&subject, &batch, ("nothing", &|_| false), (&outcome, &grads));
        }
    }
}

#[test]
fn every_single_parameter_can_be_trained_alone() {
    for shape in [Shape::Untied, Shape::Experts] {
        let subject = Subject::new(&Weights::random(shape, 18), Backend::Flash);
        let all = samples();
        let batch = packed(&all[1..3]);
        let (outcome, grads) = subject.run(&batch);
        for spec in &subject.specs {
            let alone = |other: &ParamSpec| other == spec;
            assert_frozen(&subject, &batch, (&spec.name, &alone), (&outcome, &grads));
        }
    }
}

/// Norms of the gradient of each expert, and whether it computed a token of the batch.
#[test]
fn each_expert_with_a_token_has_the_oracles_gradient_and_the_others_none() {
    for files in [ExpertFiles::InOut, ExpertFiles::OutIn] {
        let set_files = |config: &mut ModelConfig| {
            for layer in &mut config.text.layers {
                if let MlpSpec::Experts(moe) = &mut layer.mlp {
                    moe.files = files;
                }
            }
        };
        let weights = Weights::with_config(set_files, Shape::Experts, 19);
        let (mut idle, mut busy) = (0, 0);
        for batch in [packed(&samples()), packed(&samples()[3..4])] {
            let (_, grads) = Subject::new(&weights, Backend::Flash).run(&batch);
            let expected = Oracle::new(&weights).gradients(&batch).unwrap();
            for (at, spec) in weights.specs.iter().enumerate().filter(|(_, spec)| spec.is_experts())
            {
                let len = spec.shape[1] * spec.shape[2];
                for (expert, (found, expected)) in
                    grads[at].chunks(len).zip(expected[at].chunks(len)).enumerate()
                {
                    let what = format!("{files:?}, expert {expert} of `{}`", spec.name);
                    assert_close(&what, &wide(found), expected, Tolerance::ORACLE_GRADIENT);
                    if expected.iter().all(|x| *x == 0.0) {
                        idle += 1;
                        assert!(found.iter().all(|x| *x == 0.0), "{what}: no token, a gradient");
                    } else {
                        busy += 1;
                    }
                }
            }
        }
        assert!(idle >= 8 && busy >= 24, "{idle} without a token, {busy} with tokens");
    }
}
