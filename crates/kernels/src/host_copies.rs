//! Copies from host memory to tensors, at the same time as the work on other tensors.

use candle_core::{Device, Result, Tensor};

/// Copies from host memory to tensors of a device. On a GPU they run on a stream of their own,
/// which nothing orders with the work on tensors except [`Self::begin`] and
/// [`Self::tensors_wait_for`]. On the CPU a copy is done on return.
pub struct HostCopies {
    #[cfg(feature = "cuda")]
    side: Option<super::SideStream>,
}

impl HostCopies {
    /// Prepares copies to `device`, with `marks` numbers for [`Self::record`].
    pub fn new(device: &Device, marks: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if !device.is_cpu() {
            let side = super::SideStream::new(device)?;
            (0..marks).try_for_each(|mark| side.record(mark))?;
            return Ok(Self { side: Some(side) });
        }
        let _ = (device, marks);
        Ok(Self {
            #[cfg(feature = "cuda")]
            side: None,
        })
    }

    /// Makes later copies wait for all earlier work on tensors.
    pub fn begin(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(side) = &self.side {
            side.wait_for_tensors()?;
        }
        Ok(())
    }

    /// Copies `from`, in host memory, to `to`, a contiguous tensor of the same dtype and number of
    /// elements. The copy may still be in progress on return, but `from` is no longer needed.
    pub fn copy(&self, from: &Tensor, to: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(side) = &self.side {
            super::gpu::check_copy(from, to)?;
            return super::with_bytes(from, |bytes| side.upload(bytes, to))?;
        }
        super::copy_from_host(from, to)
    }

    /// Records the earlier copies as number `mark`, in place of what this number stood for.
    pub fn record(&self, mark: usize) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(side) = &self.side {
            side.record(mark)?;
        }
        let _ = mark;
        Ok(())
    }

    /// Makes later work on tensors wait for the copies that were recorded as `mark`.
    pub fn tensors_wait_for(&self, mark: usize) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(side) = &self.side {
            side.tensors_wait_for(mark)?;
        }
        let _ = mark;
        Ok(())
    }

    /// Makes later work on tensors, such as freeing them, wait for all earlier copies.
    pub fn tensors_wait(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(side) = &self.side {
            side.tensors_wait()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, values};
    use super::*;
    use candle_core::DType;

    #[test]
    fn copies_wait_for_earlier_work_on_their_target_and_later_work_for_them() {
        let device = device();
        let copies = HostCopies::new(&device, 2).unwrap();
        let len = (1 << 20) + 3;
        let host = |offset: usize| {
            let values: Vec<f32> = (0..len).map(|at| ((at + offset) % 8191) as f32).collect();
            Tensor::from_vec(values, len, &Device::Cpu).unwrap()
        };
        let slots = [(); 2].map(|()| Tensor::zeros(len, DType::F32, &device).unwrap());
        for round in 0..6 {
            let (slot, from) = (&slots[round % 2], host(round));
            let before = slot.affine(1.0, 0.0).unwrap(); // must have the values before the copy
            copies.begin().unwrap();
            copies.copy(&from, slot).unwrap();
            copies.record(round % 2).unwrap();
            copies.tensors_wait_for(round % 2).unwrap();
            assert_eq!(values(&slot.affine(1.0, 0.0).unwrap()), values(&from), "{round}");
            if round >= 2 {
                assert_eq!(values(&before), values(&host(round - 2)), "{round}");
            }
        }
    }
}
