//! What a row contains besides the tokens of its sample.

use crate::data::{ImageBox, JsonlRows, SampleIndex, image_boxes};

/// The boxes of a row, and its thoughts that the model does not see.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) boxes: Vec<ImageBox>,
    /// Turns with thoughts that the template does not render.
    hidden_thoughts: Vec<usize>,
}

impl Notes {
    /// The notes of a row that can be encoded.
    pub(super) fn of(rows: &JsonlRows, row: SampleIndex) -> Self {
        let Some(Ok(sample)) = rows.sample(row) else { return Self::default() };
        let hidden_thoughts = rows.encoder().hidden_thoughts(&sample).unwrap_or_default();
        Self {
            boxes: image_boxes(rows.encoder().image_processor(), &sample).unwrap_or_default(),
            hidden_thoughts,
        }
    }

    /// A text about thoughts that are not rendered, to be appended to a list; empty without any.
    pub(super) fn hidden_thoughts(&self) -> String {
        if self.hidden_thoughts.is_empty() {
            return String::new();
        }
        let turns: Vec<String> = self.hidden_thoughts.iter().map(ToString::to_string).collect();
        format!(", thoughts not rendered: turns {}", turns.join(", "))
    }
}
