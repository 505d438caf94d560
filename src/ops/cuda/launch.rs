//! Tensors as addresses, and kernels as calls.

#![expect(unsafe_code, reason = "kernels take addresses")]

use candle_core::{DType, Device, Result, Shape, Storage, Tensor, bail};
use half::bf16;
use std::ffi::c_void;

/// Where a tensor's first element is, in the memory of its device. Valid while the tensor lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address(pub(super) u64);

/// Whether the kernels take `t`.
pub(in crate::ops) fn on_gpu(t: &Tensor) -> bool {
    takes(t.device())
}

/// Whether the kernels take tensors on `device`: it is a GPU.
#[cfg(feature = "cuda")]
pub(in crate::ops) fn takes(device: &Device) -> bool {
    device.is_cuda()
}

/// Whether the kernels take tensors on `device`: any, if the environment has `TRAINER_EMULATE_CUDA`.
#[cfg(not(feature = "cuda"))]
pub(in crate::ops) fn takes(_: &Device) -> bool {
    static EMULATE: std::sync::LazyLock<bool> =
        std::sync::LazyLock::new(|| std::env::var_os("TRAINER_EMULATE_CUDA").is_some());
    *EMULATE
}

/// The address of a contiguous tensor of any dtype that kernels know.
pub(super) fn address(op: &str, name: &str, t: &Tensor) -> Result<Address> {
    let (storage, layout) = t.storage_and_layout();
    let Some((start, _)) = layout.contiguous_offsets() else {
        bail!("{op}: `{name}` {:?} must be contiguous", layout.shape());
    };
    let base = base_address(op, name, &storage)?;
    Ok(Address(base + (start * t.dtype().size_in_bytes()) as u64))
}

#[cfg(feature = "cuda")]
fn base_address(op: &str, name: &str, storage: &Storage) -> Result<u64> {
    use candle_core::backend::BackendStorage as _;
    use candle_core::cuda_backend::cudarc::driver::DevicePtr as _;
    let Storage::Cuda(cuda) = storage else {
        bail!("{op}: `{name}` is on the CPU, expected the GPU of the other operands");
    };
    let stream = cuda.device().cuda_stream();
    // The guards record use on a stream; there is only one, and tracking is off.
    Ok(match cuda.dtype() {
        DType::F32 => cuda.as_cuda_slice::<f32>()?.device_ptr(&stream).0,
        DType::BF16 => cuda.as_cuda_slice::<bf16>()?.device_ptr(&stream).0,
        DType::U32 => cuda.as_cuda_slice::<u32>()?.device_ptr(&stream).0,
        DType::I64 => cuda.as_cuda_slice::<i64>()?.device_ptr(&stream).0,
        DType::F64 => cuda.as_cuda_slice::<f64>()?.device_ptr(&stream).0,
        dtype => bail!("{op}: `{name}` is {dtype:?}, which no kernel takes"),
    })
}

#[cfg(not(feature = "cuda"))]
fn base_address(op: &str, name: &str, storage: &Storage) -> Result<u64> {
    use candle_core::backend::BackendStorage as _;
    let Storage::Cpu(cpu) = storage else {
        bail!("{op}: `{name}` is not on the CPU, where kernels are emulated");
    };
    Ok(match cpu.dtype() {
        DType::F32 => cpu.as_slice::<f32>()?.as_ptr() as u64,
        DType::BF16 => cpu.as_slice::<bf16>()?.as_ptr() as u64,
        DType::U32 => cpu.as_slice::<u32>()?.as_ptr() as u64,
        DType::I64 => cpu.as_slice::<i64>()?.as_ptr() as u64,
        DType::F64 => cpu.as_slice::<f64>()?.as_ptr() as u64,
        dtype => bail!("{op}: `{name}` is {dtype:?}, which no kernel takes"),
    })
}

/// A tensor beside `like` that a kernel will fill: uninitialised, under emulation full of NaNs.
pub(super) fn empty(shape: impl Into<Shape>, dtype: DType, like: &Tensor) -> Result<Tensor> {
    let shape = shape.into();
    #[cfg(not(feature = "cuda"))]
    if dtype.is_float() {
        return Tensor::full(f32::NAN, shape, like.device())?.to_dtype(dtype);
    }
    // SAFETY: whoever asks for it launches a kernel that writes every element.
    unsafe { Tensor::empty(shape, dtype, like.device()) }
}

/// Whether rows of `d` elements of all `tensors` begin at multiples of 16 bytes.
pub(super) fn vectors(d: usize, tensors: &[&Tensor]) -> Result<bool> {
    for tensor in tensors {
        let bytes = tensor.dtype().size_in_bytes();
        if !(d * bytes).is_multiple_of(16) || address("", "", tensor)?.0 % 16 != 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// One argument, as the kernel's signature has it.
#[derive(Debug, Clone)]
enum Argument {
    Address(u64),
    Int(i32),
    Long(i64),
    Float(f32),
    Words(Vec<u64>),
}

/// A call of a kernel: `name_f32` or `name_bf16`, after the compute dtype.
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

    /// Blocks, in a row.
    pub(super) fn grid(self, blocks: usize) -> Self {
        self.grid3([blocks, 1, 1])
    }

    /// Blocks, in `x`, `y` and `z`; the last two take at most 65,535.
    pub(super) fn grid3(mut self, blocks: [usize; 3]) -> Self {
        assert!(blocks[1..].iter().all(|blocks| *blocks < 1 << 16), "a grid is {blocks:?} blocks");
        self.grid = blocks
            .map(|blocks| i32::try_from(blocks).expect("a grid has less than 2^31 blocks") as u32);
        self
    }

    /// Threads of a block: whole warps, at most 1024.
    pub(super) fn threads(mut self, threads: u32) -> Self {
        self.threads = threads;
        self
    }

    /// Bytes of dynamic shared memory.
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

    /// A null pointer for `None`.
    pub(super) fn optional(self, op: &str, name: &str, t: Option<&Tensor>) -> Result<Self> {
        let address = match t {
            Some(t) => address(op, name, t)?,
            None => Address(0),
        };
        Ok(self.address(address))
    }

    /// An `int`.
    pub(super) fn int(self, value: usize) -> Self {
        self.with(Argument::Int(i32::try_from(value).expect("sizes of a kernel fit in 31 bits")))
    }

    /// An `unsigned`.
    pub(super) fn bits(self, value: u32) -> Self {
        self.with(Argument::Int(value as i32))
    }

    /// A `long long`.
    pub(super) fn long(self, value: usize) -> Self {
        self.with(Argument::Long(value as i64))
    }

    /// A `float`.
    pub(super) fn float(self, value: f32) -> Self {
        self.with(Argument::Float(value))
    }

    /// An `int`, 0 or 1.
    pub(super) fn flag(self, value: bool) -> Self {
        self.with(Argument::Int(i32::from(value)))
    }

    /// A struct by value, or a `double`: its memory, in words of eight bytes.
    pub(super) fn words(self, value: Vec<u64>) -> Self {
        self.with(Argument::Words(value))
    }

    /// Starts it on the device of `on`; a grid without blocks is nothing to do.
    pub(super) fn run(mut self, on: &Tensor) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        let mut arguments: Vec<*mut c_void> = self
            .arguments
            .iter_mut()
            .map(|argument| match argument {
                Argument::Address(value) => std::ptr::from_mut(value).cast(),
                Argument::Int(value) => std::ptr::from_mut(value).cast(),
                Argument::Long(value) => std::ptr::from_mut(value).cast(),
                Argument::Float(value) => std::ptr::from_mut(value).cast(),
                Argument::Words(value) => value.as_mut_ptr().cast(),
            })
            .collect();
        start(&self.kernel, self.grid, self.threads, self.shared, &mut arguments, on)
    }
}

#[cfg(feature = "cuda")]
fn start(
    kernel: &str,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    arguments: &mut [*mut c_void],
    on: &Tensor,
) -> Result<()> {
    use candle_core::cuda_backend::cudarc::driver::result::launch_kernel;
    let Device::Cuda(device) = on.device() else {
        bail!("{kernel}: no operand is on a GPU");
    };
    let failed = |error| candle_core::Error::msg(format!("{kernel} {grid:?}x{threads}: {error}"));
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().map_err(failed)?;
    let function = super::module::function(device, kernel, shared)?;
    // SAFETY: the arguments are those of the kernel's signature, and the tensors outlive the work on their stream:
    // memory is freed on the same one.
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
    _: &Tensor,
) -> Result<()> {
    unsafe extern "C" {
        fn trainer_emulation_launch(
            name: *const std::ffi::c_char,
            grid: *const u32,
            threads: u32,
            shared: u32,
            arguments: *mut *mut c_void,
        ) -> i32;
    }
    let name = std::ffi::CString::new(kernel).expect("names of kernels hold no zero");
    // SAFETY: the arguments are those of the kernel's signature, and the tensors are borrowed by the caller.
    let unknown = unsafe {
        trainer_emulation_launch(
            name.as_ptr(),
            grid.as_ptr(),
            threads,
            shared,
            arguments.as_mut_ptr(),
        )
    };
    if unknown != 0 {
        bail!("no kernel is called `{kernel}`");
    }
    Ok(())
}
