//! Properties that every training step must have, tested on tiny random models without files.
//!
//! Shapes: `T` tokens, `D` hidden size, `P` patches, `S` supervised rows.
//! This file has the models, the samples, and the comparison of results. `oracle` is a second
//! implementation of the whole model, in `f64` and with automatic differentiation.

mod generation;
mod gradients;
mod isolation;
mod layouts;
mod oracle;
mod seams;
mod sequence;

use crate::harness::device;
use candle_core::{DType, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::Path;
use std::sync::Arc;
use trainer::batch::{
    Batch, EncodedSample, IGNORE_INDEX, MediumKind, Pack, PaddingSide, Patches, SampleId,
    VarlenBatch,
};
use trainer::data::collate;
use trainer::loss::{Targets, loss_and_gradient};
use trainer::models::{
    EarlyMerger, MergerHidden, MergerParts, Model, ModelConfig, ModelInput, NormPlace,
    RecomputePolicy, TableReading, VisionAttention, VisionConfig, VisionMlp, VisionNames,
    VisionNorm, VisionParts, VisionWindows,
};
use trainer::nn::{
    AttentionSpec, DecoderConfig, ExpertFiles, Init, LayerSpec, LinearAttentionSpec, MixerSpec,
    MlpSpec, MoeConfig, Mrope, MropeLayout, ParamSpec, TensorNames,
};
use trainer::ops::{AttentionBackend, Flash, Gelu, Masked, Matmul, NormScale};
use trainer::tape::{GradSink, Gradients, Param, Pass, Trainable};

/// Maximum difference of two results, relative to the largest expected value.
#[derive(Debug, Clone, Copy)]
struct Tolerance(f64);

impl Tolerance {
    /// Hidden states and losses of the model in `f32` against the oracle in `f64`.
    const ORACLE: Self = Self(1e-5);
    /// Gradients of one tensor against the oracle's.
    const ORACLE_GRADIENT: Self = Self(1e-4);
    /// The same hidden states by another path through the same kernels.
    const PATH: Self = Self(1e-5);
    /// The nll of one target in another layout.
    const LAYOUT: Self = Self(2e-6);
    /// The nll of one target at shifted positions: the rotation angles round differently.
    const SHIFT: Self = Self(1e-5);
    /// Gradients summed in another order.
    const SUMMED: Self = Self(1e-5);
    /// The same with linear attention: the gradients of its gates are sums that cancel.
    const SUMMED_HYBRID: Self = Self(3e-5);
}

/// Asserts that all values are within the tolerance, relative to the largest expected one.
fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: Tolerance) {
    let scale = expected.iter().fold(0f64, |scale, x| scale.max(x.abs()));
    assert_within(what, found, expected, tolerance.0 * scale);
}

/// Asserts that each nll is within the tolerance, relative to itself but at least to 1: an nll is a
/// difference of logits, and a small one has the rounding error of large logits.
fn assert_each_close(what: &str, found: &[f32], expected: &[f32], tolerance: Tolerance) {
    assert_eq!(found.len(), expected.len(), "{what}: number of targets");
    for (target, (found, expected)) in wide(found).into_iter().zip(wide(expected)).enumerate() {
        let what = format!("{what}: nll of target {target}");
        assert_within(&what, &[found], &[expected], tolerance.0 * expected.abs().max(1.0));
    }
}

/// Asserts that all differences are at most `bound`; the panic message has the worst element.
fn assert_within(what: &str, found: &[f64], expected: &[f64], bound: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: number of values");
    let errors = found.iter().zip(expected).map(|(x, y)| (x - y).abs());
    // A NaN is the largest error.
    let worst = errors.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((at, error)) = worst {
        assert!(
            error <= bound,
            "{what}: element {at} is {}, expected {}: off by {error:e}, {:.1} times the bound \
             {bound:e}",
            found[at],
            expected[at],
            error / bound
        );
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

fn host(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

/// The models that the tests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// Qwen3-VL; the head shares the weight of the embedding.
    Tied,
    /// Qwen3-VL with a head of its own.
    Untied,
    /// Qwen3.5: layers with linear attention and with gated attention, no deepstack.
    Hybrid,
    /// Qwen2.5-VL: windows in the vision encoder, biases in place of the norms of queries and keys.
    Windowed,
    /// Qwen2-VL: the decoder of Qwen2.5-VL, layer norms and no windows in the vision encoder.
    QuickGelu,
    /// InternVL3.5: a class token, layer scale, separate layers for queries, keys and values with norms,
    /// and positions on one axis.
    ClassToken,
    /// MiniCPM-V: patches are merged after block 0 too, the nearest row of the table, a norm after the
    /// blocks; the decoder of Qwen3.5 with positions on one axis.
    EarlyMerger,
    /// Qwen3-VL with experts in two of three layers.
    Experts,
    /// Qwen3.5 with experts in all layers, one of which computes every token.
    SharedExpert,
}

const IMAGE_TOKEN: u32 = 7;
const VOCABULARY: u32 = 50;
const SHAPES: [Shape; 9] = [
    Shape::Tied,
    Shape::Untied,
    Shape::Hybrid,
    Shape::Windowed,
    Shape::QuickGelu,
    Shape::ClassToken,
    Shape::EarlyMerger,
    Shape::Experts,
    Shape::SharedExpert,
];

fn is_hybrid(shape: Shape) -> bool {
    [Shape::Hybrid, Shape::SharedExpert, Shape::EarlyMerger].contains(&shape)
}

fn vision_parts(shape: Shape) -> VisionParts {
    let is_hybrid = is_hybrid(shape);
    let qwen = VisionParts::QWEN;
    let learned = VisionParts {
        mlp: VisionMlp::Gelu { act: Gelu::Tanh, layers: ["linear_fc1", "linear_fc2"] },
        has_patch_bias: true,
        num_position_embeddings: Some(25),
        deepstack: if is_hybrid { vec![] } else { vec![0, 2] },
        merger: MergerParts { layers: ["norm", "linear_fc1", "linear_fc2"], ..qwen.merger.clone() },
        ..qwen.clone()
    };
    match shape {
        Shape::Windowed => VisionParts {
            norm: VisionNorm::Rms,
            mlp: VisionMlp::SwiGlu,
            // The images of the samples have up to 2 x 3 tokens. Block 1 attends inside frames.
            windows: Some(VisionWindows { side: 2, full_attention_blocks: vec![1] }),
            merger: MergerParts { norm: VisionNorm::Rms, ..qwen.merger.clone() },
            ..qwen
        },
        Shape::QuickGelu => qwen,
        Shape::ClassToken => VisionParts {
            norm: VisionNorm::Rms,
            attention: VisionAttention::Separate { has_bias: true, has_norms: true },
            names: VisionNames {
                class_token: Some("model.visual.class_token"),
                layer_scales: Some(["layer_scale1", "layer_scale2"]),
                ..learned.names
            },
            num_position_embeddings: Some(26),
            deepstack: vec![],
            merger: MergerParts {
                place: NormPlace::AfterMerge,
                hidden: MergerHidden::Output,
                ..learned.merger
            },
            ..learned
        },
        Shape::EarlyMerger => {
            let merger = MergerParts { place: NormPlace::AfterMerge, ..learned.merger };
            VisionParts {
                // without norms, the gradient of the bias of keys would be 0
                attention: VisionAttention::Separate { has_bias: false, has_norms: false },
                table_reading: TableReading::Nearest,
                early_merger: Some(EarlyMerger {
                    after_block: 0,
                    norm: "norm1",
                    merger: MergerParts {
                        name: "model.visual.early_merger",
                        layers: ["norm2", "linear_1", "linear_2"],
                        hidden: MergerHidden::Mlp,
                        ..merger.clone()
                    },
                }),
                post_norm: Some("model.visual.post_norm"),
                merger,
                ..learned
            }
        }
        _ => learned,
    }
}

/// A small config in which sizes that could be confused are different.
fn config(shape: Shape) -> ModelConfig {
    // The sections also differ: with [4, 1, 1] frequencies 4 and 5 fall back to time.
    let (hidden_size, kv, section) = match shape {
        Shape::Tied | Shape::Experts => (24, 2, [4, 1, 1]),
        Shape::Untied => (32, 1, [2, 2, 2]),
        Shape::Hybrid | Shape::SharedExpert | Shape::EarlyMerger => (24, 2, [2, 1, 1]),
        Shape::Windowed | Shape::QuickGelu => (24, 2, [1, 2, 3]),
        Shape::ClassToken => (24, 2, [6, 0, 0]),
    };
    let has_biases = [Shape::Windowed, Shape::QuickGelu].contains(&shape);
    let layout = if has_biases { MropeLayout::Blocks } else { MropeLayout::Interleaved };
    let is_hybrid = is_hybrid(shape);
    // One layer of `Untied` has a window, so each token still changes all later ones.
    let window = |k: usize| NonZeroUsize::new(3).filter(|_| shape == Shape::Untied && k == 1);
    let attention = |k| {
        MixerSpec::Attention(AttentionSpec {
            qk_norm: !has_biases,
            qkv_bias: has_biases,
            output_gate: is_hybrid,
            window: window(k),
        })
    };
    let linear_attention = MixerSpec::LinearAttention(LinearAttentionSpec {
        num_key_heads: 2,
        num_value_heads: 4,
        key_head_dim: 6,
        value_head_dim: 10,
        conv_kernel: 4,
    });
    // 4 of 6 experts compute no token of the shortest sample.
    let shared = shape == Shape::SharedExpert;
    let moe = MlpSpec::Experts(MoeConfig {
        num_experts: 6,
        experts_per_token: 2,
        intermediate_size: 14,
        shared_size: shared.then_some(10),
        files: if shared { ExpertFiles::OutIn } else { ExpertFiles::InOut },
    });
    let layer = |k: usize| LayerSpec {
        mixer: if is_hybrid && k != 1 { linear_attention } else { attention(k) },
        mlp: if shared || (shape == Shape::Experts && k != 1) { moe } else { MlpSpec::Dense },
    };
    ModelConfig {
        text: DecoderConfig {
            vocab_size: VOCABULARY as usize,
            hidden_size,
            intermediate_size: 40,
            num_attention_heads: 4,
            num_key_value_heads: kv,
            head_dim: 12, // 4 * 12 is not the hidden size
            attention_scale: if shape == Shape::Untied { 0.25 } else { 1.0 / 12f32.sqrt() },
            rms_norm_eps: 1e-6,
            rope_theta: 100.0, // small: every frequency turns within a short sample
            tie_word_embeddings: [Shape::Tied, Shape::Experts].contains(&shape) || has_biases,
            initializer_range: 0.02,
            mrope: Some(Mrope { section, layout })
                .filter(|_| ![Shape::ClassToken, Shape::EarlyMerger].contains(&shape)),
            rotary_dim: if is_hybrid { 8 } else { 12 },
            norm_scale: if is_hybrid { NormScale::OnePlusWeight } else { NormScale::Weight },
            layers: (0..3).map(layer).collect(),
        },
        vision: Some(VisionConfig {
            depth: 3,
            hidden_size: 16,
            intermediate_size: if has_biases { 22 } else { 20 },
            num_heads: 2,
            in_channels: 3,
            patch_size: 2,
            temporal_patch_size: 2,
            spatial_merge_size: if shape == Shape::EarlyMerger { 4 } else { 2 },
            out_hidden_size: hidden_size,
            image_token_id: IMAGE_TOKEN,
            parts: vision_parts(shape),
        }),
        tensor_names: TensorNames::Modules,
    }
}

/// Values of every parameter of a model. All are random: norm weights of 1 and biases of 0 would
/// hide mistakes.
#[derive(Debug, Clone)]
struct Weights {
    config: ModelConfig,
    specs: Vec<ParamSpec>,
    values: Vec<Vec<f32>>,
}

impl Weights {
    fn random(shape: Shape, seed: u64) -> Self {
        Self::with_config(|_| {}, shape, seed)
    }

    fn with_config(change: impl FnOnce(&mut ModelConfig), shape: Shape, seed: u64) -> Self {
        let mut config = config(shape);
        change(&mut config);
        let specs = config.param_specs();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values = specs.iter().map(|spec| {
            let layout = config.text.moe().map(|moe| moe.files);
            let fan_in: usize = match (spec.is_experts(), layout) {
                (true, Some(ExpertFiles::InOut)) => spec.shape[1],
                (true, _) => spec.shape[2],
                _ => spec.shape[1..].iter().product(),
            };
            let (mean, deviation) = match spec.shape.len() {
                1 if spec.name.ends_with("bias") => (0.0, 0.3),
                // A head of linear attention keeps about three quarters of its state per token.
                1 if spec.init == Init::LogDecay => (-1.0, 0.5),
                1 if spec.init == Init::Zero => (0.0, 0.3), // 1 is added to it
                1 => (1.0, 0.3),
                _ if spec.name.contains("embed") && !spec.name.contains("proj") => (0.0, 0.7),
                _ => (0.0, 0.7 / (fan_in as f32).sqrt()), // at 1 rounding grows from stage to stage
            };
            let mut draw = || mean + deviation * rng.sample::<f32, _>(StandardNormal);
            (0..spec.shape.iter().product()).map(|_| draw()).collect()
        });
        let values = values.collect();
        Self { config, specs, values }
    }

    /// The same model without attention between tokens of the decoder, so that each row depends
    /// only on its embedding or its vision features.
    fn without_text_attention(mut self) -> Self {
        for (spec, values) in self.specs.iter().zip(&mut self.values) {
            if spec.name.contains("self_attn.v_proj") {
                values.fill(0.0);
            }
        }
        self
    }
}

/// Implementation of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    Flash,
    Masked,
}

/// The implementations that the device of the tests has: dense masks are on the CPU only.
fn backends() -> &'static [Backend] {
    if device().is_cpu() { &[Backend::Flash, Backend::Masked] } else { &[Backend::Flash] }
}

/// The model under test.
struct Subject {
    config: ModelConfig,
    specs: Vec<ParamSpec>,
    params: Vec<Param>,
    model: Model,
}

/// Results of a micro-batch.
struct Outcome {
    hidden: Vec<f32>, // [T, D]
    nll: Vec<f32>,    // [S]
}

impl Subject {
    fn new(weights: &Weights, backend: Backend) -> Self {
        Self::in_dtype(weights, backend, DType::F32)
    }

    /// Weights and activations have this dtype.
    fn in_dtype(weights: &Weights, backend: Backend, dtype: DType) -> Self {
        let specs = weights.specs.clone();
        let params: Vec<Param> = (specs.iter().zip(&weights.values).enumerate())
            .map(|(index, (spec, values))| {
                let tensor = Tensor::from_slice(values, spec.shape.as_slice(), &device());
                Param::new(spec.name.as_str(), index, tensor.unwrap().to_dtype(dtype).unwrap())
            })
            .collect();
        let attention: Arc<dyn AttentionBackend> = match backend {
            Backend::Flash => Arc::new(Flash),
            Backend::Masked => Arc::new(Masked),
        };
        let model = weights.config.build(&params, &attention, None, Matmul::Native).unwrap();
        Self { config: weights.config.clone(), specs, params, model }
    }

    fn upload(&self, batch: &VarlenBatch) -> Result<ModelInput> {
        self.model.upload(self.own(batch.clone()), self.model.dtype(), &device())
    }

    /// The batch with the images of the model.
    fn own(&self, batch: VarlenBatch) -> VarlenBatch {
        VarlenBatch { media: media_of(&self.config, &batch), ..batch }
    }

    /// Hidden states, one row per token.
    fn hidden(&self, batch: &VarlenBatch) -> Vec<Vec<f32>> {
        let input = self.upload(batch).unwrap();
        self.model.hidden(&input, &Pass::default()).unwrap().to_vec2().unwrap()
    }

    /// Tolerance of gradients that are summed in another order.
    fn summed(&self) -> Tolerance {
        let is_hybrid = self.specs.iter().any(|spec| spec.init == Init::LogDecay);
        if is_hybrid { Tolerance::SUMMED_HYBRID } else { Tolerance::SUMMED }
    }

    /// Zeros for the parameters that `trained` picks.
    fn buffers(&self, trained: impl Fn(&ParamSpec) -> bool) -> Gradients {
        let trainable = |spec| if trained(spec) { Trainable::Yes } else { Trainable::Frozen };
        let trainable: Vec<Trainable> = self.specs.iter().map(trainable).collect();
        Gradients::zeros(&self.params, &trainable, &device()).unwrap()
    }

    /// Forward and backward of a micro-batch of a step whose targets have this weight.
    fn accumulate(
        &self,
        batch: &VarlenBatch,
        weight: f64,
        recompute: RecomputePolicy,
        grads: &dyn GradSink,
    ) -> Outcome {
        let (input, pass) = (self.upload(batch).unwrap(), Pass::training(grads));
        let (hidden, tape) = self.model.forward(&input, recompute, &pass).unwrap();
        let (head, targets) = (self.model.lm_head(), Targets::of(batch));
        let loss = loss_and_gradient(&hidden, head, &targets, weight, &pass).unwrap();
        let loss = loss.expect("the samples of these tests have targets");
        let outcome = Outcome { hidden: host(&hidden), nll: host(&loss.nll) };
        self.model.backward(tape, loss.d_hidden, &input, &pass).unwrap();
        outcome
    }

    /// Forward and backward of one micro-batch with all parameters trained.
    fn run(&self, batch: &VarlenBatch) -> (Outcome, Vec<Vec<f32>>) {
        let grads = self.buffers(|_| true);
        let outcome = self.accumulate(batch, target_weight(batch), RecomputePolicy::CHEAP, &grads);
        (outcome, self.values(&grads))
    }

    /// Gradients of a run in which nothing is frozen, in the order of `specs`.
    fn values(&self, grads: &Gradients) -> Vec<Vec<f32>> {
        (0..self.specs.len()).map(|index| host(grads.get(index).unwrap())).collect()
    }

    /// Compares the gradient of every parameter with the expected one.
    fn assert_gradients(
        &self,
        what: &str,
        found: &[Vec<f32>],
        expected: &[Vec<f64>],
        t: Tolerance,
    ) {
        assert_eq!(found.len(), expected.len(), "{what}: number of gradients");
        for ((spec, found), expected) in self.specs.iter().zip(found).zip(expected) {
            assert_close(
                &format!("{what}: gradient of `{}`", spec.name),
                &wide(found),
                expected,
                t,
            );
        }
    }
}

fn target_weight(batch: &VarlenBatch) -> f64 {
    Targets::of(batch).weight()
}

/// A part of a sample.
#[derive(Debug, Clone, Copy)]
enum Piece {
    /// Number of tokens.
    Text(usize),
    /// Number of patches along time, height and width. Above 1 frame it is a video of Qwen2.5-VL.
    Image([u32; 3]),
    /// The same, with text between the frames.
    Video([u32; 3]),
}
use Piece::{Image, Text, Video};

/// A sample of random tokens and pixels. About half of its text is supervised, including the last
/// token.
fn sample(seed: u64, pieces: &[Piece]) -> EncodedSample {
    let whole = pieces;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let id = SampleId { file: Path::new("laws.jsonl").into(), line: seed };
    let (mut input_ids, mut labels, mut position_ids) = (vec![], vec![], vec![]);
    let (mut vision_rows, mut media) = (vec![], vec![]);
    let mut next_position = 0;
    // The frames of a video are separate images with a timestamp before each; `joined` makes one
    // patch tensor of them.
    let pieces = pieces.iter().flat_map(|piece| match *piece {
        Video([t, h, w]) => [Text(2), Image([1, h, w])].repeat(t as usize),
        piece => vec![piece],
    });
    for piece in pieces {
        match piece {
            Text(tokens) => {
                for _ in 0..tokens {
                    let token = random_id(&mut rng);
                    input_ids.push(token);
                    labels.push(if rng.random() { i64::from(token) } else { IGNORE_INDEX });
                    position_ids.push([next_position; 3]);
                    next_position += 1;
                }
            }
            Video(_) => unreachable!("split into frames above"),
            Image(grid) => {
                let [t, h, w] = grid;
                for (frame, row, column) in (0..t).flat_map(|frame| {
                    (0..h / 2).flat_map(move |row| (0..w / 2).map(move |col| (frame, row, col)))
                }) {
                    vision_rows.push(input_ids.len() as u32);
                    input_ids.push(IMAGE_TOKEN);
                    labels.push(IGNORE_INDEX);
                    let at = |offset| next_position + offset;
                    position_ids.push([at(frame), at(row), at(column)]);
                }
                next_position += t.max(h / 2).max(w / 2);
                let values =
                    (t * h * w) as usize * config(Shape::Tied).vision.unwrap().patch_values();
                let pixel_values = (0..values).map(|_| rng.random_range(-1.0..1.0)).collect();
                let kind = MediumKind::Image; // `joined` sets the kind of videos
                media.push(Patches { pixel_values, grid_thw: grid, kind, continues_medium: false });
            }
        }
    }
    if let (Some(label), Some(token)) = (labels.last_mut(), input_ids.last()) {
        *label = i64::from(*token);
    }
    EncodedSample {
        weights: None,
        id,
        input_ids,
        labels,
        position_ids,
        segment_starts: Vec::new(),
        vision_rows,
        media: joined(media, whole),
    }
}

/// Joins the frames of each video into one medium.
fn joined(frames: Vec<Patches>, pieces: &[Piece]) -> Vec<Patches> {
    let mut frames = frames.into_iter();
    let mut media = Vec::new();
    for piece in pieces {
        match *piece {
            Text(_) => {}
            Image(_) => media.extend(frames.next()),
            Video(grid_thw) => {
                let values = frames.by_ref().take(grid_thw[0] as usize);
                let pixel_values = values.flat_map(|patches| patches.pixel_values).collect();
                let kind = MediumKind::Video;
                media.push(Patches { pixel_values, grid_thw, kind, continues_medium: false });
            }
        }
    }
    media
}

/// The images of a batch. The samples have four patches for each token; if a token of the model has
/// 16, each patch is replaced by four that differ.
fn media_of(config: &ModelConfig, batch: &VarlenBatch) -> Vec<Patches> {
    let vision = config.vision.as_ref().unwrap();
    let larger = |patches: &Patches| {
        let [t, h, w] = patches.grid_thw;
        let four = |patch: &[f32]| {
            let part = |k: usize| patch.iter().map(move |value| value * (1.0 - 0.3 * k as f32));
            (0..4).flat_map(part).collect::<Vec<f32>>()
        };
        let pixel_values = patches.pixel_values.chunks(vision.patch_values()).flat_map(four);
        let pixel_values = pixel_values.collect();
        Patches { pixel_values, grid_thw: [t, 2 * h, 2 * w], ..patches.clone() }
    };
    match vision.spatial_merge_size {
        2 => batch.media.clone(),
        _ => batch.media.iter().map(larger).collect(),
    }
}

/// A random text token.
fn random_id(rng: &mut ChaCha8Rng) -> u32 {
    loop {
        let token = rng.random_range(0..VOCABULARY);
        if token != IMAGE_TOKEN {
            return token;
        }
    }
}

/// Text only; an image and a video; two images with different, non-square grids; two tokens of
/// text; a video without text between its frames.
fn samples() -> Vec<EncodedSample> {
    vec![
        sample(1, &[Text(9)]),
        sample(2, &[Text(3), Image([1, 4, 6]), Text(2), Video([2, 2, 4]), Text(4)]),
        sample(3, &[Text(2), Image([1, 6, 2]), Text(3), Image([1, 2, 4]), Text(5)]),
        sample(4, &[Text(2)]),
        sample(5, &[Text(2), Image([2, 6, 4]), Text(3)]),
    ]
}

/// The samples with another weight for each token, from a half to two and a half. The first sample
/// has no weights.
fn weighted(mut samples: Vec<EncodedSample>) -> Vec<EncodedSample> {
    for sample in samples.iter_mut().skip(1) {
        let weight = |token| 0.5 + (token * 7 % 5) as f32 * 0.5;
        sample.weights = Some((0..sample.len()).map(weight).collect());
    }
    samples
}

fn pad(rows: &[&[EncodedSample]], pad_id: u32, side: PaddingSide) -> Batch {
    let packs = rows.iter().map(|row| Pack { samples: row.to_vec() }).collect();
    collate(packs, pad_id, side, NonZeroU32::new(2).unwrap()).unwrap()
}

/// Packs all samples into one row.
fn packed(samples: &[EncodedSample]) -> VarlenBatch {
    pad(&[samples], 0, PaddingSide::Right).unpad().unwrap()
}
