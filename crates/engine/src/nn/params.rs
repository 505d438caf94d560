//! The list of parameters: published names, shapes, and the component that each belongs to.

use super::adapter::Adapters;
use super::init::Init;
use crate::tape::Param;
use kernels::Matmul;
use std::collections::HashMap;

/// The samples that give a component its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Inputs {
    /// All samples.
    All,
    /// Samples with images or videos.
    Media,
}

/// A part of a model that `model.freeze` and `optim.lr_multipliers` can name. Families define
/// their components as constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Component {
    /// Name in a config, for example `llm`.
    pub name: &'static str,
    /// The samples that give it a gradient.
    pub inputs: Inputs,
}

/// One tensor of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Published name.
    pub name: String,
    /// Published shape.
    pub shape: Vec<usize>,
    pub component: Component,
    /// Values of a model with random weights.
    pub init: Init,
    pub stored: Stored,
}

/// How weight files have a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stored {
    /// Under its name and in its shape.
    #[default]
    Whole,
    /// The same; the matrices of experts are `[inputs, outputs]`.
    InOut,
    /// As the tensors of [`ParamSpec::pieces`], which belong to one expert each.
    PerExpert,
}

impl ParamSpec {
    /// The name of the linear layer that the tensor is the weight of. Embeddings, heads,
    /// convolutions and routers are no linear layers here.
    pub fn linear_layer(&self) -> Option<&str> {
        let layer = self.name.strip_suffix(".weight").filter(|_| self.shape.len() == 2)?;
        let name = layer.rsplit('.').next().unwrap_or(layer);
        let is_other = name.contains("embed") || ["lm_head", "gate"].contains(&name);
        (!is_other).then_some(layer)
    }

    /// Whether the tensor can be stored in host memory or in NF4 while it is frozen: weights of
    /// linear layers and of experts.
    pub fn can_be_stored_elsewhere(&self) -> bool {
        self.linear_layer().is_some() || self.is_experts()
    }

    /// Whether checkpoints contain the tensor in `f32`, whatever the compute dtype is: published
    /// folders in `bf16` have the decays of linear attention and the weights of its norm so.
    pub fn is_saved_in_f32(&self) -> bool {
        let names = ["linear_attn.A_log", "linear_attn.norm.weight"];
        names.iter().any(|name| self.name.ends_with(name))
    }

    /// Whether the tensor is the weight of a linear layer or of experts, the token embedding or the
    /// head: nearly all elements of a model. Ops read these weights in `bf16` too while they
    /// compute in `f32`.
    pub fn is_large_matrix(&self) -> bool {
        let tables = ["embed_tokens.weight", "lm_head.weight"];
        let is_table = tables.iter().any(|table| self.name.ends_with(table));
        is_table || self.can_be_stored_elsewhere()
    }
}

/// The reason why a model cannot be built from a list of parameters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Data, hint = "the weights belong to another model than `config.json`")]
pub enum WeightError {
    #[error("the model has no tensor `{name}`")]
    Missing { name: String },
}

/// Finds parameters by name while a model is built.
pub(crate) struct ParamMap<'a> {
    by_name: HashMap<&'a str, &'a Param>,
    adapters: Option<&'a Adapters>,
    matmul: Matmul,
}

impl<'a> ParamMap<'a> {
    pub(crate) fn new(params: &'a [Param], adapters: Option<&'a Adapters>) -> Self {
        let by_name = params.iter().map(|param| (param.name(), param)).collect();
        Self { by_name, adapters, matmul: Matmul::Native }
    }

    /// The same parameters, with this format of operands in the decoder.
    pub(crate) fn with_matmul(self, matmul: Matmul) -> Self {
        Self { matmul, ..self }
    }

    pub(super) fn matmul(&self) -> Matmul {
        self.matmul
    }

    pub(super) fn adapters(&self) -> Option<&'a Adapters> {
        self.adapters
    }

    pub(crate) fn get(&self, name: &str) -> Result<Param, WeightError> {
        let missing = || WeightError::Missing { name: name.to_owned() };
        self.by_name.get(name).map(|param| (*param).clone()).ok_or_else(missing)
    }
}
