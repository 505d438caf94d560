//! Tokenises texts in parallel and writes the tokens to a file in the order of the texts.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use sha2::digest::generic_array::GenericArray;

use super::documents::Separators;
use super::text::{self, Piece, TextFault};
use super::token_file::{TokenFile, TokenWriter, TooManyTokens};
use super::{CorpusOptions, Texts};
use crate::encode::Encoder;
use crate::row::Rejection;
use crate::source::{AtRow, RowFile, SampleError, SampleFault, SourceError};
use batch::SampleId;

/// Number of texts that are tokenised in parallel before their tokens are written.
const TEXTS_AT_A_TIME: usize = 64;

/// Opens the cached tokens of a corpus, or tokenises it. During tokenisation, calls
/// `progress(bytes of text done, bytes of text in total)`.
pub(super) fn tokens(
    path: &Path,
    texts: &Texts,
    separators: Separators,
    encoder: &Encoder,
    options: &CorpusOptions,
    fingerprint: [u8; 32],
    progress: &dyn Fn(u64, u64),
) -> Result<TokenFile, SourceError> {
    let key = format!("{:x}", GenericArray::from(fingerprint));
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = format!("{stem}-{}.tokens", &key[..16]);
    let kept = options.cache.as_ref().map(|folder| folder.join(name));
    if let Some(kept) = &kept
        && let Ok(Some(file)) = TokenFile::open(kept, &key)
    {
        return Ok(file);
    }
    let folder = options.cache.clone().unwrap_or_else(std::env::temp_dir);
    let failed =
        |cause| SourceError::WriteTokens { path: path.to_owned(), folder: folder.clone(), cause };
    tracing::info!(file = %path.display(), "tokenising a corpus");
    let mut writer = TokenWriter::create(&folder, separators, key).map_err(failed)?;
    match texts {
        Texts::Rows(file) => tokenise_rows(file, separators, encoder, &mut writer, progress),
        Texts::File(path, _) => tokenise_file(path, separators, encoder, &mut writer, progress),
    }
    .map_err(|problem| problem.at(path, &folder))?;
    writer.finish(kept.as_deref()).map_err(failed)
}

/// The reason why tokenisation stops, without the paths.
enum Problem {
    Read(io::Error),
    Write(io::Error),
    Utf8(u64),
    TooLarge,
    Text(SampleError),
}

impl Problem {
    fn at(self, path: &Path, folder: &Path) -> SourceError {
        let (path, folder) = (path.to_owned(), folder.to_owned());
        match self {
            Self::Read(cause) => SourceError::Read { path, cause },
            Self::Write(cause) => SourceError::WriteTokens { path, folder, cause },
            Self::Utf8(line) => SourceError::NotUtf8 { path, line },
            Self::TooLarge => SourceError::ManyTokens { path },
            Self::Text(error) => SourceError::Rejected(Box::new(Rejection::of(&error))),
        }
    }
}

fn push(writer: &mut TokenWriter, id: u32, line: u64) -> Result<(), Problem> {
    match writer.push(id, line) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(TooManyTokens)) => Err(Problem::TooLarge),
        Err(cause) => Err(Problem::Write(cause)),
    }
}

/// Tokenises a data set, in which every row is a text of one or more documents.
fn tokenise_rows(
    file: &RowFile,
    separators: Separators,
    encoder: &Encoder,
    writer: &mut TokenWriter,
    progress: &dyn Fn(u64, u64),
) -> Result<(), Problem> {
    let all: Vec<usize> = (0..file.len()).collect();
    for rows in all.chunks(TEXTS_AT_A_TIME) {
        let encode = |row: &usize| row_tokens(encoder, &file.read_text(*row)?).at(&file.id(*row));
        let encoded: Vec<Result<Vec<u32>, SampleError>> = rows.par_iter().map(encode).collect();
        for (row, ids) in rows.iter().zip(encoded) {
            let id = file.id(*row);
            let empty = || Rejection::new(&id, "empty", "the text has no tokens".to_owned());
            let ids = ids.map_err(|error| Rejection::of(&error));
            let ids = ids.and_then(|ids| if ids.is_empty() { Err(empty()) } else { Ok(ids) });
            match ids {
                Err(rejection) => writer.count(Some(rejection)),
                Ok(ids) => {
                    writer.count(None);
                    let bos = separators.bos.filter(|bos| ids[0] != *bos);
                    let eos = separators.eos.filter(|eos| ids[ids.len() - 1] != *eos);
                    for id_of_text in bos.into_iter().chain(ids).chain(eos) {
                        push(writer, id_of_text, id.line)?;
                    }
                }
            }
        }
        let next = rows.last().map_or(0, |row| row + 1);
        progress(file.bytes_before(next), file.bytes_before(file.len()));
    }
    Ok(())
}

/// Tokenises a row. Long texts are tokenised in pieces, which takes little memory.
fn row_tokens(encoder: &Encoder, text: &str) -> Result<Vec<u32>, SampleFault> {
    if text.len() <= text::ROW_PIECE_BYTES {
        return encoder.encode_text(text).map(|tokens| tokens.ids);
    }
    let mut ids = Vec::new();
    // the pieces of a string can be read
    for piece in text::Pieces::of_row(text).flatten() {
        ids.extend(encoder.encode_text(&piece.text)?.ids);
    }
    Ok(ids)
}

/// Tokenises a text file, which is one text.
fn tokenise_file(
    path: &Path,
    separators: Separators,
    encoder: &Encoder,
    writer: &mut TokenWriter,
    progress: &dyn Fn(u64, u64),
) -> Result<(), Problem> {
    let file: Arc<Path> = path.into();
    let text = files::open(path).map_err(Problem::Read)?;
    let num_bytes = text.metadata().map_err(Problem::Read)?.len();
    let mut pieces = text::Pieces::new(text);
    let (mut line, mut done) = (1, 0);
    loop {
        let some: Vec<Result<Piece, TextFault>> = pieces.by_ref().take(TEXTS_AT_A_TIME).collect();
        if some.is_empty() {
            break;
        }
        let encode = |piece: Result<Piece, TextFault>| {
            let piece = piece.map_err(|fault| match fault {
                TextFault::Read(cause) => Problem::Read(cause),
                TextFault::Utf8(line) => Problem::Utf8(line),
            })?;
            let id = SampleId { file: file.clone(), line: piece.line };
            let tokens = encoder.encode_text(&piece.text).at(&id).map_err(Problem::Text)?;
            Ok((piece, tokens))
        };
        let encoded: Vec<Result<_, Problem>> = some.into_par_iter().map(encode).collect();
        for encoded in encoded {
            let (piece, tokens) = encoded?;
            let text_bytes = piece.text.as_bytes();
            done += text_bytes.len() as u64;
            let mut counted = 0; // number of bytes whose newlines `line` includes
            line = piece.line;
            for (id, (start, _)) in tokens.ids.into_iter().zip(tokens.offsets) {
                line += text::newlines(&text_bytes[counted..start.max(counted)]);
                counted = counted.max(start);
                if writer.last().is_none()
                    && let Some(bos) = separators.bos.filter(|bos| *bos != id)
                {
                    push(writer, bos, line)?;
                }
                push(writer, id, line)?;
            }
        }
        progress(done.min(num_bytes), num_bytes);
    }
    progress(num_bytes, num_bytes); // the byte order mark was not counted above
    if let (Some(last), Some(eos)) = (writer.last(), separators.eos)
        && last != eos
    {
        push(writer, eos, line)?;
    }
    writer.count(None);
    Ok(())
}
