//! The rows of a data set: one file, or several that are read one after the other.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::files::listing::{data_files, image_root};
use super::files::{DataFile, KnownIndex, RowContent};
use super::raw_row::RawRow;
use super::rows::{RowForm, RowParser, RowRules};
use super::sample_error::{AtRow, SampleError, SampleFault};
use super::source_error::SourceError;
use batch::{Sample, SampleId};

/// Maximum number of rows that are parsed to detect the form of the rows.
const DETECTION_ROWS: usize = 100;

/// Maximum number of rows, and of their bytes, that are parsed to find keys that are not read.
const SURVEY_ROWS: usize = 1000;
const SURVEY_BYTES: usize = 16 << 20;

/// The open rows of a data set. Rows can be read in any order and from several threads.
#[derive(Debug)]
pub struct RowFile {
    paths: Vec<PathBuf>,
    parser: RowParser,
    data_files: Vec<DataFile>,
    ends: Vec<usize>, // [data_files], number of rows up to the end of each
    fingerprint: [u8; 32],
    form: RowForm,
}

impl RowFile {
    /// Opens a file, a folder of files or the files that match a pattern. Finds the rows of each
    /// and computes its fingerprint.
    ///
    /// Relative image paths in the rows are resolved against `image_root`, or against the folder of
    /// the files if it is `None`.
    pub fn open(path: &Path, image_root: Option<&Path>) -> Result<Self, SourceError> {
        Self::open_all(&[path.to_owned()], image_root)
    }

    /// [`RowFile::open`] for several paths.
    pub fn open_all(paths: &[PathBuf], image_root: Option<&Path>) -> Result<Self, SourceError> {
        let files = data_files(paths)?;
        Self::open_files(paths, &files, image_root, RowRules::default(), &[], None)
    }

    /// [`RowFile::open_all`] with rules for the rows; logs which keys of the first rows are not
    /// read.
    pub fn open_with(
        paths: &[PathBuf],
        image_root: Option<&Path>,
        rules: RowRules,
    ) -> Result<Self, SourceError> {
        let files = data_files(paths)?;
        let file = Self::open_files(paths, &files, image_root, rules.clone(), &[], None)?;
        Ok(file.with_rules(rules))
    }

    /// Opens `files`, the data files of `paths`. A file whose index is in `known` is not scanned if
    /// it is unchanged. Compressed files are unpacked into `cache`, or into temporary files.
    pub(crate) fn open_files(
        paths: &[PathBuf],
        files: &[PathBuf],
        image_root: Option<&Path>,
        rules: RowRules,
        known: &[KnownIndex],
        cache: Option<&Path>,
    ) -> Result<Self, SourceError> {
        permit_open_files(files.len() as u64);
        let open = |file: &PathBuf| {
            DataFile::open(file, known.iter().find(|known| known.path == *file), cache)
        };
        let data_files = files.par_iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let ends: Vec<usize> = data_files
            .iter()
            .scan(0, |end, data_file| {
                *end += data_file.len();
                Some(*end)
            })
            .collect();
        let mut this = Self {
            paths: paths.to_owned(),
            fingerprint: fingerprint(&data_files, &rules),
            parser: RowParser::new(&Self::image_root_of(paths, files, image_root), rules),
            data_files,
            ends,
            form: RowForm::Messages,
        };
        if this.is_empty() {
            return Err(SourceError::NoRows { path: this.path().to_owned() });
        }
        this.form = this.detect()?;
        Ok(this)
    }

    /// Sets the rules for the rows, and logs which keys of the first rows are not read.
    #[must_use]
    pub fn with_rules(mut self, rules: RowRules) -> Self {
        self.parser = RowParser::new(&self.parser.image_root, rules);
        let rules = &self.parser.rules;
        let named = rules.columns.iter().flat_map(|columns| columns.pairs().map(|(_, of)| of));
        let of_info = rules.info.iter().flat_map(|info| info.mapping().named_columns());
        let mut missing: Vec<&str> = named.chain(of_info).collect();
        let is_mapped = !missing.is_empty();
        let (mut num_rows, mut replaced) = (0, None);
        for (_, content) in self.first().filter(|_| is_mapped) {
            let Ok(row) = content.into_raw() else { continue };
            num_rows += 1;
            missing.retain(|column| !row.object.contains_key(*column));
            replaced = replaced.or_else(|| rules.columns.as_ref()?.replaced(&row));
        }
        let file = self.path().display();
        for column in missing.into_iter().filter(|_| num_rows > 0) {
            tracing::warn!(
                "{file}: no row of the first {num_rows} has a value in the column `{column}`, which `columns` names"
            );
        }
        if let Some(column) = replaced {
            tracing::warn!(
                "{file}: `{column}` is not read, because `columns` names another column"
            );
        }
        let rows = self.first().filter_map(|(id, content)| Some((id, self.raw_of(content).ok()?)));
        self.parser.survey(self.path(), rows);
        self
    }

    /// The contents of the first rows.
    fn first(&self) -> impl Iterator<Item = (SampleId, RowContent)> {
        let mut left = SURVEY_BYTES;
        (0..self.len().min(SURVEY_ROWS)).map_while(move |row| {
            let (id, content) = (self.id(row), self.content(row).ok()?);
            left = left.checked_sub(content.num_bytes())?;
            Some((id, content))
        })
    }

    /// The rules for the rows.
    pub fn rules(&self) -> &RowRules {
        &self.parser.rules
    }

    /// Returns the folder for relative image paths: the given one, or that of the files.
    pub(crate) fn image_root_of(
        paths: &[PathBuf],
        files: &[PathBuf],
        given: Option<&Path>,
    ) -> PathBuf {
        match given {
            Some(root) if root == Path::new("") => PathBuf::from("."),
            Some(root) => root.to_owned(),
            None => image_root(paths, files),
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Always `false`, because a data set without rows cannot be opened.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first path of the data set, as in the config.
    pub fn path(&self) -> &Path {
        self.paths.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// The paths of the data set, as in the config.
    pub(crate) fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The files, in the order of their rows.
    pub(crate) fn data_files(&self) -> &[DataFile] {
        &self.data_files
    }

    /// File and line of row `row < len()`. In a file without lines, the line is the number of the
    /// row.
    pub fn id(&self, row: usize) -> SampleId {
        let (data_file, row) = self.place(row);
        SampleId { file: data_file.path().clone(), line: data_file.line(row) }
    }

    /// The line of [`Self::id`].
    pub(crate) fn line(&self, row: usize) -> u64 {
        let (data_file, row) = self.place(row);
        data_file.line(row)
    }

    /// Reads and parses row `row < len()`.
    pub fn read(&self, row: usize) -> Result<Sample, SampleError> {
        self.parse(row, self.content(row)?)
    }

    /// Reads the content of row `row < len()`.
    pub(crate) fn content(&self, row: usize) -> Result<RowContent, SampleError> {
        let (data_file, at) = self.place(row);
        data_file.content(at).map_err(|cause| SampleFault::Read(cause).at(&self.id(row)))
    }

    /// Parses the content of row `row < len()`.
    pub(crate) fn parse(&self, row: usize, content: RowContent) -> Result<Sample, SampleError> {
        let id = self.id(row);
        self.raw_of(content).and_then(|raw| self.parser.parse(&id, raw)).at(&id)
    }

    /// The value of the key `id` of row `row < len()`: a text, or a number as text. `None` if it
    /// has none.
    pub(crate) fn own_id(&self, row: usize) -> Option<String> {
        Self::id_in(self.content(row).ok()?)
    }

    /// [`Self::own_id`] of the content of a row.
    pub(crate) fn id_in(content: RowContent) -> Option<String> {
        match content.into_raw().ok()?.object.get("id")? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        }
    }

    /// Reads the keys and values of row `row < len()`.
    fn raw(&self, row: usize) -> Result<RawRow, SampleError> {
        self.raw_of(self.content(row)?).at(&self.id(row))
    }

    /// The keys and values of a row, under our names.
    fn raw_of(&self, content: RowContent) -> Result<RawRow, SampleFault> {
        let mut raw = content.into_raw()?;
        if let Some(columns) = &self.parser.rules.columns {
            columns.apply(&mut raw);
        }
        if let Some(info) = &self.parser.rules.info {
            info.mapping().apply(&mut raw);
        }
        Ok(raw)
    }

    /// The place of row `row < len()` in its file: a byte offset, or a number of rows. Rows of
    /// unchanged files keep it.
    pub(crate) fn offset(&self, row: usize) -> u64 {
        let (data_file, row) = self.place(row);
        data_file.offset(row)
    }

    /// Number of bytes of all files before row `row <= len()`, after unpacking.
    pub(crate) fn bytes_before(&self, row: usize) -> u64 {
        let number = self.ends.partition_point(|end| *end <= row);
        let whole: u64 = self.data_files[..number].iter().map(DataFile::num_bytes).sum();
        let first = number.checked_sub(1).map_or(0, |before| self.ends[before]);
        whole
            + self.data_files.get(number).map_or(0, |data_file| data_file.bytes_before(row - first))
    }

    /// Folder that relative image paths are resolved against.
    pub(crate) fn image_root(&self) -> &Path {
        &self.parser.image_root
    }

    /// Returns whether an open file was written to since it was opened. A new file at the same path
    /// does not count.
    pub(crate) fn has_changed(&self) -> bool {
        self.data_files.iter().any(DataFile::has_changed)
    }

    /// Reads the documents in rows of a corpus that follow each other, and calls `map` with each.
    pub(crate) fn map_texts<T>(
        &self,
        rows: Range<usize>,
        map: &dyn Fn(&str) -> Result<T, SampleFault>,
    ) -> Vec<Result<T, SampleError>> {
        let (data_file, first) = self.place(rows.start);
        if rows.len() > data_file.len() - first {
            return rows.flat_map(|row| self.map_texts(row..row + 1, map)).collect();
        }
        let text = |content| RowParser::parse_text(self.raw_of(content)?);
        let map = |content: io::Result<_>| map(&text(content.map_err(SampleFault::Read)?)?);
        let contents = data_file.contents(first..first + rows.len());
        rows.zip(contents)
            .map(|(row, content)| map(content).map_err(|fault| fault.at(&self.id(row))))
            .collect()
    }

    /// Hash of the content of the files when they were opened, and of the rules that change the
    /// rows: their entry in `dataset_info.json`, columns and system turn. For a single file without
    /// such rules it is the SHA-256 of its bytes, after unpacking.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Form of the first row whose form is known.
    pub fn form(&self) -> RowForm {
        self.form
    }

    /// The file of a row, and the row in it.
    fn place(&self, row: usize) -> (&DataFile, usize) {
        let number = self.ends.partition_point(|end| *end <= row);
        let first = number.checked_sub(1).map_or(0, |before| self.ends[before]);
        (&self.data_files[number], row - first)
    }

    fn detect(&self) -> Result<RowForm, SourceError> {
        let checked = self.len().min(DETECTION_ROWS);
        let (mut first, mut text) = (None, None);
        for row in 0..checked {
            match self.raw(row).and_then(|raw| RowForm::of(&raw.object).at(&self.id(row))) {
                Ok(RowForm::Text) => text = Some(RowForm::Text), // a later row may have an image
                Ok(form) if text.is_none() || form.has_media() => return Ok(form),
                Ok(_) => {}
                Err(error) => first = first.or(Some(error)),
            }
        }
        if let Some(text) = text {
            return Ok(text);
        }
        let first = Box::new(first.expect("there is at least one row"));
        Err(SourceError::UnknownForm { path: self.path().to_owned(), checked, first })
    }
}

/// Raises the limit of open files of this process as far as the system permits, if so many more are
/// needed. A run also opens images and checkpoints.
fn permit_open_files(more: u64) {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < 2 * more + 512) {
        // if it fails, opening the files reports it
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

fn fingerprint(data_files: &[DataFile], rules: &RowRules) -> [u8; 32] {
    let RowRules { info, columns, system, .. } = rules;
    if let ([data_file], None, None, None) = (data_files, info, columns, system) {
        return data_file.sha256();
    }
    let mut hasher = Sha256::new();
    for data_file in data_files {
        hasher.update(data_file.sha256());
    }
    if let Some(info) = info {
        hasher.update(info.digest());
    }
    if let Some(columns) = columns {
        hasher.update(format!("{columns:?}"));
    }
    if let Some(system) = system {
        hasher.update(format!("system {system:?}"));
    }
    hasher.finalize().into()
}
