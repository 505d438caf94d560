//! The model as a list of stages: embedding, layers, final norm.

use super::config::{DECODER, TextConfig};
use crate::cost::{ActivationMemory, PartWork};
use crate::models::model::{Model, ModelConfig, RecomputePolicy};
use crate::models::opaque::{ModelInput, Tape};
use crate::nn::{
    Adapters, Decoder, DecoderConfig, DecoderContext, DecoderTape, HostTable, KvCache, ParamMap,
    ParamSpec, Routers, WeightError, inverse_frequencies,
};
use crate::tape::{GradSink, InputGrad, Param};
use batch::VarlenBatch;
use candle_core::{DType, Device, Result, Tensor, bail};
use kernels::{AttentionBackend, Matmul};
use std::num::NonZeroU32;
use std::sync::Arc;

struct TextModel {
    config: TextConfig,
    decoder: Decoder,
}

struct TextInput {
    input_ids: Tensor, // [T] u32
    context: DecoderContext,
}

impl ModelConfig for TextConfig {
    fn param_specs(&self) -> Vec<ParamSpec> {
        self.specs()
    }

    fn text(&self) -> &DecoderConfig {
        &self.text
    }

    fn of_files(
        &self,
        shape_of: &dyn Fn(&str) -> Option<Vec<usize>>,
    ) -> Option<Arc<dyn ModelConfig>> {
        Some(Arc::new(Self { text: self.text.of_files(DECODER, shape_of) }))
    }

    fn build(
        &self,
        params: &[Param],
        attention: &Arc<dyn AttentionBackend>,
        adapters: Option<&Adapters>,
        matmul: Matmul,
    ) -> std::result::Result<Box<dyn Model>, WeightError> {
        let map = ParamMap::new(params, adapters).with_matmul(matmul);
        let decoder = Decoder::new(&map, DECODER, &self.text, attention)?;
        Ok(Box::new(TextModel { config: self.clone(), decoder }))
    }
}

/// Rotary angles of positions that are equal on all three axes.
fn rope_table(config: &DecoderConfig, position_ids: &[[u32; 3]]) -> HostTable {
    let frequencies = inverse_frequencies(config.rope_theta, config.rotary_dim());
    let mut table = HostTable::with_capacity(position_ids.len() * frequencies.len());
    for [position, ..] in position_ids {
        for frequency in &frequencies {
            table.push(frequency * *position as f32);
        }
    }
    table
}

impl Model for TextModel {
    fn param_specs(&self) -> Vec<ParamSpec> {
        self.config.specs()
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
        self.decoder.stages()
    }

    fn routers(&self) -> Option<&Routers> {
        self.decoder.routers()
    }

    fn merge_size(&self) -> NonZeroU32 {
        NonZeroU32::MIN
    }

    fn head_dims(&self) -> Vec<(&'static str, usize)> {
        vec![("text", self.config.text.head_dim)]
    }

    fn upload(&self, mut batch: VarlenBatch, _: DType, device: &Device) -> Result<ModelInput> {
        if !batch.media.is_empty() {
            bail!("the batch has {} images, but the model is text-only", batch.media.len());
        }
        let rope = rope_table(&self.config.text, &batch.position_ids);
        let vocab_size = self.config.text.vocab_size;
        let (input_ids, context) = DecoderContext::upload(&mut batch, rope, vocab_size, device)?;
        Ok(ModelInput::new(TextInput { input_ids, context }))
    }

    fn forward(
        &self,
        input: &ModelInput,
        recompute: RecomputePolicy,
        grads: &dyn GradSink,
    ) -> Result<(Tensor, Tape)> {
        let input = input.get::<TextInput>()?;
        let h = self.decoder.embed(&input.input_ids)?; // [T, D]
        let below = InputGrad::needed_if(grads.buffer(&self.decoder.embed_tokens).is_some());
        let (context, llm) = (&input.context, recompute.llm);
        let (hidden, tape) = self.decoder.forward(h, context, llm, grads, below, &|_, _| Ok(()))?;
        Ok((hidden, Tape::new(tape)))
    }

    fn hidden(&self, input: &ModelInput) -> Result<Tensor> {
        let input = input.get::<TextInput>()?;
        let h = self.decoder.embed(&input.input_ids)?; // [T, D]
        self.decoder.hidden(h, &input.context, &|_, _| Ok(()))
    }

    fn backward(
        &self,
        tape: Tape,
        d_hidden: Tensor,
        input: &ModelInput,
        grads: &dyn GradSink,
    ) -> Result<()> {
        let (input, tape) = (input.get::<TextInput>()?, tape.take::<DecoderTape>()?);
        let d_table = grads.buffer(&self.decoder.embed_tokens);
        let below = InputGrad::needed_if(d_table.is_some());
        let context = &input.context;
        let dh =
            self.decoder.backward(tape, d_hidden, context, grads, below, &mut |_, _| Ok(()))?;
        if let (Some(d_table), Some(dh)) = (d_table, dh) {
            kernels::embedding_backward(&input.input_ids, &dh, d_table)?;
        }
        grads.finished(&[&self.decoder.embed_tokens]);
        Ok(())
    }

    fn decode(&self, input: &ModelInput, caches: &mut [&mut KvCache]) -> Result<Tensor> {
        let input = input.get::<TextInput>()?;
        let h = self.decoder.embed(&input.input_ids)?; // [N, D]
        self.decoder.decode(h, &input.context, caches, &|_, _| Ok(()))
    }

    fn work(&self) -> Vec<PartWork> {
        self.decoder.work(&self.config.text).to_vec()
    }

    fn activation_memory(
        &self,
        element: f64,
        recompute: RecomputePolicy,
        _grads: &dyn GradSink,
    ) -> ActivationMemory {
        let text = &self.config.text;
        self.decoder.with_expert_adapters(text, element, text.memory(element, recompute.llm))
    }
}
