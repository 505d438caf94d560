//! `bench --ops`: each op at a few sizes. `share` is relative to the measured peak of this machine:
//! the matmul rate for ops that compute, the copy rate for ops that move data.

use super::{Clock, Seconds, Sizes, Table, random};
use crate::batch::CuSeqlens;
use crate::metrics::peak_memory_bytes;
use crate::ops::{
    Adafactor, AdafactorUpdate, AdamW, AdamWTensors, AttentionBackend, CONV_TAPS, DeltaHeads,
    DeltaInputs, ExpertLayout, Flash, Gelu, Nf4, NormScale, Qkv, RecomputeInput, RopeTable,
    Routing, Scores, SecondMoment, Segments, adafactor_step, adamw_step, causal_conv1d,
    causal_conv1d_backward, combine, embedding, embedding_backward, expert_rows,
    expert_rows_backward, expert_swiglu, expert_swiglu_backward, fill_zero, gated_delta_rule,
    gated_delta_rule_backward, gelu, gelu_backward, gpu_memory, grouped_linear,
    grouped_linear_backward_input, grouped_linear_backward_weight, layer_norm, layer_norm_backward,
    layer_scale_add, layer_scale_backward, linear, linear_backward_input, linear_backward_weight,
    linear_cross_entropy_backward, nf4_bytes, qk_norm_rope, qk_norm_rope_backward, rms_norm,
    rms_norm_backward, route, swiglu, swiglu_backward, vision_rope_merge_backward,
    vision_rope_split,
};
use candle_core::{DType, Device, Result, Tensor};

pub(super) struct OpBench {
    pub(super) clock: Clock,
    /// Dtype of the operands; gradient buffers and statistics are `f32`.
    pub(super) dtype: DType,
    pub(super) sizes: &'static Sizes,
}

/// Peak rates of this machine, per second.
struct Peaks {
    flops: f64,
    bytes: f64,
}

pub(super) struct Case<'a> {
    name: String,
    work: Work,
    /// Further figures for its row of the table.
    figures: Vec<(&'static str, f64)>,
    time: Box<TimedOp<'a>>,
}

type TimedOp<'a> = dyn FnOnce(&Clock) -> Result<Seconds> + 'a;

pub(super) enum Work {
    Flops(f64),
    Bytes(f64),
}

pub(super) fn case<'a>(name: &str, work: Work, run: impl FnMut() -> Result<()> + 'a) -> Case<'a> {
    Case {
        name: name.to_owned(),
        work,
        figures: Vec::new(),
        time: Box::new(move |clock| clock.time(run)),
    }
}

/// A case whose op overwrites its operands: each run receives copies of `operands`.
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
    let time = Box::new(move |clock: &Clock| clock.time_after(copies, run));
    Case { name: name.to_owned(), work, figures: Vec::new(), time }
}

pub(super) type Time<'t> = dyn FnMut(Case<'_>) -> anyhow::Result<()> + 't;

impl OpBench {
    pub(super) fn random(&self, shape: &[usize]) -> Result<Tensor> {
        random(shape, self.dtype, &self.clock.device)
    }

    pub(super) fn f32s(&self, shape: &[usize]) -> Result<Tensor> {
        random(shape, DType::F32, &self.clock.device)
    }

    pub(super) fn zeros(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::zeros(shape, DType::F32, &self.clock.device)
    }

    /// Size in bytes of a tensor in the compute dtype.
    pub(super) fn bytes(&self, sizes: &[usize]) -> f64 {
        (self.dtype.size_in_bytes() * sizes.iter().product::<usize>()) as f64
    }

    /// Prints one row per op whose name contains `filter`.
    pub(super) fn run(&self, filter: &str, table: &mut Table) -> anyhow::Result<()> {
        // Must run before all other ops: memory that they freed would be reused and not be counted.
        let head_memory = if Head::name(self).contains(filter) {
            Some(Head::new(self)?.memory_bytes()?)
        } else {
            None
        };
        let (unit, scale) = match self.clock.device {
            Device::Cpu => ("GFLOP/s", 1e9),
            _ => ("TFLOP/s", 1e12),
        };
        let peaks = Peaks {
            flops: self.clock.matmul_flops(self.sizes.matmul, self.dtype)?,
            bytes: self.clock.copy_bytes(self.sizes.copy)?,
        };
        table.row("peak", &[(unit, peaks.flops / scale), ("GB/s", peaks.bytes / 1e9)])?;
        let mut time = |case: Case<'_>| -> anyhow::Result<()> {
            if !case.name.contains(filter) {
                return Ok(());
            }
            let seconds = (case.time)(&self.clock)?;
            let (rate, share) = match case.work {
                Work::Flops(flops) => {
                    let rate = flops / seconds.best;
                    ((unit, rate / scale), rate / peaks.flops)
                }
                Work::Bytes(bytes) => {
                    let rate = bytes / seconds.best;
                    (("GB/s", rate / 1e9), rate / peaks.bytes)
                }
            };
            let (best, median) = (seconds.best * 1e3, seconds.median * 1e3);
            let mut figures = vec![("ms", best), ("median_ms", median), rate, ("share", share)];
            figures.extend(case.figures);
            table.row(&case.name, &figures)
        };
        self.linears(&mut time)?;
        self.experts(&mut time)?;
        self.norms(&mut time)?;
        self.rotations(&mut time)?;
        self.pointwise(&mut time)?;
        self.embeddings(&mut time)?;
        self.attention(&mut time)?;
        self.delta_rule(&mut time)?;
        if let Some(memory) = head_memory {
            Head::new(self)?.time(memory, &mut time)?;
        }
        self.dequantization(&mut time)?;
        self.optimizer(&mut time)
    }

    fn dequantization(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        let n = self.sizes.dequantized;
        let x = random(&[n], DType::F32, &Device::Cpu)?;
        let matrix = Nf4::quantize(&[n], |range| x.narrow(0, range.start, range.len()))?;
        let matrix = matrix.to_device(&self.clock.device)?;
        let y = Tensor::zeros(n, self.dtype, &self.clock.device)?;
        let bytes = nf4_bytes(n) as f64 + self.bytes(&[n]);
        let name = format!("nf4 dequantize {:.1}M", n as f64 / 1e6);
        time(case(&name, Work::Bytes(bytes), || matrix.dequantize_into(&y)))
    }

    fn norms(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        for &[n, d] in self.sizes.rms_norms {
            let (x, dy, w) = (self.random(&[n, d])?, self.random(&[n, d])?, self.random(&[d])?);
            let (dw, size, pass) = (self.zeros(&[d])?, format!("{n}x{d}"), self.bytes(&[n, d]));
            let (_, rstd) = rms_norm(&x, &w, NormScale::Weight, 1e-6)?;
            time(case(&format!("rms_norm {size}"), Work::Bytes(2.0 * pass), || {
                rms_norm(&x, &w, NormScale::Weight, 1e-6).map(drop)
            }))?;
            time(case(&format!("rms_norm backward {size}"), Work::Bytes(3.0 * pass), || {
                rms_norm_backward(&x, &rstd, &w, NormScale::Weight, &dy, None, Some(&dw)).map(drop)
            }))?;
        }
        for &[n, d] in self.sizes.layer_norms {
            let (x, dy, w) = (self.random(&[n, d])?, self.random(&[n, d])?, self.random(&[d])?);
            let (dw, db) = (self.zeros(&[d])?, self.zeros(&[d])?);
            let (size, pass) = (format!("{n}x{d}"), self.bytes(&[n, d]));
            let (_, stats) = layer_norm(&x, &w, &w, 1e-6)?;
            time(case(&format!("layer_norm {size}"), Work::Bytes(2.0 * pass), || {
                layer_norm(&x, &w, &w, 1e-6).map(drop)
            }))?;
            time(case(&format!("layer_norm backward {size}"), Work::Bytes(3.0 * pass), || {
                layer_norm_backward(&x, &stats, &w, &dy, None, Some(&dw), Some(&db)).map(drop)
            }))?;
            time(case(&format!("layer_scale {size}"), Work::Bytes(3.0 * pass), || {
                layer_scale_add(&x, &w, &dy).map(drop)
            }))?;
            time(case(&format!("layer_scale backward {size}"), Work::Bytes(4.0 * pass), || {
                layer_scale_backward(&w, &dy, Some((&x, &dw))).map(drop)
            }))?;
        }
        Ok(())
    }

    /// A rotary table for `n` positions.
    fn rope_table(&self, n: usize, dh: usize) -> Result<RopeTable> {
        Ok(RopeTable { cos: self.f32s(&[n, dh / 2])?, sin: self.f32s(&[n, dh / 2])? })
    }

    fn rotations(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        for &[n, h, dh] in self.sizes.rotations {
            let (x, w) = (self.random(&[n, h * dh])?, self.random(&[dh])?);
            let (dw, table) = (self.zeros(&[dh])?, self.rope_table(n, dh)?);
            let (rotated, rstd) = qk_norm_rope(&x, &w, NormScale::Weight, 1e-6, &table)?;
            let (size, pass) = (format!("{n}x{h}x{dh}"), self.bytes(&[n, h, dh]));
            time(case(&format!("qk_norm_rope {size}"), Work::Bytes(2.0 * pass), || {
                qk_norm_rope(&x, &w, NormScale::Weight, 1e-6, &table).map(drop)
            }))?;
            time(case(&format!("qk_norm_rope backward {size}"), Work::Bytes(3.0 * pass), || {
                qk_norm_rope_backward(&x, &rstd, &w, NormScale::Weight, &table, &rotated, Some(&dw))
                    .map(drop)
            }))?;
        }
        for &[n, h, dh] in self.sizes.vision_rotations {
            let (qkv, table) = (self.random(&[n, 3 * h * dh])?, self.rope_table(n, dh)?);
            let (q, k, v) = vision_rope_split(&qkv, h, &table)?;
            let (size, pass) = (format!("{n}x{h}x{dh}"), self.bytes(&[n, h, dh]));
            time(case(&format!("vision_rope {size}"), Work::Bytes(6.0 * pass), || {
                vision_rope_split(&qkv, h, &table).map(drop)
            }))?;
            time(case(&format!("vision_rope backward {size}"), Work::Bytes(6.0 * pass), || {
                vision_rope_merge_backward(&q, &k, &v, &table).map(drop)
            }))?;
        }
        Ok(())
    }

    fn pointwise(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        for &[n, f] in self.sizes.swiglus {
            let (gate, up) = (self.random(&[n, f])?, self.random(&[n, f])?);
            let (da, size, pass) = (self.random(&[n, f])?, format!("{n}x{f}"), self.bytes(&[n, f]));
            time(case(&format!("swiglu {size}"), Work::Bytes(3.0 * pass), || {
                swiglu(&gate, &up).map(drop)
            }))?;
            for (what, passes, again) in SWIGLU_BACKWARDS {
                let name = format!("swiglu {what} {size}");
                let run =
                    |[gate, up, da]: [Tensor; 3]| swiglu_backward(gate, up, da, again).map(drop);
                time(case_in_place(&name, Work::Bytes(passes * pass), [&gate, &up, &da], run))?;
            }
        }
        for &[n, f] in self.sizes.gelus {
            let (x, da) = (self.random(&[n, f])?, self.random(&[n, f])?);
            let (size, pass) = (format!("{n}x{f}"), self.bytes(&[n, f]));
            for (name, kind) in [("tanh", Gelu::Tanh), ("erf", Gelu::Erf), ("quick", Gelu::Quick)] {
                time(case(&format!("gelu {name} {size}"), Work::Bytes(2.0 * pass), || {
                    gelu(&x, kind).map(drop)
                }))?;
                for (what, passes, again) in GELU_BACKWARDS {
                    let name = format!("gelu {name} {what} {size}");
                    let run = |[x, da]: [Tensor; 2]| gelu_backward(x, da, kind, again).map(drop);
                    time(case_in_place(&name, Work::Bytes(passes * pass), [&x, &da], run))?;
                }
            }
        }
        Ok(())
    }

    fn embeddings(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        for &[n, d, v] in self.sizes.embeddings {
            let spread = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % v as u32;
            let ids = Tensor::from_iter((0..n).map(spread), &self.clock.device)?;
            let (w, dy, dw) = (self.random(&[v, d])?, self.random(&[n, d])?, self.zeros(&[v, d])?);
            let (size, pass) = (format!("{n}x{d}x{v}"), self.bytes(&[n, d]));
            time(case(&format!("embedding {size}"), Work::Bytes(2.0 * pass), || {
                embedding(&ids, &w).map(drop)
            }))?;
            // Reads `dy`; reads and writes rows of `dw` in `f32`.
            let bytes = pass + 8.0 * (n * d) as f64;
            time(case(&format!("embedding backward {size}"), Work::Bytes(bytes), || {
                embedding_backward(&ids, &dy, &dw)
            }))?;
        }
        Ok(())
    }

    fn attention(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        for &(segments, length, heads, kv_heads, dim, masking) in self.sizes.attention {
            let tokens = segments * length;
            let q = self.random(&[tokens, heads, dim])?;
            let (k, v) =
                (self.random(&[tokens, kv_heads, dim])?, self.random(&[tokens, kv_heads, dim])?);
            let cu_seqlens = CuSeqlens::from_lengths(&vec![length as u32; segments])?;
            let boundaries =
                &Segments::new(cu_seqlens, CuSeqlens::from_lengths(&[tokens as u32])?)?;
            let (qkv, scores) = (|| Qkv { q: &q, k: &k, v: &v }, Scores::new(masking, dim));
            let (o, lse) = Flash.forward(qkv(), boundaries, scores)?;
            let product = 2.0 * masking.num_scores(length) * (segments * heads * dim) as f64;
            let name = format!("{segments}x{length} h{heads}/{kv_heads} d{dim} {masking:?}");
            time(case(&format!("attention {name}"), Work::Flops(2.0 * product), || {
                Flash.forward(qkv(), boundaries, scores).map(drop)
            }))?;
            time(case(&format!("attention backward {name}"), Work::Flops(5.0 * product), || {
                Flash.backward(qkv(), &o, &lse, &o, boundaries, scores).map(drop)
            }))?;
        }
        Ok(())
    }

    fn delta_rule(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        for &[segments, length, key_heads, value_heads, dim] in self.sizes.delta_rules {
            let tokens = segments * length;
            let cu_seqlens = &CuSeqlens::from_lengths(&vec![length as u32; segments])?;
            let heads = DeltaHeads { key_heads, value_heads, key_dim: dim, value_dim: dim };
            let channels = (2 * key_heads + value_heads) * dim;
            let (qkv, d_o) =
                (self.random(&[tokens, channels])?, self.random(&[tokens, value_heads * dim])?);
            let gates = self.f32s(&[tokens, value_heads])?;
            let (g, beta) = ((gates.abs()? * -0.1)?, (gates.abs()? * 0.5)?);
            let inputs = || DeltaInputs { qkv: &qkv, g: &g, beta: &beta };
            let name = format!("{segments}x{length} h{key_heads}/{value_heads} d{dim}");
            // The recurrence reads, writes and reads each state once.
            let product = 2.0 * (tokens * value_heads * dim * dim) as f64;
            time(case(&format!("delta_rule {name}"), Work::Flops(3.0 * product), || {
                gated_delta_rule(inputs(), heads, cu_seqlens, None).map(drop)
            }))?;
            time(case(&format!("delta_rule backward {name}"), Work::Flops(8.0 * product), || {
                gated_delta_rule_backward(inputs(), heads, cu_seqlens, &d_o).map(drop)
            }))?;
            let (w, dw) =
                (self.random(&[channels, CONV_TAPS])?, self.zeros(&[channels, CONV_TAPS])?);
            let pass = self.bytes(&[tokens, channels]);
            time(case(&format!("causal_conv1d {name}"), Work::Bytes(2.0 * pass), || {
                causal_conv1d(&qkv, &w, cu_seqlens).map(drop)
            }))?;
            time(case(&format!("causal_conv1d backward {name}"), Work::Bytes(3.0 * pass), || {
                causal_conv1d_backward(&qkv, &w, &qkv, cu_seqlens, Some(&dw)).map(drop)
            }))?;
        }
        Ok(())
    }

    fn optimizer(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        let count = self.sizes.optimizer;
        let [exp_avg, exp_avg_sq] = [self.zeros(&[count])?, self.zeros(&[count])?];
        let (weight, grad) = (self.random(&[count])?, self.f32s(&[count])?);
        let (master, written) = match self.dtype {
            DType::F32 => (None, 0.0),
            _ => (Some(weight.to_dtype(DType::F32)?), self.bytes(&[count])),
        };
        let tensors = AdamWTensors {
            weight: &weight,
            master: master.as_ref(),
            exp_avg: &exp_avg,
            exp_avg_sq: &exp_avg_sq,
            absmax: None,
            grad: &grad,
        };
        let hyper = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
        let bytes = 7.0 * (4 * count) as f64 + written;
        let name = format!("adamw {:.1}M", count as f64 / 1e6);
        time(case(&name, Work::Bytes(bytes), || adamw_step(&hyper, &tensors, 1e-4, 0.1, 1, 1.0)))?;
        self.adafactor(&weight, master.as_ref(), &grad, time)
    }

    fn adafactor(
        &self,
        weight: &Tensor,
        master: Option<&Tensor>,
        grad: &Tensor,
        time: &mut Time<'_>,
    ) -> anyhow::Result<()> {
        let rows = 1 << (weight.elem_count().ilog2() / 2);
        let columns = weight.elem_count() / rows;
        let [row_var, col_var] = [self.zeros(&[rows])?, self.zeros(&[columns])?];
        let matrix = |t: &Tensor| t.narrow(0, 0, rows * columns)?.reshape((rows, columns));
        let (weight, grad) = (matrix(weight)?, matrix(grad)?);
        let master = master.map(matrix).transpose()?;
        let update = AdafactorUpdate {
            weight: &weight,
            master: master.as_ref(),
            second: SecondMoment::Factored([&row_var, &col_var]),
            grad: &grad,
            index: 0,
            lr: 1e-2,
            weight_decay: 0.1,
        };
        let hyper = Adafactor { beta2_decay: -0.8, eps: [1.2e-7, 1e-3], d: 1.0 };
        // The gradient three times; the direction twice after it is written; the weight twice, and
        // once after it is written.
        let written = if master.is_some() { 3.0 * self.bytes(&[rows, columns]) } else { 0.0 };
        let bytes = 9.0 * (4 * rows * columns) as f64 + written;
        let name = format!("adafactor {rows}x{columns}");
        time(case(&name, Work::Bytes(bytes), || adafactor_step(&hyper, &update, 1, 1.0)))
    }
}

/// Name, number of tensors read and written, and recomputed input. Training recomputes the output
/// where the weight behind the op is trained.
const SWIGLU_BACKWARDS: [(&str, f64, RecomputeInput); 2] =
    [("backward", 5.0, RecomputeInput::No), ("backward and output", 6.0, RecomputeInput::Yes)];
const GELU_BACKWARDS: [(&str, f64, RecomputeInput); 2] =
    [("backward", 3.0, RecomputeInput::No), ("backward and output", 4.0, RecomputeInput::Yes)];

/// The language model head with its cross-entropy.
struct Head<'b> {
    bench: &'b OpBench,
    h: Tensor,
    w: Tensor,
    dw: Tensor,
    targets: Tensor,
}

impl<'b> Head<'b> {
    fn name(bench: &OpBench) -> String {
        let [s, d, v] = bench.sizes.head;
        format!("linear_cross_entropy {s}x{d}x{v}")
    }

    fn new(bench: &'b OpBench) -> Result<Self> {
        let [s, d, v] = bench.sizes.head;
        let targets = Tensor::from_iter(0..s as u32, &bench.clock.device)?;
        let (h, w, dw) = (bench.random(&[s, d])?, bench.random(&[v, d])?, bench.zeros(&[v, d])?);
        Ok(Self { bench, h, w, dw, targets })
    }

    /// Computes the loss, `dh` and `dw`.
    fn run(&self) -> Result<()> {
        let Self { h, w, dw, targets, .. } = self;
        linear_cross_entropy_backward(h, w, targets, 1e-3.into(), Some(dw), true).map(drop)
    }

    /// Bytes that the first run in a process adds to peak memory, beyond the operands and `dw`.
    fn memory_bytes(&self) -> Result<f64> {
        fill_zero(&self.dw)?; // zero pages become resident only when they are written
        let device = &self.bench.clock.device;
        let peak = || gpu_memory(device).map_or_else(peak_memory_bytes, |memory| memory.peak);
        let before = gpu_memory(device).map_or_else(peak_memory_bytes, |memory| memory.used);
        self.run()?;
        device.synchronize()?;
        Ok(peak().saturating_sub(before) as f64)
    }

    fn time(&self, memory_bytes: f64, time: &mut Time<'_>) -> anyhow::Result<()> {
        let flops = 6.0 * self.bench.sizes.head.iter().product::<usize>() as f64;
        let mut case = case(&Self::name(self.bench), Work::Flops(flops), || self.run());
        case.figures.push(("memory_mib", memory_bytes / f64::from(1 << 20)));
        time(case)
    }
}

impl OpBench {
    pub(super) fn linears(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        self.sizes.linears.iter().try_for_each(|size| self.linear(*size, time))
    }

    fn linear(&self, [n, k, m]: [usize; 3], time: &mut Time<'_>) -> anyhow::Result<()> {
        let (x, w) = (self.random(&[n, k])?, self.random(&[m, k])?);
        let (dy, dw) = (self.random(&[n, m])?, self.zeros(&[m, k])?);
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
        }))
    }

    /// The first products of experts, and those of a linear layer with as many rows.
    pub(super) fn experts(&self, time: &mut Time<'_>) -> anyhow::Result<()> {
        for &[tokens, experts, k, hidden, intermediate] in self.sizes.experts {
            let logits = self.f32s(&[tokens, experts])?;
            let bytes = 4.0 * (tokens * experts) as f64;
            time(case(&format!("route {tokens}x{experts}x{k}"), Work::Bytes(bytes), || {
                route(&logits, k).map(drop)
            }))?;
            let routing = route(&logits, k)?;
            self.rows_of_experts(&routing, hidden, intermediate, time)?;
            self.linear([tokens * k, hidden, 2 * intermediate], time)?;
            self.grouped(&routing, experts, [hidden, 2 * intermediate], time)?;
        }
        Ok(())
    }

    fn rows_of_experts(
        &self,
        routing: &Routing,
        hidden: usize,
        intermediate: usize,
        time: &mut Time<'_>,
    ) -> anyhow::Result<()> {
        let (tokens, k) = routing.weights.dims2()?;
        let rows = tokens * k;
        let (x, y) = (self.random(&[tokens, hidden])?, self.random(&[rows, hidden])?);
        let (size, bytes) = (format!("{tokens}x{k}x{hidden}"), self.bytes(&[rows, hidden]));
        let moved = bytes + self.bytes(&[tokens, hidden]);
        time(case(&format!("expert_rows {size}"), Work::Bytes(2.0 * bytes), || {
            expert_rows(&x, routing).map(drop)
        }))?;
        time(case(&format!("expert_rows backward {size}"), Work::Bytes(moved), || {
            expert_rows_backward(&y, routing).map(drop)
        }))?;
        time(case(&format!("combine {size}"), Work::Bytes(moved), || {
            combine(&y, routing, None).map(drop)
        }))?;
        let gate_up = self.random(&[rows, 2 * intermediate])?;
        let d_activated = self.random(&[rows, intermediate])?;
        let (size, bytes) = (format!("{rows}x{intermediate}"), self.bytes(&[rows, intermediate]));
        time(case(&format!("expert_swiglu {size}"), Work::Bytes(3.0 * bytes), || {
            expert_swiglu(&gate_up, routing).map(drop)
        }))?;
        let name = format!("expert_swiglu backward {size}");
        let run = |[gate_up, d_activated]: [Tensor; 2]| {
            expert_swiglu_backward(gate_up, routing, d_activated, RecomputeInput::Yes).map(drop)
        };
        time(case_in_place(&name, Work::Bytes(6.0 * bytes), [&gate_up, &d_activated], run))
    }

    fn grouped(
        &self,
        routing: &Routing,
        experts: usize,
        [k, m]: [usize; 2],
        time: &mut Time<'_>,
    ) -> anyhow::Result<()> {
        let (rows, at) = (routing.order.elem_count(), &routing.offsets);
        let flops = 2.0 * (rows * k * m) as f64;
        let size = format!("{rows}x{k}x{m}");
        let (x, dy) = (self.random(&[rows, k])?, self.random(&[rows, m])?);
        for (layout, name) in [(ExpertLayout::OutIn, "out-in"), (ExpertLayout::InOut, "in-out")] {
            let dims = if layout == ExpertLayout::OutIn { [m, k] } else { [k, m] };
            // The same numbers for each expert take less time to prepare.
            let w = self.random(&dims)?.unsqueeze(0)?;
            let w = w.broadcast_as((experts, dims[0], dims[1]))?.contiguous()?;
            time(case(&format!("grouped_linear {name} {size}"), Work::Flops(flops), || {
                grouped_linear(&x, &w, layout, at).map(drop)
            }))?;
            time(case(&format!("grouped_linear dx {name} {size}"), Work::Flops(flops), || {
                grouped_linear_backward_input(&dy, &w, layout, at).map(drop)
            }))?;
        }
        let dw = self.written_zeros(&[experts, k, m])?;
        time(case(&format!("grouped_linear dw {size}"), Work::Flops(flops), || {
            grouped_linear_backward_weight(&x, &dy, ExpertLayout::InOut, at, &dw)
        }))
    }

    /// Zeros that are resident in memory.
    fn written_zeros(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::full(0f32, shape, &self.clock.device)?.to_dtype(DType::F32)?.contiguous()
    }
}
