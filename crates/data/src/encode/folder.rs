//! The tokenizer, the chat template, the special tokens and the JSON files of a model folder.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use batch::PatchSizes;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::media::image::{ImageConfig, ImageProcessor};
use crate::media::{CanvasTokens, MediaFamily, Positions, VideoForm};
use crate::model_folder::{ModelFolderError, read, read_json, read_json_if_there};
use crate::template::{ChatTemplate, TemplateError};
use tokenizer::TextTokenizer;

/// Template variables with the texts of special tokens.
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// The files of a model folder that decide how text is encoded.
#[derive(Debug)]
pub(super) struct TextFolder {
    pub(super) tokenizer: TextTokenizer,
    pub(super) template: ChatTemplate,
    /// Placeholder tokens of media. Texts of rows must not contain them.
    pub(super) media: MediaTokens,
    pub(super) stop_ids: Vec<u32>,
    pub(super) pad_id: u32,
    pub(super) vocab_size: usize,
    /// SHA-256 of `tokenizer.json`.
    pub(super) tokenizer_fingerprint: [u8; 32],
    /// Hash of everything that decides the tokens of a chat, except the date.
    pub(super) undated_key: [u8; 32],
    /// Hash of everything that decides the tokens of a chat.
    pub(super) key: [u8; 32],
}

#[derive(Debug)]
pub(super) struct MediaTokens {
    /// Placeholder of an image and its id; `None` for a text-only model.
    pub(super) image: Option<(String, u32)>,
    /// The tokens directly before and after visual tokens, if the model has them.
    pub(super) marks: [Option<u32>; 2],
    /// `None` if the model does not support videos.
    pub(super) video: Option<VideoTokens>,
}

#[derive(Debug)]
pub(super) struct VideoTokens {
    pub(super) pad: String,
    pub(super) pad_id: u32,
    /// Precedes the tokens of each group of frames, or of the whole video.
    pub(super) start: String,
    /// Follows the tokens of each group of frames, or of the whole video.
    pub(super) end: String,
}

impl MediaTokens {
    fn read(
        folder: &Path,
        config: &JsonFile,
        tokenizer: &TextTokenizer,
    ) -> Result<Self, ModelFolderError> {
        if config.is_text_only() {
            return Ok(Self { image: None, marks: [None; 2], video: None });
        }
        let image_id = config.id("image_token_id")?;
        let image = config.token("image_token_id", image_id, tokenizer)?;
        // the processors report a family that is not known
        if let Ok(family) = MediaFamily::of_folder(folder)
            && let Some(marks) = family.image_marks
        {
            if let Positions::Canvas(tokens) = family.positions {
                check_canvas(config, tokens, tokenizer)?;
            }
            return Self::with_marks((image, image_id), marks, family, (config, tokenizer));
        }
        let mark = |key, published: &str| match config.id(key) {
            Ok(id) => config.token(key, id, tokenizer),
            Err(_) => Ok(published.to_owned()),
        };
        let video = match config.id("video_token_id") {
            Ok(pad_id) => Some(VideoTokens {
                pad: config.token("video_token_id", pad_id, tokenizer)?,
                pad_id,
                start: mark("vision_start_token_id", "<|vision_start|>")?,
                end: mark("vision_end_token_id", "<|vision_end|>")?,
            }),
            Err(_) => None,
        };
        let marks = ["vision_start_token_id", "vision_end_token_id"].map(|key| config.id(key).ok());
        Ok(Self { image: Some((image, image_id)), marks, video })
    }

    /// The tokens of a family whose `config.json` has only the tokens of media. `marks` are around
    /// the visual tokens of an image and of each frame.
    fn with_marks(
        image: (String, u32),
        [start, end]: [&'static str; 2],
        family: MediaFamily,
        (config, tokenizer): (&JsonFile, &TextTokenizer),
    ) -> Result<Self, ModelFolderError> {
        let id = |mark: &'static str| {
            let missing = || ModelFolderError::NoToken { token: mark };
            tokenizer.id(mark).ok_or_else(missing)
        };
        let marks = [Some(id(start)?), Some(id(end)?)];
        family.reserved().iter().try_for_each(|mark| id(mark).map(drop))?;
        let pad = match (family.videos, config.id("video_token_id")) {
            // the visual tokens of frames are those of images
            (VideoForm::NumberedFrames { placeholder }, _) => {
                Some((placeholder.to_owned(), image.1))
            }
            (VideoForm::SlicedFrames { .. }, Ok(id)) => {
                Some((config.token("video_token_id", id, tokenizer)?, id))
            }
            _ => None,
        };
        let [start, end] = [start, end].map(str::to_owned);
        let video = pad.map(|(pad, pad_id)| VideoTokens { pad, pad_id, start, end });
        Ok(Self { image: Some(image), marks, video })
    }

    /// The part of the length cache's key.
    fn key(&self) -> String {
        format!("{self:?}")
    }

    /// The texts of the placeholder tokens.
    pub(super) fn pads(&self) -> impl Iterator<Item = &str> {
        let image = self.image.as_ref().map(|(pad, _)| pad.as_str());
        image.into_iter().chain(self.video.as_ref().map(|video| video.pad.as_str()))
    }

    /// Whether vision features replace this token.
    pub(super) fn is_pad(&self, id: u32) -> bool {
        self.image.as_ref().is_some_and(|(_, image)| *image == id)
            || self.video.as_ref().is_some_and(|video| video.pad_id == id)
    }
}

/// A vocabulary with more tokens than that of the files of a model folder.
#[derive(Debug, Clone, Copy)]
pub struct Vocabulary<'a> {
    /// Content of `tokenizer.json`.
    pub tokenizer: &'a [u8],
    /// Number of rows of the embedding.
    pub vocab_size: usize,
}

impl TextFolder {
    /// `vocabulary` has the tokens in place of those of the folder.
    pub(super) fn read(
        folder: &Path,
        vocabulary: Option<Vocabulary<'_>>,
    ) -> Result<Self, ModelFolderError> {
        let config = JsonFile::read(folder, "config.json")?;
        let tokenizer_config = JsonFile::read(folder, "tokenizer_config.json")?;
        let path = folder.join("tokenizer.json");
        let bytes = vocabulary.map_or_else(|| read(&path), |of| Ok(of.tokenizer.to_vec()))?;
        let tokenizer = TextTokenizer::from_bytes(&path, &bytes)?;
        let tokenizer_fingerprint: [u8; 32] = Sha256::digest(&bytes).into();
        drop(bytes);
        let media = MediaTokens::read(folder, &config, &tokenizer)?;
        let vocab_size = vocabulary.map_or_else(|| config.vocab_size(), |of| Ok(of.vocab_size))?;
        let max_id = tokenizer.max_id();
        if max_id as usize >= vocab_size {
            return Err(ModelFolderError::VocabSize { path: config.path, max_id, vocab_size });
        }
        let mut special_tokens = Vec::new();
        for key in SPECIAL_TOKENS {
            special_tokens.extend(tokenizer_config.special_token(key).map(|token| (key, token)));
        }
        let special_id = |key| match special_tokens.iter().find(|(name, _)| *name == key) {
            None => Ok(None),
            Some((_, token)) => match tokenizer.id(token) {
                Some(id) => Ok(Some(id)),
                None => Err(ModelFolderError::UnknownToken {
                    path: tokenizer_config.path.clone(),
                    key,
                    token: token.clone(),
                }),
            },
        };
        let generation = JsonFile::read_if_there(folder, "generation_config.json")?;
        let mut stop_ids = generation.as_ref().map_or(Vec::new(), |g| g.ids("eos_token_id"));
        stop_ids.extend(special_id("eos_token")?.filter(|id| !stop_ids.contains(id)));
        let first_stop = *stop_ids
            .first()
            .ok_or_else(|| ModelFolderError::NoStopToken { folder: folder.to_owned() })?;
        let pad_id = special_id("pad_token")?
            .or_else(|| generation.and_then(|generation| generation.id("pad_token_id").ok()))
            .unwrap_or(first_stop);
        let (path, source) = chat_template(folder, &tokenizer_config)?;
        let mut key = Sha256::new_with_prefix(tokenizer_fingerprint);
        key.update(format!("{source:?} {special_tokens:?} {}", media.key()));
        let undated_key = key.clone().finalize().into();
        if source.contains("strftime_now") {
            // a template may print the date, so the hash must change with the day
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            key.update((now.as_secs() / 86_400).to_le_bytes());
        }
        let key = key.finalize().into();
        let template = ChatTemplate::new(&source, special_tokens)
            .map_err(|cause| ModelFolderError::Template { path: path.clone(), cause })?;
        check_end_mark(&path, template.end_mark(), &tokenizer, &stop_ids)?;
        Ok(Self {
            tokenizer,
            template,
            media,
            stop_ids,
            pad_id,
            vocab_size,
            tokenizer_fingerprint,
            undated_key,
            key,
        })
    }
}

/// Checks that the ids in `config.json` are those of the tokens in the text of an image.
fn check_canvas(
    config: &JsonFile,
    CanvasTokens(ids): CanvasTokens,
    tokenizer: &TextTokenizer,
) -> Result<(), ModelFolderError> {
    for ((key, token), found) in CanvasTokens::KEYS.into_iter().zip(ids) {
        let &[expected] = tokenizer.encode(token)?.ids.as_slice() else {
            return Err(ModelFolderError::NoToken { token });
        };
        if found != expected {
            let path = config.path.clone();
            return Err(ModelFolderError::TokenId { path, key, found, token, expected });
        }
    }
    Ok(())
}

/// The image processor of a folder. It must cut the patches that the vision encoder expects.
pub(super) fn image_processor(
    folder: &Path,
    config: &ImageConfig,
) -> Result<ImageProcessor, ModelFolderError> {
    let images = ImageProcessor::from_folder(folder, config)?;
    let JsonFile { path, value } = JsonFile::read(folder, "config.json")?;
    // The vision encoder has these sizes if its keys are missing. Other families need the keys.
    let default = PatchSizes::QWEN2;
    let has_default = value["model_type"].as_str().is_some_and(|kind| kind.starts_with("qwen2"));
    for (key, name, found, default) in [
        ("patch_size", "patch_size", images.patch_size(), default.patch),
        (
            "temporal_patch_size",
            "temporal_patch_size",
            images.temporal_patch_size(),
            default.temporal,
        ),
        ("spatial_merge_size", "merge_size", images.merge_size(), default.merge),
    ] {
        let default = has_default.then_some(u64::from(default));
        let expected = value["vision_config"][key].as_u64().or(default);
        if let Some(expected) = expected.filter(|expected| *expected != u64::from(found)) {
            return Err(ModelFolderError::Patches { path, key, expected, name, found });
        }
    }
    Ok(images)
}

/// Checks that the template ends an answer with one token. If generation does not stop at this
/// token, as with base models, this is a warning only.
fn check_end_mark(
    path: &Path,
    mark: &str,
    tokenizer: &TextTokenizer,
    stop_ids: &[u32],
) -> Result<(), ModelFolderError> {
    let ids = tokenizer.encode(mark)?.ids;
    let &[id] = ids.as_slice() else {
        let cause = TemplateError::EndMarkTokens { mark: mark.to_owned(), num_tokens: ids.len() };
        return Err(ModelFolderError::Template { path: path.to_owned(), cause });
    };
    if !stop_ids.contains(&id) {
        tracing::warn!(
            path = %path.display(),
            mark,
            "the end mark of the chat template is not a stop token: add its id to `eos_token_id` in generation_config.json"
        );
    }
    Ok(())
}

/// The source of the chat template of a model folder; `None` if it has none.
pub fn chat_template_source(folder: &Path) -> Result<Option<String>, ModelFolderError> {
    match chat_template(folder, &JsonFile::read(folder, "tokenizer_config.json")?) {
        Ok((_, source)) => Ok(Some(source)),
        Err(ModelFolderError::NoChatTemplate { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The template and its file: `chat_template.jinja`, else `chat_template.json`, else a key of
/// `tokenizer_config.json`.
fn chat_template(
    folder: &Path,
    tokenizer_config: &JsonFile,
) -> Result<(PathBuf, String), ModelFolderError> {
    let path = folder.join("chat_template.jinja");
    if path.exists() {
        let source = String::from_utf8(read(&path)?).map_err(|error| ModelFolderError::Read {
            path: path.clone(),
            cause: io::Error::new(io::ErrorKind::InvalidData, error),
        })?;
        return Ok((path, source));
    }
    let older = JsonFile::read_if_there(folder, "chat_template.json")?;
    for file in older.iter().chain([tokenizer_config]) {
        if let Some(source) = file.chat_template() {
            return Ok((file.path.clone(), source));
        }
    }
    Err(ModelFolderError::NoChatTemplate { folder: folder.to_owned() })
}

/// A parsed file and its path.
struct JsonFile {
    pub(super) path: PathBuf,
    pub(super) value: Value,
}

impl JsonFile {
    pub(super) fn read(folder: &Path, name: &str) -> Result<Self, ModelFolderError> {
        let path = folder.join(name);
        Ok(Self { value: read_json(&path)?, path })
    }

    fn read_if_there(folder: &Path, name: &str) -> Result<Option<Self>, ModelFolderError> {
        let path = folder.join(name);
        Ok(read_json_if_there(&path)?.map(|value| Self { path, value }))
    }

    /// Whether this `config.json` is that of a model without a vision encoder.
    fn is_text_only(&self) -> bool {
        self.value["vision_config"].is_null() && self.value["image_token_id"].is_null()
    }

    pub(super) fn id(&self, key: &'static str) -> Result<u32, ModelFolderError> {
        as_id(&self.value[key]).ok_or_else(|| self.key_error(key, "token id"))
    }

    /// One id or a list of ids. Empty without the key.
    pub(super) fn ids(&self, key: &str) -> Vec<u32> {
        match &self.value[key] {
            Value::Array(ids) => ids.iter().filter_map(as_id).collect(),
            one => as_id(one).into_iter().collect(),
        }
    }

    pub(super) fn token(
        &self,
        key: &'static str,
        id: u32,
        tokenizer: &TextTokenizer,
    ) -> Result<String, ModelFolderError> {
        tokenizer.token(id).ok_or_else(|| ModelFolderError::UnknownToken {
            path: self.path.clone(),
            key,
            token: id.to_string(),
        })
    }

    pub(super) fn vocab_size(&self) -> Result<usize, ModelFolderError> {
        let nested = self.value["text_config"]["vocab_size"].as_u64();
        nested
            .or_else(|| self.value["vocab_size"].as_u64())
            .map(|size| size as usize)
            .ok_or_else(|| self.key_error("text_config.vocab_size", "count"))
    }

    /// The text of a token: a string, or the `content` of an object.
    fn special_token(&self, key: &str) -> Option<String> {
        let value = &self.value[key];
        value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
    }

    /// The template, or the one named `default` of several.
    pub(super) fn chat_template(&self) -> Option<String> {
        let value = &self.value["chat_template"];
        let of_list = || {
            let templates = value.as_array()?;
            let default = templates.iter().find(|entry| entry["name"] == "default")?;
            default["template"].as_str()
        };
        value.as_str().or_else(of_list).map(str::to_owned)
    }

    fn key_error(&self, key: &'static str, expected: &'static str) -> ModelFolderError {
        ModelFolderError::Key { path: self.path.clone(), key, expected }
    }
}

fn as_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write as _;

    use serde_json::{Value, json};

    use super::*;
    use crate::encode::Encoder;

    #[test]
    fn patches_unlike_those_of_the_vision_encoder_are_refused_with_both_files() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models");
        for (model, template, key, value, named) in [
            ("small-tied", "chat_template.jinja", "patch_size", 14, "patch_size"),
            ("small-tied", "chat_template.jinja", "temporal_patch_size", 3, "temporal_patch_size"),
            ("small-tied", "chat_template.jinja", "merge_size", 3, "spatial_merge_size"),
            ("small-qwen25vl", "chat_template.json", "patch_size", 16, "patch_size"),
            ("small-qwen25vl", "chat_template.json", "merge_size", 3, "spatial_merge_size"),
        ] {
            let (model, folder) = (models.join(model), tempfile::tempdir().unwrap());
            for file in ["tokenizer_config.json", "tokenizer.json", template] {
                fs::copy(model.join(file), folder.path().join(file)).unwrap();
            }
            let mut config: Value =
                serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
            if template == "chat_template.json" {
                // The vision encoder has the default size.
                config["vision_config"].as_object_mut().unwrap().remove(named);
            }
            let mut file = File::create(folder.path().join("config.json")).unwrap();
            file.write_all(config.to_string().as_bytes()).unwrap();
            let settings = fs::read_to_string(model.join("preprocessor_config.json")).unwrap();
            let named = format!("vision_config.{named}");
            let mut changed: Value = serde_json::from_str(&settings).unwrap();
            changed[key] = json!(value);
            let mut file = File::create(folder.path().join("preprocessor_config.json")).unwrap();
            file.write_all(changed.to_string().as_bytes()).unwrap();
            let error = Encoder::from_folder(folder.path(), &ImageConfig::default()).err();
            let error = error.unwrap().to_string();
            assert!(
                error.contains(&named) && error.contains("`preprocessor_config.json`"),
                "{error}"
            );
        }
    }
}
