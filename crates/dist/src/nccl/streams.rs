//! Memory and streams of a GPU, as the sums use them.

use candle_core::{DType, Result, Tensor, bail};
use std::ffi::c_void;
use std::ops::Range;

/// A CUDA stream (`cudaStream_t`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream(pub(super) *mut c_void);

/// What a [`Span`] consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    F32,
    Byte,
}

/// A range of `f32`, or of bytes, in the memory of a device. It is valid while its tensor exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    address: u64,
    len: usize,
    unit: Unit,
}

impl Span {
    pub(super) fn address(self) -> u64 {
        self.address
    }

    /// Length in units.
    pub(super) fn len(self) -> usize {
        self.len
    }

    pub(super) fn unit(self) -> Unit {
        self.unit
    }

    pub(super) fn num_bytes(self) -> usize {
        match self.unit {
            Unit::F32 => 4 * self.len,
            Unit::Byte => self.len,
        }
    }

    /// The units `range` of this span.
    pub(super) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        let before = Self { len: range.start, ..self }.num_bytes() as u64;
        Self { address: self.address + before, len: range.len(), ..self }
    }
}

/// The compute stream of a device, on which all its tensors are used, and the communication stream.
/// No function waits for the device.
///
/// Candle does not track which stream uses which tensor: `kernels::open_gpu` switches that off. The
/// order is right nevertheless, because the communication stream uses only two kinds of memory:
///
/// - Tensors that were passed to a call that starts an operation. The communication stream waits
///   for an event of the compute stream first, so earlier writes are visible. The callers use the
///   tensors again only after `wait` or `wait_for`, which makes the compute stream wait for the
///   communication stream. `Sums` keeps the tensors until then, and the memory of a tensor is freed
///   on the compute stream, so the memory is reused only after the operation.
/// - Two buffers that are allocated once. After their creation on the compute stream, only the
///   communication stream uses them. They are freed when it is idle.
pub(super) trait Streams: Send + Sync {
    /// Makes the device current on this thread, as NCCL requires.
    fn bind(&self) -> Result<()>;

    /// The communication stream.
    fn communication(&self) -> Stream;

    /// Address of a tensor on the device, in `f32`, `bf16` or `u8`. Fails if it is not contiguous.
    fn address(&self, tensor: &Tensor) -> Result<u64>;

    /// The memory of an `f32` tensor, as [`Self::address`].
    fn span(&self, tensor: &Tensor) -> Result<Span> {
        if tensor.dtype() != DType::F32 {
            bail!("found {:?} {:?}, expected contiguous F32", tensor.dtype(), tensor.layout());
        }
        let len = tensor.elem_count();
        Ok(Span { address: self.address(tensor)?, len, unit: Unit::F32 })
    }

    /// The bytes of a tensor, as [`Self::address`].
    fn bytes(&self, tensor: &Tensor) -> Result<Span> {
        let len = tensor.elem_count() * tensor.dtype().size_in_bytes();
        Ok(Span { address: self.address(tensor)?, len, unit: Unit::Byte })
    }

    /// Makes the communication stream wait for all earlier work of the compute stream.
    fn communication_waits(&self) -> Result<()>;

    /// Makes the compute stream wait for all earlier work of the communication stream.
    fn compute_waits(&self) -> Result<()>;

    /// Records the earlier work of the communication stream as number `mark`, in place of what this
    /// number stood for. A new number is one above all before it, from 0.
    fn record(&self, mark: usize) -> Result<()>;

    /// Makes the compute stream wait for the work that was recorded as `mark`.
    fn compute_waits_for(&self, mark: usize) -> Result<()>;

    /// Copies `from` to `to` on the communication stream. The spans have the same length.
    fn copy(&self, from: Span, to: Span) -> Result<()>;

    /// Adds `from` to `to`, both `f32`, on the communication stream. The spans have the same
    /// length.
    fn add(&self, from: Span, to: Span) -> Result<()>;

    /// Whether all work of the communication stream is done.
    fn is_idle(&self) -> Result<bool>;
}

#[cfg(feature = "cuda")]
impl Streams for kernels::SideStream {
    fn bind(&self) -> Result<()> {
        self.bind_to_thread()
    }

    fn communication(&self) -> Stream {
        Stream(self.handle())
    }

    fn address(&self, tensor: &Tensor) -> Result<u64> {
        Self::address(self, tensor)
    }

    fn communication_waits(&self) -> Result<()> {
        self.wait_for_tensors()
    }

    fn compute_waits(&self) -> Result<()> {
        self.tensors_wait()
    }

    fn record(&self, mark: usize) -> Result<()> {
        Self::record(self, mark)
    }

    fn compute_waits_for(&self, mark: usize) -> Result<()> {
        self.tensors_wait_for(mark)
    }

    fn copy(&self, from: Span, to: Span) -> Result<()> {
        assert_eq!((from.len(), from.unit()), (to.len(), to.unit()));
        Self::copy(self, from.address(), to.address(), from.num_bytes())
    }

    fn add(&self, from: Span, to: Span) -> Result<()> {
        assert_eq!((from.len(), from.unit(), to.unit()), (to.len(), Unit::F32, Unit::F32));
        self.add_f32(from.address(), to.address(), from.len())
    }

    fn is_idle(&self) -> Result<bool> {
        self.is_done()
    }
}
