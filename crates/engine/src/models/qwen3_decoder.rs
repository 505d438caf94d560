//! What Qwen3 and InternVL3.5 share: the decoder, with norms of queries and keys and positions on one
//! axis, dense or with experts.

use super::config::{ModelConfigError, QK_NORM, Section};
use super::experts::Family;
use crate::nn::{DecoderConfig, ExpertFiles};
use serde_json::Value;

const EXPERTS: Family =
    Family { published: ExpertFiles::Separate, must_have_norm: true, has_shared: false };

/// The decoder with the sizes of a section.
pub(super) fn decoder(section: &Section<'_>) -> Result<DecoderConfig, ModelConfigError> {
    let rope = section.rope()?;
    for key in ["rope_type", "type"] {
        rope.expect(key, &Value::from("default"), "`default`")?; // positions have one axis: no `mrope`
    }
    section.decoder(QK_NORM)
}

/// [`decoder`], with experts.
pub(super) fn decoder_with_experts(
    section: &Section<'_>,
) -> Result<DecoderConfig, ModelConfigError> {
    section.with_experts(decoder(section)?, EXPERTS)
}
