//! Lines of `rejects.jsonl`.

use crate::data::Rejection;
use crate::metrics::{JsonlError, JsonlSink};

#[derive(serde::Serialize)]
struct RejectRow<'a> {
    step: u64,
    #[serde(flatten)]
    rejection: &'a Rejection,
}

/// Appends to `rejects.jsonl` the rows that were rejected while `step` was prepared. Without a
/// file, another rank writes them.
pub fn write_rejects<'a>(
    sink: Option<&mut JsonlSink>,
    step: u64,
    rejections: impl IntoIterator<Item = &'a Rejection>,
) -> Result<(), JsonlError> {
    let Some(sink) = sink else { return Ok(()) };
    let mut rejections = rejections.into_iter();
    rejections.try_for_each(|rejection| sink.write(&RejectRow { step, rejection }))
}
