//! Plain text as a data set: tokenised once into a file, then read as windows or documents.
//!
//! For windows, a row number is the index of the window's first token, so that a row is the same
//! sample in every epoch although each epoch draws a new offset. For documents, a row number counts
//! the documents, or their pieces if long documents are split.

mod text;
mod token_file;
pub(crate) mod windows;

use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use text::tokens;
use token_file::{DocumentPieces, Separators, TokenFile};
pub use windows::{CorpusConfig, Sampling, Spacing, Windows};

use crate::config::OnError;
use crate::encode::Encoder;
use crate::encode::truncate::{
    DroppedTokens, TokenCounts, TruncationError, TruncationRule, dropped,
};
use crate::row::{Length, Rejection};
use crate::source::{AtRow, RowFile, RowForm, SampleError, SampleFault, SourceError, UnknownKeys};
use batch::{EncodedSample, SampleId};

/// Settings of a corpus that come from other sections of the config.
#[derive(Debug, Clone)]
pub struct CorpusOptions {
    /// Whether the corpus is opened for training or evaluation.
    pub purpose: Purpose,
    /// Maximum number of tokens of a piece of a document, above 1. `None` does not split documents.
    pub split_at: Option<NonZeroU32>,
    /// How long documents are truncated. Windows are never truncated.
    pub cut: Option<TruncationRule>,
    /// Folder in which the tokens are cached. `None` stores them in a temporary file.
    pub cache: Option<PathBuf>,
    /// Whether a text that cannot be used is skipped or stops the run.
    pub on_error: OnError,
    /// Maximum share of rejected texts, from 0 to 1.
    pub max_rejected: f64,
    /// How unknown keys of chats are handled. Rows of a corpus are read for their text alone.
    pub unknown_keys: UnknownKeys,
    /// The system turn of chats that have none, unless their data set gives one.
    pub system: Option<String>,
}

/// Whether a corpus is opened for training or evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Training, with this many rows per batch.
    Train(NonZeroUsize),
    /// Evaluation: windows start at the first token, without a random offset. They are placed end
    /// to end unless `sampling` is `sliding_window`.
    Eval,
}

impl Default for CorpusOptions {
    fn default() -> Self {
        Self {
            purpose: Purpose::Train(NonZeroUsize::MIN),
            split_at: None,
            cut: None,
            cache: None,
            unknown_keys: UnknownKeys::default(),
            system: None,
            on_error: OnError::Skip,
            max_rejected: 1.0,
        }
    }
}

/// A tokenised corpus. Samples can be read from several threads.
#[derive(Debug)]
pub struct Corpus {
    path: Arc<Path>,
    fingerprint: [u8; 32],
    separators: Separators,
    tokens: TokenFile,
    rows: CorpusRows,
    cut: Option<TruncationRule>,
}

#[derive(Debug)]
enum CorpusRows {
    Windows(Windows),
    Documents(DocumentPieces),
}

impl Corpus {
    /// Opens `paths`, a `.txt` file or files of rows with the key `text`, and tokenises them unless
    /// `options.cache` has the tokens. There must be a path. During tokenisation, calls
    /// `progress(bytes of text done, bytes of text in total)`.
    pub fn open(
        paths: &[PathBuf],
        config: &CorpusConfig,
        encoder: &Encoder,
        options: &CorpusOptions,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Self, SourceError> {
        let path = &*paths[0];
        let separators = separators(path, config, encoder)?;
        let texts = Texts::open(paths)?;
        let fingerprint = key(&texts, separators, encoder);
        let tokens = tokens(path, &texts, separators, encoder, options, fingerprint, progress)?;
        check_rejected(path, &tokens, options)?;
        let rows = rows(path, &tokens, config, options)?;
        Ok(Self { path: path.into(), fingerprint, separators, tokens, rows, cut: options.cut })
    }

    /// Returns whether `path` ends in `.txt`, so that the file is read as one text.
    pub fn is_text_file(path: &Path) -> bool {
        path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("txt"))
    }

    /// The first path as passed to [`Self::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Hash of the text, the tokenizer and the separators. Equal hashes mean equal tokens.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Number of tokens, including separators.
    pub fn num_tokens(&self) -> u64 {
        u64::from(self.tokens.index.num_tokens)
    }

    /// Number of documents, as divided by the separators.
    pub fn num_documents(&self) -> usize {
        self.tokens.index.documents.len()
    }

    /// Rejections of the texts that could not be used.
    pub fn rejected(&self) -> &[Rejection] {
        &self.tokens.index.rejected
    }

    /// Number of samples in a pass with offset 0.
    pub fn len(&self) -> usize {
        match &self.rows {
            CorpusRows::Windows(windows) => windows.count(0) as usize,
            CorpusRows::Documents(pieces) => pieces.len(self.num_documents()),
        }
    }

    /// Always `false`, because a corpus without samples cannot be opened.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The [`Corpus::len`] row numbers of a pass with offset 0.
    pub fn rows(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match &self.rows {
            CorpusRows::Windows(windows) => Box::new(windows.starts(0)),
            CorpusRows::Documents(_) => Box::new(0..self.len() as u32),
        }
    }

    /// Positions of the windows; `None` for documents.
    pub fn windows(&self) -> Option<Windows> {
        match &self.rows {
            CorpusRows::Windows(windows) => Some(*windows),
            CorpusRows::Documents(_) => None,
        }
    }

    /// Length of every sample if all are equal; `None` for documents.
    pub fn uniform_length(&self) -> Option<Length> {
        let tokens = self.windows()?.length() as usize + 1;
        Some(Length { tokens, ..Length::default() })
    }

    /// Returns the first token of a row in the corpus, and its number of tokens after truncation.
    pub fn span(&self, row: u32) -> (u32, u32) {
        let (start, tokens) = self.whole_span(row);
        let kept = self.kept(tokens).unwrap_or(0..tokens as usize);
        (start + kept.start as u32, kept.len() as u32)
    }

    /// Returns the range of tokens that truncation keeps of a row with `tokens` tokens.
    fn kept(&self, tokens: u32) -> Result<Range<usize>, TruncationError> {
        let cut = self.cut.filter(|_| matches!(self.rows, CorpusRows::Documents(_)));
        TokenCounts::of_text(tokens as usize).kept_text(cut)
    }

    /// Returns the range of tokens that truncation keeps of a row.
    fn kept_of(&self, row: u32) -> Result<Range<usize>, SampleError> {
        let kept = self.kept(self.whole_span(row).1);
        kept.map_err(|cause| SampleFault::from(cause).at(&self.id(row)))
    }

    /// Number of documents that are truncated.
    pub fn num_truncated(&self) -> usize {
        let cut = |row: &u32| self.span(*row).1 < self.whole_span(*row).1;
        if self.cut.is_some() { self.rows().filter(cut).count() } else { 0 }
    }

    /// Returns the tokens that truncation removes from a row, by their places in the result of
    /// [`Corpus::read`].
    pub fn dropped(&self, row: u32) -> Result<Vec<DroppedTokens>, SampleError> {
        let (start, tokens) = self.whole_span(row);
        let kept = self.kept_of(row)?;
        let ids = self.tokens.read(start, tokens).map_err(SampleFault::Read).at(&self.id(row))?;
        Ok(dropped(&ids, &[kept]))
    }

    /// Returns the first token of a row in the corpus, and its number of tokens before truncation.
    fn whole_span(&self, row: u32) -> (u32, u32) {
        match &self.rows {
            CorpusRows::Windows(windows) => (row, windows.length() + 1),
            CorpusRows::Documents(pieces) => {
                let (document, first) = pieces.place(row);
                let (start, end) = self.tokens.index.document(document);
                (start + first, pieces.tokens(end - start, first))
            }
        }
    }

    /// Returns the file and the line in which the first token of a row starts.
    pub fn id(&self, row: u32) -> SampleId {
        let line = self.tokens.index.line(self.span(row).0);
        SampleId { file: self.path.clone(), line }
    }

    /// Reads the sample of a row.
    pub fn read(&self, row: u32) -> Result<EncodedSample, SampleError> {
        self.check_targets(row)?;
        let (start, tokens) = self.span(row);
        let id = self.id(row);
        let ids = self.tokens.read(start, tokens).map_err(SampleFault::Read).at(&id)?;
        Ok(self.separators.sample(id, ids))
    }

    /// Returns the length of the sample of a row. Fails like [`Corpus::read`], without reading the
    /// tokens.
    pub fn length(&self, row: u32) -> Result<Length, SampleError> {
        self.check_targets(row)?;
        Ok(Length { tokens: self.span(row).1 as usize, ..Length::default() })
    }

    /// Checks that a row has at least two tokens before and after truncation: with one token it has
    /// no target.
    fn check_targets(&self, row: u32) -> Result<(), SampleError> {
        if self.whole_span(row).1 < 2 {
            return Err(SampleFault::NoSupervisedToken { num_tokens: 1 }.at(&self.id(row)));
        }
        self.kept_of(row).map(drop)
    }
}

/// Source of the text: rows, or the path and SHA-256 of a text file.
enum Texts {
    Rows(RowFile),
    File(PathBuf, [u8; 32]),
}

impl Texts {
    fn open(paths: &[PathBuf]) -> Result<Self, SourceError> {
        let path = &*paths[0];
        if paths.len() > 1 || !Corpus::is_text_file(path) {
            let file = RowFile::open_all(paths, None)?;
            return match file.form() {
                RowForm::Text => Ok(Self::Rows(file)),
                form => Err(SourceError::NoText { path: path.to_owned(), form }),
            };
        }
        let fingerprint = text::fingerprint(path)
            .map_err(|cause| SourceError::Read { path: path.to_owned(), cause })?;
        Ok(Self::File(path.to_owned(), fingerprint))
    }

    fn fingerprint(&self) -> [u8; 32] {
        match self {
            Self::Rows(file) => file.fingerprint(),
            Self::File(_, fingerprint) => *fingerprint,
        }
    }
}

/// Computes the fingerprint of a tokenised corpus.
fn key(texts: &Texts, separators: Separators, encoder: &Encoder) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(token_file::VERSION.to_le_bytes());
    hash.update([u8::from(matches!(texts, Texts::Rows(_)))]);
    hash.update(texts.fingerprint());
    hash.update(encoder.tokenizer_fingerprint());
    for id in [separators.eos, separators.bos] {
        hash.update(id.map_or(u64::MAX, u64::from).to_le_bytes());
    }
    hash.finalize().into()
}

/// Resolves the separators of the config to ids. Without any, documents end in the model folder's
/// end-of-document token.
fn separators(
    path: &Path,
    config: &CorpusConfig,
    encoder: &Encoder,
) -> Result<Separators, SourceError> {
    let id = |key, token: &Option<String>| {
        let id = token.as_ref().map(|token| (token, encoder.token_id(token)));
        match id {
            None => Ok(None),
            Some((_, Some(id))) => Ok(Some(id)),
            Some((token, None)) => {
                Err(SourceError::UnknownToken { path: path.to_owned(), key, token: token.clone() })
            }
        }
    };
    let (eos, bos) = (id("eos_token", &config.eos_token)?, id("bos_token", &config.bos_token)?);
    let neither = eos.is_none() && bos.is_none();
    Ok(Separators { eos: if neither { Some(encoder.end_of_document()) } else { eos }, bos })
}

/// Fails if more texts were rejected than the config allows.
fn check_rejected(
    path: &Path,
    tokens: &TokenFile,
    options: &CorpusOptions,
) -> Result<(), SourceError> {
    let index = &tokens.index;
    let Some(first) = index.rejected.first() else { return Ok(()) };
    if options.on_error == OnError::Stop {
        return Err(SourceError::Rejected(Box::new(first.clone())));
    }
    if index.rejected.len() as f64 > options.max_rejected * index.num_texts as f64 {
        return Err(SourceError::TooManyRejected {
            path: path.to_owned(),
            rejected: index.rejected.len(),
            rows: index.num_texts,
            max_rejected: options.max_rejected,
            first: Box::new(first.clone()),
        });
    }
    Ok(())
}

fn rows(
    path: &Path,
    tokens: &TokenFile,
    config: &CorpusConfig,
    options: &CorpusOptions,
) -> Result<CorpusRows, SourceError> {
    let path = path.to_owned();
    let index = &tokens.index;
    let num_tokens = index.num_tokens;
    let lanes = match options.purpose {
        Purpose::Train(rows) => u32::try_from(rows.get()).unwrap_or(u32::MAX),
        Purpose::Eval => 1,
    };
    let length = config.length.map_or(1, NonZeroU32::get);
    let Some(spacing) = config.spacing(lanes) else {
        if index.documents.is_empty() {
            return Err(SourceError::FewTokens { path, tokens: 0, length, fewest: 2 });
        }
        let pieces =
            DocumentPieces::new(index.document_lengths(), options.split_at.map(NonZeroU32::get));
        return pieces.map(CorpusRows::Documents).ok_or(SourceError::ManyTokens { path });
    };
    let spacing = match (options.purpose, spacing) {
        (Purpose::Eval, Spacing::Tiled | Spacing::Lanes(_)) => Spacing::Stride(length),
        (_, spacing) => spacing,
    };
    Windows::new(num_tokens, length, spacing)
        .map(CorpusRows::Windows)
        .map_err(|fewest| SourceError::FewTokens { path, tokens: num_tokens, length, fewest })
}

#[cfg(test)]
mod tests;
