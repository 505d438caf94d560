//! Lists of numbers on the device, which depend on the boundaries of segments. They are cached,
//! because every layer of a step uses the same ones.

use crate::upload;
use candle_core::{Result, Tensor};
use std::sync::{Mutex, PoisonError};

/// Maximum number of cached lists of a kind: those of a few batches.
const KEPT: usize = 16;

/// The cached lists of a kind, most recently used first, with the keys that they depend on.
pub(super) struct Uploaded<K>(Mutex<Vec<(K, Tensor)>>);

impl<K: PartialEq> Uploaded<K> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Returns the list of `key` in rows of `width` on the device of `on`, from the cache if it is
    /// there.
    pub(super) fn get(
        &self,
        key: K,
        width: usize,
        on: &Tensor,
        list: impl FnOnce(&K) -> Vec<u32>,
    ) -> Result<Tensor> {
        let mut uploaded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Compare devices, not GPU ordinals: a GPU that was opened twice has two unsynchronized
        // streams.
        let device = on.device();
        let known =
            |(cached, list): &(K, Tensor)| *cached == key && list.device().same_device(device);
        let found = if let Some(at) = uploaded.iter().position(known) {
            uploaded.remove(at)
        } else {
            let list = list(&key);
            let shape = (list.len() / width, width);
            (key, upload(list, shape, device)?)
        };
        let list = found.1.clone();
        uploaded.insert(0, found);
        uploaded.truncate(KEPT);
        Ok(list)
    }
}
