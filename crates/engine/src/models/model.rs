//! The model as a list of stages: the vision encoder, if there is one, feeds the decoder.
//!
//! ```text
//! main features       -> rows of the embedding
//! deepstack feature k -> added to the rows after decoder layer k
//! ids -> embedding -> layer 0 .. layer m -> norm -> hidden [T, D]
//! ```

use super::model_config::ModelConfig;
use super::vision::{Features, VisionEncoder, VisionInput, VisionTape};
use crate::cost::{ActivationMemory, PartWork};
use crate::nn::{
    Adapters, Decoder, DecoderContext, DecoderTape, KvCache, ParamMap, ParamSpec, Routers,
    WeightError, rope_table,
};
use crate::tape::{GradSink, InputGrad, Param, Pass, Recompute};
use batch::VarlenBatch;
use candle_core::{DType, Device, Result, Tensor, bail};
use kernels::{AttentionBackend, Matmul};
use std::num::NonZeroU32;
use std::sync::Arc;

/// The stages that backward runs forward again instead of keeping their activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecomputePolicy {
    /// Blocks and mergers of the vision encoder, if the model has one.
    pub vision: Recompute,
    /// Decoder layers.
    pub llm: Recompute,
}

impl RecomputePolicy {
    /// The forward pass keeps all activations but those that are cheap to compute again.
    pub const CHEAP: Self = Self { vision: Recompute::Cheap, llm: Recompute::Cheap };
}

/// A model of any family: a list of stages with a hand-written backward.
///
/// Shapes: `T` tokens, `M` merged vision tokens, `D` hidden size, `V` vocabulary, `N` new tokens in
/// generation.
pub struct Model {
    config: ModelConfig,
    vision: Option<VisionEncoder>,
    decoder: Decoder,
}

/// One micro-batch on the device.
pub struct ModelInput {
    ids: Tensor, // [T] u32
    text: DecoderContext,
    vision: Option<VisionInput>, // None: a batch or part without images
    /// Whether the micro-batch has images, in any of its parts. The ranks that share a micro-batch
    /// run backward through the same layers.
    has_media: bool,
}

/// What the forward pass of a model saves for backward.
pub struct Tape {
    vision: Option<VisionTape>, // None: no images, or nothing of the encoder is trained
    decoder: DecoderTape,
}

impl ModelConfig {
    /// Builds the model from parameters with their published names, and those of its adapters.
    /// `matmul` is the format of the operands of the linear layers of the decoder.
    pub fn build(
        &self,
        params: &[Param],
        attention: &Arc<dyn AttentionBackend>,
        adapters: Option<&Adapters>,
        matmul: Matmul,
    ) -> std::result::Result<Model, WeightError> {
        let map = ParamMap::new(params, adapters).with_matmul(matmul);
        let vision = self.vision.as_ref();
        let vision =
            vision.map(|vision| VisionEncoder::new(&map, vision, attention)).transpose()?;
        let decoder = Decoder::new(&map, self.decoder_name(), &self.text, attention)?;
        Ok(Model { config: self.clone(), vision, decoder })
    }
}

impl Model {
    /// Every tensor of the model, as in [`ModelConfig::param_specs`].
    pub fn param_specs(&self) -> Vec<ParamSpec> {
        self.config.param_specs()
    }

    /// Weight of the head, `[V, D]`; the embedding if the two are tied.
    pub fn lm_head(&self) -> &Param {
        &self.decoder.lm_head
    }

    /// The token embedding, `[V, D]`, a stage of its own. Backward does not read its weights.
    pub fn embedding(&self) -> &Param {
        &self.decoder.embed_tokens
    }

    /// Dtype of the activations. The weights of matrices may be narrower.
    pub fn dtype(&self) -> DType {
        self.decoder.dtype()
    }

    /// Parameters of each stage, in the order in which a micro-batch reports them to
    /// [`GradSink::finished`]. Each parameter is in one stage.
    pub fn stages(&self) -> Vec<Vec<&Param>> {
        let mut stages = self.decoder.stages();
        stages.extend(self.vision.iter().flat_map(VisionEncoder::stages));
        stages
    }

    /// The routers of the layers with experts, if there are any.
    pub fn routers(&self) -> Option<Routers> {
        self.decoder.routers()
    }

    /// Patches on a side of the square that becomes one vision token; 1 without a vision encoder.
    pub fn merge_size(&self) -> NonZeroU32 {
        self.config.merge_size()
    }

    /// Name and head dim of each kind of attention, the decoder's first.
    pub fn head_dims(&self) -> Vec<(&'static str, usize)> {
        let text = ("text", self.config.text.head_dim);
        let vision = self.config.vision.iter();
        let vision = vision.map(|vision| ("vision", vision.hidden_size / vision.num_heads));
        [text].into_iter().chain(vision).collect()
    }

    /// Copies a batch to the device; `dtype` is the compute dtype of the pixels. Fails if an id is
    /// outside of the vocabulary or if the images do not match their tokens.
    pub fn upload(
        &self,
        mut batch: VarlenBatch,
        dtype: DType,
        device: &Device,
    ) -> Result<ModelInput> {
        let config = &self.config;
        let rope = rope_table(&config.text, &batch.position_ids);
        let vocab_size = config.text.vocab_size;
        let (ids, text) = DecoderContext::upload(&mut batch, rope, vocab_size, device)?;
        let has_media = batch.part.as_ref().map_or(!batch.media.is_empty(), |part| part.has_media);
        let vision = match &config.vision {
            _ if batch.media.is_empty() => None,
            Some(vision) => Some(VisionInput::upload(batch, vision, dtype, device)?),
            None => {
                bail!("the batch has {} images, but the model is text-only", batch.media.len())
            }
        };
        Ok(ModelInput { ids, text, vision, has_media })
    }

    /// Returns hidden states after the final norm, `[T, D]`, and the tape for a backward into the
    /// gradients of `pass`. The tape keeps nothing of stages before the first trained parameter.
    pub fn forward(
        &self,
        input: &ModelInput,
        recompute: RecomputePolicy,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Tape)> {
        let (features, vision) = match (&self.vision, &input.vision) {
            (Some(encoder), Some(vision)) if encoder.is_trained(pass) => {
                let (features, tape) = encoder.forward(vision, recompute.vision, pass)?;
                (Some(features), Some(tape))
            }
            _ => (self.features(input, pass)?, None),
        };
        let (hidden, decoder) = self.decoder.forward(
            self.embed(input, features.as_ref(), pass)?,
            &input.text,
            recompute.llm,
            self.below(input, pass),
            &|k, h| add_deepstack(h, input, features.as_ref(), k),
            pass,
        )?;
        Ok((hidden, Tape { vision, decoder }))
    }

    /// Hidden states after the final norm, `[T, D]`, in a pass that trains nothing.
    pub fn hidden(&self, input: &ModelInput, pass: &Pass<'_>) -> Result<Tensor> {
        Ok(self.forward(input, RecomputePolicy::CHEAP, pass)?.0)
    }

    /// Adds the gradient of every trained parameter to those of `pass`, given
    /// `d_hidden: [T, D]`, and reports every stage as finished. The gradient of the head must have
    /// been added before.
    pub fn backward(
        &self,
        tape: Tape,
        d_hidden: Tensor,
        input: &ModelInput,
        pass: &Pass<'_>,
    ) -> Result<()> {
        let vision = input.vision.as_ref().filter(|_| tape.vision.is_some());
        let num_deepstack = self.vision.as_ref().map_or(0, VisionEncoder::num_deepstack);
        let mut d_deepstack = Vec::with_capacity(num_deepstack); // last first
        let mut before_layer = |k, dh: &Tensor| {
            if let Some(vision) = vision.filter(|_| k < num_deepstack) {
                d_deepstack.push(vision.all(kernels::gather_rows(dh, &vision.rows)?)?); // [M, D]
            }
            Ok(())
        };
        let below = self.below(input, pass);
        let (decoder, text) = (&self.decoder, &input.text);
        let dh = decoder.backward(tape.decoder, d_hidden, text, below, &mut before_layer, pass)?;
        let d_main = match (vision, &dh) {
            (Some(vision), Some(dh)) => Some(vision.all(kernels::gather_rows(dh, &vision.rows)?)?), // [M, D]
            _ => None,
        };
        let embed_tokens = self.embedding();
        if let (Some(d_table), Some(dh)) = (pass.grad(embed_tokens), &dh) {
            if let Some(vision) = &input.vision {
                kernels::zero_rows(dh, &vision.rows)?; // features replaced these rows of the embedding
            }
            kernels::embedding_backward(&input.ids, dh, d_table)?;
        }
        drop(dh);
        pass.grads.finished(&[embed_tokens])?;
        match (&self.vision, vision, d_main, tape.vision) {
            (Some(encoder), Some(vision), Some(d_main), Some(tape)) => {
                encoder.backward(tape, d_main, d_deepstack, vision, pass)
            }
            (Some(encoder), ..) => finish_all(&encoder.stages(), pass),
            (None, ..) => Ok(()),
        }
    }

    /// Reports all stages as finished, for a micro-batch without targets.
    pub fn finish_without_backward(&self, pass: &Pass<'_>) -> Result<()> {
        finish_all(&self.stages(), pass)
    }

    /// Hidden states of the next tokens of the samples in `caches`, `[N, D]`. The first segments of
    /// `input` belong to the caches, in their order; the rows of the others have no meaning.
    pub(super) fn decode(
        &self,
        input: &ModelInput,
        caches: &mut [&mut KvCache],
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let features = self.features(input, pass)?;
        let h = self.embed(input, features.as_ref(), pass)?; // [N, D]
        let after_layer = |k, h: &Tensor| add_deepstack(h, input, features.as_ref(), k);
        self.decoder.decode(h, &input.text, caches, &after_layer, pass)
    }

    /// Sizes that decide the number of operations of each part, from the input to the head.
    pub fn work(&self) -> Vec<PartWork> {
        let mut work = match (&self.config.vision, &self.vision) {
            (Some(config), Some(encoder)) => config.work(encoder),
            _ => Vec::new(),
        };
        work.extend(self.decoder.work(&self.config.text));
        work
    }

    /// Memory of activations, for elements of `element` bytes. `grads` says what is trained.
    pub fn activation_memory(
        &self,
        element: f64,
        recompute: RecomputePolicy,
        grads: &dyn GradSink,
    ) -> ActivationMemory {
        let text = &self.config.text;
        let mut memory = text.memory(element, recompute.llm);
        if let (Some(config), Some(encoder)) = (&self.config.vision, &self.vision) {
            let vision = encoder.is_trained(&Pass::training(grads)).then_some(recompute.vision);
            config.add_memory(&mut memory, element, vision);
        }
        self.decoder.with_expert_adapters(text, element, memory)
    }

    /// Whether the gradient of the embedded tokens is needed.
    fn below(&self, input: &ModelInput, pass: &Pass<'_>) -> InputGrad {
        let trains_vision = self.vision.as_ref().is_some_and(|encoder| encoder.is_trained(pass));
        let trains_table = pass.grad(self.embedding()).is_some();
        InputGrad::needed_if((input.has_media && trains_vision) || trains_table)
    }

    /// Features of the images, without a tape; `None` without images.
    fn features(&self, input: &ModelInput, pass: &Pass<'_>) -> Result<Option<Features>> {
        let images = self.vision.as_ref().zip(input.vision.as_ref());
        images.map(|(encoder, vision)| encoder.features(vision, pass)).transpose()
    }

    /// Token embeddings, with the main features in their rows, `[T, D]`.
    fn embed(
        &self,
        input: &ModelInput,
        features: Option<&Features>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let h = self.decoder.embed(&input.ids, pass)?;
        if let (Some(vision), Some(features)) = (&input.vision, features) {
            kernels::index_copy(&h, &vision.rows, &vision.own(&features.main)?)?;
        }
        Ok(h)
    }
}

fn finish_all(stages: &[Vec<&Param>], pass: &Pass<'_>) -> Result<()> {
    stages.iter().try_for_each(|stage| pass.grads.finished(stage))
}

/// Adds deepstack feature `k` to the rows of the images in `h`, the output of decoder layer `k`.
fn add_deepstack(
    h: &Tensor,
    input: &ModelInput,
    features: Option<&Features>,
    k: usize,
) -> Result<()> {
    match (&input.vision, features.and_then(|features| features.deepstack.get(k))) {
        (Some(vision), Some(feature)) => kernels::index_add(h, &vision.rows, &vision.own(feature)?),
        _ => Ok(()),
    }
}
