//! What the layers keep of the tokens of one sample so far, for generation: keys and values, and
//! the states of linear attention.

use batch::CuSeqlens;
use candle_core::{DType, Result, Tensor, bail};
use kernels::{CONV_TAPS, DeltaHeads};
use std::collections::BTreeMap;
use std::ops::Range;

/// Minimum number of further tokens for which the buffers are enlarged.
const GROWTH: usize = 64;

/// Keys and values of the tokens of one sample so far.
#[derive(Default)]
pub struct KvCache {
    /// Keys and values of each layer, `[C, Hkv, Dh]` with `C >= len`. Rows from `len` on have no
    /// meaning.
    layers: BTreeMap<usize, [Tensor; 2]>,
    /// State of each layer with linear attention.
    states: BTreeMap<usize, Option<LinearState>>,
    len: usize,
}

/// The state of linear attention after some tokens of a sample.
pub(super) struct LinearState {
    /// The last inputs of the convolution, `[3, C]`.
    pub(super) window: Tensor,
    /// State of the gated delta rule, `[1, Hv, dk, dv]`, `f32`.
    pub(super) rule: Tensor,
}

impl LinearState {
    /// The state before the first token; `qkv: [N, C]` has the dtype and the device.
    pub(super) fn zeros(heads: DeltaHeads, qkv: &Tensor) -> Result<Self> {
        let window = Tensor::zeros((CONV_TAPS - 1, qkv.dim(1)?), qkv.dtype(), qkv.device())?;
        let shape = (1, heads.value_heads, heads.key_dim, heads.value_dim);
        Ok(Self { window, rule: Tensor::zeros(shape, DType::F32, qkv.device())? })
    }
}

impl KvCache {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all tokens after the first `len`. Those before do not depend on them. Removes all
    /// tokens if a layer has a state, which cannot go back.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len && !self.states.is_empty() {
            *self = Self::default();
        }
        self.len = self.len.min(len);
    }

    /// The state of layer `layer`, which has linear attention; `None` before the first token.
    pub(super) fn state(&mut self, layer: usize) -> &mut Option<LinearState> {
        self.states.entry(layer).or_default()
    }

    /// Writes keys and values of the next tokens, `[N, Hkv, Dh]` each, of layer `layer`, and
    /// returns those of all tokens, `[S, Hkv, Dh]`. [`Self::advance`] counts the tokens after the
    /// last layer.
    pub(super) fn append(
        &mut self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let end = self.len + keys.dim(0)?;
        let old = self.layers.get(&layer);
        let is_large = old.is_some_and(|[keys, _]| keys.dim(0).is_ok_and(|size| size >= end));
        if !is_large {
            let old = old.map(|[keys, values]| [keys, values]);
            let enlarged = [
                self.enlarged(old.map(|[keys, _]| keys), keys, end)?,
                self.enlarged(old.map(|[_, values]| values), values, end)?,
            ];
            self.layers.insert(layer, enlarged);
        }
        let [all_keys, all_values] = &self.layers[&layer];
        all_keys.slice_set(&keys.contiguous()?, 0, self.len)?;
        all_values.slice_set(&values.contiguous()?, 0, self.len)?;
        Ok((all_keys.narrow(0, 0, end)?, all_values.narrow(0, 0, end)?)) // [S, Hkv, Dh]
    }

    /// Counts the tokens that all layers have appended.
    pub(super) fn advance(&mut self, num_tokens: usize) {
        self.len += num_tokens;
    }

    /// A buffer for at least `end` tokens with those of `old`. It grows by an eighth, so that few
    /// tokens are copied often.
    fn enlarged(&self, old: Option<&Tensor>, like: &Tensor, end: usize) -> Result<Tensor> {
        let (_, heads, dim) = like.dims3()?;
        let capacity = end + (end / 8).max(GROWTH);
        let buffer = Tensor::zeros((capacity, heads, dim), like.dtype(), like.device())?;
        if let Some(old) = old.filter(|_| self.len > 0) {
            buffer.slice_set(&old.narrow(0, 0, self.len)?, 0, 0)?;
        }
        Ok(buffer)
    }
}

/// Calls `each` with each cache and the range of its tokens, and concatenates the results
/// `[n, ..]` to `[N, ..]`. The first segments belong to the caches, in their order. The rows of the
/// other segments are 0.
pub(super) fn for_each_sample(
    caches: &mut [&mut KvCache],
    segments: &CuSeqlens,
    mut each: impl FnMut(&mut KvCache, Range<usize>) -> Result<Tensor>,
) -> Result<Tensor> {
    let mut results = Vec::with_capacity(caches.len() + 1);
    let mut num_used = 0;
    for (cache, tokens) in caches.iter_mut().zip(segments.segments()) {
        num_used = tokens.end;
        results.push(each(cache, tokens)?);
    }
    let Some(first) = results.first() else { bail!("there is no sample to continue") };
    let mut shape = first.dims().to_vec();
    shape[0] = segments.num_tokens() - num_used;
    if shape[0] > 0 {
        results.push(Tensor::zeros(shape, first.dtype(), first.device())?);
    }
    match &*results {
        [only] => Ok(only.clone()),
        all => Tensor::cat(all, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn rows(first: usize, count: usize) -> Tensor {
        let values: Vec<f32> = (first * 2..(first + count) * 2).map(|i| i as f32).collect();
        Tensor::from_vec(values, (count, 1, 2), &Device::Cpu).unwrap()
    }

    fn bits(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn tokens_appended_in_any_pieces_and_after_a_truncation_are_those_of_one_piece() {
        let whole = bits(&rows(0, 300));
        for pieces in [vec![300], vec![1; 300], vec![100, 1, 1, 190, 8]] {
            let mut cache = KvCache::default();
            let mut last = None;
            for piece in pieces {
                let new = rows(cache.len(), piece);
                last = Some(cache.append(0, &new, &new).unwrap());
                cache.advance(piece);
            }
            let (keys, values) = last.unwrap();
            assert_eq!((bits(&keys), bits(&values)), (whole.clone(), whole.clone()));
            cache.truncate(70);
            let (keys, _) = cache.append(0, &rows(70, 2), &rows(70, 2)).unwrap();
            assert_eq!(bits(&keys), whole[..144]);
        }
    }
}
