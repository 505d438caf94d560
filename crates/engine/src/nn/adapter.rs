//! Low-rank adapters of linear layers: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024).
//!
//! Shapes: `x [N, K]`, `y [N, M]`, `A [r, K]`, `B [M, r]`, `W [M, K]`.
//!
//! ```text
//! LoRA: y = x W^T + scale drop(x) A^T B^T
//! DoRA: y = (x W^T + scale drop(x) A^T B^T) * m / |W + scale B A|     |..| of each row, [M]
//! ```
//!
//! Backward of DoRA takes the row norms as constants, as the paper and PEFT do.

use super::params::{Inputs, ParamMap, ParamSpec, WeightError};
use super::tensor_names::TensorNames;
use crate::tape::{DropoutPlace, Param, Pass};
use candle_core::{D, DType, Result, Tensor};
use kernels::{DropoutMask, ExpertLayout, LowRank};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Prefix that PEFT puts before the names of modules.
const PREFIX: &str = "base_model.model.";

/// The tensors of an adapter, with their names in PEFT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdapterTensor {
    /// `A [r, K]`.
    A,
    /// `B [M, r]`.
    B,
    /// `m [M]` of DoRA.
    Magnitude,
}

impl AdapterTensor {
    pub fn name(self, module: &str) -> String {
        let end = match self {
            Self::A => "lora_A.weight",
            Self::B => "lora_B.weight",
            Self::Magnitude => "lora_magnitude_vector",
        };
        format!("{PREFIX}{module}.{end}")
    }

    pub fn of(name: &str) -> Option<(Self, &str)> {
        let name = name.strip_prefix(PREFIX)?;
        [Self::A, Self::B, Self::Magnitude].into_iter().find_map(|tensor| {
            let module = name.strip_suffix(&tensor.name("")[PREFIX.len()..])?;
            Some((tensor, module))
        })
    }
}

/// The name that PEFT gives to a parameter of the model in the file of an adapter.
pub fn peft_name(param: &str) -> String {
    format!("{PREFIX}{param}")
}

/// The name in PEFT of a tensor of a file that may name the modules in another spelling.
pub fn peft_name_of_file(names: TensorNames, name: &str) -> String {
    let own = name.strip_prefix(PREFIX);
    own.map_or_else(|| name.to_owned(), |own| peft_name(&names.of_file(own)))
}

#[derive(Debug, Default)]
pub struct Adapters {
    /// By the name of the weight.
    modules: HashMap<String, Module>,
    dropout: Dropout,
}

/// The adapter of one linear layer, or of the experts of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterModule {
    /// Name of the module in PEFT, for example `model.language_model.layers.0.mlp.up_proj`.
    pub name: String,
    /// Name of the weight that it changes, that of a linear layer or of experts.
    pub weight: String,
    /// Layout of the weight if it is that of experts.
    pub experts: Option<ExpertLayout>,
    /// Rank of `A` and `B`; of experts, that of each expert.
    pub rank: usize,
    /// Factor of the adapter's output.
    pub scale: f64,
    pub is_dora: bool,
}

#[derive(Debug)]
struct Module {
    name: String,
    rank: usize,
    scale: f64,
    rows: DropoutRows,
}

/// The rows of the inputs of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DropoutRows {
    Tokens,
    /// Patches or merged tokens.
    Media,
}

impl Adapters {
    /// Adapters of layers whose weights are among `specs`; `probability` and `seed` are
    /// those of the dropout.
    pub fn new(
        modules: &[AdapterModule],
        specs: &[ParamSpec],
        probability: f64,
        seed: u64,
    ) -> Self {
        let inputs: HashMap<&str, Inputs> =
            specs.iter().map(|spec| (spec.name.as_str(), spec.component.inputs)).collect();
        let module = |module: &AdapterModule| {
            let rows = match inputs.get(module.weight.as_str()) {
                Some(Inputs::Media) => DropoutRows::Media,
                _ => DropoutRows::Tokens,
            };
            let (name, weight) = (module.name.clone(), module.weight.clone());
            (weight, Module { name, rank: module.rank, scale: module.scale, rows })
        };
        let modules = modules.iter().map(module).collect();
        Self { modules, dropout: Dropout { probability, seed } }
    }

    /// Name in PEFT, factor and rank of the adapter of the experts `weight`.
    pub(super) fn of_experts(&self, weight: &str) -> Option<(&str, f64, usize)> {
        self.modules.get(weight).map(|module| (module.name.as_str(), module.scale, module.rank))
    }
}

/// Dropout of the inputs of adapters, in passes with a [`DropoutPlace`].
///
/// An element is dropped depending on seed, step, layer, column, and the number of its row in the
/// step. So the same elements are dropped for any division of a step into micro-batches, on any
/// number of ranks, and after a resume.
#[derive(Debug, Clone, Copy, Default)]
struct Dropout {
    probability: f64,
    seed: u64,
}

impl Dropout {
    /// The masks of the `num_rows` inputs of a layer: one, or one for each run of rows; none without
    /// dropout.
    fn masks(
        self,
        layer: u32,
        rows: DropoutRows,
        num_rows: usize,
        place: Option<&DropoutPlace>,
    ) -> Vec<(Range<usize>, DropoutMask)> {
        let Some(place) = place.filter(|_| self.probability > 0.0) else { return Vec::new() };
        let runs = match rows {
            DropoutRows::Tokens => Arc::clone(&place.runs),
            DropoutRows::Media => {
                let (first, count) = place.patches;
                // a merged token has several patches
                Arc::new([(0, first * num_rows as u64 / count.max(1))])
            }
        };
        let seed = DropoutMask::seed_of([self.seed, place.step, u64::from(layer)]);
        let mask = |first: u64| DropoutMask {
            seed,
            first_row: first as u32,
            probability: self.probability,
        };
        let ends = runs.iter().skip(1).map(|(row, _)| (*row).min(num_rows)).chain([num_rows]);
        let masks = runs.iter().zip(ends).map(|((row, first), end)| (*row..end, mask(*first)));
        masks.filter(|(rows, _)| rows.start < rows.end).collect()
    }
}

#[derive(Debug, Clone)]
pub(super) struct Adapter {
    a: Param,
    b: Param,
    magnitude: Option<Param>,
    scale: f64,
    dropout: Dropout,
    layer: u32,
    rows: DropoutRows,
    /// Sums of the squares of the rows of the frozen weight, `f32`, `[M, 1]`.
    weight_squares: Arc<OnceLock<Tensor>>,
}

/// The gradient of an output, in the forms that the parts of a backward need.
pub(crate) struct OutputGrad {
    /// The gradient of `x W^T + ..`, before DoRA's factor, `[N, M]`.
    pub(super) product: Tensor,
    /// `None`: the layer has no adapter.
    pub(super) adapter: Option<AdapterGrad>,
}

/// What the parts of a backward need of an adapter.
pub(crate) struct AdapterGrad {
    /// The gradient of `drop(x) A^T`, `[N, r]`.
    du: Tensor,
    /// DoRA: norms of the rows of the weight, `f32`, `[M]`.
    norm: Option<Tensor>,
}

/// DoRA's factor of each output, and the norms of the rows of the weight; `f32`, `[M]`.
struct Gain {
    factor: Tensor,
    norm: Tensor,
}

/// Smallest square of a norm: a row of zeros has the factor 0 and no NaN.
const SMALLEST: f32 = 1e-30;
/// Number of elements of a weight that are converted to `f32` at a time.
const CHUNK: usize = 1 << 22;

impl Adapter {
    /// The adapter of `module`; `None` if it has none.
    pub(super) fn find(
        params: &ParamMap<'_>,
        module: &str,
    ) -> std::result::Result<Option<Self>, WeightError> {
        let weight = format!("{module}.weight");
        let Some((adapters, of)) =
            params.adapters().and_then(|all| Some((all, all.modules.get(&weight)?)))
        else {
            return Ok(None);
        };
        let (a, b) = (AdapterTensor::A.name(module), AdapterTensor::B.name(module));
        Ok(Some(Self {
            a: params.get(&a)?,
            b: params.get(&b)?,
            magnitude: params.get(&AdapterTensor::Magnitude.name(module)).ok(),
            scale: of.scale,
            dropout: adapters.dropout,
            layer: DropoutMask::seed_of(module.bytes().map(u64::from)),
            rows: of.rows,
            weight_squares: Arc::default(),
        }))
    }

    pub(super) fn params(&self) -> impl Iterator<Item = &Param> {
        [&self.a, &self.b].into_iter().chain(&self.magnitude)
    }

    /// `scale drop(x) A^T`, `[N, r]`.
    fn down(&self, x: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        let a = pass.weight(&self.a)?;
        let down = |part: &dyn Fn(&Tensor) -> Result<Tensor>, mask| {
            kernels::dropout_linear(&part(x)?, &a, mask, self.scale)
        };
        self.each_run(x, pass, down)
    }

    fn masks(&self, x: &Tensor, pass: &Pass<'_>) -> Result<Vec<(Range<usize>, DropoutMask)>> {
        Ok(self.dropout.masks(self.layer, self.rows, x.dim(0)?, pass.dropout))
    }

    /// Computes `f` for the rows of each mask of the inputs `x`, and joins its results. The first
    /// argument of `f` takes these rows of a tensor.
    fn each_run(
        &self,
        x: &Tensor,
        pass: &Pass<'_>,
        f: impl Fn(&dyn Fn(&Tensor) -> Result<Tensor>, Option<DropoutMask>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let masks = self.masks(x, pass)?;
        if let [] | [_] = masks[..] {
            return f(&|of| Ok(of.clone()), masks.first().map(|(_, mask)| *mask));
        }
        let part = |(rows, mask): (Range<usize>, DropoutMask)| {
            f(&|of| of.narrow(0, rows.start, rows.len()), Some(mask))
        };
        Tensor::cat(&masks.into_iter().map(part).collect::<Result<Vec<_>>>()?, 0)
    }

    /// The output for `x: [N, K]` of a layer with this adapter, `[N, M]`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let u = self.down(x, pass)?;
        let b = pass.weight(&self.b)?;
        let low_rank = LowRank { u: &u, b: &b };
        let Some(Gain { factor, .. }) = self.gain(weight, pass)? else {
            return kernels::linear_low_rank(x, weight, low_rank, bias, residual);
        };
        let product = kernels::linear_low_rank(x, weight, low_rank, None, None)?;
        let mut y = scaled(&product, &factor)?;
        if let Some(bias) = bias {
            y = y.broadcast_add(bias)?;
        }
        residual.map_or(Ok(y.clone()), |residual| y + residual)
    }

    /// DoRA's factor; `None` without a magnitude.
    fn gain(&self, weight: &Tensor, pass: &Pass<'_>) -> Result<Option<Gain>> {
        let Some(magnitude) = &self.magnitude else { return Ok(None) };
        let (a, b) = (pass.weight(&self.a)?, pass.weight(&self.b)?);
        let wide = |t: Tensor| t.to_dtype(DType::F32);
        let b_wide = wide(b)?; // [M, r]
        let cross = if weight.dtype() == a.dtype() {
            kernels::linear(weight, &a, None)?
        } else {
            kernels::linear(&a, weight, None)?.t()? // a stored bf16 weight is always the second operand
        }; // [M, r]
        let cross = (wide(cross)? * &b_wide)?.sum_keepdim(D::Minus1)?; // [M, 1]
        let gram = wide(kernels::linear(&a, &a, None)?)?; // [r, r]
        let square = (b_wide.matmul(&gram)? * &b_wide)?.sum_keepdim(D::Minus1)?; // [M, 1]
        let squares = (self.weight_squares(weight)?
            + ((cross * (2.0 * self.scale))? + (square * (self.scale * self.scale))?)?)?;
        let norm = squares.maximum(SMALLEST)?.sqrt()?.flatten_all()?; // [M]
        Ok(Some(Gain { factor: (wide(pass.weight(magnitude)?)? / &norm)?, norm }))
    }

    /// Sums of the squares of the rows of `weight`, which is frozen, `f32`, `[M, 1]`.
    fn weight_squares(&self, weight: &Tensor) -> Result<Tensor> {
        if let Some(squares) = self.weight_squares.get() {
            return Ok(squares.clone());
        }
        let (rows, columns) = weight.dims2()?;
        let step = (CHUNK / columns).max(1);
        let chunk = |start: usize| {
            let part = weight.narrow(0, start, step.min(rows - start))?;
            part.to_dtype(DType::F32)?.sqr()?.sum_keepdim(D::Minus1)
        };
        let chunks = (0..rows).step_by(step).map(chunk).collect::<Result<Vec<_>>>()?;
        let squares = Tensor::cat(&chunks, 0)?;
        Ok(self.weight_squares.get_or_init(|| squares).clone())
    }

    /// The gradient `dy: [N, M]` of the output, before the adapter.
    pub(super) fn output_grad(
        &self,
        dy: &Tensor,
        weight: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<OutputGrad> {
        let (product, norm) = match self.gain(weight, pass)? {
            Some(Gain { factor, norm }) => (scaled(dy, &factor)?, Some(norm)),
            None => (dy.clone(), None),
        };
        let b = pass.weight(&self.b)?;
        let du = kernels::linear_backward_input_times(&product, &b, self.scale)?; // [N, r]
        Ok(OutputGrad { product, adapter: Some(AdapterGrad { du, norm }) })
    }

    /// The gradient of the input, `[N, K]`, added to `dx` if given.
    pub(super) fn backward_input(
        &self,
        product: &Tensor,
        AdapterGrad { du, .. }: &AdapterGrad,
        weight: &Tensor,
        dx: Option<Tensor>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let a = pass.weight(&self.a)?;
        let masks = self.masks(product, pass)?;
        if masks.is_empty() && dx.is_none() {
            let low_rank = LowRank { u: du, b: &a };
            return kernels::linear_backward_input_low_rank(product, weight, low_rank);
        }
        let dx = match dx {
            Some(dx) => kernels::linear_backward_input_add(product, weight, dx)?,
            None => kernels::linear_backward_input(product, weight)?,
        };
        if let [] | [_] = masks[..] {
            let mask = masks.first().map(|(_, mask)| *mask);
            return kernels::dropout_linear_backward_input_add(du, &a, mask, dx);
        }
        self.each_run(product, pass, |part, mask| {
            kernels::dropout_linear_backward_input_add(&part(du)?, &a, mask, part(&dx)?.copy()?)
        })
    }

    /// Adds the gradients of the adapter for the input `x: [N, K]`.
    pub(super) fn backward_params(
        &self,
        x: &Tensor,
        dy: &Tensor,
        (product, AdapterGrad { du, norm }): (&Tensor, &AdapterGrad),
        weight: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<()> {
        let u = match pass.grad(&self.a) {
            Some(da) => {
                let a = pass.weight(&self.a)?;
                self.each_run(x, pass, |part, mask| {
                    let du = (&part(du)?, self.scale);
                    kernels::dropout_linear_backward(&part(x)?, &a, mask, du, da)
                })?
            }
            None => self.down(x, pass)?,
        };
        if let Some(db) = pass.grad(&self.b) {
            kernels::linear_backward_weight(&u, product, db)?;
        }
        let d_magnitude = self.magnitude.as_ref().and_then(|magnitude| pass.grad(magnitude));
        if let (Some(dm), Some(norm)) = (d_magnitude, norm) {
            let b = pass.weight(&self.b)?;
            let z = kernels::linear_low_rank(x, weight, LowRank { u: &u, b: &b }, None, None)?;
            let sums = Tensor::zeros(norm.shape(), DType::F32, norm.device())?;
            kernels::bias_backward(&(z * dy)?, &sums)?;
            kernels::add_in_place(dm, &(sums / norm)?)?;
        }
        Ok(())
    }
}

/// `x [N, M]` with each column multiplied by its `factor [M]`, computed in `f32`.
fn scaled(x: &Tensor, factor: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.broadcast_mul(factor)?.to_dtype(x.dtype())
}

#[cfg(test)]
mod tests;
