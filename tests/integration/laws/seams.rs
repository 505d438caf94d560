//! What ranks and shards rely on: stages report their gradients, and weights may move.

use super::{
    Backend, Image, SHAPES, Shape, Subject, Text, Weights, host, packed, sample, samples,
    target_weight,
};
use candle_core::{Device, Tensor};
use std::cell::RefCell;
use std::collections::BTreeMap;
use trainer::models::RecomputePolicy;
use trainer::ops::Store;
use trainer::tape::{GradSink, Gradients, Param, Pass, Recompute};

/// Records each parameter when it is reported, with its gradient at that time.
struct Recorder<'a> {
    grads: &'a Gradients,
    reported: RefCell<Vec<(usize, Option<Vec<f32>>)>>,
}

impl GradSink for Recorder<'_> {
    fn buffer(&self, param: &Param) -> Option<&Tensor> {
        self.grads.buffer(param)
    }

    fn product_buffer(&self, param: &Param) -> Option<(&Tensor, Store)> {
        self.grads.product_buffer(param)
    }

    fn finished(&self, params: &[&Param]) -> candle_core::Result<()> {
        let mut reported = self.reported.borrow_mut();
        for param in params {
            reported.push((param.index(), self.grads.get(param.index()).map(host)));
        }
        Ok(())
    }
}

#[test]
fn every_stage_is_reported_once_after_its_last_gradient_and_in_one_order() {
    let batches = [packed(&samples()), packed(&[sample(40, &[Text(6)])])];
    let policies =
        [Recompute::Cheap, Recompute::Stage].map(|r| RecomputePolicy { vision: r, llm: r });
    for shape in SHAPES {
        let subject = Subject::new(&Weights::random(shape, 80), Backend::Flash);
        let order: Vec<usize> =
            subject.model.stages().concat().iter().map(|param| param.index()).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..subject.specs.len()).collect::<Vec<_>>(), "a stage for each");
        let frozen = ["nothing", "visual.", "language_model.", "layers.0.", "embed_tokens", ""];
        for (batch, frozen) in batches.iter().flat_map(|b| frozen.map(|frozen| (b, frozen))) {
            for policy in policies {
                let grads = subject.buffers(|spec| !spec.name.contains(frozen));
                let recorder = Recorder { grads: &grads, reported: RefCell::default() };
                subject.accumulate(batch, target_weight(batch), policy, &recorder);
                let reported = recorder.reported.into_inner();
                let found: Vec<usize> = reported.iter().map(|(index, _)| *index).collect();
                assert_eq!(found, order, "{shape:?}, frozen: {frozen}, {policy:?}");
                for (index, then) in reported {
                    let name = &subject.specs[index].name;
                    assert!(
                        then == grads.get(index).map(host),
                        "`{name}` changed after its report"
                    );
                }
            }
        }
        let grads = subject.buffers(|_| true);
        let recorder = Recorder { grads: &grads, reported: RefCell::default() };
        subject.model.finish_without_backward(&Pass::training(&recorder)).unwrap();
        let found: Vec<usize> =
            recorder.reported.borrow().iter().map(|(index, _)| *index).collect();
        assert_eq!(found, order, "a micro-batch without targets");
    }
}

/// In the second batch, backward does not reach the vision encoder.
#[test]
fn gradients_do_not_depend_on_what_their_buffers_contained_before_the_step() {
    let batches = [packed(&samples()), packed(&[sample(40, &[Text(6)])])];
    for shape in SHAPES {
        let subject = Subject::new(&Weights::random(shape, 82), Backend::Flash);
        for batch in &batches {
            let run = |grads: &Gradients| {
                subject.accumulate(batch, target_weight(batch), RecomputePolicy::CHEAP, grads);
            };
            let zeroed = subject.buffers(|_| true);
            let used = subject.buffers(|_| true);
            used.iter().flatten().for_each(fill_with_nan);
            used.begin(&subject.params).unwrap();
            for micro_batch in 1..=2 {
                run(&zeroed);
                run(&used);
                used.end(&subject.params).unwrap();
                let (found, expected) = (subject.values(&used), subject.values(&zeroed));
                for ((spec, found), expected) in subject.specs.iter().zip(found).zip(expected) {
                    assert!(found == expected, "{shape:?}, {micro_batch}: `{}`", spec.name);
                }
            }
        }
    }
}

fn fill_with_nan(tensor: &Tensor) {
    let nan = Tensor::new(f32::NAN, &Device::Cpu).unwrap();
    let nan = nan.broadcast_as(tensor.shape()).unwrap().contiguous().unwrap();
    tensor.slice_set(&nan.to_device(tensor.device()).unwrap(), 0, 0).unwrap();
}

#[test]
fn weights_in_another_buffer_give_the_same_bits() {
    let batch = packed(&[sample(41, &[Text(3), Image([1, 4, 2]), Text(5)])]);
    for shape in [Shape::Tied, Shape::Untied] {
        let subject = Subject::new(&Weights::random(shape, 81), Backend::Flash);
        let (expected, grads) = subject.run(&batch);
        let old: BTreeMap<usize, Tensor> =
            subject.params.iter().map(|param| (param.index(), param.tensor().unwrap())).collect();
        for param in &subject.params {
            // a view in the middle of a larger buffer, as a slot has
            let values = host(&param.tensor().unwrap());
            let slot = [&[f32::NAN; 8], values.as_slice(), &[f32::NAN; 8]].concat();
            let slot = Tensor::new(slot, param.tensor().unwrap().device()).unwrap();
            let view = slot.narrow(0, 8, values.len()).unwrap();
            param.set_tensor(view.reshape(param.tensor().unwrap().shape()).unwrap()).unwrap();
        }
        old.values().for_each(fill_with_nan);
        let (found, moved) = subject.run(&batch);
        assert_eq!(found.hidden, expected.hidden, "{shape:?}");
        assert!(moved == grads, "{shape:?}");
    }
}
