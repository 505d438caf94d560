//! The second half of some vision blocks: norm, MLP with a GELU, residual. Others have that of the
//! decoder.

use super::branch::BranchEnd;
use crate::nn::{Linear, Norm};
use crate::tape::{InputGrad, Param, Pass, Recompute, Saved, Stage};
use candle_core::{Result, Tensor};
use kernels::Gelu;

/// `x + fc2(gelu(fc1(norm(x))))`, with learned factors of the output of `fc2` in some encoders.
pub(super) struct GeluMlp {
    pub(super) norm: Norm,
    pub(super) fc1: Linear,
    pub(super) fc2: BranchEnd,
    pub(super) act: Gelu,
}

/// Gradient of `hidden` in `fc2(gelu(hidden))` from that of the result, `dy`. Adds the gradients of
/// `fc2` to those of `pass`.
pub(super) fn backward_of_gelu(
    hidden: Tensor,
    dy: &Tensor,
    act: Gelu,
    fc2: &Linear,
    pass: &Pass<'_>,
) -> Result<Tensor> {
    let d_fc2 = fc2.output_grad(dy, pass)?;
    let d_activated = fc2.backward_input(&d_fc2, pass)?;
    let recompute = fc2.recompute_input(pass);
    let (d_hidden, activated) = kernels::gelu_backward(hidden, d_activated, act, recompute)?;
    if let Some(activated) = activated {
        fc2.backward_params(&activated, dy, &d_fc2, pass)?;
    }
    Ok(d_hidden)
}

impl Stage for GeluMlp {
    type Context = ();

    fn params(&self) -> Vec<&Param> {
        self.norm.params().chain(self.fc1.params()).chain(self.fc2.params()).collect()
    }

    fn forward(
        &self,
        x: &Tensor, // [R, Dv]
        (): &(),
        _recompute: Recompute,
        pass: &Pass<'_>,
    ) -> Result<(Tensor, Saved)> {
        let (normed, stats) = self.norm.normed(x, pass)?;
        let hidden = self.fc1.forward(&normed, pass)?; // [R, F]
        let (y, f) = self.fc2.forward(&kernels::gelu(&hidden, self.act)?, x, pass)?; // [R, Dv]
        Ok((y, Saved::new([x.clone(), stats, hidden]).with_optional([f])))
    }

    fn backward(
        &self,
        mut saved: Saved,
        dy: Tensor, // [R, Dv]
        (): &(),
        _input_grad: InputGrad, // always computed: the residual needs it
        pass: &Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let [x, stats, hidden] = saved.tensors()?;
        let [f] = saved.optional()?;
        let d_f = self.fc2.output_grad(f.as_ref(), &dy, pass)?;
        let d_hidden = backward_of_gelu(hidden, &d_f, self.act, &self.fc2.linear, pass)?; // [R, F]
        let normed = self.norm.apply(&x, &stats, pass)?;
        let d_normed = self.fc1.backward(&normed, &d_hidden, pass)?; // [R, Dv]
        self.norm.backward_add(&x, &stats, &d_normed, Some(&dy), pass).map(Some)
    }
}
