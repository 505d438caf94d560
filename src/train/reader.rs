//! Rows of JSONL files as the loader wants them.

use crate::batch::{EncodedSample, Sample, SampleId};
use crate::data::{
    Cut, DatasetConfig, Encoder, JsonlFile, Length, Rejection, Row, RowReader, SampleError,
    SourceError, open_indexed,
};
use std::path::Path;
use std::sync::Arc;

/// The data sets of a config section, and the encoder that turns their rows into numbers.
pub struct JsonlRows {
    files: Vec<JsonlFile>,
    encoder: Arc<Encoder>,
    cut: Option<Cut>,
}

impl JsonlRows {
    /// Opens and indexes every file.
    pub fn open(datasets: &[DatasetConfig], encoder: Arc<Encoder>) -> Result<Self, SourceError> {
        let open = |set: &DatasetConfig| JsonlFile::open(&set.path, set.image_root.as_deref());
        let files = datasets.iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { files, encoder, cut: None })
    }

    /// Opens every file; those that the caches in `folder` know are not scanned.
    pub fn open_indexed(
        datasets: &[DatasetConfig],
        encoder: Arc<Encoder>,
        folder: &Path,
    ) -> Result<Self, SourceError> {
        let open = |set: &DatasetConfig| {
            open_indexed(&set.path, set.image_root.as_deref(), &encoder, folder)
        };
        let files = datasets.iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { files, encoder, cut: None })
    }

    /// The same rows, those that are too long cut to a limit.
    #[must_use]
    pub fn cut(self, cut: Option<Cut>) -> Self {
        Self { cut, ..self }
    }

    /// How rows that are too long are cut.
    pub fn cut_of_rows(&self) -> Option<Cut> {
        self.cut
    }

    /// The files, in config order.
    pub fn files(&self) -> &[JsonlFile] {
        &self.files
    }

    /// What turns rows into numbers.
    pub fn encoder(&self) -> &Encoder {
        &self.encoder
    }

    /// All rows of all files, in order.
    pub fn rows(&self) -> impl Iterator<Item = Row> + '_ {
        self.files.iter().enumerate().flat_map(|(dataset, file)| {
            (0..file.len()).map(move |row| Row { dataset: dataset as u32, row: row as u32 })
        })
    }

    /// The parsed row.
    pub fn sample(&self, row: Row) -> Result<Sample, SampleError> {
        self.files[row.dataset as usize].read(row.row as usize)
    }

    /// Hash over the contents of all files.
    pub fn fingerprint(&self) -> [u8; 32] {
        use sha2::{Digest, Sha256};
        let mut hash = Sha256::new();
        for file in &self.files {
            hash.update(file.fingerprint());
        }
        hash.finalize().into()
    }
}

impl RowReader for JsonlRows {
    fn read(&self, row: Row) -> Result<EncodedSample, Rejection> {
        self.read_admitted(row, &|_| Ok(()))
    }

    fn read_admitted(
        &self,
        row: Row,
        admit: &dyn Fn(Length) -> Result<(), Rejection>,
    ) -> Result<EncodedSample, Rejection> {
        self.encoder.encode_cut(&self.sample(row)?, self.cut, admit)
    }

    fn length(&self, row: Row) -> Result<Length, Rejection> {
        Ok(self.encoder.length_cut(&self.sample(row)?, self.cut)?)
    }

    fn id(&self, row: Row) -> SampleId {
        self.files[row.dataset as usize].id(row.row as usize)
    }
}
