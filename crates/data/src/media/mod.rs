//! Images and videos to patches, and the differences between model families in the text and the
//! size of media.

pub mod image;
pub mod video;

use std::path::Path;

use serde::de::Error as _;
use serde_json::Value;

use crate::model_folder::{ModelFolderError, read_json_if_there};

/// How a model family writes videos and boxes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum MediaFamily {
    /// Qwen3-VL and Qwen3.5: the text has a timestamp before each group of frames, limits on pixels
    /// are those of all frames together, and boxes are in thousandths of the image.
    Qwen3Vl,
    /// Qwen2.5-VL: a video is one run of tokens, whose temporal positions have the time; the
    /// folder's limits on pixels are those of one frame, and boxes are in pixels of the resized
    /// image.
    Qwen25Vl {
        /// Temporal positions per second of video.
        tokens_per_second: f32,
    },
}

/// Types of models that write media as Qwen3-VL does, or have none.
const LIKE_QWEN3_VL: [&str; 8] = [
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3",
    "qwen3_moe",
];
/// The value of transformers if the folder has none. Published folders have 2.
const TOKENS_PER_SECOND: f32 = 4.0;

impl MediaFamily {
    /// The family of the model in a folder, from its `config.json`.
    pub(crate) fn of_folder(folder: &Path) -> Result<Self, ModelFolderError> {
        let path = folder.join("config.json");
        let config = read_json_if_there::<Value>(&path)?.unwrap_or_default();
        match config["model_type"].as_str() {
            Some("qwen2_5_vl") => {}
            Some(kind) if LIKE_QWEN3_VL.contains(&kind) => return Ok(Self::Qwen3Vl),
            kind => {
                let found = kind.unwrap_or("missing").to_owned();
                let known = LIKE_QWEN3_VL.map(|kind| format!("`{kind}`")).join(", ");
                let expected = format!("`qwen2_5_vl`, {known}");
                return Err(ModelFolderError::value(&path, "model_type", found, expected));
            }
        }
        let tokens = &config["vision_config"]["tokens_per_second"];
        let tokens_per_second = match tokens.as_f64() {
            Some(tokens) if tokens > 0.0 => tokens as f32,
            None if tokens.is_null() => TOKENS_PER_SECOND,
            _ => {
                let problem = format!(
                    "`vision_config.tokens_per_second` is `{tokens}`, expected a number above 0"
                );
                return Err(ModelFolderError::parse(&path)(serde_json::Error::custom(problem)));
            }
        };
        Ok(Self::Qwen25Vl { tokens_per_second })
    }
}
