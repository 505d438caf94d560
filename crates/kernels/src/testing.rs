//! Shared helpers for the tests of the ops: seeded operands, a differentiable `f64` reference,
//! named tolerances.

use candle_core::{DType, Device, Result, Tensor, Var};
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};

/// Tolerance per element: `|got - want| <= bound * (|want| + rms(want))`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tolerance {
    name: &'static str,
    bound: f64,
}

impl Tolerance {
    /// One rounding to `f32`, or a short `f32` sum.
    pub(super) const F32: Self = Self { name: "F32", bound: 2e-5 };
    /// A few roundings to the 8 bits of the `bf16` significand.
    pub(super) const BF16: Self = Self { name: "BF16", bound: 1e-2 };
    /// Like [`Self::BF16`], for gradients that depend on a saved output that was rounded.
    pub(super) const BF16_SAVED: Self = Self { name: "BF16_SAVED", bound: 2e-2 };
    /// Like [`Self::BF16_SAVED`], if probabilities and their gradients are `bf16` operands too, or
    /// if the reference does not round.
    pub(super) const BF16_TILES: Self = Self { name: "BF16_TILES", bound: 4e-2 };
    /// An `f32` sum of products of `e4m3` operands by the library: the tensor cores of Hopper keep
    /// about 14 bits of such a sum.
    pub(super) const E4M3_SUMS: Self =
        Self { name: "E4M3_SUMS", bound: if cfg!(feature = "cuda") { 1e-3 } else { 2e-5 } };
    /// The same with [`super::E4m3Sums::Fast`], for sums of up to 4,096 products, in emulation.
    #[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
    pub(super) const E4M3_FAST: Self = Self { name: "E4M3_FAST", bound: 1e-2 };
}

/// Device of the tests: the CPU, or the one named by the variable `TRAINER_TEST_DEVICE` (`cuda:N`).
pub(super) fn device() -> Device {
    static DEVICE: std::sync::LazyLock<Device> = std::sync::LazyLock::new(|| {
        let Ok(name) = std::env::var("TRAINER_TEST_DEVICE") else { return Device::Cpu };
        let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        super::open_gpu(ordinal.expect("`TRAINER_TEST_DEVICE` is `cuda:N`")).unwrap()
    });
    DEVICE.clone()
}

/// Whether ops check the values of ids and rows. On a GPU they check shapes only, because reading
/// values would wait for the device.
pub(super) fn ids_are_checked() -> bool {
    device().is_cpu()
}

/// Whether the kernels for GPUs are emulated or used, for tests whose sizes would take minutes in
/// emulation.
pub(super) fn kernels_are_tested() -> bool {
    super::launch::supports_device(&device())
}

/// Standard normal `f32` values that depend on the seed only.
pub(super) fn random(seed: u64, dims: &[usize]) -> Tensor {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let x: Vec<f32> = (0..dims.iter().product()).map(|_| StandardNormal.sample(&mut rng)).collect();
    Tensor::from_vec(x, dims, &device()).unwrap()
}

/// A `u32` tensor `[N]`.
pub(super) fn ids(ids: &[u32]) -> Tensor {
    Tensor::new(ids, &device()).unwrap()
}

/// All elements as `f64`.
pub(super) fn values(t: &Tensor) -> Vec<f64> {
    if t.elem_count() == 0 {
        return vec![]; // candle cannot launch a kernel on an empty GPU tensor
    }
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// All elements as `f32` bit patterns.
pub(super) fn bits(t: &Tensor) -> Vec<u32> {
    if t.elem_count() == 0 {
        return vec![]; // see `values`
    }
    let t = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap(); // exact for bf16
    t.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Fails with the worst element and the share of the tolerance that its error uses.
#[track_caller]
pub(super) fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: Tolerance) {
    assert_eq!(got.dims(), want.dims(), "{what}: shape");
    let (got, want) = (values(got), values(want));
    let count = want.len().max(1) as f64;
    let rms = (want.iter().map(|w| w * w).sum::<f64>() / count).sqrt().max(1e-9);
    let used = |at: usize| {
        let used = (got[at] - want[at]).abs() / (tolerance.bound * (want[at].abs() + rms));
        if used.is_nan() { f64::INFINITY } else { used }
    };
    let Some(worst) = (0..want.len()).max_by(|a, b| used(*a).total_cmp(&used(*b))) else { return };
    assert!(
        used(worst) <= 1.0,
        "{what}: element {worst} of {} is {}, expected {}: {:.0} % of `{}`",
        want.len(),
        got[worst],
        want[worst],
        100.0 * used(worst),
        tolerance.name
    );
}

/// Converts `x` to `dtype`: contiguous, but at a nonzero offset of its storage.
pub(super) fn operand(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Tensor::zeros(x.shape(), dtype, &device()); // see `values`
    }
    let padding = Tensor::zeros(3, dtype, &device())?;
    let flat = Tensor::cat(&[&padding, &x.to_dtype(dtype)?.flatten_all()?], 0)?;
    flat.narrow(0, 3, x.elem_count())?.reshape(x.shape())
}

/// The routing of `T` tokens to `k` of `E` experts, where `uneven` makes the first experts more
/// likely.
pub(super) fn routing(seed: u64, (t, e, k): (usize, usize, usize), uneven: f64) -> super::Routing {
    let slope: Vec<f32> = (0..e).map(|expert| -(expert as f32) / e as f32).collect();
    let slope = (Tensor::new(slope, &device()).unwrap() * uneven).unwrap();
    super::route(&random(seed, &[t, e]).broadcast_add(&slope).unwrap(), k).unwrap()
}

/// The contents of a [`gradient_buffer`]. Each term of a sum is rounded to the precision of the
/// contents, so they are not larger than most gradients.
const CONTENTS: f32 = 0.0625;

/// A gradient buffer that already has nonzero contents.
pub(super) fn gradient_buffer(dims: &[usize]) -> Tensor {
    let buffer = Tensor::full(CONTENTS, dims, &device()).unwrap();
    buffer.contiguous().unwrap()
}

/// The amount that an op has added to a [`gradient_buffer`].
pub(super) fn added(buffer: &Tensor) -> Tensor {
    (buffer - f64::from(CONTENTS)).unwrap()
}

/// Runs `f` in a rayon pool of its own with `num_threads` threads.
pub(super) fn with_threads<R: Send>(num_threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap().install(f)
}

/// Returns the output and the input gradients of `f` at `inputs` in `f64`, for the output gradient
/// `dy`.
fn reference(
    inputs: &[Tensor],
    f: &impl Fn(&[Tensor]) -> Result<Tensor>,
    dy: &Tensor,
) -> Result<(Tensor, Vec<Tensor>)> {
    let vars: Vec<Var> = inputs
        .iter()
        .map(|x| Var::from_tensor(&x.to_dtype(DType::F64)?.contiguous()?))
        .collect::<Result<_>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors)?;
    let grads = (&y * dy.to_dtype(DType::F64)?)?.sum_all()?.backward()?;
    let grads = vars.iter().map(|var| match grads.get(var) {
        Some(grad) => Ok(grad.clone()),
        None => candle_core::bail!("the reference returned no gradient"),
    });
    Ok((y.detach(), grads.collect::<Result<_>>()?))
}

/// Compares a few elements of the reference gradients with central differences of the reference
/// output.
fn check_reference(
    what: &str,
    inputs: &[Tensor],
    f: &impl Fn(&[Tensor]) -> Result<Tensor>,
    dy: &Tensor,
    grads: &[Tensor],
) -> Result<()> {
    let dy = dy.to_dtype(DType::F64)?;
    for (index, grad) in grads.iter().enumerate() {
        let (x, grad) = (values(&inputs[index]), values(grad));
        for at in (0..x.len()).step_by((x.len() / 2).max(1)) {
            let step = 1e-5;
            let value = |delta: f64| -> Result<f64> {
                let mut x = x.clone();
                x[at] += delta;
                let mut inputs: Vec<Tensor> =
                    inputs.iter().map(|x| x.to_dtype(DType::F64)).collect::<Result<_>>()?;
                inputs[index] = Tensor::from_vec(x, inputs[index].shape(), &device())?;
                (f(&inputs)? * &dy)?.sum_all()?.to_scalar::<f64>()
            };
            let slope = (value(step)? - value(-step)?) / (2.0 * step);
            let error = (slope - grad[at]).abs() / (1.0 + slope.abs());
            assert!(error < 1e-5, "{what}: input {index} at {at}: {slope} against {}", grad[at]);
        }
    }
    Ok(())
}

/// Compares an op with its reference: the output and every input gradient, in `f32` and `bf16`,
/// with operands at a nonzero storage offset. Also checks that one, two and three threads give the
/// same bits, and compares the reference itself with finite differences. `ours(inputs, dy)` returns
/// the output, and the gradients in the order of the inputs.
#[track_caller]
pub(super) fn check(
    what: &str,
    inputs: &[Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
    ours: impl Fn(&[Tensor], &Tensor) -> Result<(Tensor, Vec<Tensor>)> + Sync,
) {
    check_within(Tolerance::BF16, what, inputs, f, ours);
}

/// Like [`check`], with another tolerance for the `bf16` gradients.
#[track_caller]
pub(super) fn check_within(
    bf16_grads: Tolerance,
    what: &str,
    inputs: &[Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
    ours: impl Fn(&[Tensor], &Tensor) -> Result<(Tensor, Vec<Tensor>)> + Sync,
) {
    check_chain((Tolerance::BF16, bf16_grads), what, inputs, f, ours);
}

/// Like [`check`], with other tolerances for the output and the gradients in `bf16`.
#[track_caller]
pub(super) fn check_chain(
    bf16: (Tolerance, Tolerance),
    what: &str,
    inputs: &[Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
    ours: impl Fn(&[Tensor], &Tensor) -> Result<(Tensor, Vec<Tensor>)> + Sync,
) {
    for (dtype, tolerance, grad_tolerance) in
        [(DType::F32, Tolerance::F32, Tolerance::F32), (DType::BF16, bf16.0, bf16.1)]
    {
        let what = format!("{what} in {dtype:?}");
        let inputs: Vec<Tensor> = inputs.iter().map(|x| operand(x, dtype).unwrap()).collect();
        let wide: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
        let dims = f(&wide).unwrap().dims().to_vec();
        let dy = operand(&random(99, &dims), dtype).unwrap();
        let (want, want_grads) = reference(&wide, &f, &dy).unwrap();
        if dtype == DType::F32 {
            check_reference(&what, &wide, &f, &dy, &want_grads).unwrap();
        }
        let (got, grads) = with_threads(1, || ours(&inputs, &dy)).unwrap();
        assert_eq!(got.dtype(), dtype, "{what}: dtype of the output");
        assert_close(&format!("{what}: output"), &got, &want, tolerance);
        assert_eq!(grads.len(), want_grads.len(), "{what}: number of gradients");
        for (index, (grad, want)) in grads.iter().zip(&want_grads).enumerate() {
            assert_close(&format!("{what}: gradient {index}"), grad, want, grad_tolerance);
        }
        for num_threads in [2, 3] {
            let (again, again_grads) = with_threads(num_threads, || ours(&inputs, &dy)).unwrap();
            assert_eq!(bits(&got), bits(&again), "{what}: output with {num_threads} threads");
            for (index, (grad, again)) in grads.iter().zip(&again_grads).enumerate() {
                let same = bits(grad) == bits(again);
                assert!(same, "{what}: gradient {index} with {num_threads} threads");
            }
        }
    }
}

/// Returns the message of an error, and fails if there is none.
#[track_caller]
pub(super) fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => error.to_string(),
    }
}

/// A table of cosines and sines of arbitrary angles, each `[T, half]`.
pub(super) fn rope_table(t: usize, half: usize) -> super::RopeTable {
    let angles = (random(77, &[t, half]) * 3.0).unwrap();
    super::RopeTable { cos: angles.cos().unwrap(), sin: angles.sin().unwrap() }
}

/// Rotary embedding of `x [T, H, Dh]`, composed of differentiable candle ops.
pub(super) fn rotate_half(x: &Tensor, table: &super::RopeTable) -> Result<Tensor> {
    let half = x.dim(2)? / 2;
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let cos = table.cos.to_dtype(x.dtype())?.unsqueeze(1)?;
    let sin = table.sin.to_dtype(x.dtype())?.unsqueeze(1)?;
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[first, second], 2)
}
