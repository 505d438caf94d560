//! Queries, keys and values of the vision blocks.

use super::config::{VisionAttention, VisionParts};
use crate::nn::{Linear, Norm, ParamMap, WeightError, backward_of};
use crate::tape::{Param, Pass};
use candle_core::{Result, Tensor, bail};
use kernels::{QkvGrad, RopeTable};

/// Added to the mean square in the norms of queries and keys.
const EPS: f64 = 1e-6;

/// The layers between the norm of a block and the scores of attention.
pub(super) enum Heads {
    /// One layer, then rotary positions.
    Rotary(Box<Linear>),
    /// A layer for each.
    Separate(Box<SeparateHeads>),
}

/// Layers of queries, keys and values, and norms of the rows of the first two in some encoders.
pub(super) struct SeparateHeads {
    layers: [Linear; 3],
    norms: Option<[Norm; 2]>,
}

/// Queries, keys and values, `[R, H, Dh]` each.
pub(super) type HeadRows = [Tensor; 3];
/// What the backward of the norms needs: the rows of queries and of keys before their norms,
/// `[R, Dv]`, each with its statistics.
pub(super) type NormInputs = [Option<Tensor>; 4];

impl Heads {
    /// `block` is the name of the block.
    pub(super) fn new(
        params: &ParamMap<'_>,
        parts: &VisionParts,
        block: &str,
    ) -> std::result::Result<Self, WeightError> {
        let name = |layer: &str| format!("{block}.{}.{layer}", parts.names.attention);
        let VisionAttention::Separate { has_bias, has_norms } = parts.attention else {
            return Ok(Self::Rotary(Box::new(Linear::with_bias(params, &name("qkv"))?)));
        };
        let layer = |layer| {
            let build = if has_bias { Linear::with_bias } else { Linear::without_bias };
            build(params, &name(layer))
        };
        let norm = |norm| Norm::rms(params, &name(norm), EPS);
        let norms = has_norms.then(|| Ok([norm("q_norm")?, norm("k_norm")?])).transpose()?;
        let layers = [layer("q_proj")?, layer("k_proj")?, layer("v_proj")?];
        Ok(Self::Separate(Box::new(SeparateHeads { layers, norms })))
    }

    pub(super) fn params(&self) -> Vec<&Param> {
        match self {
            Self::Rotary(layer) => layer.params().collect(),
            Self::Separate(of) => {
                let SeparateHeads { layers, norms } = &**of;
                let norms = norms.iter().flatten().flat_map(Norm::params);
                layers.iter().flat_map(Linear::params).chain(norms).collect()
            }
        }
    }

    /// `normed` is `[R, Dv]`. `rope` has the rotary positions of encoders with them.
    pub(super) fn forward(
        &self,
        normed: &Tensor,
        num_heads: usize,
        rope: Option<&RopeTable>,
        pass: &Pass<'_>,
    ) -> Result<(HeadRows, NormInputs)> {
        match self {
            Self::Rotary(layer) => {
                let qkv = layer.forward(normed, pass)?; // [R, 3 * Dv]
                let (q, k, v) = kernels::vision_rope_split(&qkv, num_heads, required(rope)?)?;
                Ok(([q, k, v], Default::default()))
            }
            Self::Separate(of) => {
                let SeparateHeads { layers: [q, k, v], norms } = &**of;
                let project = |layer: &Linear| layer.forward(normed, pass); // [R, Dv]
                let (mut q, mut k, v) = (project(q)?, project(k)?, project(v)?);
                let mut before = NormInputs::default();
                if let Some([q_norm, k_norm]) = norms {
                    let (q_normed, q_stats) = q_norm.normed(&q, pass)?;
                    let (k_normed, k_stats) = k_norm.normed(&k, pass)?;
                    before = [Some(q), Some(q_stats), Some(k), Some(k_stats)];
                    (q, k) = (q_normed, k_normed);
                }
                let (rows, width) = normed.dims2()?;
                let heads = |x: Tensor| x.reshape((rows, num_heads, width / num_heads));
                Ok(([heads(q)?, heads(k)?, heads(v)?], before))
            }
        }
    }

    /// Adds the gradients of the parameters and returns that of `normed`, `[R, Dv]`.
    pub(super) fn backward(
        &self,
        QkvGrad { dq, dk, dv }: QkvGrad,
        before: NormInputs,
        normed: &Tensor,
        rope: Option<&RopeTable>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        match self {
            Self::Rotary(layer) => {
                let d_qkv = kernels::vision_rope_merge_backward(&dq, &dk, &dv, required(rope)?)?; // [R, 3 * Dv]
                layer.backward(normed, &d_qkv, pass)
            }
            Self::Separate(of) => {
                let SeparateHeads { layers: [q, k, v], norms } = &**of;
                let (mut dq, mut dk) = (dq.flatten_from(1)?, dk.flatten_from(1)?); // [R, Dv]
                if let (Some([q_norm, k_norm]), [Some(q), Some(q_stats), Some(k), Some(k_stats)]) =
                    (norms, before)
                {
                    dq = q_norm.backward_add(&q, &q_stats, &dq, None, pass)?;
                    dk = k_norm.backward_add(&k, &k_stats, &dk, None, pass)?;
                }
                backward_of([q, k, v], normed, [dq, dk, dv.flatten_from(1)?], pass)
            }
        }
    }
}

fn required(rope: Option<&RopeTable>) -> Result<&RopeTable> {
    match rope {
        Some(rope) => Ok(rope),
        None => bail!("the patches have no rotary positions"),
    }
}
