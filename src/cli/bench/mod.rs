//! `trainer bench`: speed of the ops, of a training step and of the data loader; its timing on a CPU
//! and on a GPU, the sizes of ops, and its output.

mod data;
mod ops;
mod step;

use super::args::ConfigArgs;
use super::failure::{Exit, Failure};
use super::logging::Logging;
use super::terminal::stdout;
use crate::ops::{Masking, simd_level};
use crate::run::device_name;
use crate::train::{DeviceChoice, Precision};
use candle_core::{DType, Device, Result, Tensor};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, ValueEnum};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
#[command(after_help = "Example:\n  trainer bench --ops\n  \
    trainer bench --ops --device cuda:0\n  \
    trainer bench --step --config config.yaml --steps 20\n  \
    trainer bench --data --config config.yaml --json")]
pub(super) struct BenchArgs {
    /// Time each op at a few sizes, relative to the measured peaks of this machine (the default)
    #[arg(long)]
    ops: bool,
    /// Time whole optimizer steps of a config: tokens/s, MFU, data wait, memory
    #[arg(long)]
    step: bool,
    /// Time reading, encoding and packing the rows of a config: rows/s, MPix/s, tokens/s
    #[arg(long)]
    data: bool,
    /// YAML config, for `--step` and `--data`
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Change a key, for example `--set data.packing=false`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Number of steps to time, after a first step that is not timed
    #[arg(long, default_value_t = 10)]
    steps: u64,
    /// Device of `--ops`: `cpu`, `cuda:N` or `auto`; the others use that of the config
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Dtype of the operands of `--ops`; by default `f32` on a CPU and `bf16` on a GPU
    #[arg(long, value_parser = precision())]
    precision: Option<Precision>,
    /// Sizes of `--ops`; by default those of the device
    #[arg(long, value_enum)]
    sizes: Option<SizeChoice>,
    /// Run only ops whose name contains TEXT
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &BenchArgs, logging: &Logging) -> anyhow::Result<()> {
    let config = || -> anyhow::Result<_> {
        let file = args.config.clone().ok_or_else(|| {
            Failure::new(Exit::Usage, "`--step` and `--data` need a config")
                .hint("add `--config config.yaml`, or use `--ops`")
        })?;
        ConfigArgs { config: file, overrides: args.overrides.clone() }.load(logging)
    };
    let mut table = Table { json: args.json };
    if args.ops || !(args.step || args.data) {
        run_ops(args, &mut table)?;
    }
    if args.step {
        step::run(&config()?, args.steps, &mut table)?;
    }
    if args.data {
        data::run(&config()?, &mut table)?;
    }
    Ok(())
}

fn precision() -> impl clap::builder::TypedValueParser<Value = Precision> {
    PossibleValuesParser::new(["f32", "bf16"]).map(|name| match name.as_str() {
        "f32" => Precision::F32,
        _ => Precision::Bf16,
    })
}

fn run_ops(args: &BenchArgs, table: &mut Table) -> anyhow::Result<()> {
    let device = args.device.open()?;
    table.text("simd", "level", &simd_level()?.to_string())?;
    let (sizes, dtype) = if device.is_cpu() {
        (SizeChoice::Cpu, DType::F32)
    } else {
        (SizeChoice::Gpu, DType::BF16)
    };
    let (sizes, dtype) =
        (args.sizes.unwrap_or(sizes), args.precision.map_or(dtype, Precision::dtype));
    if sizes != SizeChoice::Cpu {
        table.text("device", "used", &device_name(&device))?;
        table.text("precision", "used", dtype.as_str())?;
    }
    let clock = match sizes {
        SizeChoice::Tiny => Clock::hasty(&device),
        SizeChoice::Cpu | SizeChoice::Gpu => Clock::new(&device),
    };
    ops::OpBench { clock, dtype, sizes: sizes.sizes() }.run(&args.filter, table)
}

/// Durations of one run.
#[derive(Debug, Clone, Copy)]
struct Seconds {
    /// The fastest run: the one that other processes disturbed least.
    best: f64,
    median: f64,
}

/// Times runs on one device.
///
/// On a GPU, runs are timed in batches: a call returns before its kernels have run, and
/// synchronising after each run would dominate the time of short kernels.
#[derive(Debug, Clone)]
struct Clock {
    device: Device,
    /// Duration of a batch of runs, in seconds; 0: one run per batch.
    batch_s: f64,
    min_rounds: usize,
    min_s: f64,
    /// Seconds after which timing stops, if at least three batches were timed.
    max_s: f64,
}

/// Maximum number of runs in a batch whose operands are prepared per run: all of them are in memory
/// at the same time.
const MAX_PREPARED: usize = 8;
/// Maximum number of runs in any batch.
const MAX_RUNS: usize = 500;

impl Clock {
    fn new(device: &Device) -> Self {
        let device = device.clone();
        if device.is_cpu() {
            Self { device, batch_s: 0.0, min_rounds: 5, min_s: 0.6, max_s: f64::INFINITY }
        } else {
            Self { device, batch_s: 0.02, min_rounds: 10, min_s: 0.2, max_s: 2.0 }
        }
    }

    /// A clock for tests, which runs each op a few times only. Its times are not meaningful.
    fn hasty(device: &Device) -> Self {
        let device = device.clone();
        Self { device, batch_s: 1e-9, min_rounds: 1, min_s: 0.0, max_s: 0.0 }
    }

    /// Times `run`, which is called many times.
    fn time(&self, mut run: impl FnMut() -> Result<()>) -> Result<Seconds> {
        self.rounds(MAX_RUNS, || Ok(()), |()| run())
    }

    /// Times a run that consumes what `prepare` returns; the time of `prepare` is not counted.
    fn time_after<T>(
        &self,
        prepare: impl FnMut() -> Result<T>,
        run: impl FnMut(T) -> Result<()>,
    ) -> Result<Seconds> {
        self.rounds(MAX_PREPARED, prepare, run)
    }

    fn rounds<T>(
        &self,
        max_runs: usize,
        mut prepare: impl FnMut() -> Result<T>,
        mut run: impl FnMut(T) -> Result<()>,
    ) -> Result<Seconds> {
        let mut batch = |runs: usize| -> Result<f64> {
            let prepared = (0..runs).map(|_| prepare()).collect::<Result<Vec<_>>>()?;
            self.device.synchronize()?;
            let begin = Instant::now();
            for one in prepared {
                run(one)?;
            }
            self.device.synchronize()?;
            Ok(begin.elapsed().as_secs_f64() / runs as f64)
        };
        batch(1)?; // warms up memory and caches, and loads kernels
        let mut runs = 1;
        if self.batch_s > 0.0 {
            runs = ((self.batch_s / batch(1)?).ceil() as usize).clamp(1, max_runs);
            batch(runs)?; // the clock rate of a GPU rises under load
        }
        let start = Instant::now();
        let mut rounds = Vec::new();
        loop {
            rounds.push(batch(runs)?);
            let (count, elapsed) = (rounds.len(), start.elapsed().as_secs_f64());
            let is_slow = count >= 3 && elapsed > self.max_s;
            if is_slow || (count >= self.min_rounds && elapsed >= self.min_s) {
                break;
            }
        }
        rounds.sort_by(f64::total_cmp);
        Ok(Seconds { best: rounds[0], median: rounds[rounds.len() / 2] })
    }

    /// Operations per second of a product of two square matrices. They are random, because a GPU is
    /// faster on zeros.
    fn matmul_flops(&self, side: usize, dtype: DType) -> Result<f64> {
        let square = || random(&[side, side], dtype, &self.device);
        let (x, w) = (square()?, square()?);
        let seconds = self.time(|| crate::ops::linear(&x, &w, None).map(drop))?;
        Ok(2.0 * (side as f64).powi(3) / seconds.best)
    }

    /// Bytes read and written per second by a copy of `count` floats.
    fn copy_bytes(&self, count: usize) -> Result<f64> {
        let seconds = if self.device.is_cpu() {
            use rayon::prelude::*;
            let (source, mut target) = (vec![1f32; count], vec![0f32; count]);
            self.time(|| {
                let chunks = target.par_chunks_mut(1 << 16).zip(source.par_chunks(1 << 16));
                chunks.for_each(|(target, source)| target.copy_from_slice(source));
                Ok(())
            })?
        } else {
            let source = Tensor::zeros(count, DType::F32, &self.device)?;
            self.time(|| source.copy().map(drop))?
        };
        Ok(2.0 * (4 * count) as f64 / seconds.best)
    }
}

fn random(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(dtype)
}

/// The sizes that `bench --ops` uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SizeChoice {
    /// For CPUs: takes two minutes on two cores
    Cpu,
    /// For GPUs: the published shapes with 16,384 tokens per pack
    Gpu,
    /// For tests: the ops of `gpu` at tiny sizes
    Tiny,
}

impl SizeChoice {
    fn sizes(self) -> &'static Sizes {
        match self {
            Self::Cpu => &CPU,
            Self::Gpu => &GPU,
            Self::Tiny => &TINY,
        }
    }
}

/// Number of segments, their length, `H`, `Hkv`, `Dh`.
type AttentionSizes = (usize, usize, usize, usize, usize, Masking);

/// Sizes of each op; `N` is a number of rows.
struct Sizes {
    /// Side of the square matrices whose product measures the peak FLOP rate.
    matmul: usize,
    /// Number of floats whose copy measures the peak memory rate.
    copy: usize,
    /// Rows `N`, inputs, outputs.
    linears: &'static [[usize; 3]],
    /// Tokens, experts `E`, experts of a token, hidden size, intermediate size of an expert.
    experts: &'static [[usize; 5]],
    /// Rows `N`, width.
    rms_norms: &'static [[usize; 2]],
    layer_norms: &'static [[usize; 2]],
    /// Rows `N`, heads `H`, head size `Dh`.
    rotations: &'static [[usize; 3]],
    vision_rotations: &'static [[usize; 3]],
    swiglus: &'static [[usize; 2]],
    gelus: &'static [[usize; 2]],
    /// Rows `N`, hidden size `D`, vocabulary `V`.
    embeddings: &'static [[usize; 3]],
    attention: &'static [AttentionSizes],
    /// Number of segments, their length, `Hk`, `Hv`, head size.
    delta_rules: &'static [[usize; 5]],
    /// Supervised rows `S`, hidden size `D`, vocabulary `V`.
    head: [usize; 3],
    /// Number of elements of a matrix in NF4.
    dequantized: usize,
    optimizer: usize,
}

const CPU: Sizes = Sizes {
    matmul: 2048,
    copy: 64 << 20,
    linears: &[[2048, 1024, 3072], [1881, 512, 1536], [416, 128, 256]],
    // 256 and 8 rows per expert.
    experts: &[[4096, 128, 8, 2048, 768], [128, 128, 8, 2048, 768]],
    rms_norms: &[[2048, 1024]],
    layer_norms: &[[2048, 1024]],
    rotations: &[[2048, 16, 64], [2048, 16, 128]],
    vision_rotations: &[],
    swiglus: &[[2048, 3072]],
    gelus: &[[2048, 3072]],
    embeddings: &[],
    attention: &[
        (1, 2048, 16, 8, 128, Masking::Causal),
        (16, 128, 16, 8, 128, Masking::Causal),
        (4, 512, 16, 16, 64, Masking::Full),
    ],
    // 1,024 and 32,768 tokens: the time of a token does not depend on the length.
    delta_rules: &[
        [1, 2048, 16, 32, 128],
        [16, 128, 16, 32, 128],
        [1, 1024, 4, 8, 128],
        [1, 32_768, 4, 8, 128],
    ],
    head: [1024, 512, 151_936],
    dequantized: 64 << 20,
    optimizer: 16 << 20,
};

/// Every operand of a memory-bound op is larger than the caches of the GPUs in use (60 MB), so that
/// it is read from memory.
const GPU: Sizes = Sizes {
    matmul: 8192,
    copy: 512 << 20,
    // 4B: query, key or value, all three, gate or up, both, down projection; 8B: query, gate or up
    // projection.
    linears: &[
        [16384, 2560, 4096],
        [16384, 2560, 1024],
        [16384, 2560, 6144],
        [16384, 2560, 9728],
        [16384, 2560, 19456],
        [16384, 9728, 2560],
        [16384, 4096, 4096],
        [16384, 4096, 12288],
    ],
    experts: &[[16384, 128, 8, 2048, 768], [128, 128, 8, 2048, 768]],
    rms_norms: &[[16384, 2560], [16384, 4096]],
    layer_norms: &[[65536, 1024], [65536, 1152]],
    rotations: &[[16384, 32, 128]],
    vision_rotations: &[[65536, 16, 64], [65536, 16, 72]],
    swiglus: &[[16384, 9728], [16384, 12288]],
    gelus: &[[65536, 4096]],
    embeddings: &[[16384, 2560, 151_936]],
    attention: &[
        (8, 4096, 16, 16, 128, Masking::Causal),
        (8, 4096, 16, 16, 64, Masking::Causal),
        (8, 4096, 32, 8, 128, Masking::Causal),
        (1, 16384, 32, 8, 128, Masking::Causal),
        (8, 4096, 16, 4, 256, Masking::Causal),
        (128, 128, 32, 8, 128, Masking::Causal),
        (1024, 16, 32, 8, 128, Masking::Causal),
        (16, 4096, 16, 16, 64, Masking::Full),
        (16, 4096, 16, 16, 72, Masking::Full),
        (128, 256, 16, 16, 72, Masking::Full),
    ],
    delta_rules: &[[1, 16384, 16, 32, 128], [8, 2048, 16, 32, 128], [128, 128, 16, 32, 128]],
    head: [16384, 2560, 151_936],
    dequantized: 512 << 20,
    optimizer: 512 << 20,
};

const TINY: Sizes = Sizes {
    matmul: 64,
    copy: 1 << 16,
    linears: &[[33, 24, 40]],
    experts: &[[9, 5, 2, 24, 20]],
    rms_norms: &[[9, 40], [5, 64]],
    layer_norms: &[[9, 72]],
    rotations: &[[17, 4, 128]],
    vision_rotations: &[[17, 2, 64], [9, 2, 72]],
    swiglus: &[[9, 152]],
    gelus: &[[9, 64]],
    embeddings: &[[40, 16, 300]],
    attention: &[
        (2, 150, 2, 2, 128, Masking::Causal),
        (1, 70, 4, 1, 64, Masking::Causal),
        (5, 3, 2, 1, 128, Masking::Causal),
        (2, 33, 2, 2, 72, Masking::Full),
    ],
    delta_rules: &[[2, 70, 1, 2, 16]],
    head: [40, 24, 600],
    dequantized: 5000,
    optimizer: 5000,
};

/// Prints rows of named figures, aligned for people or as JSON.
struct Table {
    json: bool,
}

impl Table {
    fn text(&mut self, name: &str, key: &str, value: &str) -> anyhow::Result<()> {
        let mut out = stdout();
        if self.json {
            writeln!(out, "{}", serde_json::json!({ "name": name, key: value }))?;
        } else {
            writeln!(out, "{name:44}  {key} {value}")?;
        }
        Ok(())
    }

    fn row(&mut self, name: &str, figures: &[(&str, f64)]) -> anyhow::Result<()> {
        let mut out = stdout();
        if self.json {
            let mut object = serde_json::Map::new();
            object.insert("name".to_owned(), name.into());
            for (key, value) in figures {
                object.insert((*key).to_owned(), (*value).into());
            }
            writeln!(out, "{}", serde_json::Value::Object(object))?;
        } else {
            write!(out, "{name:44}")?;
            for (key, value) in figures {
                let digits = if value.abs() >= 1000.0 { 0 } else { 3 };
                write!(out, "  {key} {value:>9.digits$}")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn each_prepared_value_is_used_once_and_the_best_is_not_above_the_median() {
        let (prepared, used) = (Cell::new(0), Cell::new(0));
        let count = |cell: &Cell<usize>| cell.set(cell.get() + 1);
        let clock = Clock { batch_s: 1.0, ..Clock::hasty(&Device::Cpu) };
        let prepare = || {
            count(&prepared);
            Ok(())
        };
        let run = |()| {
            count(&used);
            Ok(())
        };
        let seconds = clock.time_after(prepare, run).unwrap();
        assert_eq!(prepared.get(), used.get());
        assert_eq!(used.get(), 1 + 1 + 2 * MAX_PREPARED); // first, length, warm-up, one round
        assert!(seconds.best <= seconds.median);
    }
}
