//! Memory and streams of a GPU, as the sums use them.

use candle_core::{Result, Tensor};
use std::ffi::c_void;
use std::ops::Range;

/// A CUDA stream (`cudaStream_t`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream(pub(super) *mut c_void);

/// A range of `f32` in the memory of a device. It is valid while its tensor exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    address: u64,
    len: usize,
}

impl Span {
    pub(super) fn address(self) -> u64 {
        self.address
    }

    pub(super) fn len(self) -> usize {
        self.len
    }

    /// The elements `range` of this span.
    pub(super) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        Self { address: self.address + 4 * range.start as u64, len: range.len() }
    }
}

/// The compute stream of a device, on which all its tensors are used, and the communication stream.
/// No function waits for the device.
///
/// Candle does not track which stream uses which tensor: `ops::open_gpu` switches that off. The
/// order is right nevertheless, because the communication stream uses only two kinds of memory:
///
/// - Tensors that were passed to `start_sum`. The communication stream waits for an event of the
///   compute stream first, so earlier writes are visible. The callers use the tensors again only
///   after `wait`, which makes the compute stream wait for the communication stream. `Sums` keeps
///   the tensors until then, and the memory of a tensor is freed on the compute stream, so the
///   memory is reused only after the sum.
/// - Two buffers that are allocated once. After their creation on the compute stream, only the
///   communication stream uses them. They are freed when it is idle.
pub(super) trait Streams: Send + Sync {
    /// Makes the device current on this thread, as NCCL requires.
    fn bind(&self) -> Result<()>;

    /// The communication stream.
    fn communication(&self) -> Stream;

    /// Address of a tensor on the device. Fails if it is not `f32` or not contiguous.
    fn address(&self, tensor: &Tensor) -> Result<u64>;

    /// The memory of a tensor, as [`Self::address`].
    fn span(&self, tensor: &Tensor) -> Result<Span> {
        Ok(Span { address: self.address(tensor)?, len: tensor.elem_count() })
    }

    /// Makes the communication stream wait for all earlier work of the compute stream.
    fn communication_waits(&self) -> Result<()>;

    /// Makes the compute stream wait for all earlier work of the communication stream.
    fn compute_waits(&self) -> Result<()>;

    /// Copies `from` to `to` on the communication stream. The spans have the same length.
    fn copy(&self, from: Span, to: Span) -> Result<()>;

    /// Adds `from` to `to` on the communication stream. The spans have the same length.
    fn add(&self, from: Span, to: Span) -> Result<()>;

    /// Whether all work of the communication stream is done.
    fn is_idle(&self) -> Result<bool>;
}

#[cfg(feature = "cuda")]
impl Streams for crate::ops::SideStream {
    fn bind(&self) -> Result<()> {
        self.bind_to_thread()
    }

    fn communication(&self) -> Stream {
        Stream(self.handle())
    }

    fn address(&self, tensor: &Tensor) -> Result<u64> {
        self.address_f32(tensor)
    }

    fn communication_waits(&self) -> Result<()> {
        self.wait_for_tensors()
    }

    fn compute_waits(&self) -> Result<()> {
        self.tensors_wait()
    }

    fn copy(&self, from: Span, to: Span) -> Result<()> {
        assert_eq!(from.len(), to.len());
        self.copy_f32(from.address(), to.address(), from.len())
    }

    fn add(&self, from: Span, to: Span) -> Result<()> {
        assert_eq!(from.len(), to.len());
        self.add_f32(from.address(), to.address(), from.len())
    }

    fn is_idle(&self) -> Result<bool> {
        self.is_done()
    }
}
