//! The decoder: token embedding, layers, final norm.

use super::attention::AttentionBlock;
use super::config::{
    DecoderConfig, LM_HEAD, LayerSpec, MixerSpec, MlpSpec, embedding_name, layer_name,
};
use super::context::DecoderContext;
use super::kv_cache::KvCache;
use super::linear::Linear;
use super::linear_attention::LinearAttentionBlock;
use super::mixer::Mixer;
use super::mlp::MlpBlock;
use super::moe::MoeBlock;
use super::norm::Norm;
use super::params::{ParamMap, WeightError};
use super::routers::Routers;
use crate::cost::{ActivationMemory, PartWork};
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, SavedStage, Stage};
use candle_core::{DType, Result, Tensor, bail};
use kernels::AttentionBackend;
use std::sync::Arc;

struct DecoderLayer {
    mixer: Box<dyn Mixer>,
    /// The second half: an MLP, or experts.
    mlp: Box<dyn Stage<Context = ()>>,
}

impl DecoderLayer {
    /// The layer `name`, with `moe_index` layers with experts before it.
    fn new(
        params: &ParamMap<'_>,
        name: &str,
        (config, spec): (&DecoderConfig, &LayerSpec),
        moe_index: usize,
        attention: Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let mixer: Box<dyn Mixer> = match &spec.mixer {
            MixerSpec::LinearAttention(sizes) => {
                Box::new(LinearAttentionBlock::new(params, name, config, sizes)?)
            }
            MixerSpec::Attention(spec) => {
                Box::new(AttentionBlock::new(params, name, (config, *spec), attention)?)
            }
        };
        if let MlpSpec::Experts(moe) = &spec.mlp {
            let mlp = Box::new(MoeBlock::new(params, name, (config, moe), moe_index)?);
            return Ok(Self { mixer, mlp });
        }
        let norm = format!("{name}.post_attention_layernorm");
        let norm = Norm::of_decoder(params, &norm, config)?;
        let linear = |part: &str| {
            let linear = Linear::without_bias(params, &format!("{name}.mlp.{part}"))?;
            Ok::<_, WeightError>(linear.of_decoder(params))
        };
        Ok(Self { mixer, mlp: Box::new(MlpBlock::new(norm, linear)?) })
    }
}

impl Stage for DecoderLayer {
    type Context = DecoderContext;

    fn params(&self) -> Vec<&Param> {
        self.mixer.params().into_iter().chain(self.mlp.params()).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [T, D]
        context: &DecoderContext,
        recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let (x, mixer) = self.mixer.forward(x, context, recompute, pass)?; // [T, D]
        let (y, mlp) = self.mlp.forward(&x, &(), recompute, pass)?; // [T, D]
        Ok((y, Saved::default().with_parts([mixer, mlp])))
    }

    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [T, D]
        context: &DecoderContext,
        input_grad: InputGrad,
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [mixer, mlp] = saved.parts()?;
        let Some(dx) = self.mlp.backward(mlp, dy, &(), InputGrad::Needed, pass)? else {
            bail!("the second half of a layer returned no gradient of its input");
        };
        self.mixer.backward(mixer, dx, context, input_grad, pass)
    }
}

/// Token embedding, layers, final norm and the weight of the head.
pub(crate) struct Decoder {
    pub(crate) embed_tokens: Param, // [V, D]
    pub(crate) lm_head: Param,      // [V, D]; the embedding if tied
    layers: Vec<DecoderLayer>,
    norm: Norm,
    routers: Option<Routers>,
}

/// The tensors that the forward pass of the decoder saves for backward.
pub(crate) struct DecoderTape {
    layers: Vec<SavedStage>, // from the first that backward visits
    norm: SavedStage,
}

impl Decoder {
    pub(crate) fn new(
        params: &ParamMap<'_>,
        prefix: &str,
        config: &DecoderConfig,
        attention: &Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let mut moe_index = 0;
        let layers = config.layers.iter().enumerate().map(|(k, spec)| {
            let name = layer_name(prefix, k);
            let layer =
                DecoderLayer::new(params, &name, (config, spec), moe_index, Arc::clone(attention));
            moe_index += usize::from(spec.experts().is_some());
            layer
        });
        let embed_tokens = params.get(&embedding_name(prefix))?;
        let tied = config.tie_word_embeddings;
        Ok(Self {
            lm_head: if tied { embed_tokens.clone() } else { params.get(LM_HEAD)? },
            embed_tokens,
            layers: layers.collect::<std::result::Result<_, _>>()?,
            norm: Norm::of_decoder(params, &format!("{prefix}.norm"), config)?,
            routers: config.moe().map(|moe| moe.routers(config.num_with_experts())),
        })
    }

    pub(crate) fn routers(&self) -> Option<Routers> {
        self.routers
    }

    #[cfg(test)]
    pub(super) fn layers(&self) -> impl Iterator<Item = &dyn Stage<Context = DecoderContext>> {
        self.layers.iter().map(|layer| layer as &dyn Stage<Context = DecoderContext>)
    }

    fn untied_head(&self) -> Option<&Param> {
        Some(&self.lm_head).filter(|head| head.index() != self.embed_tokens.index())
    }

    /// Parameters of each stage, in the order of backward. An untied head is the first.
    pub(crate) fn stages(&self) -> Vec<Vec<&Param>> {
        let head = self.untied_head().map(|head| vec![head]);
        let layers = self.layers.iter().rev().map(Stage::params);
        head.into_iter()
            .chain([Stage::params(&self.norm)])
            .chain(layers)
            .chain([vec![&self.embed_tokens]])
            .collect()
    }

    /// Sizes that decide the number of operations of the decoder and of the head.
    pub(crate) fn work(&self, config: &DecoderConfig) -> [PartWork; 2] {
        let skipped = usize::from(self.untied_head().is_some());
        let params: Vec<&Param> = self.stages().into_iter().skip(skipped).flatten().collect();
        config.work(&params, &self.embed_tokens, &self.lm_head)
    }

    /// `memory`, that of the decoder without adapters, with the buffers of adapters of experts.
    pub(crate) fn with_expert_adapters(
        &self,
        config: &DecoderConfig,
        element: f64,
        memory: ActivationMemory,
    ) -> ActivationMemory {
        let params: Vec<&Param> = self.stages().into_iter().flatten().collect();
        let more = config.expert_adapter_bytes(&params, element);
        ActivationMemory { token_backward: memory.token_backward + more, ..memory }
    }

    /// Dtype of the activations. A table or the weight of a layer may be narrower.
    pub(crate) fn dtype(&self) -> DType {
        self.norm.dtype()
    }

    /// `ids: [T]` to `[T, D]`.
    pub(crate) fn embed(&self, ids: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        kernels::embedding(ids, &pass.weight(&self.embed_tokens)?)?.to_dtype(self.dtype())
    }

    /// Hidden states after the final norm, `[T, D]`, from embeddings `h: [T, D]`. Only the layers
    /// that backward visits are kept; `below`: whether anything before the first layer needs a
    /// gradient. `after_layer` may change the output of a layer in place.
    pub(crate) fn forward(
        &self,
        mut h: Tensor,
        context: &DecoderContext,
        recompute: Recompute,
        below: InputGrad,
        after_layer: &dyn Fn(usize, &Tensor) -> Result<()>,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, DecoderTape)> {
        let mut visited = below == InputGrad::Needed;
        let mut layers = Vec::with_capacity(self.layers.len());
        for (k, layer) in self.layers.iter().enumerate() {
            visited = visited || layer.is_trained(pass);
            h = if visited {
                let (y, saved) = SavedStage::forward(layer, h, context, recompute, pass)?;
                layers.push(saved);
                y
            } else {
                layer.forward(&h, context, Recompute::Cheap, pass)?.0
            };
            after_layer(k, &h)?;
        }
        let (hidden, norm) = SavedStage::forward(&self.norm, h, &(), Recompute::Cheap, pass)?;
        Ok((hidden, DecoderTape { layers, norm }))
    }

    /// Adds the gradients of layers and norm to those of `pass` and reports these stages as finished,
    /// and before them an untied head. Returns the gradient of the embeddings, `[T, D]`, if `below`
    /// needs it. `before_layer` receives the gradient of each layer's output.
    pub(crate) fn backward(
        &self,
        tape: DecoderTape,
        d_hidden: Tensor,
        context: &DecoderContext,
        below: InputGrad,
        before_layer: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        self.untied_head().map_or(Ok(()), |head| pass.grads.finished(&[head]))?;
        let mut trained = below == InputGrad::Needed;
        let mut input_grads = vec![InputGrad::needed_if(trained)]; // of layer 0, 1, .., of the norm
        for layer in &self.layers {
            trained = trained || layer.is_trained(pass);
            input_grads.push(InputGrad::needed_if(trained));
        }
        let needed = input_grads[self.layers.len()];
        let mut dh = tape.norm.backward(&self.norm, d_hidden, &(), needed, pass)?;
        let mut saved = tape.layers;
        for (k, layer) in self.layers.iter().enumerate().rev() {
            let dy = dh.take().filter(|_| input_grads[k + 1] == InputGrad::Needed);
            dh = if let (Some(dy), Some(saved)) = (dy, saved.pop()) {
                before_layer(k, &dy)?;
                saved.backward(layer, dy, context, input_grads[k], pass)?
            } else {
                pass.grads.finished(&layer.params())?;
                None
            };
        }
        Ok(dh.filter(|_| below == InputGrad::Needed))
    }

    /// Hidden states of the next tokens of the samples in `caches`, `[N, D]`; adds them to the
    /// caches. The first segments of `context` belong to the caches, in their order; the rows of
    /// the others have no meaning.
    pub(crate) fn decode(
        &self,
        mut h: Tensor,
        context: &DecoderContext,
        caches: &mut [&mut KvCache],
        after_layer: &dyn Fn(usize, &Tensor) -> Result<()>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        for (k, layer) in self.layers.iter().enumerate() {
            let x = layer.mixer.decode(k, &h, context, caches, pass)?;
            h = layer.mlp.forward(&x, &(), Recompute::Cheap, pass)?.0;
            after_layer(k, &h)?;
        }
        for (cache, tokens) in caches.iter_mut().zip(context.segments.cu_seqlens().segments()) {
            cache.advance(tokens.len());
        }
        Ok(self.norm.normed(&h, pass)?.0)
    }
}
