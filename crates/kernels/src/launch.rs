//! Launches of CUDA kernels. An op whose operands are on a GPU ([`on_gpu`]) calls [`launch!`] with the
//! arguments of its kernel, in its own file.
//!
//! With the feature `cuda-emulation`, the kernels run on the host. With neither feature, this code is
//! compiled, and no device has kernels.

#![allow(unsafe_code, reason = "kernels take addresses")]
#![cfg_attr(
    not(any(feature = "cuda", feature = "cuda-emulation")),
    allow(dead_code, reason = "no device has kernels in this build")
)]

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaDevice, cudarc::driver::CudaStream};
use candle_core::{DType, Device, Result, Shape, Storage, Tensor, bail};
use half::bf16;
#[cfg(any(feature = "cuda", feature = "cuda-emulation"))]
use std::ffi::c_void;

/// `launch!(op, launch; arguments)` launches a kernel. Arguments are tensors (their addresses; a null
/// pointer for `None`), `usize` and `bool` (`int`), `f32` (`float`), [`Long`], [`Words`],
/// [`Address`], slices of these, and other types that implement [`KernelArgument`]. The expression of
/// a tensor is its name in errors, unless it is given as `(name, tensor)`. The launch is on the device
/// of the first tensor, or of that of [`Launch::on`].
macro_rules! launch {
    ($op:expr, $launch:expr; $($argument:expr),+ $(,)?) => {{
        use $crate::launch::KernelArgument as _;
        let mut launch: $crate::launch::Launch = $launch;
        $($argument.add_to(&mut launch, ($op, stringify!($argument)))?;)+
        launch.run()
    }};
}
pub(crate) use launch;

/// `launch_elementwise!(op; tensors)` launches the kernel `op` on all elements of these tensors, which
/// have the same shape and dtype. Each block has [`ELEMENTS`].
macro_rules! launch_elementwise {
    ($op:expr; $($tensor:expr),+ $(,)?) => {
        $crate::launch::elementwise(&$op, &[$((stringify!($tensor), $tensor)),+])
    };
}
pub(crate) use launch_elementwise;

/// Device address of the first element of a tensor. Valid while the tensor is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address(pub(crate) u64);

/// Whether the CUDA implementation handles `t`. Inlined, so that a build without kernels has no code
/// that launches them.
#[inline]
pub(crate) fn on_gpu(t: &Tensor) -> bool {
    supports_device(t.device())
}

/// Whether the CUDA implementation handles tensors on `device`, that is, whether it is a GPU.
#[cfg(feature = "cuda")]
pub(crate) fn supports_device(device: &Device) -> bool {
    device.is_cuda()
}

/// Whether the emulated kernels handle CPU tensors: true if the environment variable
/// `TRAINER_EMULATE_CUDA` is set, and inside of [`with_kernels`].
#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
pub(crate) fn supports_device(_: &Device) -> bool {
    static EMULATE: std::sync::LazyLock<bool> =
        std::sync::LazyLock::new(|| std::env::var_os("TRAINER_EMULATE_CUDA").is_some());
    #[cfg(test)]
    if WITH_KERNELS.get() {
        return true;
    }
    *EMULATE
}

#[cfg(not(any(feature = "cuda", feature = "cuda-emulation")))]
#[inline]
pub(crate) fn supports_device(_: &Device) -> bool {
    false
}

/// Whether indices can be checked without a wait for a GPU. Inside of [`with_kernels`] they are not,
/// so that tests see what kernels do with wrong ones.
pub(crate) fn can_be_checked(indices: &Tensor) -> bool {
    #[cfg(all(test, feature = "cuda-emulation", not(feature = "cuda")))]
    if WITH_KERNELS.get() {
        return false;
    }
    indices.device().is_cpu()
}

#[cfg(all(test, feature = "cuda-emulation", not(feature = "cuda")))]
thread_local! {
    static WITH_KERNELS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Calls `run` with ops that launch their kernels on this thread.
#[cfg(all(test, feature = "cuda-emulation", not(feature = "cuda")))]
pub(crate) fn with_kernels<T>(run: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            WITH_KERNELS.set(self.0);
        }
    }
    let _restore = Restore(WITH_KERNELS.replace(true));
    run()
}

/// Returns the address of a contiguous tensor. Fails for dtypes that no kernel supports.
pub(crate) fn address(op: &str, name: &str, t: &Tensor) -> Result<Address> {
    if !t.is_contiguous() {
        bail!("{op}: `{name}` {:?} must be contiguous", t.shape());
    }
    first_address(op, name, t)
}

/// Returns the address of the first element of a tensor that need not be contiguous.
fn first_address(op: &str, name: &str, t: &Tensor) -> Result<Address> {
    let (storage, layout) = t.storage_and_layout();
    let base = base_address(op, name, &storage)?;
    Ok(Address(base + (layout.start_offset() * t.dtype().size_in_bytes()) as u64))
}

#[cfg(feature = "cuda")]
fn base_address(op: &str, name: &str, storage: &Storage) -> Result<u64> {
    use candle_core::backend::BackendStorage as _;
    use candle_core::cuda_backend::cudarc::driver::DevicePtr as _;
    let Storage::Cuda(cuda) = storage else {
        bail!("{op}: `{name}` is on the CPU, expected the GPU of the other operands");
    };
    let stream = cuda.device().cuda_stream();
    // The guards only record use on a stream; there is one stream, and tracking is disabled.
    Ok(match cuda.dtype() {
        DType::F32 => cuda.as_cuda_slice::<f32>()?.device_ptr(&stream).0,
        DType::BF16 => cuda.as_cuda_slice::<bf16>()?.device_ptr(&stream).0,
        DType::U8 => cuda.as_cuda_slice::<u8>()?.device_ptr(&stream).0,
        DType::U32 => cuda.as_cuda_slice::<u32>()?.device_ptr(&stream).0,
        DType::I64 => cuda.as_cuda_slice::<i64>()?.device_ptr(&stream).0,
        DType::F64 => cuda.as_cuda_slice::<f64>()?.device_ptr(&stream).0,
        dtype => bail!("{op}: `{name}` is {dtype:?}, which no kernel supports"),
    })
}

#[cfg(not(feature = "cuda"))]
fn base_address(op: &str, name: &str, storage: &Storage) -> Result<u64> {
    use candle_core::backend::BackendStorage as _;
    let Storage::Cpu(cpu) = storage else {
        bail!("{op}: `{name}` is on a GPU, but emulated kernels need the CPU");
    };
    let at = match cpu.dtype() {
        DType::F32 => cpu.as_slice::<f32>()?.as_ptr() as u64,
        DType::BF16 => cpu.as_slice::<bf16>()?.as_ptr() as u64,
        DType::U8 => cpu.as_slice::<u8>()?.as_ptr() as u64,
        DType::U32 => cpu.as_slice::<u32>()?.as_ptr() as u64,
        DType::I64 => cpu.as_slice::<i64>()?.as_ptr() as u64,
        DType::F64 => cpu.as_slice::<f64>()?.as_ptr() as u64,
        dtype => bail!("{op}: `{name}` is {dtype:?}, which no kernel supports"),
    };
    #[cfg(feature = "cuda-emulation")]
    super::cuda::interpreted::mark(at);
    Ok(at)
}

/// Allocates a tensor on the device of `like` for a kernel to fill. It is uninitialized, or full of
/// NaN under emulation.
pub(crate) fn empty(shape: impl Into<Shape>, dtype: DType, like: &Tensor) -> Result<Tensor> {
    let shape = shape.into();
    // SAFETY: each caller launches a kernel that writes every element that is read.
    let new = unsafe { Tensor::empty(shape, dtype, like.device()) }?;
    #[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
    let new = if dtype.is_float() {
        Tensor::full(f32::NAN, new.shape(), like.device())?.to_dtype(dtype)?
    } else {
        new
    };
    #[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
    super::cuda::interpreted::forget(
        first_address("", "", &new)?.0,
        new.elem_count() * dtype.size_in_bytes(),
    );
    Ok(new)
}

/// Whether rows of `d` elements are 16-byte aligned in all `tensors`.
pub(crate) fn vectors(d: usize, tensors: &[&Tensor]) -> Result<bool> {
    for tensor in tensors {
        let bytes = tensor.dtype().size_in_bytes();
        if !(d * bytes).is_multiple_of(16) || first_address("", "", tensor)?.0 % 16 != 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A value of a kernel's signature.
#[derive(Debug, Clone)]
enum Argument {
    Address(u64),
    Int(i32),
    Long(i64),
    Float(f32),
    Words(Vec<u64>),
}

#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
impl Argument {
    /// Its size as a parameter of a kernel.
    fn bytes(&self) -> usize {
        match self {
            Self::Address(_) | Self::Long(_) => 8,
            Self::Int(_) | Self::Float(_) => 4,
            Self::Words(words) => 8 * words.len(),
        }
    }
}

/// An argument of [`launch!`].
pub(crate) trait KernelArgument {
    /// Appends the value to the arguments of `launch`. `op` and the expression are for errors.
    fn add_to(&self, launch: &mut Launch, of: (&str, &str)) -> Result<()>;
}

/// A `long long` argument.
pub(crate) struct Long(pub(crate) usize);

/// A struct by value, or a `double`, as its memory in words of eight bytes.
pub(crate) struct Words(pub(crate) Vec<u64>);

/// The memory of a struct of arrays, each `most` long; the arrays are in the order of the calls.
pub(crate) struct Arrays {
    most: usize,
    words: Vec<u64>,
}

impl Arrays {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, words: Vec::new() }
    }

    pub(crate) fn longs(&mut self, values: impl Iterator<Item = Result<u64>>) -> Result<()> {
        let end = self.words.len() + self.most;
        for value in values {
            self.words.push(value?);
        }
        self.words.resize(end, 0);
        Ok(())
    }

    /// Two to a word; `length` is even, or this is the last array.
    pub(crate) fn halves(&mut self, length: usize, values: impl Iterator<Item = u32>) {
        let end = self.words.len() + length.div_ceil(2);
        let values: Vec<u32> = values.collect();
        let pairs = values.chunks(2);
        self.words.extend(
            pairs.map(|pair| {
                u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32
            }),
        );
        self.words.resize(end, 0);
    }

    /// The first block of each tensor, and their number, as the last array; also returns the number.
    pub(crate) fn with_blocks(mut self, blocks: impl Iterator<Item = usize>) -> (Words, usize) {
        let (mut firsts, mut next) = (vec![0], 0);
        for blocks in blocks {
            next += blocks;
            firsts.push(u32::try_from(next).expect("a grid has fewer than 2^31 blocks"));
        }
        self.halves(self.most + 1, firsts.into_iter());
        (Words(self.words), next)
    }
}

impl KernelArgument for Tensor {
    fn add_to(&self, launch: &mut Launch, (op, expression): (&str, &str)) -> Result<()> {
        launch.device.get_or_insert_with(|| self.device().clone());
        launch.arguments.push(Argument::Address(address(op, name_of(expression), self)?.0));
        Ok(())
    }
}

/// A tensor whose name is not its expression.
impl KernelArgument for (&str, &Tensor) {
    fn add_to(&self, launch: &mut Launch, (op, _): (&str, &str)) -> Result<()> {
        self.1.add_to(launch, (op, self.0))
    }
}

impl<T: KernelArgument + ?Sized> KernelArgument for &T {
    fn add_to(&self, launch: &mut Launch, of: (&str, &str)) -> Result<()> {
        (**self).add_to(launch, of)
    }
}

impl<T: KernelArgument> KernelArgument for Option<T> {
    fn add_to(&self, launch: &mut Launch, of: (&str, &str)) -> Result<()> {
        match self {
            Some(argument) => argument.add_to(launch, of),
            None => Address(0).add_to(launch, of),
        }
    }
}

impl<T: KernelArgument> KernelArgument for [T] {
    fn add_to(&self, launch: &mut Launch, of: (&str, &str)) -> Result<()> {
        self.iter().try_for_each(|argument| argument.add_to(launch, of))
    }
}

/// Implements [`KernelArgument`] for a type whose values become one [`Argument`].
macro_rules! argument {
    ($type:ty, $value:ident => $argument:expr) => {
        impl KernelArgument for $type {
            fn add_to(&self, launch: &mut Launch, _: (&str, &str)) -> Result<()> {
                let $value = self;
                launch.arguments.push($argument);
                Ok(())
            }
        }
    };
}
argument!(Address, at => Argument::Address(at.0));
argument!(usize, n => Argument::Int(i32::try_from(*n).expect("sizes of a kernel fit in 31 bits")));
argument!(bool, flag => Argument::Int(i32::from(*flag)));
argument!(Long, n => Argument::Long(n.0 as i64));
argument!(f32, x => Argument::Float(*x));
argument!(Words, words => Argument::Words(words.0.clone()));

/// The name of an operand, from its expression: `w` for `&table.w`.
fn name_of(expression: &str) -> &str {
    let last = expression.rsplit('.').next().unwrap_or(expression);
    last.trim_start_matches('&')
}

/// Number of threads of a block that has a row per warp, or [`ELEMENTS`].
pub(crate) const THREADS: u32 = 256;
/// Number of rows of a block that has a row per warp.
pub(crate) const ROWS: usize = 8;
/// Number of elements of a block of an elementwise kernel: 8 per thread, `SHARE` of the kernels.
pub(crate) const ELEMENTS: usize = 8 * THREADS as usize;

/// See [`launch_elementwise!`].
pub(crate) fn elementwise(op: &str, tensors: &[(&str, &Tensor)]) -> Result<()> {
    let first = tensors[0].1;
    super::cpu::compute_dtype(op, tensors)?;
    let all: Vec<&Tensor> = tensors.iter().map(|(_, tensor)| *tensor).collect();
    let mut launch = Launch::new(&version(op, 0, &all)?, first.dtype())
        .grid(first.elem_count().div_ceil(ELEMENTS))
        .threads(THREADS);
    for of in tensors {
        of.1.add_to(&mut launch, (op, of.0))?;
    }
    Long(first.elem_count()).add_to(&mut launch, (op, "n"))?;
    launch.run()
}

/// Name of the version of a kernel: itself, with 16-byte accesses, if rows of `d` elements of these
/// tensors are aligned, else the one for single elements.
pub(crate) fn version(kernel: &str, d: usize, tensors: &[&Tensor]) -> Result<String> {
    Ok(if vectors(d, tensors)? { kernel.to_owned() } else { format!("{kernel}_single") })
}

/// A kernel and its geometry. The kernel is `name_f32` or `name_bf16`, depending on the compute dtype.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    kernel: String,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    arguments: Vec<Argument>,
    /// That of the first tensor.
    device: Option<Device>,
}

impl Launch {
    pub(crate) fn new(name: &str, dtype: DType) -> Self {
        let suffix = if dtype == DType::BF16 { "bf16" } else { "f32" };
        let (kernel, arguments) = (format!("{name}_{suffix}"), Vec::new());
        Self { kernel, grid: [1; 3], threads: 32, shared: 0, arguments, device: None }
    }

    /// One warp for each of `n` rows of `d` elements, in the [`version`] for the tensors whose rows
    /// are accessed.
    pub(crate) fn for_rows(name: &str, (n, d): (usize, usize), rows: &[&Tensor]) -> Result<Self> {
        let name = version(name, d, rows)?;
        Ok(Self::new(&name, rows[0].dtype()).grid(n.div_ceil(ROWS)).threads(THREADS))
    }

    /// Sets a one-dimensional grid.
    pub(crate) fn grid(self, blocks: usize) -> Self {
        self.grid3([blocks, 1, 1])
    }

    /// Sets the grid in `x`, `y` and `z`. The last two must be at most 65,535.
    pub(crate) fn grid3(mut self, blocks: [usize; 3]) -> Self {
        assert!(
            blocks[1..].iter().all(|blocks| *blocks < 1 << 16),
            "grid {blocks:?} exceeds the limit of 65,535"
        );
        self.grid = blocks
            .map(|blocks| i32::try_from(blocks).expect("a grid has fewer than 2^31 blocks") as u32);
        self
    }

    /// Sets the number of threads per block: whole warps, at most 1024.
    pub(crate) fn threads(mut self, threads: u32) -> Self {
        self.threads = threads;
        self
    }

    /// Sets the number of bytes of dynamic shared memory.
    pub(crate) fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes as u32;
        self
    }

    /// Sets the device, unless an earlier tensor has set it.
    pub(crate) fn on(mut self, tensor: &Tensor) -> Self {
        self.device.get_or_insert_with(|| tensor.device().clone());
        self
    }

    /// Launches the kernel. Does nothing if the grid has no blocks.
    #[cfg(feature = "cuda")]
    pub(crate) fn run(mut self) -> Result<()> {
        match self.device.take() {
            Some(Device::Cuda(device)) => self.run_on(&device, &device.cuda_stream()),
            _ => bail!("{}: found operands on the CPU, expected a GPU", self.kernel),
        }
    }

    /// Launches the kernel on `stream` of `device`. Does nothing if the grid has no blocks.
    #[cfg(feature = "cuda")]
    pub(crate) fn run_on(mut self, device: &CudaDevice, stream: &CudaStream) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        tracing::trace!(kernel = self.kernel, "launch");
        let mut arguments = pointers(&mut self.arguments);
        start(&self.kernel, self.grid, self.threads, self.shared, &mut arguments, device, stream)
    }

    /// Runs the kernel on the host. Does nothing if the grid has no blocks.
    #[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
    pub(crate) fn run(mut self) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        tracing::trace!(kernel = self.kernel, "launch");
        let sizes: Vec<usize> = self.arguments.iter().map(Argument::bytes).collect();
        let mut arguments = pointers(&mut self.arguments);
        start(&self.kernel, self.grid, self.threads, self.shared, &mut arguments, &sizes)
    }

    #[cfg(not(any(feature = "cuda", feature = "cuda-emulation")))]
    pub(crate) fn run(self) -> Result<()> {
        unreachable!("no device has kernels in this build: {self:?}")
    }
}

/// Addresses of the values of all arguments.
#[cfg(any(feature = "cuda", feature = "cuda-emulation"))]
fn pointers(arguments: &mut [Argument]) -> Vec<*mut c_void> {
    let pointer = |argument: &mut Argument| match argument {
        Argument::Address(value) => std::ptr::from_mut(value).cast(),
        Argument::Int(value) => std::ptr::from_mut(value).cast(),
        Argument::Long(value) => std::ptr::from_mut(value).cast(),
        Argument::Float(value) => std::ptr::from_mut(value).cast(),
        Argument::Words(value) => value.as_mut_ptr().cast(),
    };
    arguments.iter_mut().map(pointer).collect()
}

#[cfg(feature = "cuda")]
fn start(
    kernel: &str,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    arguments: &mut [*mut c_void],
    device: &CudaDevice,
    stream: &CudaStream,
) -> Result<()> {
    use candle_core::cuda_backend::cudarc::driver::result::launch_kernel;
    let failed = |error| candle_core::Error::msg(format!("{kernel} {grid:?}x{threads}: {error}"));
    stream.context().bind_to_thread().map_err(failed)?;
    let function = super::cuda::module::function(device, kernel, shared)?;
    // SAFETY: the arguments match the signature of the kernel. The tensors outlive the kernel,
    // because their memory is freed on the same stream, or after this stream is done with them.
    let launched = unsafe {
        launch_kernel(
            function.cu_function(),
            grid.into(),
            (threads, 1, 1),
            shared,
            stream.cu_stream(),
            arguments,
        )
    };
    launched.map_err(failed)
}

#[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
fn start(
    kernel: &str,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    arguments: &mut [*mut c_void],
    sizes: &[usize],
) -> Result<()> {
    unsafe extern "C" {
        fn trainer_emulation_launch(
            name: *const std::ffi::c_char,
            grid: *const u32,
            threads: u32,
            shared: u32,
            arguments: *mut *mut c_void,
        ) -> i32;
        fn trainer_emulation_error() -> *const std::ffi::c_char;
    }
    super::cuda::select::Gpu::of(&Device::Cpu)?; // an unknown one has no kernels
    if super::cuda::interpreted::is_on() {
        return super::cuda::interpreted::launch(kernel, grid, threads, shared, arguments, sizes);
    }
    let name = std::ffi::CString::new(kernel).expect("kernel names contain no NUL");
    // SAFETY: the arguments match the signature of the kernel, and the caller borrows the tensors.
    let code = unsafe {
        trainer_emulation_launch(
            name.as_ptr(),
            grid.as_ptr(),
            threads,
            shared,
            arguments.as_mut_ptr(),
        )
    };
    match code {
        0 => Ok(()),
        1 => bail!("no kernel has the name `{kernel}`"),
        _ => {
            // SAFETY: the text belongs to this thread until its next launch.
            let error = unsafe { std::ffi::CStr::from_ptr(trainer_emulation_error()) };
            bail!("emulation: {}", error.to_string_lossy())
        }
    }
}
