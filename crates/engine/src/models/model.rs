//! The traits that every family implements.

use super::opaque::{ModelInput, Tape};
use crate::cost::{ActivationMemory, PartWork};
use crate::nn::{Adapters, DecoderConfig, KvCache, ParamSpec, Routers, TensorNames, WeightError};
use crate::tape::{GradSink, Param, Recompute};
use batch::VarlenBatch;
use candle_core::{DType, Device, Result, Tensor};
use kernels::{AttentionBackend, Matmul};
use std::fmt::Debug;
use std::num::NonZeroU32;
use std::sync::Arc;

/// The shape of a model, read from `config.json`.
pub trait ModelConfig: Debug + Send + Sync {
    /// Every tensor of the model in a fixed order. A tied head is not listed.
    fn param_specs(&self) -> Vec<ParamSpec>;

    fn text(&self) -> &DecoderConfig;

    /// Standard deviation of random weights.
    fn initializer_range(&self) -> f64 {
        self.text().initializer_range
    }

    /// How weight files name the tensors.
    fn tensor_names(&self) -> TensorNames {
        TensorNames::Modules
    }

    /// The same model as weight files have it, if the layout of some tensors differs between files:
    /// `shape_of` is the shape of a tensor in the files, and `None` of one that they do not have.
    fn of_files(
        &self,
        _shape_of: &dyn Fn(&str) -> Option<Vec<usize>>,
    ) -> Option<Arc<dyn ModelConfig>> {
        None
    }

    /// Builds the model from parameters with their published names, and those of its adapters.
    /// `matmul` is the format of the operands of the linear layers of the decoder.
    fn build(
        &self,
        params: &[Param],
        attention: &Arc<dyn AttentionBackend>,
        adapters: Option<&Adapters>,
        matmul: Matmul,
    ) -> std::result::Result<Box<dyn Model>, WeightError>;
}

/// The stages that backward runs forward again instead of keeping their activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecomputePolicy {
    /// Blocks and mergers of the vision encoder, if the model has one.
    pub vision: Recompute,
    /// Decoder layers.
    pub llm: Recompute,
}

impl RecomputePolicy {
    /// All activations are kept.
    pub const NONE: Self = Self { vision: Recompute::No, llm: Recompute::No };
}

/// A model of any family: a list of stages with a hand-written backward.
///
/// Shapes: `T` tokens, `D` hidden size, `V` vocabulary, `N` new tokens in generation.
pub trait Model: Send + Sync {
    /// Every tensor of the model, as in [`ModelConfig::param_specs`].
    fn param_specs(&self) -> Vec<ParamSpec>;

    /// Weight of the head, `[V, D]`; the embedding if the two are tied.
    fn lm_head(&self) -> &Param;

    /// The token embedding, `[V, D]`, a stage of its own. Backward does not read its weights.
    fn embedding(&self) -> &Param;

    /// Dtype of the activations. The weights of matrices may be narrower.
    fn dtype(&self) -> DType;

    /// Parameters of each stage, in the order in which a micro-batch reports them to
    /// [`GradSink::finished`]. Each parameter is in one stage.
    fn stages(&self) -> Vec<Vec<&Param>>;

    /// The routers of the layers with experts, if there are any.
    fn routers(&self) -> Option<&Routers> {
        None
    }

    /// Patches on a side of the square that becomes one vision token; 1 without a vision encoder.
    fn merge_size(&self) -> NonZeroU32;

    /// Name and head dim of each kind of attention, the decoder's first.
    fn head_dims(&self) -> Vec<(&'static str, usize)>;

    /// Copies a batch to the device; `dtype` is the compute dtype of the pixels. Fails if an id is
    /// outside of the vocabulary or if the images do not match their tokens.
    fn upload(&self, batch: VarlenBatch, dtype: DType, device: &Device) -> Result<ModelInput>;

    /// Returns hidden states after the final norm, `[T, D]`, and the tape for backward into
    /// `grads`. The tape keeps nothing of stages before the first trained parameter.
    fn forward(
        &self,
        input: &ModelInput,
        recompute: RecomputePolicy,
        grads: &dyn GradSink,
    ) -> Result<(Tensor, Tape)>;

    /// Hidden states after the final norm, `[T, D]`, without a tape.
    fn hidden(&self, input: &ModelInput) -> Result<Tensor>;

    /// Adds the gradient of every trained parameter to `grads`, given `d_hidden: [T, D]`, and
    /// reports every stage as finished. The gradient of the head must have been added before.
    fn backward(
        &self,
        tape: Tape,
        d_hidden: Tensor,
        input: &ModelInput,
        grads: &dyn GradSink,
    ) -> Result<()>;

    /// Hidden states of the next tokens of the samples in `caches`, `[N, D]`. The first segments of
    /// `input` belong to the caches, in their order; the rows of the others have no meaning.
    fn decode(&self, input: &ModelInput, caches: &mut [&mut KvCache]) -> Result<Tensor>;

    /// Sizes that decide the number of operations of each part, from the input to the head.
    fn work(&self) -> Vec<PartWork>;

    /// Memory of activations, for elements of `element` bytes.
    fn activation_memory(
        &self,
        element: f64,
        recompute: RecomputePolicy,
        grads: &dyn GradSink,
    ) -> ActivationMemory;
}

/// Reports all stages as finished, for a micro-batch without targets.
pub fn report_without_backward(model: &dyn Model, grads: &dyn GradSink) {
    model.stages().iter().for_each(|stage| grads.finished(stage));
}
