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
pub(crate) struct MediaFamily {
    pub(crate) videos: VideoForm,
    pub(crate) boxes: BoxForm,
}

/// How the text has a video.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum VideoForm {
    /// A timestamp before each group of frames. Limits on pixels are those of all frames together.
    Timestamps,
    /// One run of tokens. The folder's limits on pixels are those of one frame.
    OneRun {
        /// Temporal positions per second of video. `None`: the positions of the groups of frames
        /// are consecutive numbers.
        tokens_per_second: Option<f32>,
    },
}

/// How the text has a box, and the name of its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BoxForm {
    /// `[x1, y1, x2, y2]` in thousandths of the image.
    Thousandths,
    /// `[x1, y1, x2, y2]` in pixels of the resized image.
    Pixels,
    /// `(x1,y1),(x2,y2)`, or `(x,y)` for a point, in thousandths of the image. Box and name are between
    /// special tokens.
    MarkedThousandths,
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
            Some("qwen2_vl") => Ok(Self {
                videos: VideoForm::OneRun { tokens_per_second: None },
                boxes: BoxForm::MarkedThousandths,
            }),
            Some("qwen2_5_vl") => {
                let tokens_per_second = Some(tokens_per_second(&path, &config)?);
                Ok(Self { videos: VideoForm::OneRun { tokens_per_second }, boxes: BoxForm::Pixels })
            }
            Some(kind) if LIKE_QWEN3_VL.contains(&kind) => {
                Ok(Self { videos: VideoForm::Timestamps, boxes: BoxForm::Thousandths })
            }
            kind => {
                let found = kind.unwrap_or("missing").to_owned();
                let known = LIKE_QWEN3_VL.map(|kind| format!("`{kind}`")).join(", ");
                let expected = format!("`qwen2_vl`, `qwen2_5_vl`, {known}");
                Err(ModelFolderError::value(&path, "model_type", found, expected))
            }
        }
    }
}

/// Temporal positions per second of video in `config`, the content of the file at `path`.
fn tokens_per_second(path: &Path, config: &Value) -> Result<f32, ModelFolderError> {
    let tokens = &config["vision_config"]["tokens_per_second"];
    match tokens.as_f64() {
        Some(tokens) if tokens > 0.0 => Ok(tokens as f32),
        None if tokens.is_null() => Ok(TOKENS_PER_SECOND),
        _ => {
            let problem = format!(
                "`vision_config.tokens_per_second` is `{tokens}`, expected a number above 0"
            );
            Err(ModelFolderError::parse(path)(serde_json::Error::custom(problem)))
        }
    }
}
