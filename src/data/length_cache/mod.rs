//! The length cache: what each row of a data file is before any limit, so that lengths, packs and
//! schedules are known without reading the rows again.
//!
//! It holds a row's tokens without the visual ones, what of them is supervised, and the sizes of its
//! images. Limits on pixels and tokens are arithmetic on that. A row is known by the hash of its
//! bytes, an image by size and modification time of its file, and the whole by the tokenizer, the chat
//! template and the places of the files.

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
use crate::data::source::{JsonlFile, SourceError, Stamp};

/// Opens a data file; one that the cache in `folder` knows and that has not changed is not scanned.
pub fn open_indexed(
    path: &Path,
    image_root: Option<&Path>,
    encoder: &Encoder,
    folder: &Path,
) -> Result<JsonlFile, SourceError> {
    let unreadable = |cause| SourceError::Read { path: path.to_owned(), cause };
    let file = File::open(path).map_err(unreadable)?;
    let stamp = Stamp::of(&file).map_err(unreadable)?;
    let root = JsonlFile::image_root_of(path, image_root);
    let place = Place::new(folder, path, root, encoder.text_key());
    match place.index(&stamp) {
        Some(index) => JsonlFile::with_index(file, path, image_root, index, Some(stamp)),
        None => JsonlFile::open(path, image_root),
    }
}
