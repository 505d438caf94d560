//! The tensors that the optimizer keeps for each parameter.

use super::{Kind, Master, Moments, OptimConfig, ParamGroup, ParamGroups};
use crate::tape::Param;
use candle_core::{DType, Device, Result, Shape, Tensor};
use kernels::EIGHT_BIT_BLOCK;
use std::ops::Range;

/// Parameters with fewer elements have moments in `f32` with `adamw_8bit`, as in bitsandbytes.
const SMALLEST_IN_8_BITS: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateKind {
    /// The name of the tensor in a checkpoint is `<name>.<parameter>`.
    pub name: &'static str,
    pub dtype: DType,
    extent: Extent,
}

/// The number of elements of a state tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// One for each of this number of elements of the parameter.
    Per(usize),
    /// This number, for a parameter that is not divided.
    Whole(usize),
}

impl StateKind {
    /// Elements of the tensor that belong to these elements of the parameter. Parts of a parameter
    /// begin at multiples of [`crate::tape::BUCKET_ALIGNMENT`].
    pub fn elements(&self, of_param: &Range<usize>) -> Range<usize> {
        match self.extent {
            Extent::Per(count) => of_param.start / count..of_param.end.div_ceil(count),
            Extent::Whole(count) => 0..count,
        }
    }

    /// Shape of the tensor of a whole parameter.
    pub fn shape(&self, param: &Shape) -> Shape {
        match self.extent {
            Extent::Per(1) => param.clone(),
            Extent::Per(count) => param.elem_count().div_ceil(count).into(),
            Extent::Whole(count) => count.into(),
        }
    }

    fn zeros(&self, of_param: &Range<usize>, device: &Device) -> Result<Tensor> {
        Tensor::zeros(self.elements(of_param).len(), self.dtype, device)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// `AdamW` with moments of this dtype; `u8` means 8-bit codes.
    AdamW(DType),
    Muon,
    Adafactor,
}

impl Rule {
    fn of(config: &OptimConfig, param: &Param, group: &ParamGroup) -> Self {
        match config.kind {
            Kind::Muon if group.hidden_matrix => Self::Muon,
            Kind::Adafactor => Self::Adafactor,
            Kind::Adamw8bit if param.shape().elem_count() >= SMALLEST_IN_8_BITS => {
                Self::AdamW(DType::U8)
            }
            Kind::Adamw if config.moments == Moments::Bf16 => Self::AdamW(DType::BF16),
            Kind::Adamw | Kind::Adamw8bit | Kind::Muon => Self::AdamW(DType::F32),
        }
    }

    /// The tensors that an update reads and overwrites, without a master weight.
    fn kinds(self, param: &Shape) -> Vec<StateKind> {
        let each = |name, dtype| StateKind { name, dtype, extent: Extent::Per(1) };
        let f32s = |name, extent| StateKind { name, dtype: DType::F32, extent };
        let scales = |name| f32s(name, Extent::Per(EIGHT_BIT_BLOCK));
        match self {
            Self::AdamW(dtype) => {
                let mut kinds = vec![each("exp_avg", dtype), each("exp_avg_sq", dtype)];
                if dtype == DType::U8 {
                    kinds.extend([scales("exp_avg_absmax"), scales("exp_avg_sq_absmax")]);
                }
                kinds
            }
            Self::Muon => vec![each("momentum_buffer", DType::F32)],
            Self::Adafactor => match param.dims() {
                [others @ .., rows, columns] => {
                    let matrices: usize = others.iter().product();
                    vec![
                        f32s("row_var", Extent::Whole(matrices * rows)),
                        f32s("col_var", Extent::Whole(matrices * columns)),
                    ]
                }
                _ => vec![each("variance", DType::F32)],
            },
        }
    }
}

/// The kinds of state tensors of a trained parameter; the master weight is the last.
pub(super) fn kinds(config: &OptimConfig, param: &Param, group: &ParamGroup) -> Vec<StateKind> {
    let mut kinds = Rule::of(config, param, group).kinds(&param.shape());
    if param.dtype() != DType::F32 && config.master == Master::F32 {
        let extent = Extent::Per(1);
        kinds.push(StateKind { name: MASTER, dtype: DType::F32, extent });
    }
    kinds
}

/// Name of the kind of master weights.
pub const MASTER: &str = "master";

/// Mean bytes of the state of a trained weight.
pub fn state_bytes_per_weight(config: &OptimConfig, params: &[Param], groups: &ParamGroups) -> f64 {
    let (mut bytes, mut weights) = (0, 0);
    for (param, group) in params.iter().zip(groups.iter()).filter(|(_, group)| !group.frozen) {
        let all = 0..param.shape().elem_count();
        let of_kind = |kind: &StateKind| kind.elements(&all).len() * kind.dtype.size_in_bytes();
        bytes += kinds(config, param, group).iter().map(of_kind).sum::<usize>();
        weights += all.len();
    }
    bytes as f64 / weights.max(1) as f64
}

/// The state of a trained parameter, or of the part of it that this rank updates.
#[derive(Debug)]
pub struct ParamState {
    /// The parameter. If it has a master weight, it is the rounded master.
    pub param: Param,
    /// The elements of the flat parameter that the state belongs to.
    pub elements: Range<usize>,
    pub(super) rule: Rule,
    kinds: Vec<StateKind>,
    /// Flat, in the order of `kinds`.
    tensors: Vec<Tensor>,
    /// The weight, if it is not a part of the parameter's tensor.
    weight: Option<Tensor>,
    /// The parameter's value on the host, if the update runs there and the parameter is on a GPU.
    pub(super) host_weight: Option<Tensor>,
    /// Number of the parameter among the trained ones.
    pub(super) index: usize,
    pub(super) lr_multiplier: f64,
    pub(super) weight_decay: f64,
}

/// A part of a parameter that this rank updates.
#[derive(Debug, Clone)]
pub struct OwnedPart {
    pub param: usize,
    /// The elements of the flat parameter.
    pub elements: Range<usize>,
    /// These elements in the compute dtype; `None` if the tensor of the parameter has them.
    pub weight: Option<Tensor>,
}

impl ParamState {
    /// State of zeros, with a master weight from `master`. `index` is the number of the parameter
    /// among the trained ones.
    pub(super) fn new(
        config: &OptimConfig,
        (param, group, index): (&Param, &ParamGroup, usize),
        (elements, weight): (Range<usize>, Option<Tensor>),
        master: impl FnOnce(Range<usize>) -> Result<Tensor>,
        device: &Device,
    ) -> Result<Self> {
        let kinds = kinds(config, param, group);
        let mut tensors = Vec::with_capacity(kinds.len());
        for kind in kinds.iter().filter(|kind| kind.name != MASTER) {
            tensors.push(kind.zeros(&elements, device)?);
        }
        if tensors.len() < kinds.len() {
            tensors.push(master(elements.clone())?);
        }
        Ok(Self {
            param: param.clone(),
            rule: Rule::of(config, param, group),
            elements,
            kinds,
            tensors,
            weight,
            host_weight: None,
            index,
            lr_multiplier: group.lr_multiplier,
            weight_decay: if group.decay { config.weight_decay } else { 0.0 },
        })
    }

    /// The weight in the compute dtype, flat.
    pub fn weight(&self) -> Result<Tensor> {
        if let Some(weight) = &self.weight {
            return Ok(weight.clone());
        }
        let Range { start, end } = self.elements;
        self.param.tensor()?.flatten_all()?.narrow(0, start, end - start)
    }

    /// The state tensors with their kinds. They are flat.
    pub fn tensors(&self) -> impl Iterator<Item = (&StateKind, &Tensor)> {
        self.kinds.iter().zip(&self.tensors)
    }

    /// As [`Self::tensors`], to restore a checkpoint.
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = (&StateKind, &mut Tensor)> {
        self.kinds.iter().zip(&mut self.tensors)
    }

    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors().find(|(kind, _)| kind.name == name).map(|(_, tensor)| tensor)
    }
}
