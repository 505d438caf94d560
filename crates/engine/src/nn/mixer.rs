use super::context::DecoderContext;
use super::kv_cache::KvCache;
use crate::tape::{Pass, Stage};
use candle_core::{Result, Tensor};

/// The first half of a decoder layer, which mixes the tokens of a sample.
pub(super) trait Mixer: Stage<Context = DecoderContext> {
    /// The next tokens of the samples in `caches`, `x: [N, D]` to `[N, D]`; `layer` is the number
    /// of the layer.
    fn decode(
        &self,
        layer: usize,
        x: &Tensor,
        context: &DecoderContext,
        caches: &mut [&mut KvCache],
        pass: &Pass<'_>,
    ) -> Result<Tensor>;
}
