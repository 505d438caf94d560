//! Rows of JSONL files as the loader wants them.

use crate::batch::{EncodedSample, Sample, SampleId};
use crate::data::{
    DatasetConfig, Encoder, JsonlFile, Length, Rejection, Row, RowReader, SampleError, SourceError,
};
use std::sync::Arc;

/// The data sets of a config section, and the encoder that turns their rows into numbers.
pub struct JsonlRows {
    files: Vec<JsonlFile>,
    encoder: Arc<Encoder>,
}

impl JsonlRows {
    /// Opens and indexes every file.
    pub fn open(datasets: &[DatasetConfig], encoder: Arc<Encoder>) -> Result<Self, SourceError> {
        let open = |set: &DatasetConfig| JsonlFile::open(&set.path, set.image_root.as_deref());
        Ok(Self { files: datasets.iter().map(open).collect::<Result<_, _>>()?, encoder })
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

/// As the log and `rejects.jsonl` say it.
fn rejection(error: &SampleError) -> Rejection {
    let hint = error.hint().map_or_else(String::new, |hint| format!("; hint: {hint}"));
    Rejection::new(error.id(), error.reason(), format!("{error}{hint}"))
}

impl RowReader for JsonlRows {
    fn read(&self, row: Row) -> Result<EncodedSample, Rejection> {
        let encoded = self.sample(row).and_then(|sample| self.encoder.encode(&sample));
        encoded.map_err(|error| rejection(&error))
    }

    fn length(&self, row: Row) -> Result<Length, Rejection> {
        let length = self.sample(row).and_then(|sample| self.encoder.length(&sample));
        length.map_err(|error| rejection(&error))
    }

    fn id(&self, row: Row) -> SampleId {
        self.files[row.dataset as usize].id(row.row as usize)
    }
}
