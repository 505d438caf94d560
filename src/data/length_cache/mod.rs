//! The length cache: the size of each row of a data file before any limit. Lengths, packs and
//! schedules are computed from it without reading the rows again.
//!
//! It stores the number of a row's tokens without visual ones, which of them are supervised, and the
//! sizes of its images. The lengths under limits on pixels and tokens follow by arithmetic. A row is
//! identified by the hash of its bytes, an image by the size and modification time of its file, and
//! the cache by the tokenizer, the chat template and the paths of the files.

pub(in crate::data) mod background;
mod build;
mod file;
mod measure;
mod rows;
mod stamps;
mod table;

use std::fs::File;
use std::path::Path;

pub use build::CacheWork;
pub use file::CacheError;
use file::Place;
pub use table::LengthCache;

use crate::data::encode::Encoder;
use crate::data::source::{JsonlFile, RowRules, SourceError, Stamp};

/// Opens a data file. It is not scanned if the cache in `folder` has its index and it is unchanged.
pub fn open_indexed(
    path: &Path,
    image_root: Option<&Path>,
    rules: RowRules,
    encoder: &Encoder,
    folder: &Path,
) -> Result<JsonlFile, SourceError> {
    let unreadable = |cause| SourceError::Read { path: path.to_owned(), cause };
    let file = File::open(path).map_err(unreadable)?;
    let stamp = Stamp::of(&file).map_err(unreadable)?;
    let root = JsonlFile::image_root_of(path, image_root);
    let place = Place::new(folder, path, root, rules, encoder.text_key());
    let file = match place.index(&stamp) {
        Some(index) => JsonlFile::with_index(file, path, image_root, index, Some(stamp)),
        None => JsonlFile::open(path, image_root),
    };
    Ok(file?.with_rules(rules))
}
