//! The data sets of a run: chats and corpora, their mixture, their order, and their rows.
//! [`RowReader`] is the interface between the loader and the data sets: a row is measured, packed,
//! then read.

pub(crate) mod cached;
pub(crate) mod corpus;
pub(crate) mod order;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::row::{Length, Rejection, SampleIndex, TransientRowError};
use crate::{
    Corpus, CorpusOptions, DatasetConfig, DatasetInfo, DroppedTokens, Encoder, RowFile, RowForm,
    RowRules, SampleError, SourceError, TruncationRule, UnknownKeys, dataset_names, open_indexed,
};
use batch::{EncodedSample, Sample, SampleId};

/// A data set, open for reading.
pub enum DataSet {
    /// Chats, one per row.
    Chats(RowFile),
    /// Plain text.
    Corpus(Corpus),
}

impl DataSet {
    fn open(
        set: &DatasetConfig,
        encoder: &Encoder,
        options: &CorpusOptions,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Self, SourceError> {
        if let Some(corpus) = &set.corpus {
            return Corpus::open(set.path.paths(), corpus, encoder, options, progress)
                .map(Self::Corpus);
        }
        let cache = options.cache.as_deref().map(|folder| (encoder, folder));
        Self::open_chats(set, options.unknown_keys, cache).map(Self::Chats)
    }

    /// Opens and indexes the files of chats, with the index in the folder of a cache if there is
    /// one.
    fn open_chats(
        set: &DatasetConfig,
        unknown_keys: UnknownKeys,
        cache: Option<(&Encoder, &Path)>,
    ) -> Result<RowFile, SourceError> {
        let info = set.dataset_info.as_ref().map(|entry| {
            let entry = entry.to_string_lossy();
            let of = |problem| {
                let problem = Box::new(problem);
                SourceError::DatasetInfo { entry: entry.to_string(), problem }
            };
            DatasetInfo::of(&entry).map(Arc::new).map_err(of)
        });
        let info = info.transpose()?;
        let named = info.as_ref().map(|info| [info.path().to_owned()]);
        let paths = named.as_ref().map_or(set.path.paths(), |named| &named[..]);
        let first = paths.first().map_or(Path::new(""), PathBuf::as_path);
        let plain = || SourceError::PlainText { path: first.to_owned() };
        if Corpus::is_text_file(first) {
            return Err(plain());
        }
        let folder = info.as_ref().map(|info| info.folder().to_owned());
        let image_root = set.image_root.as_deref().or(folder.as_deref());
        let literal_placeholders = set.literal_placeholders;
        let columns = set.columns.clone().map(Arc::new);
        let rules = RowRules { literal_placeholders, unknown_keys, info, columns };
        let file = match cache {
            Some((encoder, folder)) => open_indexed(paths, image_root, rules, encoder, folder)?,
            None => RowFile::open_with(paths, image_root, rules)?,
        };
        if file.form() == RowForm::Text { Err(plain()) } else { Ok(file) }
    }

    /// Whether the files of a data set can be read. Those of a corpus must exist: reading them
    /// needs a tokenizer.
    pub fn check_files(set: &DatasetConfig, unknown_keys: UnknownKeys) -> Result<(), SourceError> {
        if set.corpus.is_none() {
            return Self::open_chats(set, unknown_keys, None).map(|_| ());
        }
        let is_pattern = |path: &PathBuf| path.to_string_lossy().contains(['*', '?', '[']);
        for path in set.path.paths().iter().filter(|path| !is_pattern(path)) {
            std::fs::metadata(path)
                .map_err(|source| SourceError::Read { path: path.clone(), cause: source })?;
        }
        Ok(())
    }

    /// Number of rows, or of samples of one pass over a corpus.
    pub fn len(&self) -> usize {
        match self {
            Self::Chats(file) => file.len(),
            Self::Corpus(corpus) => corpus.len(),
        }
    }

    /// Always false: opening a data set without rows is an error.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first path in the config.
    pub fn path(&self) -> &Path {
        match self {
            Self::Chats(file) => file.path(),
            Self::Corpus(corpus) => corpus.path(),
        }
    }

    /// Number of rows that an epoch uses with weight 1: `num_samples` of the entry in
    /// `dataset_info.json`, or all rows.
    pub fn num_samples(&self) -> u64 {
        let info = match self {
            Self::Chats(file) => file.rules().info.as_ref(),
            Self::Corpus(_) => None,
        };
        info.and_then(|info| info.num_samples()).unwrap_or(self.len() as u64)
    }

    /// Hash of the content of the data set.
    pub fn fingerprint(&self) -> [u8; 32] {
        match self {
            Self::Chats(file) => file.fingerprint(),
            Self::Corpus(corpus) => corpus.fingerprint(),
        }
    }

    /// The corpus; `None` for chats.
    pub fn corpus(&self) -> Option<&Corpus> {
        match self {
            Self::Chats(_) => None,
            Self::Corpus(corpus) => Some(corpus),
        }
    }
}

/// Reads and encodes single rows. The same row gives the same result each time.
pub trait RowReader: Send + Sync {
    /// The encoded sample of a row.
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection>;

    /// [`RowReader::read`], again after a wait while the process or a disk fails.
    fn read_patiently(
        &self,
        row: SampleIndex,
    ) -> Result<Result<EncodedSample, Rejection>, TransientRowError> {
        TransientRowError::or_read(Rejection::clone, || self.read(row))
    }

    /// [`Length::of`] the sample that [`RowReader::read`] would return, from text and media headers
    /// alone.
    ///
    /// It rejects the rows that `read` rejects, unless only decoding an image finds the error.
    fn length(&self, row: SampleIndex) -> Result<Length, Rejection>;

    /// [`RowReader::read`], but a row that does not have this length is rejected as `changed`, and
    /// its pixels are not read.
    fn read_of_length(&self, row: SampleIndex, length: Length) -> Result<EncodedSample, Rejection> {
        let sample = self.read(row)?;
        length.check_unchanged(Length::of(&sample), || self.id(row))?;
        Ok(sample)
    }

    /// The length of every row of a data set whose rows all have the same, as windows of a corpus
    /// do.
    fn uniform_length(&self, _dataset: u32) -> Option<Length> {
        None
    }

    /// File and line of a row, for messages.
    fn id(&self, row: SampleIndex) -> SampleId;
}

/// The data sets of a config section, and the encoder of their rows.
pub struct DatasetRows {
    sets: Vec<DataSet>,
    names: Vec<String>,
    encoder: Arc<Encoder>,
    cut: Option<TruncationRule>,
}

impl DatasetRows {
    /// [`DatasetRows::open_with`] with default options for corpora.
    pub fn open(datasets: &[DatasetConfig], encoder: Arc<Encoder>) -> Result<Self, SourceError> {
        Self::open_with(datasets, encoder, &CorpusOptions::default(), &|_, _| ())
    }

    /// Opens and indexes every data set, and tokenises corpora. `progress` receives the number
    /// of bytes of text that are tokenised, and the total number.
    pub fn open_with(
        datasets: &[DatasetConfig],
        encoder: Arc<Encoder>,
        options: &CorpusOptions,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Self, SourceError> {
        let open = |set: &DatasetConfig| DataSet::open(set, &encoder, options, progress);
        let sets = datasets.iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { sets, names: dataset_names(datasets), encoder, cut: None })
    }

    /// Sets the truncation rule for chats. `None` truncates no chat.
    #[must_use]
    pub fn truncated(self, cut: Option<TruncationRule>) -> Self {
        Self { cut, ..self }
    }

    /// The truncation rule for chats; `None` if they are not truncated.
    pub fn truncation_rule(&self) -> Option<TruncationRule> {
        self.cut
    }

    /// The data sets, in config order.
    pub fn sets(&self) -> &[DataSet] {
        &self.sets
    }

    /// The names of the data sets in the metrics.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Number of rows of all data sets.
    pub fn num_rows(&self) -> usize {
        self.sets.iter().map(DataSet::len).sum()
    }

    /// The encoder of the rows.
    pub fn encoder(&self) -> &Encoder {
        &self.encoder
    }

    /// All rows of all data sets, in order. A corpus has the rows of a pass at the first offset.
    pub fn rows(&self) -> impl Iterator<Item = SampleIndex> + '_ {
        (0u32..).zip(&self.sets).flat_map(|(dataset, set)| {
            let rows: Box<dyn Iterator<Item = u32> + '_> = match set {
                DataSet::Chats(file) => Box::new(0..file.len() as u32),
                DataSet::Corpus(corpus) => corpus.rows(),
            };
            rows.map(move |row| SampleIndex { dataset, row })
        })
    }

    /// Rejected texts of corpora.
    pub fn rejected_texts(&self) -> impl Iterator<Item = &Rejection> {
        self.sets.iter().filter_map(DataSet::corpus).flat_map(Corpus::rejected)
    }

    /// The parsed row; `None` for a row of a corpus.
    pub fn sample(&self, row: SampleIndex) -> Option<Result<Sample, SampleError>> {
        match self.set(row) {
            DataSet::Chats(file) => Some(file.read(row.row as usize)),
            DataSet::Corpus(_) => None,
        }
    }

    /// The value of the row's own key `id`, as text; `None` if it has none, and for a row of a
    /// corpus.
    pub fn own_id(&self, row: SampleIndex) -> Option<String> {
        match self.set(row) {
            DataSet::Chats(file) => file.own_id(row.row as usize),
            DataSet::Corpus(_) => None,
        }
    }

    /// The tokens that truncation removes from a row, with their positions in the truncated row.
    pub fn dropped(&self, row: SampleIndex) -> Result<Vec<DroppedTokens>, Rejection> {
        Ok(match (self.set(row), self.cut) {
            (DataSet::Corpus(corpus), _) => corpus.dropped(row.row)?,
            (DataSet::Chats(file), Some(cut)) => {
                self.encoder.dropped(&file.read(row.row as usize)?, cut)?
            }
            (DataSet::Chats(_), None) => Vec::new(),
        })
    }

    /// A unique label of a row: file and line, and for a corpus its first token.
    pub fn label(&self, row: SampleIndex) -> String {
        let id = self.id(row);
        match self.set(row) {
            DataSet::Chats(_) => id.to_string(),
            DataSet::Corpus(corpus) => format!("{id}@{}", corpus.span(row.row).0),
        }
    }

    /// Hash of the contents of all data sets.
    pub fn fingerprint(&self) -> [u8; 32] {
        use sha2::{Digest, Sha256};
        let mut hash = Sha256::new();
        for set in &self.sets {
            hash.update(set.fingerprint());
        }
        hash.finalize().into()
    }

    fn set(&self, row: SampleIndex) -> &DataSet {
        &self.sets[row.dataset as usize]
    }
}

impl RowReader for DatasetRows {
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection> {
        Ok(match self.set(row) {
            DataSet::Corpus(corpus) => corpus.read(row.row)?,
            DataSet::Chats(file) => {
                self.encoder.encode_truncated(&file.read(row.row as usize)?, self.cut)?
            }
        })
    }

    fn read_of_length(&self, row: SampleIndex, length: Length) -> Result<EncodedSample, Rejection> {
        let accept = |now| length.check_unchanged(now, || self.id(row));
        match self.set(row) {
            DataSet::Corpus(corpus) => {
                let sample = corpus.read(row.row)?;
                accept(Length::of(&sample)).map(|()| sample)
            }
            DataSet::Chats(file) => {
                self.encoder.encode_if(&file.read(row.row as usize)?, self.cut, accept)
            }
        }
    }

    fn length(&self, row: SampleIndex) -> Result<Length, Rejection> {
        let length = match self.set(row) {
            DataSet::Corpus(corpus) => corpus.length(row.row),
            DataSet::Chats(file) => file
                .read(row.row as usize)
                .and_then(|sample| self.encoder.length_truncated(&sample, self.cut)),
        };
        Ok(length?)
    }

    fn uniform_length(&self, dataset: u32) -> Option<Length> {
        self.sets[dataset as usize].corpus()?.uniform_length()
    }

    fn id(&self, row: SampleIndex) -> SampleId {
        match self.set(row) {
            DataSet::Chats(file) => file.id(row.row as usize),
            DataSet::Corpus(corpus) => corpus.id(row.row),
        }
    }
}
