//! Parameters, and where their gradients go.

use candle_core::{DType, Device, Result, Tensor};
use std::sync::Arc;

/// A tensor of the model under its published name.
///
/// Clones share storage; a tied weight is one `Param` in two places.
#[derive(Debug, Clone)]
pub struct Param {
    name: Arc<str>,
    index: usize,
    tensor: Tensor,
}

impl Param {
    /// `index` is the place of the parameter in the model's list, and in [`Gradients`].
    pub fn new(name: impl Into<Arc<str>>, index: usize, tensor: Tensor) -> Self {
        Self { name: name.into(), index, tensor }
    }

    /// Name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Place in the model's list of parameters.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The weight in the compute dtype, in its published shape.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Takes finished parameter gradients; also the one place that knows which parameters are frozen.
pub trait GradSink {
    /// The `f32` buffer that an op adds the gradient of `param` into, or `None` if it is frozen.
    fn buffer(&self, param: &Param) -> Option<&Tensor>;
}

/// Whether a parameter is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trainable {
    /// Gets a gradient and an update.
    Yes,
    /// Stays as loaded.
    Frozen,
}

/// One `f32` buffer for each trained parameter, summed over the micro-batches of a step.
#[derive(Debug)]
pub struct Gradients {
    buffers: Vec<Option<Tensor>>,
}

impl Gradients {
    /// Zeroed buffers for the trained ones of `params`, in their shapes.
    pub fn zeros(params: &[Param], trainable: &[Trainable], device: &Device) -> Result<Self> {
        let buffers = params.iter().zip(trainable).map(|(param, trainable)| match trainable {
            Trainable::Yes => Tensor::zeros(param.tensor.shape(), DType::F32, device).map(Some),
            Trainable::Frozen => Ok(None),
        });
        Ok(Self { buffers: buffers.collect::<Result<_>>()? })
    }

    /// The buffer of parameter `index`, or `None` if it is frozen.
    pub fn get(&self, index: usize) -> Option<&Tensor> {
        self.buffers[index].as_ref()
    }

    /// All buffers, in the order of the parameters.
    pub fn iter(&self) -> impl Iterator<Item = Option<&Tensor>> {
        self.buffers.iter().map(Option::as_ref)
    }
}

impl GradSink for Gradients {
    fn buffer(&self, param: &Param) -> Option<&Tensor> {
        self.buffers[param.index].as_ref()
    }
}
