//! The length cache: the size of each row of a data file before truncation and before the limits on
//! images. Lengths, packs and schedules are computed from it without reading the rows again.
//!
//! It stores the number of a row's tokens without those of its images, which of them are
//! supervised, and the sizes of its images. The lengths under limits on the pixels and tokens of
//! images follow by arithmetic. A row is identified by the hash of its bytes, and an image or video
//! by the size and modification time of its file. The cache is identified by [`Encoder::text_key`]
//! (the tokenizer, the chat template, the settings of videos, and with Qwen2.5-VL the limits on the
//! pixels of images), the rules for rows, and the paths of the files.

pub(crate) mod build;
mod file;
mod measure;
mod media;
mod rows;

use std::path::{Path, PathBuf};

pub use build::CacheWork;
pub use file::CacheError;
use file::CachePath;
pub use media::{MediaDigests, MediaLook, MediaStamps};
pub use rows::LengthCache;

use crate::encode::Encoder;
use crate::source::files::listing::data_files;
use crate::source::{RowFile, RowRules, SourceError};

/// Opens the files of a data set. A file is not scanned if the cache in `folder` has its index and
/// it is unchanged.
pub fn open_indexed(
    paths: &[PathBuf],
    image_root: Option<&Path>,
    rules: RowRules,
    encoder: &Encoder,
    folder: &Path,
) -> Result<RowFile, SourceError> {
    let files = data_files(paths)?;
    let root = RowFile::image_root_of(paths, &files, image_root);
    let known = CachePath::new(folder, paths, &root, &rules, encoder.text_key()).indexes();
    let file = RowFile::open_files(paths, &files, image_root, rules.clone(), &known, Some(folder))?;
    Ok(file.with_rules(rules))
}
