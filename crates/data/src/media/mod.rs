//! Images and videos to patches, and the differences between model families in the text and the
//! size of media.

pub mod image;
pub mod video;

use std::path::Path;

use batch::{SliceSizes, TileSizes, WrongSize};
use serde_json::Value;

use crate::model_folder::{ModelFolderError, read_json_if_there};

/// How a model family cuts images, writes media and boxes, and places tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MediaFamily {
    pub(crate) images: ImageForm,
    pub(crate) videos: VideoForm,
    /// `None`: rows with boxes are refused, because no published data of the model shows their form.
    pub(crate) boxes: Option<BoxForm>,
    pub(crate) positions: Positions,
    /// Special tokens around the visual tokens of an image, if the chat template leaves them out.
    pub(crate) image_marks: Option<[&'static str; 2]>,
}

/// Special tokens around the number of an image of a family with [`ImageForm::Slices`].
pub(crate) const NUMBER_MARKS: [&str; 2] = ["<image_id>", "</image_id>"];
/// Special tokens around the visual tokens of a slice.
pub(crate) const SLICE_MARKS: [&str; 2] = ["<slice>", "</slice>"];
/// Special tokens around the visual tokens of the whole image.
const WHOLE_MARKS: [&str; 2] = ["<image>", "</image>"];
const RESERVED: [[&str; 2]; 3] = [NUMBER_MARKS, SLICE_MARKS, WHOLE_MARKS];

/// Ids of the special tokens around an image and its slices, and of the newline between rows of
/// slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CanvasTokens(pub(crate) [u32; 5]);

/// How an image becomes patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageForm {
    /// One grid with about the aspect ratio of the image. The folder's settings of images have the
    /// size of a patch and limits on the pixels.
    OneGrid,
    /// Square tiles, which the vision encoder reads like the frames of a video.
    Tiles(TileSizes),
    /// The whole image, and slices if it is large. The text has each between special tokens, and the
    /// rows of slices on lines.
    Slices(SliceSizes),
}

/// How visual tokens count as positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Positions {
    /// By their place in the grid of their medium, on three axes.
    Grid,
    /// By their index, like text.
    Index,
    /// By their place on the canvas of their image, on three axes. The tokens around visual tokens
    /// have places on it, too.
    Canvas(CanvasTokens),
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
    /// The number of each frame before it. A frame is stretched to one tile.
    NumberedFrames {
        /// What the chat template writes for a video.
        placeholder: &'static str,
    },
    /// Each frame as an image with [`ImageForm::Slices`]. The folder's settings of videos decide the
    /// slices.
    SlicedFrames {
        /// Whether the number of the video is in front of the first frame if images have numbers.
        can_be_numbered: bool,
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
    /// `<box>[[x1, y1, x2, y2]]</box>` in thousandths of the image, after `<ref>name</ref>`.
    TaggedThousandths,
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
        let of_grids = |videos, boxes| Self {
            images: ImageForm::OneGrid,
            videos,
            boxes: Some(boxes),
            positions: Positions::Grid,
            image_marks: None,
        };
        let wrong = |WrongSize { key, found, expected }| {
            ModelFolderError::value(&path, key, found.to_string(), expected)
        };
        match config["model_type"].as_str() {
            Some("qwen2_vl") => {
                let videos = VideoForm::OneRun { tokens_per_second: None };
                Ok(of_grids(videos, BoxForm::MarkedThousandths))
            }
            Some("qwen2_5_vl") => {
                let tokens_per_second = Some(tokens_per_second(&path, &config)?);
                Ok(of_grids(VideoForm::OneRun { tokens_per_second }, BoxForm::Pixels))
            }
            Some("internvl") => Ok(Self {
                images: ImageForm::Tiles(TileSizes::read(&config).map_err(wrong)?),
                videos: VideoForm::NumberedFrames { placeholder: "<video>" },
                boxes: Some(BoxForm::TaggedThousandths),
                positions: Positions::Index,
                image_marks: Some(["<img>", "</img>"]),
            }),
            Some(kind @ ("minicpmv4_6" | "minicpmv4_7")) => Ok(Self {
                images: ImageForm::Slices(SliceSizes::read(&config).map_err(wrong)?),
                videos: VideoForm::SlicedFrames { can_be_numbered: kind == "minicpmv4_6" },
                boxes: None,
                positions: match kind {
                    "minicpmv4_7" => Positions::Canvas(CanvasTokens::read(&path, &config)?),
                    _ => Positions::Index,
                },
                image_marks: Some(WHOLE_MARKS),
            }),
            Some(kind) if LIKE_QWEN3_VL.contains(&kind) => {
                Ok(of_grids(VideoForm::Timestamps, BoxForm::Thousandths))
            }
            kind => {
                let found = kind.unwrap_or("missing").to_owned();
                let known = LIKE_QWEN3_VL.map(|kind| format!("`{kind}`")).join(", ");
                let others = "`qwen2_vl`, `qwen2_5_vl`, `internvl`, `minicpmv4_6`, `minicpmv4_7`";
                let expected = format!("{others}, {known}");
                Err(ModelFolderError::value(&path, "model_type", found, expected))
            }
        }
    }

    /// Special tokens that only the encoder writes: texts of rows must not contain them.
    pub(crate) fn reserved(&self) -> &'static [&'static str] {
        match self.images {
            ImageForm::Slices(_) => RESERVED.as_flattened(),
            ImageForm::OneGrid | ImageForm::Tiles(_) => &[],
        }
    }
}

impl CanvasTokens {
    /// The keys of the ids in `config.json`, and the texts of the tokens.
    pub(crate) const KEYS: [(&'static str, &'static str); 5] = [
        ("image_start_id", WHOLE_MARKS[0]),
        ("image_end_id", WHOLE_MARKS[1]),
        ("slice_start_id", SLICE_MARKS[0]),
        ("slice_end_id", SLICE_MARKS[1]),
        ("newline_id", "\n"),
    ];

    /// The ids in `config`, the content of the file at `path`.
    fn read(path: &Path, config: &Value) -> Result<Self, ModelFolderError> {
        let mut ids = [0; 5];
        for (id, (key, _)) in ids.iter_mut().zip(Self::KEYS) {
            let found = config[key].as_u64().and_then(|id| u32::try_from(id).ok());
            let missing =
                || ModelFolderError::Key { path: path.to_owned(), key, expected: "token id" };
            *id = found.ok_or_else(missing)?;
        }
        Ok(Self(ids))
    }

    pub(crate) fn contains(self, id: u32) -> bool {
        self.0.contains(&id)
    }
}

/// Temporal positions per second of video in `config`, the content of the file at `path`.
fn tokens_per_second(path: &Path, config: &Value) -> Result<f32, ModelFolderError> {
    let tokens = &config["vision_config"]["tokens_per_second"];
    match tokens.as_f64() {
        Some(tokens) if tokens > 0.0 => Ok(tokens as f32),
        None if tokens.is_null() => Ok(TOKENS_PER_SECOND),
        _ => {
            let key = "vision_config.tokens_per_second";
            Err(ModelFolderError::value(path, key, tokens.to_string(), "a number above 0"))
        }
    }
}
