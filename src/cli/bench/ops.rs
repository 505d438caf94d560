//! Each op at a few sizes. `share` is of the measured matmul or memory peak of this machine.

use super::{Table, fastest, fastest_after};
use crate::metrics::peak_memory_bytes;
use crate::ops::{
    AdamW, AdamWTensors, Again, AttentionBackend, Flash, Gelu, Masking, Qkv, RopeTable, Segments,
    adamw_step, fill_zero, gelu, gelu_backward, layer_norm, layer_norm_backward, linear,
    linear_backward_input, linear_backward_weight, linear_cross_entropy_backward, qk_norm_rope,
    qk_norm_rope_backward, rms_norm, rms_norm_backward, swiglu, swiglu_backward,
};
use candle_core::{DType, Device, Result, Tensor};

fn random(shape: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu)
}

fn zeros(shape: &[usize]) -> Result<Tensor> {
    Tensor::zeros(shape, DType::F32, &Device::Cpu)
}

/// What this machine can do at best.
struct Peaks {
    flops: f64,
    bytes: f64,
}

impl Peaks {
    fn measure(table: &mut Table) -> anyhow::Result<Self> {
        let (x, w) = (random(&[2048, 2048])?, random(&[2048, 2048])?);
        let seconds = fastest(|| linear(&x, &w, None).map(drop))?;
        let flops = 2.0 * 2048f64.powi(3) / seconds;
        let source = vec![1f32; 64 << 20];
        let mut target = vec![0f32; 64 << 20];
        let seconds = fastest(|| {
            use rayon::prelude::*;
            let chunks = target.par_chunks_mut(1 << 16).zip(source.par_chunks(1 << 16));
            chunks.for_each(|(target, source)| target.copy_from_slice(source));
            Ok(())
        })?;
        let bytes = 2.0 * (source.len() * 4) as f64 / seconds;
        table.row("peak", &[("GFLOP/s", flops / 1e9), ("GB/s", bytes / 1e9)])?;
        Ok(Self { flops, bytes })
    }
}

/// An op to time: what it computes or moves, and how to run it.
struct Case<'a> {
    name: String,
    work: Work,
    /// Further figures of its row.
    figures: Vec<(&'static str, f64)>,
    /// Seconds of its fastest run.
    fastest: Box<dyn FnOnce() -> Result<f64> + 'a>,
}

enum Work {
    Flops(f64),
    Bytes(f64),
}

fn case<'a>(name: &str, work: Work, run: impl FnMut() -> Result<()> + 'a) -> Case<'a> {
    Case {
        name: name.to_owned(),
        work,
        figures: Vec::new(),
        fastest: Box::new(move || fastest(run)),
    }
}

/// A case that gets copies of `operands` and writes its results over them.
fn case_in_place<'a, const N: usize>(
    name: &str,
    work: Work,
    operands: [&'a Tensor; N],
    mut run: impl FnMut([Tensor; N]) -> Result<()> + 'a,
) -> Case<'a> {
    let copies = move || operands.iter().map(|t| t.copy()).collect::<Result<Vec<_>>>();
    let run = move |copies: Vec<Tensor>| match copies.try_into() {
        Ok(copies) => run(copies),
        Err(_) => unreachable!("a copy of each operand"),
    };
    let fastest = Box::new(move || fastest_after(copies, run));
    Case { name: name.to_owned(), work, figures: Vec::new(), fastest }
}

/// Prints one row an op whose name contains `filter`.
pub(super) fn run(filter: &str, table: &mut Table) -> anyhow::Result<()> {
    // First of all: later, blocks that other ops gave back would be used again and not be seen.
    let head_memory = if HEAD.contains(filter) { Some(Head::new()?.memory_bytes()?) } else { None };
    let peaks = Peaks::measure(table)?;
    let mut time = |case: Case<'_>| -> anyhow::Result<()> {
        if !case.name.contains(filter) {
            return Ok(());
        }
        let seconds = (case.fastest)()?;
        let (unit, rate, share) = match case.work {
            Work::Flops(flops) => ("GFLOP/s", flops / seconds, flops / seconds / peaks.flops),
            Work::Bytes(bytes) => ("GB/s", bytes / seconds, bytes / seconds / peaks.bytes),
        };
        let mut figures = vec![("ms", seconds * 1e3), (unit, rate / 1e9), ("share", share)];
        figures.extend(case.figures);
        table.row(&case.name, &figures)
    };
    linears(&mut time)?;
    rows(&mut time)?;
    attention(&mut time)?;
    if let Some(memory) = head_memory {
        Head::new()?.time(memory, &mut time)?;
    }
    optimizer(&mut time)
}

type Time<'t> = dyn FnMut(Case<'_>) -> anyhow::Result<()> + 't;

fn linears(time: &mut Time<'_>) -> anyhow::Result<()> {
    for (n, k, m) in [(2048, 1024, 3072), (1881, 512, 1536), (416, 128, 256)] {
        let (x, w, dy) = (random(&[n, k])?, random(&[m, k])?, random(&[n, m])?);
        let dw = zeros(&[m, k])?;
        let flops = 2.0 * (n * k * m) as f64;
        let size = format!("{n}x{k}x{m}");
        time(case(&format!("linear {size}"), Work::Flops(flops), || {
            linear(&x, &w, None).map(drop)
        }))?;
        time(case(&format!("linear dx {size}"), Work::Flops(flops), || {
            linear_backward_input(&dy, &w).map(drop)
        }))?;
        time(case(&format!("linear dw {size}"), Work::Flops(flops), || {
            linear_backward_weight(&x, &dy, &dw)
        }))?;
    }
    Ok(())
}

/// Names, tensors read and written, and what is computed again: training does where the next weight trains.
const SWIGLU_BACKWARDS: [(&str, f64, Again); 2] = [
    ("swiglu backward 2048x3072", 5.0, Again::Nothing),
    ("swiglu backward and output 2048x3072", 6.0, Again::Output),
];
const GELU_BACKWARDS: [(&str, f64, Again); 2] =
    [("backward", 3.0, Again::Nothing), ("backward and output", 4.0, Again::Output)];

fn rows(time: &mut Time<'_>) -> anyhow::Result<()> {
    let (n, d, f) = (2048, 1024, 3072);
    let (x, dy, w, dw) = (random(&[n, d])?, random(&[n, d])?, random(&[d])?, zeros(&[d])?);
    let pass = (4 * n * d) as f64;
    let (_, rstd) = rms_norm(&x, &w, 1e-6)?;
    time(case("rms_norm 2048x1024", Work::Bytes(2.0 * pass), || rms_norm(&x, &w, 1e-6).map(drop)))?;
    time(case("rms_norm backward 2048x1024", Work::Bytes(3.0 * pass), || {
        rms_norm_backward(&x, &rstd, &w, &dy, None, Some(&dw)).map(drop)
    }))?;
    let (_, stats) = layer_norm(&x, &w, &w, 1e-6)?;
    time(case("layer_norm 2048x1024", Work::Bytes(2.0 * pass), || {
        layer_norm(&x, &w, &w, 1e-6).map(drop)
    }))?;
    time(case("layer_norm backward 2048x1024", Work::Bytes(3.0 * pass), || {
        layer_norm_backward(&x, &stats, &w, &dy, None, Some(&dw), Some(&dw.copy()?)).map(drop)
    }))?;
    for (h, dh) in [(16, 64), (16, 128)] {
        let (x, w, dw) = (random(&[n, h * dh])?, random(&[dh])?, zeros(&[dh])?);
        let table = RopeTable { cos: random(&[n, dh / 2])?, sin: random(&[n, dh / 2])? };
        let (rotated, rstd) = qk_norm_rope(&x, &w, 1e-6, &table)?;
        let (size, pass) = (format!("{n}x{h}x{dh}"), (4 * n * h * dh) as f64);
        time(case(&format!("qk_norm_rope {size}"), Work::Bytes(2.0 * pass), || {
            qk_norm_rope(&x, &w, 1e-6, &table).map(drop)
        }))?;
        time(case(&format!("qk_norm_rope backward {size}"), Work::Bytes(3.0 * pass), || {
            qk_norm_rope_backward(&x, &rstd, &w, &table, &rotated, Some(&dw)).map(drop)
        }))?;
    }
    let (gate, up, da) = (random(&[n, f])?, random(&[n, f])?, random(&[n, f])?);
    let pass = (4 * n * f) as f64;
    time(case("swiglu 2048x3072", Work::Bytes(3.0 * pass), || swiglu(&gate, &up).map(drop)))?;
    let operands = [&gate, &up, &da];
    for (name, passes, again) in SWIGLU_BACKWARDS {
        let run = |[gate, up, da]: [Tensor; 3]| swiglu_backward(gate, up, da, again).map(drop);
        time(case_in_place(name, Work::Bytes(passes * pass), operands, run))?;
    }
    for (name, kind) in [("tanh", Gelu::Tanh), ("erf", Gelu::Erf)] {
        time(case(&format!("gelu {name} 2048x3072"), Work::Bytes(2.0 * pass), || {
            gelu(&gate, kind).map(drop)
        }))?;
        for (what, passes, again) in GELU_BACKWARDS {
            let name = format!("gelu {name} {what} 2048x3072");
            let run = |[x, da]: [Tensor; 2]| gelu_backward(x, da, kind, again).map(drop);
            time(case_in_place(&name, Work::Bytes(passes * pass), [&gate, &da], run))?;
        }
    }
    Ok(())
}

fn attention(time: &mut Time<'_>) -> anyhow::Result<()> {
    for (segments, length, heads, kv_heads, dim, masking) in [
        (1, 2048, 16, 8, 128, Masking::Causal),
        (16, 128, 16, 8, 128, Masking::Causal),
        (4, 512, 16, 16, 64, Masking::Full),
    ] {
        let tokens = segments * length;
        let q = random(&[tokens, heads, dim])?;
        let (k, v) = (random(&[tokens, kv_heads, dim])?, random(&[tokens, kv_heads, dim])?);
        let ends: Vec<u32> = (0..=segments).map(|i| (i * length) as u32).collect();
        let boundaries = Segments { cu_seqlens: &ends, row_ends: &[0, tokens as u32] };
        let qkv = || Qkv { q: &q, k: &k, v: &v };
        let (o, lse) = Flash.forward(qkv(), boundaries, masking)?;
        let half = if masking == Masking::Causal { 0.5 } else { 1.0 };
        let product = 2.0 * half * (segments * length * length * heads * dim) as f64;
        let name = format!("{segments}x{length} h{heads}/{kv_heads} d{dim} {masking:?}");
        time(case(&format!("attention {name}"), Work::Flops(2.0 * product), || {
            Flash.forward(qkv(), boundaries, masking).map(drop)
        }))?;
        time(case(&format!("attention backward {name}"), Work::Flops(5.0 * product), || {
            Flash.backward(qkv(), &o, &lse, &o, boundaries, masking).map(drop)
        }))?;
    }
    Ok(())
}

fn optimizer(time: &mut Time<'_>) -> anyhow::Result<()> {
    let count = 16 << 20;
    let [weight, exp_avg, exp_avg_sq, grad] =
        [random(&[count])?, zeros(&[count])?, zeros(&[count])?, random(&[count])?];
    let tensors = AdamWTensors {
        weight: &weight,
        master: None,
        exp_avg: &exp_avg,
        exp_avg_sq: &exp_avg_sq,
        grad: &grad,
    };
    let hyper = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    time(case("adamw 16.8M", Work::Bytes(7.0 * (4 * count) as f64), || {
        adamw_step(&hyper, &tensors, 1e-4, 0.1, 1, 1.0)
    }))
}

/// The row of [`Head`].
const HEAD: &str = "linear_cross_entropy 1024x512x151936";

/// Operands of a head with its cross-entropy, of the published vocabulary.
struct Head {
    h: Tensor,
    w: Tensor,
    dw: Tensor,
    targets: Tensor,
}

impl Head {
    const SIZES: [usize; 3] = [1024, 512, 151_936];

    fn new() -> Result<Self> {
        let [s, d, v] = Self::SIZES;
        let targets = Tensor::from_vec((0..s as u32).collect::<Vec<_>>(), s, &Device::Cpu)?;
        Ok(Self { h: random(&[s, d])?, w: random(&[v, d])?, dw: zeros(&[v, d])?, targets })
    }

    /// Loss, `dh` and `dw`.
    fn run(&self) -> Result<()> {
        let Self { h, w, dw, targets } = self;
        linear_cross_entropy_backward(h, w, targets, 1e-3, Some(dw), true).map(drop)
    }

    /// What the first run of a fresh process adds to its peak memory, in which the operands and `dw` are.
    fn memory_bytes(&self) -> Result<f64> {
        fill_zero(&self.dw)?; // zeros of the system are not resident before they are touched
        let before = peak_memory_bytes();
        self.run()?;
        Ok(peak_memory_bytes().saturating_sub(before) as f64)
    }

    fn time(&self, memory_bytes: f64, time: &mut Time<'_>) -> anyhow::Result<()> {
        let flops = 6.0 * Self::SIZES.iter().product::<usize>() as f64;
        let mut case = case(HEAD, Work::Flops(flops), || self.run());
        case.figures.push(("memory_mib", memory_bytes / f64::from(1 << 20)));
        time(case)
    }
}
