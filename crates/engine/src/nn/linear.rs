//! A linear layer and its backward. `Linear` skips the gradients of frozen parameters, so other
//! blocks need no check.

use super::adapter::{Adapter, OutputGrad};
use super::params::{ParamMap, WeightError};
use crate::tape::{Param, Pass};
use candle_core::{Result, Tensor};
use kernels::{Matmul, RecomputeInput, Store};

/// `y = x W^T (+ b)`, `W: [M, K]`, with or without an adapter.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    weight: Param,
    bias: Option<Param>,
    adapter: Option<Adapter>,
    matmul: Matmul,
}

/// Adds the parameter gradients of layers with the input `x: [T, K]` for the gradients `dys` of their
/// outputs, and returns the sum of their input gradients, `[T, K]`. Each of `dys` is dropped after its
/// last use, to lower peak memory.
pub(crate) fn backward_of<const N: usize>(
    layers: [&Linear; N],
    x: &Tensor,
    dys: [Tensor; N],
    pass: &Pass<'_>,
) -> Result<Tensor> {
    let mut sum = None;
    for (layer, dy) in layers.into_iter().zip(dys) {
        sum = Some(match sum {
            None => layer.backward(x, &dy, pass)?,
            Some(dx) => layer.backward_add(x, &dy, dx, pass)?,
        });
    }
    Ok(sum.expect("at least one layer"))
}

impl Linear {
    /// A layer with the parameters `<name>.weight` and `<name>.bias`.
    pub(crate) fn with_bias(
        params: &ParamMap<'_>,
        name: &str,
    ) -> std::result::Result<Self, WeightError> {
        let bias = Some(params.get(&format!("{name}.bias"))?);
        Ok(Self { bias, ..Self::without_bias(params, name)? })
    }

    /// A layer with the parameter `<name>.weight` and no bias.
    pub(crate) fn without_bias(
        params: &ParamMap<'_>,
        name: &str,
    ) -> std::result::Result<Self, WeightError> {
        let weight = params.get(&format!("{name}.weight"))?;
        weight.replaces_gradient();
        Ok(Self {
            weight,
            bias: None,
            adapter: Adapter::find(params, name)?,
            matmul: Matmul::Native,
        })
    }

    /// The same layer with the format of operands of the decoder. A layer with an adapter computes
    /// in the dtype of the computation.
    pub(super) fn of_decoder(self, params: &ParamMap<'_>) -> Self {
        Self { matmul: params.matmul(), ..self }
    }

    pub(crate) fn params(&self) -> impl Iterator<Item = &Param> {
        let adapter = self.adapter.iter().flat_map(Adapter::params);
        std::iter::once(&self.weight).chain(&self.bias).chain(adapter)
    }

    fn compute(&self, x: &Tensor, residual: Option<&Tensor>, pass: &Pass<'_>) -> Result<Tensor> {
        let weight = pass.weight(&self.weight)?;
        let bias = self.bias.as_ref().map(|bias| pass.weight(bias)).transpose()?;
        match (&self.adapter, residual) {
            (Some(adapter), _) => adapter.forward(x, &weight, bias.as_ref(), residual, pass),
            (None, residual) if self.matmul != Matmul::Native => {
                let sums = self.matmul.forward_sums();
                kernels::e4m3_linear(x, &weight, bias.as_ref(), residual, sums)
            }
            (None, Some(residual)) => kernels::linear_add(x, &weight, bias.as_ref(), residual),
            (None, None) => kernels::linear(x, &weight, bias.as_ref()),
        }
    }

    /// Returns `y: [N, M]` for `x: [N, K]`.
    pub(crate) fn forward(&self, x: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        self.compute(x, None, pass)
    }

    /// `y + residual`, both `[N, M]`.
    pub(crate) fn forward_add(
        &self,
        x: &Tensor,
        residual: &Tensor,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        self.compute(x, Some(residual), pass)
    }

    /// Whether the backward of the elementwise op that computes `x` must also compute `x` again:
    /// only parameter gradients need it.
    pub(crate) fn recompute_input(&self, pass: &Pass<'_>) -> RecomputeInput {
        let trains = self.params().any(|param| pass.grad(param).is_some());
        if trains { RecomputeInput::Yes } else { RecomputeInput::No }
    }

    /// What both halves of the backward need of `dy: [N, M]`.
    pub(crate) fn output_grad(&self, dy: &Tensor, pass: &Pass<'_>) -> Result<OutputGrad> {
        match &self.adapter {
            Some(adapter) => adapter.output_grad(dy, &pass.weight(&self.weight)?, pass),
            None => Ok(OutputGrad { product: dy.clone(), adapter: None }),
        }
    }

    /// Returns `dx: [N, K]`, without parameter gradients.
    pub(crate) fn backward_input(&self, d: &OutputGrad, pass: &Pass<'_>) -> Result<Tensor> {
        self.input_gradient(d, None, pass)
    }

    /// The gradient of the input, `[N, K]`, added to `dx` in place if given.
    fn input_gradient(
        &self,
        d: &OutputGrad,
        dx: Option<Tensor>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let weight = pass.weight(&self.weight)?;
        match (&self.adapter, &d.adapter, dx) {
            (Some(adapter), Some(of), dx) => {
                adapter.backward_input(&d.product, of, &weight, dx, pass)
            }
            (None, _, dx) if self.matmul != Matmul::Native => {
                kernels::e4m3_linear_backward_input(&d.product, &weight, dx)
            }
            (_, _, Some(dx)) => kernels::linear_backward_input_add(&d.product, &weight, dx),
            (_, _, None) => kernels::linear_backward_input(&d.product, &weight),
        }
    }

    /// Adds the parameter gradients for `x: [N, K]` and `dy: [N, M]`, without `dx`.
    pub(crate) fn backward_params(
        &self,
        x: &Tensor,
        dy: &Tensor,
        d: &OutputGrad,
        pass: &Pass<'_>,
    ) -> Result<()> {
        if let Some((dw, write)) = pass.grads.product_buffer(&self.weight) {
            match (&self.adapter, self.matmul) {
                (None, Matmul::Fp8All) => {
                    if write == Store::Overwrite {
                        kernels::fill_zero(dw)?;
                    }
                    kernels::e4m3_linear_backward_weight(x, &d.product, dw)?;
                }
                _ => kernels::linear_backward_weight_into(x, &d.product, dw, write)?,
            }
        }
        if let Some(db) = self.bias.as_ref().and_then(|bias| pass.grad(bias)) {
            kernels::bias_backward(dy, db)?;
        }
        if let (Some(adapter), Some(of)) = (&self.adapter, &d.adapter) {
            let weight = pass.weight(&self.weight)?;
            adapter.backward_params(x, dy, (&d.product, of), &weight, pass)?;
        }
        Ok(())
    }

    /// Adds the parameter gradients and returns `dx: [N, K]`.
    pub(crate) fn backward(&self, x: &Tensor, dy: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        let d = self.output_grad(dy, pass)?;
        self.backward_params(x, dy, &d, pass)?;
        self.backward_input(&d, pass)
    }

    /// Adds the parameter gradients, and adds `dy W` to `dx` in place.
    pub(crate) fn backward_add(
        &self,
        x: &Tensor,
        dy: &Tensor,
        dx: Tensor,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let d = self.output_grad(dy, pass)?;
        self.backward_params(x, dy, &d, pass)?;
        self.input_gradient(&d, Some(dx), pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::{Gradients, Trainable};
    use candle_core::{DType, Device};

    fn wave(dims: &[usize], step: f32) -> Tensor {
        let values: Vec<f32> =
            (0..dims.iter().product()).map(|i| (i as f32 * step).sin()).collect();
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    }

    fn bits(t: &Tensor) -> Vec<u32> {
        let t = t.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
        t.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn the_format_of_operands_reaches_all_products_of_a_layer_of_the_decoder() {
        let (x, w, dy) = (wave(&[9, 40], 0.37), wave(&[24, 40], 0.73), wave(&[9, 24], 0.11));
        let residual = wave(&[9, 24], 0.19);
        let params = [Param::new("layer.weight", 0, w.clone())];
        for matmul in [Matmul::Native, Matmul::Fp8, Matmul::Fp8All, Matmul::Fp8Fast] {
            let map = ParamMap::new(&params, None).with_matmul(matmul);
            let layer = Linear::without_bias(&map, "layer").unwrap();
            let native = layer.forward(&x, &Pass::default()).unwrap();
            assert_eq!(bits(&native), bits(&kernels::linear(&x, &w, None).unwrap()));
            let layer = layer.of_decoder(&map);
            let grads = Gradients::zeros(&params, &[Trainable::Yes], &Device::Cpu).unwrap();
            let y = layer.forward(&x, &Pass::default()).unwrap();
            let sum = layer.forward_add(&x, &residual, &Pass::default()).unwrap();
            let dx = layer.backward(&x, &dy, &Pass::training(&grads)).unwrap();
            let dw = Tensor::zeros((24, 40), DType::F32, &Device::Cpu).unwrap();
            let (want, want_sum, want_dx) = if matmul == Matmul::Native {
                let want = kernels::linear(&x, &w, None).unwrap();
                let sum = kernels::linear_add(&x, &w, None, &residual).unwrap();
                (want, sum, kernels::linear_backward_input(&dy, &w).unwrap())
            } else {
                let sums = matmul.forward_sums();
                let want = kernels::e4m3_linear(&x, &w, None, None, sums).unwrap();
                let sum = kernels::e4m3_linear(&x, &w, None, Some(&residual), sums).unwrap();
                (want, sum, kernels::e4m3_linear_backward_input(&dy, &w, None).unwrap())
            };
            if matmul == Matmul::Fp8All {
                kernels::e4m3_linear_backward_weight(&x, &dy, &dw).unwrap();
            } else {
                kernels::linear_backward_weight(&x, &dy, &dw).unwrap();
            }
            assert_eq!(bits(&y), bits(&want), "{matmul:?}");
            assert_eq!(bits(&sum), bits(&want_sum), "{matmul:?}");
            assert_eq!(bits(&dx), bits(&want_dx), "{matmul:?}");
            assert_eq!(bits(grads.get(0).unwrap()), bits(&dw), "{matmul:?}");
            assert_eq!(bits(&y) == bits(&native), matmul == Matmul::Native);
        }
    }
}
