//! The data sets of a run: chats and corpora, their mixture, their order, and their rows.
//! [`RowReader`] is the interface between the loader and the data sets: a row is measured, packed,
//! then read.

pub(crate) mod cached;
pub(crate) mod corpus;
pub(crate) mod order;
pub(crate) mod split;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::row::{Length, Rejection, SampleIndex, TransientRowError};
use crate::{
    Corpus, CorpusOptions, DatasetConfig, DatasetInfo, DroppedTokens, Encoder, LoaderOptions,
    RowFile, RowForm, RowRules, SampleError, SourceError, TruncationRule, UnknownKeys,
    dataset_names, open_indexed,
};
use batch::{EncodedSample, Sample, SampleId};
use sha2::{Digest, Sha256};
use split::{EvalSplit, held_out};

/// A data set, open for reading.
pub enum DataSet {
    /// Chats, one per row.
    Chats(Chats),
    /// Plain text.
    Corpus(Box<Corpus>),
}

/// The rows of files with chats: all of them, or those on one side of a split.
#[derive(Clone)]
pub struct Chats {
    file: Arc<RowFile>,
    selected: Option<Vec<u32>>, // rows of `file`, ascending
}

impl Chats {
    /// The files, with all their rows.
    pub fn file(&self) -> &RowFile {
        &self.file
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.selected.as_ref().map_or(self.file.len(), Vec::len)
    }

    /// Always false, as [`DataSet::is_empty`].
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn read(&self, row: u32) -> Result<Sample, SampleError> {
        self.file.read(self.row(row))
    }

    /// The row of the files that is row `row < len()` here.
    fn row(&self, row: u32) -> usize {
        self.selected.as_ref().map_or(row, |selected| selected[row as usize]) as usize
    }

    fn fingerprint(&self) -> [u8; 32] {
        let Some(selected) = &self.selected else { return self.file.fingerprint() };
        let mut hash = Sha256::new_with_prefix(self.file.fingerprint());
        for row in selected {
            hash.update(row.to_le_bytes());
        }
        hash.finalize().into()
    }
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
                .map(|corpus| Self::Corpus(corpus.into()));
        }
        let cache = options.cache.as_deref().map(|folder| (encoder, folder));
        let system = set.system.as_ref().or(options.system.as_ref());
        let system = system.filter(|text| !text.is_empty()).map(|text| text.as_str().into());
        let rules = RowRules { unknown_keys: options.unknown_keys, system, ..RowRules::default() };
        let file = Self::open_chats(set, rules, cache)?;
        Ok(Self::Chats(Chats { file: Arc::new(file), selected: None }))
    }

    /// Opens and indexes the files of chats, with the index in the folder of a cache if there is
    /// one. `rules` are those of all data sets.
    fn open_chats(
        set: &DatasetConfig,
        rules: RowRules,
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
        let rules = RowRules { literal_placeholders, info, columns, ..rules };
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
            let rules = RowRules { unknown_keys, ..RowRules::default() };
            return Self::open_chats(set, rules, None).map(|_| ());
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
            Self::Chats(chats) => chats.len(),
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
            Self::Chats(chats) => chats.file.path(),
            Self::Corpus(corpus) => corpus.path(),
        }
    }

    /// Number of rows that an epoch uses with weight 1: `num_samples` of the entry in
    /// `dataset_info.json`, or all rows.
    pub fn num_samples(&self) -> u64 {
        let given = self.chats().and_then(|chats| {
            let samples = chats.file.rules().info.as_ref()?.num_samples()?;
            // Of the rows that are trained on, the same share.
            Some((samples as f64 * chats.len() as f64 / chats.file.len() as f64).round() as u64)
        });
        given.unwrap_or(self.len() as u64)
    }

    /// Hash of the content of the data set.
    pub fn fingerprint(&self) -> [u8; 32] {
        match self {
            Self::Chats(chats) => chats.fingerprint(),
            Self::Corpus(corpus) => corpus.fingerprint(),
        }
    }

    /// The chats; `None` for a corpus.
    fn chats(&self) -> Option<&Chats> {
        match self {
            Self::Chats(chats) => Some(chats),
            Self::Corpus(_) => None,
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
    limits: Option<LoaderOptions>,
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
        Ok(Self { sets, names: dataset_names(datasets), encoder, cut: None, limits: None })
    }

    /// Divides the rows of chats into those to train on and those to evaluate on, which are not
    /// truncated. Rows that stay together are on one side, whatever their data sets. It fails if a
    /// data set would have no row on one side.
    pub fn split(self, split: EvalSplit) -> Result<[Self; 2], SourceError> {
        let chats = self.sets.iter().filter_map(|set| Some(set.chats()?.file()));
        let mut held = held_out(&chats.collect::<Vec<_>>(), split)?.into_iter();
        let (mut train, mut eval, mut names) = (Vec::new(), Vec::new(), Vec::new());
        for (set, name) in self.sets.into_iter().zip(&self.names) {
            let DataSet::Chats(Chats { file, .. }) = set else {
                train.push(set);
                continue;
            };
            let held = held.next().expect("one list for each data set of chats");
            let trained = (0..file.len() as u32).filter(|row| held.binary_search(row).is_err());
            let selected = Some(trained.collect());
            train.push(DataSet::Chats(Chats { file: Arc::clone(&file), selected }));
            eval.push(DataSet::Chats(Chats { file, selected: Some(held) }));
            names.push(name.clone());
        }
        let encoder = Arc::clone(&self.encoder);
        let eval = Self { sets: eval, names, encoder, cut: None, limits: None };
        Ok([Self { sets: train, ..self }, eval])
    }

    /// Sets the truncation rule for chats. `None` truncates no chat.
    #[must_use]
    pub fn truncated(self, cut: Option<TruncationRule>) -> Self {
        Self { cut, ..self }
    }

    /// Rejects the samples whose length a loader with these options rejects.
    #[must_use]
    pub fn limited(self, limits: LoaderOptions) -> Self {
        Self { limits: Some(limits), ..self }
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
                DataSet::Chats(chats) => Box::new(0..chats.len() as u32),
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
            DataSet::Chats(chats) => Some(chats.read(row.row)),
            DataSet::Corpus(_) => None,
        }
    }

    /// The value of the row's own key `id`, as text; `None` if it has none, and for a row of a
    /// corpus.
    pub fn own_id(&self, row: SampleIndex) -> Option<String> {
        match self.set(row) {
            DataSet::Chats(chats) => chats.file.own_id(chats.row(row.row)),
            DataSet::Corpus(_) => None,
        }
    }

    /// The tokens that truncation removes from a row, with their positions in the truncated row.
    pub fn dropped(&self, row: SampleIndex) -> Result<Vec<DroppedTokens>, Rejection> {
        Ok(match (self.set(row), self.cut) {
            (DataSet::Corpus(corpus), _) => corpus.dropped(row.row)?,
            (DataSet::Chats(chats), Some(cut)) => {
                self.encoder.dropped(&chats.read(row.row)?, cut)?
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
        let mut hash = Sha256::new();
        for set in &self.sets {
            hash.update(set.fingerprint());
        }
        hash.finalize().into()
    }

    /// The number of a row in the files of its data set.
    fn file_row(&self, row: SampleIndex) -> usize {
        self.set(row).chats().map_or(row.row as usize, |chats| chats.row(row.row))
    }

    fn check_length(&self, row: SampleIndex, length: Length) -> Result<(), Rejection> {
        let limits = self.limits.as_ref();
        limits.map_or(Ok(()), |limits| limits.check_length(length, || self.id(row)))
    }

    fn set(&self, row: SampleIndex) -> &DataSet {
        &self.sets[row.dataset as usize]
    }
}

impl RowReader for DatasetRows {
    fn read(&self, row: SampleIndex) -> Result<EncodedSample, Rejection> {
        let sample = match self.set(row) {
            DataSet::Corpus(corpus) => corpus.read(row.row)?,
            DataSet::Chats(chats) => {
                self.encoder.encode_truncated(&chats.read(row.row)?, self.cut)?
            }
        };
        self.check_length(row, Length::of(&sample))?;
        Ok(sample)
    }

    fn read_of_length(&self, row: SampleIndex, length: Length) -> Result<EncodedSample, Rejection> {
        let accept = |now| length.check_unchanged(now, || self.id(row));
        match self.set(row) {
            DataSet::Corpus(corpus) => {
                let sample = corpus.read(row.row)?;
                accept(Length::of(&sample)).map(|()| sample)
            }
            DataSet::Chats(chats) => {
                self.encoder.encode_if(&chats.read(row.row)?, self.cut, accept)
            }
        }
    }

    fn length(&self, row: SampleIndex) -> Result<Length, Rejection> {
        let length = match self.set(row) {
            DataSet::Corpus(corpus) => corpus.length(row.row),
            DataSet::Chats(chats) => chats
                .read(row.row)
                .and_then(|sample| self.encoder.length_truncated(&sample, self.cut)),
        };
        let length = length?;
        self.check_length(row, length)?;
        Ok(length)
    }

    fn uniform_length(&self, dataset: u32) -> Option<Length> {
        self.sets[dataset as usize].corpus()?.uniform_length()
    }

    fn id(&self, row: SampleIndex) -> SampleId {
        match self.set(row) {
            DataSet::Chats(chats) => chats.file.id(chats.row(row.row)),
            DataSet::Corpus(corpus) => corpus.id(row.row),
        }
    }
}
