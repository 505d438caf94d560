//! The decoder: token embedding, pre-norm layers of attention and MLP, final norm.

use super::attention::{AttentionBlock, SavedAttention};
use super::config::{DecoderConfig, LM_HEAD, embedding_name, layer_name};
use super::context::DecoderContext;
use super::kv_cache::KvCache;
use super::linear::Linear;
use super::linear_attention::{LinearAttentionBlock, SavedLinearAttention};
use super::mlp::{MlpBlock, SavedMlp};
use super::moe::{MoeBlock, SavedMoe};
use super::norm::RmsNorm;
use super::params::{ParamMap, WeightError};
use super::routers::Routers;
use crate::cost::{ActivationMemory, PartWork};
use crate::tape::{CheapTensors, GradSink, InputGrad, Param, Recompute, SavedStage, Stage};
use candle_core::{DType, Result, Tensor, bail};
use kernels::AttentionBackend;
use std::sync::Arc;

/// The first half of a decoder layer.
enum Mixer {
    Attention(Box<AttentionBlock>),
    Linear(Box<LinearAttentionBlock>),
}

/// The tensors that the backward of a [`Mixer`] needs.
enum SavedMixer {
    Attention(SavedAttention),
    Linear(SavedLinearAttention),
}

impl Mixer {
    fn params(&self) -> Vec<&Param> {
        match self {
            Self::Attention(block) => block.params().collect(),
            Self::Linear(block) => block.params().collect(),
        }
    }

    fn forward(
        &self,
        x: &Tensor,
        context: &DecoderContext,
        cheap: CheapTensors,
    ) -> Result<(Tensor, SavedMixer)> {
        Ok(match self {
            Self::Attention(block) => {
                let (y, saved) = block.forward(x, context, cheap)?;
                (y, SavedMixer::Attention(saved))
            }
            Self::Linear(block) => {
                let (y, saved) = block.forward(x, context)?;
                (y, SavedMixer::Linear(saved))
            }
        })
    }

    fn backward(
        &self,
        saved: SavedMixer,
        dy: &Tensor,
        context: &DecoderContext,
        grads: &dyn GradSink,
        input_grad: InputGrad,
    ) -> Result<Option<Tensor>> {
        match (self, saved) {
            (Self::Attention(block), SavedMixer::Attention(saved)) => {
                block.backward(saved, dy, context, grads, input_grad)
            }
            (Self::Linear(block), SavedMixer::Linear(saved)) => {
                block.backward(saved, dy, context, grads, input_grad)
            }
            _ => bail!("the saved tensors belong to a layer of another kind"),
        }
    }

    /// The next tokens of the samples in `caches`, `x: [N, D]` to `[N, D]`.
    fn decode(
        &self,
        layer: usize,
        x: &Tensor,
        context: &DecoderContext,
        caches: &mut [&mut KvCache],
    ) -> Result<Tensor> {
        match self {
            Self::Attention(block) => block.decode(layer, x, context, caches),
            Self::Linear(block) => block.decode(layer, x, context, caches),
        }
    }
}

/// The second half of a decoder layer.
enum FeedForward {
    Mlp(Box<MlpBlock>),
    Experts(Box<MoeBlock>),
}

/// The tensors that the backward of a [`FeedForward`] needs.
enum SavedFeedForward {
    Mlp(SavedMlp),
    Experts(SavedMoe),
}

impl FeedForward {
    fn new(
        params: &ParamMap<'_>,
        layer: &str,
        k: usize,
        config: &DecoderConfig,
        routers: Option<&Arc<Routers>>,
    ) -> std::result::Result<Self, WeightError> {
        if let (Some(moe), Some(routers)) = (config.experts(k), routers) {
            let place = moe.is_sparse[..k].iter().filter(|is_sparse| **is_sparse).count();
            let block = MoeBlock::new(params, layer, (config, moe), (routers, place))?;
            return Ok(Self::Experts(Box::new(block)));
        }
        let norm = format!("{layer}.post_attention_layernorm");
        let norm = RmsNorm::of_decoder(params, &norm, config)?;
        let linear = |part: &str| {
            let linear = Linear::without_bias(params, &format!("{layer}.mlp.{part}"))?;
            Ok::<_, WeightError>(linear.of_decoder(params))
        };
        Ok(Self::Mlp(Box::new(MlpBlock::new(norm, linear)?)))
    }

    fn params(&self) -> Vec<&Param> {
        match self {
            Self::Mlp(block) => block.params().collect(),
            Self::Experts(block) => block.params().collect(),
        }
    }

    fn forward(&self, x: &Tensor, cheap: CheapTensors) -> Result<(Tensor, SavedFeedForward)> {
        Ok(match self {
            Self::Mlp(block) => {
                let (y, saved) = block.forward(x, cheap)?;
                (y, SavedFeedForward::Mlp(saved))
            }
            Self::Experts(block) => {
                let (y, saved) = block.forward(x)?;
                (y, SavedFeedForward::Experts(saved))
            }
        })
    }

    fn backward(
        &self,
        saved: SavedFeedForward,
        dy: &Tensor,
        grads: &dyn GradSink,
    ) -> Result<Tensor> {
        match (self, saved) {
            (Self::Mlp(block), SavedFeedForward::Mlp(saved)) => block.backward(saved, dy, grads),
            (Self::Experts(block), SavedFeedForward::Experts(saved)) => {
                block.backward(saved, dy, grads)
            }
            _ => bail!("the saved tensors belong to a layer of another kind"),
        }
    }
}

struct DecoderLayer {
    mixer: Mixer,
    mlp: FeedForward,
}

impl DecoderLayer {
    fn run(
        &self,
        x: &Tensor,
        context: &DecoderContext,
        cheap: CheapTensors,
    ) -> Result<(Tensor, (SavedMixer, SavedFeedForward))> {
        let (x, mixer) = self.mixer.forward(x, context, cheap)?; // [T, D]
        let (y, mlp) = self.mlp.forward(&x, cheap)?; // [T, D]
        Ok((y, (mixer, mlp)))
    }
}

impl Stage for DecoderLayer {
    type Context = DecoderContext;
    type Saved = (SavedMixer, SavedFeedForward);

    fn params(&self) -> Vec<&Param> {
        self.mixer.params().into_iter().chain(self.mlp.params()).collect()
    }

    fn forward(&self, x: &Tensor, context: &DecoderContext) -> Result<(Tensor, Self::Saved)> {
        self.run(x, context, CheapTensors::Recompute)
    }

    fn forward_keeping(
        &self,
        x: &Tensor,
        context: &DecoderContext,
    ) -> Result<(Tensor, Self::Saved)> {
        self.run(x, context, CheapTensors::Keep)
    }

    fn backward(
        &self,
        (mixer, mlp): Self::Saved,
        dy: Tensor,
        context: &DecoderContext,
        grads: &dyn GradSink,
        input_grad: InputGrad,
    ) -> Result<Option<Tensor>> {
        let dx = self.mlp.backward(mlp, &dy, grads)?; // [T, D]
        drop(dy); // a layer's peak has one gradient of the residual stream
        self.mixer.backward(mixer, &dx, context, grads, input_grad)
    }
}

/// Token embedding, layers, final norm and the weight of the head.
pub(crate) struct Decoder {
    pub(crate) embed_tokens: Param, // [V, D]
    pub(crate) lm_head: Param,      // [V, D]; the embedding if tied
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    routers: Option<Arc<Routers>>,
}

/// The tensors that the forward pass of the decoder saves for backward.
pub(crate) struct DecoderTape {
    layers: Vec<SavedStage<DecoderLayer>>, // from the first that backward visits
    norm: SavedStage<RmsNorm>,
}

impl Decoder {
    pub(crate) fn new(
        params: &ParamMap<'_>,
        prefix: &str,
        config: &DecoderConfig,
        attention: &Arc<dyn AttentionBackend>,
    ) -> std::result::Result<Self, WeightError> {
        let routers = config.moe.as_ref().map(|moe| Arc::new(moe.routers()));
        let layers = (0..config.num_hidden_layers).map(|k| {
            let name = layer_name(prefix, k);
            let sizes = config.hybrid.as_ref().filter(|_| config.is_linear(k));
            let mixer = if let Some(sizes) = sizes {
                let block =
                    LinearAttentionBlock::new(params, &name, config, sizes, attention.clone())?;
                Mixer::Linear(Box::new(block))
            } else {
                let block = AttentionBlock::new(params, &name, config, attention.clone())?;
                Mixer::Attention(Box::new(block))
            };
            Ok(DecoderLayer {
                mixer,
                mlp: FeedForward::new(params, &name, k, config, routers.as_ref())?,
            })
        });
        let embed_tokens = params.get(&embedding_name(prefix))?;
        let tied = config.tie_word_embeddings;
        Ok(Self {
            lm_head: if tied { embed_tokens.clone() } else { params.get(LM_HEAD)? },
            embed_tokens,
            layers: layers.collect::<std::result::Result<_, _>>()?,
            norm: RmsNorm::of_decoder(params, &format!("{prefix}.norm"), config)?,
            routers,
        })
    }

    pub(crate) fn routers(&self) -> Option<&Routers> {
        self.routers.as_deref()
    }

    fn untied_head(&self) -> Option<&Param> {
        Some(&self.lm_head).filter(|head| head.index() != self.embed_tokens.index())
    }

    /// Parameters of each stage, in the order of backward. An untied head is the first.
    pub(crate) fn stages(&self) -> Vec<Vec<&Param>> {
        let head = self.untied_head().map(|head| vec![head]);
        let layers = self.layers.iter().rev().map(Stage::params);
        head.into_iter()
            .chain([self.norm.params()])
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
        self.norm.param().dtype()
    }

    /// `ids: [T]` to `[T, D]`.
    pub(crate) fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        kernels::embedding(ids, &self.embed_tokens.tensor())?.to_dtype(self.dtype())
    }

    /// Hidden states after the final norm, `[T, D]`, from embeddings `h: [T, D]`. Only the layers
    /// that backward visits are kept; `below`: whether anything before the first layer needs a
    /// gradient. `after_layer` may change the output of a layer in place.
    pub(crate) fn forward(
        &self,
        mut h: Tensor,
        context: &DecoderContext,
        recompute: Recompute,
        grads: &dyn GradSink,
        below: InputGrad,
        after_layer: &dyn Fn(usize, &Tensor) -> Result<()>,
    ) -> Result<(Tensor, DecoderTape)> {
        let mut visited = below == InputGrad::Needed;
        let mut layers = Vec::with_capacity(self.layers.len());
        for (k, layer) in self.layers.iter().enumerate() {
            visited = visited || layer.is_trained(grads);
            h = if visited {
                let (y, saved) = SavedStage::forward(layer, h, context, recompute)?;
                layers.push(saved);
                y
            } else {
                layer.forward(&h, context)?.0
            };
            after_layer(k, &h)?;
        }
        let (hidden, norm) = SavedStage::forward(&self.norm, h, &(), Recompute::No)?;
        Ok((hidden, DecoderTape { layers, norm }))
    }

    /// Hidden states after the final norm, `[T, D]`; keeps nothing.
    pub(crate) fn hidden(
        &self,
        mut h: Tensor,
        context: &DecoderContext,
        after_layer: &dyn Fn(usize, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        for (k, layer) in self.layers.iter().enumerate() {
            h = layer.forward(&h, context)?.0;
            after_layer(k, &h)?;
        }
        Ok(self.norm.forward(&h, &())?.0)
    }

    /// Adds the gradients of layers and norm to `grads` and reports these stages as finished, and
    /// before them an untied head.
    /// Returns the gradient of the embeddings, `[T, D]`, if `below` needs it. `before_layer`
    /// receives the gradient of each layer's output.
    pub(crate) fn backward(
        &self,
        tape: DecoderTape,
        d_hidden: Tensor,
        context: &DecoderContext,
        grads: &dyn GradSink,
        below: InputGrad,
        before_layer: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        self.untied_head().into_iter().for_each(|head| grads.finished(&[head]));
        let mut trained = below == InputGrad::Needed;
        let mut input_grads = vec![InputGrad::needed_if(trained)]; // of layer 0, 1, .., of the norm
        for layer in &self.layers {
            trained = trained || layer.is_trained(grads);
            input_grads.push(InputGrad::needed_if(trained));
        }
        let needed = input_grads[self.layers.len()];
        let mut dh = tape.norm.backward(&self.norm, d_hidden, &(), grads, needed)?;
        let mut saved = tape.layers;
        for (k, layer) in self.layers.iter().enumerate().rev() {
            let dy = dh.take().filter(|_| input_grads[k + 1] == InputGrad::Needed);
            dh = if let (Some(dy), Some(saved)) = (dy, saved.pop()) {
                before_layer(k, &dy)?;
                saved.backward(layer, dy, context, grads, input_grads[k])?
            } else {
                grads.finished(&layer.params());
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
    ) -> Result<Tensor> {
        for (k, layer) in self.layers.iter().enumerate() {
            let x = layer.mixer.decode(k, &h, context, caches)?;
            h = layer.mlp.forward(&x, CheapTensors::Recompute)?.0;
            after_layer(k, &h)?;
        }
        for (cache, tokens) in caches.iter_mut().zip(context.segments.cu_seqlens().segments()) {
            cache.advance(tokens.len());
        }
        Ok(self.norm.forward(&h, &())?.0)
    }
}
