//! Addresses of tensors, and kernel launches.

#![expect(unsafe_code, reason = "kernels take addresses")]

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{CudaDevice, cudarc::driver::CudaStream};
use candle_core::{DType, Device, Result, Shape, Storage, Tensor, bail};
use half::bf16;
use std::ffi::c_void;

/// Device address of the first element of a tensor. Valid while the tensor is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address(pub(super) u64);

/// Whether the CUDA implementation handles `t`.
pub(crate) fn on_gpu(t: &Tensor) -> bool {
    supports_device(t.device())
}

/// Whether the CUDA implementation handles tensors on `device`, that is, whether it is a GPU.
#[cfg(feature = "cuda")]
pub(crate) fn supports_device(device: &Device) -> bool {
    device.is_cuda()
}

/// Whether the emulated kernels handle CPU tensors: true if the environment variable
/// `TRAINER_EMULATE_CUDA` is set.
#[cfg(not(feature = "cuda"))]
pub(crate) fn supports_device(_: &Device) -> bool {
    static EMULATE: std::sync::LazyLock<bool> =
        std::sync::LazyLock::new(|| std::env::var_os("TRAINER_EMULATE_CUDA").is_some());
    *EMULATE
}

/// Returns the address of a contiguous tensor. Fails for dtypes that no kernel supports.
pub(super) fn address(op: &str, name: &str, t: &Tensor) -> Result<Address> {
    if !t.is_contiguous() {
        bail!("{op}: `{name}` {:?} must be contiguous", t.shape());
    }
    first_address(op, name, t)
}

/// Returns the address of the first element of a tensor that need not be contiguous.
pub(super) fn first_address(op: &str, name: &str, t: &Tensor) -> Result<Address> {
    let (storage, layout) = t.storage_and_layout();
    let base = base_address(op, name, &storage)?;
    Ok(Address(base + (layout.start_offset() * t.dtype().size_in_bytes()) as u64))
}

/// Returns the address of a matrix `[N, M]` that may be columns of a wider one, and the number of
/// elements from one row to the next.
pub(super) fn rows_at(op: &str, name: &str, t: &Tensor) -> Result<(Address, usize)> {
    match *t.stride() {
        [row, 1] => Ok((first_address(op, name, t)?, row)),
        _ => Ok((address(op, name, t)?, t.dim(1)?)),
    }
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
    super::interpreted::mark(at);
    Ok(at)
}

/// Allocates a tensor on the device of `like` for a kernel to fill. It is uninitialized, or full of
/// NaN under emulation.
pub(super) fn empty(shape: impl Into<Shape>, dtype: DType, like: &Tensor) -> Result<Tensor> {
    let shape = shape.into();
    // SAFETY: each caller launches a kernel that writes every element.
    let new = unsafe { Tensor::empty(shape, dtype, like.device()) }?;
    #[cfg(not(feature = "cuda"))]
    let new = if dtype.is_float() {
        Tensor::full(f32::NAN, new.shape(), like.device())?.to_dtype(dtype)?
    } else {
        new
    };
    #[cfg(all(feature = "cuda-emulation", not(feature = "cuda")))]
    super::interpreted::forget(
        first_address("", "", &new)?.0,
        new.elem_count() * dtype.size_in_bytes(),
    );
    Ok(new)
}

/// Whether rows of `d` elements are 16-byte aligned in all `tensors`.
pub(super) fn vectors(d: usize, tensors: &[&Tensor]) -> Result<bool> {
    for tensor in tensors {
        let bytes = tensor.dtype().size_in_bytes();
        if !(d * bytes).is_multiple_of(16) || first_address("", "", tensor)?.0 % 16 != 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

#[derive(Debug, Clone)]
enum Argument {
    Address(u64),
    Int(i32),
    Long(i64),
    Float(f32),
    Words(Vec<u64>),
}

#[cfg(not(feature = "cuda"))]
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

/// A kernel launch. The kernel is `name_f32` or `name_bf16`, depending on the compute dtype.
#[derive(Debug, Clone)]
pub(super) struct Launch {
    kernel: String,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    arguments: Vec<Argument>,
}

impl Launch {
    pub(super) fn new(name: &str, dtype: DType) -> Self {
        let suffix = if dtype == DType::BF16 { "bf16" } else { "f32" };
        let kernel = format!("{name}_{suffix}");
        Self { kernel, grid: [1; 3], threads: 32, shared: 0, arguments: Vec::new() }
    }

    /// Sets a one-dimensional grid.
    pub(super) fn grid(self, blocks: usize) -> Self {
        self.grid3([blocks, 1, 1])
    }

    /// Sets the grid in `x`, `y` and `z`. The last two must be at most 65,535.
    pub(super) fn grid3(mut self, blocks: [usize; 3]) -> Self {
        assert!(
            blocks[1..].iter().all(|blocks| *blocks < 1 << 16),
            "grid {blocks:?} exceeds the limit of 65,535"
        );
        self.grid = blocks
            .map(|blocks| i32::try_from(blocks).expect("a grid has fewer than 2^31 blocks") as u32);
        self
    }

    /// Sets the number of threads per block: whole warps, at most 1024.
    pub(super) fn threads(mut self, threads: u32) -> Self {
        self.threads = threads;
        self
    }

    /// Sets the number of bytes of dynamic shared memory.
    pub(super) fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes as u32;
        self
    }

    fn with(mut self, argument: Argument) -> Self {
        self.arguments.push(argument);
        self
    }

    pub(super) fn address(self, address: Address) -> Self {
        self.with(Argument::Address(address.0))
    }

    /// Adds an address argument, or a null pointer for `None`.
    pub(super) fn optional(self, op: &str, name: &str, t: Option<&Tensor>) -> Result<Self> {
        let address = match t {
            Some(t) => address(op, name, t)?,
            None => Address(0),
        };
        Ok(self.address(address))
    }

    /// Adds an `int` argument.
    pub(super) fn int(self, value: usize) -> Self {
        self.with(Argument::Int(i32::try_from(value).expect("sizes of a kernel fit in 31 bits")))
    }

    /// Adds a `long long` argument.
    pub(super) fn long(self, value: usize) -> Self {
        self.with(Argument::Long(value as i64))
    }

    /// Adds a `float` argument.
    pub(super) fn float(self, value: f32) -> Self {
        self.with(Argument::Float(value))
    }

    /// Adds an `int` argument that is 0 or 1.
    pub(super) fn flag(self, value: bool) -> Self {
        self.with(Argument::Int(i32::from(value)))
    }

    /// Adds a struct by value, or a `double`, as its memory in words of eight bytes.
    pub(super) fn words(self, value: Vec<u64>) -> Self {
        self.with(Argument::Words(value))
    }

    /// Launches the kernel on the device of `on`. Does nothing if the grid has no blocks.
    #[cfg(feature = "cuda")]
    pub(super) fn run(self, on: &Tensor) -> Result<()> {
        let Device::Cuda(device) = on.device() else {
            bail!("{}: found operands on the CPU, expected a GPU", self.kernel);
        };
        self.run_on(device, &device.cuda_stream())
    }

    /// Launches the kernel on `stream` of `device`. Does nothing if the grid has no blocks.
    #[cfg(feature = "cuda")]
    pub(super) fn run_on(mut self, device: &CudaDevice, stream: &CudaStream) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        let mut arguments = pointers(&mut self.arguments);
        start(&self.kernel, self.grid, self.threads, self.shared, &mut arguments, device, stream)
    }

    /// Runs the kernel on the host. Does nothing if the grid has no blocks.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn run(mut self, _: &Tensor) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        let sizes: Vec<usize> = self.arguments.iter().map(Argument::bytes).collect();
        let mut arguments = pointers(&mut self.arguments);
        start(&self.kernel, self.grid, self.threads, self.shared, &mut arguments, &sizes)
    }
}

/// Addresses of the values of all arguments.
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
    let function = super::module::function(device, kernel, shared)?;
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

#[cfg(not(feature = "cuda"))]
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
    super::select::Gpu::of(&Device::Cpu)?; // an unknown one has no kernels
    #[cfg(feature = "cuda-emulation")]
    if super::interpreted::is_on() {
        return super::interpreted::launch(kernel, grid, threads, shared, arguments, sizes);
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
