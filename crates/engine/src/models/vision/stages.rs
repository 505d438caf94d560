//! The model as a list of stages: the vision encoder feeds the decoder.
//!
//! ```text
//! main features       -> rows of the embedding
//! deepstack feature k -> added to the rows after decoder layer k
//! ids -> embedding -> layer 0 .. layer m -> norm -> hidden [T, D]
//! ```

use super::config::VisionLanguageConfig;
use super::encoder::{Features, VisionEncoder, VisionTape};
use super::input::VisionLanguageInput;
use super::params::{DECODER, param_specs};
use crate::cost::{ActivationMemory, PartWork};
use crate::models::model::{Model, ModelConfig, RecomputePolicy};
use crate::models::opaque::{ModelInput, Tape};
use crate::nn::{
    Adapters, Decoder, DecoderConfig, DecoderTape, KvCache, ParamMap, ParamSpec, Routers,
    TensorNames, WeightError,
};
use crate::tape::{GradSink, InputGrad, Param};
use batch::VarlenBatch;
use candle_core::{DType, Device, Result, Tensor};
use kernels::{AttentionBackend, Matmul};
use std::num::NonZeroU32;
use std::sync::Arc;

pub(super) struct VisionLanguageModel {
    config: VisionLanguageConfig,
    pub(super) vision: VisionEncoder,
    pub(super) decoder: Decoder,
}

struct VisionLanguageTape {
    vision: Option<VisionTape>, // None: no images, or nothing of the encoder is trained
    decoder: DecoderTape,
}

impl ModelConfig for VisionLanguageConfig {
    fn param_specs(&self) -> Vec<ParamSpec> {
        param_specs(self)
    }

    fn text(&self) -> &DecoderConfig {
        &self.text
    }

    fn tensor_names(&self) -> TensorNames {
        self.tensor_names
    }

    fn of_files(
        &self,
        shape_of: &dyn Fn(&str) -> Option<Vec<usize>>,
    ) -> Option<Arc<dyn ModelConfig>> {
        Some(Arc::new(Self { text: self.text.of_files(DECODER, shape_of), ..self.clone() }))
    }

    fn build(
        &self,
        params: &[Param],
        attention: &Arc<dyn AttentionBackend>,
        adapters: Option<&Adapters>,
        matmul: Matmul,
    ) -> std::result::Result<Box<dyn Model>, WeightError> {
        let map = ParamMap::new(params, adapters).with_matmul(matmul);
        let vision = VisionEncoder::new(&map, self, attention)?;
        let decoder = Decoder::new(&map, DECODER, &self.text, attention)?;
        Ok(Box::new(VisionLanguageModel { config: self.clone(), vision, decoder }))
    }
}

impl Model for VisionLanguageModel {
    fn param_specs(&self) -> Vec<ParamSpec> {
        param_specs(&self.config)
    }

    fn lm_head(&self) -> &Param {
        &self.decoder.lm_head
    }

    fn embedding(&self) -> &Param {
        &self.decoder.embed_tokens
    }

    fn dtype(&self) -> DType {
        self.decoder.dtype()
    }

    fn stages(&self) -> Vec<Vec<&Param>> {
        let mut stages = self.decoder.stages();
        stages.extend(self.vision.stages());
        stages
    }

    fn routers(&self) -> Option<&Routers> {
        self.decoder.routers()
    }

    fn merge_size(&self) -> NonZeroU32 {
        self.config.merge_size()
    }

    fn head_dims(&self) -> Vec<(&'static str, usize)> {
        let vision = &self.config.vision;
        vec![("text", self.config.text.head_dim), ("vision", vision.hidden_size / vision.num_heads)]
    }

    fn upload(&self, batch: VarlenBatch, dtype: DType, device: &Device) -> Result<ModelInput> {
        VisionLanguageInput::upload(batch, &self.config, dtype, device).map(ModelInput::new)
    }

    fn forward(
        &self,
        input: &ModelInput,
        recompute: RecomputePolicy,
        grads: &dyn GradSink,
    ) -> Result<(Tensor, Tape)> {
        let input = input.get::<VisionLanguageInput>()?;
        let (features, vision) = match &input.vision {
            Some(vision) if self.vision.is_trained(grads) => {
                let (features, tape) = self.vision.forward(vision, recompute.vision)?;
                (Some(features), Some(tape))
            }
            _ => (self.features(input)?, None),
        };
        let embedding = grads.buffer(&self.decoder.embed_tokens);
        let vision_below = input.has_media && self.vision.is_trained(grads);
        let below = InputGrad::needed_if(vision_below || embedding.is_some());
        let (hidden, decoder) = self.decoder.forward(
            self.embed(input, features.as_ref())?,
            &input.text,
            recompute.llm,
            grads,
            below,
            &|k, h| add_deepstack(h, input, features.as_ref(), k),
        )?;
        Ok((hidden, Tape::new(VisionLanguageTape { vision, decoder })))
    }

    fn hidden(&self, input: &ModelInput) -> Result<Tensor> {
        let input = input.get::<VisionLanguageInput>()?;
        let features = self.features(input)?;
        let h = self.embed(input, features.as_ref())?;
        let after_layer = |k, h: &Tensor| add_deepstack(h, input, features.as_ref(), k);
        self.decoder.hidden(h, &input.text, &after_layer)
    }

    fn backward(
        &self,
        tape: Tape,
        d_hidden: Tensor,
        input: &ModelInput,
        grads: &dyn GradSink,
    ) -> Result<()> {
        let (input, tape) =
            (input.get::<VisionLanguageInput>()?, tape.take::<VisionLanguageTape>()?);
        let vision = input.vision.as_ref().filter(|_| tape.vision.is_some());
        let embed_tokens = &self.decoder.embed_tokens;
        let d_table = grads.buffer(embed_tokens);
        let vision_below = input.has_media && self.vision.is_trained(grads);
        let below = InputGrad::needed_if(vision_below || d_table.is_some());
        let num_deepstack = self.vision.num_deepstack();
        let mut d_deepstack = Vec::with_capacity(num_deepstack); // last first
        let mut before_layer = |k, dh: &Tensor| {
            if let Some(vision) = vision.filter(|_| k < num_deepstack) {
                d_deepstack.push(vision.all(kernels::gather_rows(dh, &vision.rows)?)?); // [M, D]
            }
            Ok(())
        };
        let (decoder, text) = (&self.decoder, &input.text);
        let dh = decoder.backward(tape.decoder, d_hidden, text, grads, below, &mut before_layer)?;
        let d_main = match (vision, &dh) {
            (Some(vision), Some(dh)) => Some(vision.all(kernels::gather_rows(dh, &vision.rows)?)?), // [M, D]
            _ => None,
        };
        if let (Some(d_table), Some(dh)) = (d_table, &dh) {
            if let Some(vision) = &input.vision {
                kernels::zero_rows(dh, &vision.rows)?; // features replaced these rows of the embedding
            }
            kernels::embedding_backward(&input.ids, dh, d_table)?;
        }
        drop(dh);
        grads.finished(&[embed_tokens]);
        match (vision, d_main, tape.vision) {
            (Some(vision), Some(d_main), Some(tape)) => {
                self.vision.backward(tape, d_main, d_deepstack, vision, grads)?;
            }
            _ => self.vision.stages().iter().for_each(|stage| grads.finished(stage)),
        }
        Ok(())
    }

    fn decode(&self, input: &ModelInput, caches: &mut [&mut KvCache]) -> Result<Tensor> {
        let input = input.get::<VisionLanguageInput>()?;
        let features = self.features(input)?;
        let h = self.embed(input, features.as_ref())?; // [N, D]
        let after_layer = |k, h: &Tensor| add_deepstack(h, input, features.as_ref(), k);
        self.decoder.decode(h, &input.text, caches, &after_layer)
    }

    fn work(&self) -> Vec<PartWork> {
        self.config.work(&self.vision, &self.decoder)
    }

    fn activation_memory(
        &self,
        element: f64,
        recompute: RecomputePolicy,
        grads: &dyn GradSink,
    ) -> ActivationMemory {
        let vision = self.vision.is_trained(grads).then_some(recompute.vision);
        let memory = self.config.activation_memory(element, recompute.llm, vision);
        self.decoder.with_expert_adapters(&self.config.text, element, memory)
    }
}

impl VisionLanguageModel {
    /// Features of the images, without a tape; `None` without images.
    fn features(&self, input: &VisionLanguageInput) -> Result<Option<Features>> {
        input.vision.as_ref().map(|vision| self.vision.features(vision)).transpose()
    }

    /// Token embeddings, with the main features in their rows, `[T, D]`.
    fn embed(&self, input: &VisionLanguageInput, features: Option<&Features>) -> Result<Tensor> {
        let h = self.decoder.embed(&input.ids)?;
        if let (Some(vision), Some(features)) = (&input.vision, features) {
            kernels::index_copy(&h, &vision.rows, &vision.own(&features.main)?)?;
        }
        Ok(h)
    }
}

/// Adds deepstack feature `k` to the rows of the images in `h`, the output of decoder layer `k`.
fn add_deepstack(
    h: &Tensor,
    input: &VisionLanguageInput,
    features: Option<&Features>,
    k: usize,
) -> Result<()> {
    match (&input.vision, features.and_then(|features| features.deepstack.get(k))) {
        (Some(vision), Some(feature)) => kernels::index_add(h, &vision.rows, &vision.own(feature)?),
        _ => Ok(()),
    }
}
