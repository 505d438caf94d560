//! Parameters and the buffers of their gradients.

use super::bucket::Layout;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use kernels::Store;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// A handle to a tensor of the model under its published name.
///
/// All clones of a handle share one tensor: a tied weight is one `Param` in two places, and
/// [`Param::set_tensor`] replaces the tensor of all clones. Stages read a weight when they run, so it
/// may be set just before its stage runs.
#[derive(Debug, Clone)]
pub struct Param {
    name: Arc<str>,
    index: usize,
    tensor: Arc<RwLock<Tensor>>,
    facts: Arc<Facts>,
}

/// What becomes known about a parameter after it is made.
#[derive(Debug, Default)]
struct Facts {
    is_elsewhere: AtomicBool,
    is_replaced: AtomicBool,
}

impl Param {
    /// `index` is the position in the model's list of parameters, and in [`Gradients`].
    pub fn new(name: impl Into<Arc<str>>, index: usize, tensor: Tensor) -> Self {
        let tensor = Arc::new(RwLock::new(tensor));
        Self { name: name.into(), index, tensor, facts: Arc::default() }
    }

    /// From now on, the tensor is a buffer that [`Weights`](super::Weights) fill, and the weight is
    /// kept elsewhere. May be called once.
    pub fn set_elsewhere(&self) -> Result<()> {
        if self.facts.is_elsewhere.swap(true, Ordering::Relaxed) {
            bail!("the weight `{}` is kept elsewhere already", self.name);
        }
        Ok(())
    }

    /// Whether the tensor always has the weight.
    pub fn is_resident(&self) -> bool {
        !self.facts.is_elsewhere.load(Ordering::Relaxed)
    }

    /// Promises that the gradient of this weight is only written through
    /// [`GradSink::product_buffer`], so that its buffer need not be zeroed before a step.
    pub fn replaces_gradient(&self) {
        self.facts.is_replaced.store(true, Ordering::Relaxed);
    }

    /// Name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Position in the model's list of parameters.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The weight, in its published shape. The result shares the storage.
    /// Fails if the weight is kept elsewhere: the [`Pass`](super::Pass) of a model brings it.
    pub fn tensor(&self) -> Result<Tensor> {
        if !self.is_resident() {
            bail!("the weight `{}` is not in memory outside of a pass", self.name);
        }
        Ok(self.buffer())
    }

    /// The tensor as it is now. If the weight is kept elsewhere, this is the buffer that
    /// [`Weights`](super::Weights) fill, and it may have the weight of another stage.
    pub fn buffer(&self) -> Tensor {
        self.tensor.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn shape(&self) -> Shape {
        self.tensor.read().unwrap_or_else(PoisonError::into_inner).shape().clone()
    }

    pub fn dtype(&self) -> DType {
        self.tensor.read().unwrap_or_else(PoisonError::into_inner).dtype()
    }

    /// Replaces the tensor of this handle and all its clones, for example by a view of another
    /// buffer. Fails if shape or dtype differ. The storage of the old tensor stays as it is.
    pub fn set_tensor(&self, tensor: Tensor) -> Result<()> {
        let mut slot = self.tensor.write().unwrap_or_else(PoisonError::into_inner);
        if tensor.shape() != slot.shape() || tensor.dtype() != slot.dtype() {
            bail!(
                "`{}` is {:?} {:?}, expected {:?} {:?}",
                self.name,
                tensor.dtype(),
                tensor.dims(),
                slot.dtype(),
                slot.dims()
            );
        }
        *slot = tensor;
        Ok(())
    }
}

/// Receives parameter gradients. It alone decides which parameters are frozen.
pub trait GradSink {
    /// The `f32` buffer that an op adds the gradient of `param` to, or `None` if `param` is frozen.
    fn buffer(&self, param: &Param) -> Option<&Tensor>;

    /// The buffer of a weight for the product that computes its gradient, and whether the product
    /// adds to the contents or replaces them. The caller writes to the buffer at once.
    fn product_buffer(&self, param: &Param) -> Option<(&Tensor, Store)>;

    /// Reports that this micro-batch adds nothing more to the gradients of `params`, the parameters
    /// of one stage. A micro-batch reports every stage once, in the order of backward, also the
    /// stages that it did not reach; frozen parameters are reported too. Ranks can reduce the
    /// gradients of a stage from here on.
    fn finished(&self, _params: &[&Param]) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trainable {
    /// Receives a gradient and an update.
    Yes,
    /// Keeps the value that was loaded.
    Frozen,
}

/// One `f32` buffer for each trained parameter, summed over the micro-batches of a step.
///
/// The weights of linear layers are nearly all elements of a model. Their buffers are not zeroed
/// before a step: the first product of a step replaces the contents.
#[derive(Debug)]
pub struct Gradients {
    buffers: Vec<Buffer>,
}

#[derive(Debug)]
struct Buffer {
    /// `None` if the parameter is frozen.
    tensor: Option<Tensor>,
    /// Whether the next product replaces the contents.
    is_stale: AtomicBool,
}

impl Gradients {
    /// Zeroed buffers for the trained ones of `params`, in their shapes.
    pub fn zeros(params: &[Param], trainable: &[Trainable], device: &Device) -> Result<Self> {
        let buffers = params.iter().zip(trainable).map(|(param, trainable)| match trainable {
            Trainable::Yes => Tensor::zeros(param.shape(), DType::F32, device).map(Some),
            Trainable::Frozen => Ok(None),
        });
        Ok(Self::new(buffers.collect::<Result<_>>()?))
    }

    /// Views of flat buffers, one for each stage of `layout` with trained parameters.
    pub fn in_buckets(layout: &Layout, flat: &[Option<Tensor>]) -> Result<Self> {
        let mut buffers = vec![None; layout.num_params()];
        for (stage, flat) in layout.stages().iter().zip(flat) {
            let Some(flat) = flat else { continue };
            for (param, view) in layout.views(&stage.trained, flat)? {
                buffers[param] = Some(view);
            }
        }
        Ok(Self::new(buffers))
    }

    fn new(tensors: Vec<Option<Tensor>>) -> Self {
        let buffer = |tensor| Buffer { tensor, is_stale: AtomicBool::new(false) };
        Self { buffers: tensors.into_iter().map(buffer).collect() }
    }

    /// Begins a new sum for `params`: what their buffers contain does not belong to it. Until
    /// [`Self::end`], only ops that compute gradients may use the buffers.
    pub fn begin<'a>(&self, params: impl IntoIterator<Item = &'a Param>) -> Result<()> {
        let mut zeroed = Vec::new();
        for param in params {
            let is_replaced = param.facts.is_replaced.load(Ordering::Relaxed);
            self.buffers[param.index].is_stale.store(is_replaced, Ordering::Relaxed);
            zeroed.extend(self.get(param.index).filter(|_| !is_replaced));
        }
        kernels::fill_zero_all(&zeroed)
    }

    /// Zeroes the buffers of those of `params` that no op has written to since [`Self::begin`].
    pub fn end<'a>(&self, params: impl IntoIterator<Item = &'a Param>) -> Result<()> {
        let stale = params.into_iter().map(Param::index).filter(|index| self.take_stale(*index));
        kernels::fill_zero_all(&stale.filter_map(|index| self.get(index)).collect::<Vec<_>>())
    }

    fn take_stale(&self, index: usize) -> bool {
        self.buffers[index].is_stale.swap(false, Ordering::Relaxed)
    }

    /// The buffer of parameter `index`, or `None` if it is frozen.
    pub fn get(&self, index: usize) -> Option<&Tensor> {
        self.buffers[index].tensor.as_ref()
    }

    /// All buffers, in the order of the parameters; `None` for frozen ones.
    pub fn iter(&self) -> impl Iterator<Item = Option<&Tensor>> {
        self.buffers.iter().map(|buffer| buffer.tensor.as_ref())
    }
}

impl GradSink for Gradients {
    fn buffer(&self, param: &Param) -> Option<&Tensor> {
        self.get(param.index)
    }

    fn product_buffer(&self, param: &Param) -> Option<(&Tensor, Store)> {
        let buffer = self.get(param.index)?;
        let stale = self.take_stale(param.index);
        Some((buffer, if stale { Store::Overwrite } else { Store::Add }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_a_replaced_tensor_and_another_shape_is_refused() {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        let param = Param::new("w", 0, zeros(&[2]));
        let tied = param.clone();
        // a view of a larger buffer
        let buffer = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &Device::Cpu).unwrap();
        param.set_tensor(buffer.narrow(0, 2, 2).unwrap()).unwrap();
        assert_eq!(tied.tensor().unwrap().to_vec1::<f32>().unwrap(), [3.0, 4.0]);
        let error = tied.set_tensor(zeros(&[3])).unwrap_err().to_string();
        assert!(error.starts_with("`w` is F32 [3], expected F32 [2]"), "{error}");
    }
}
