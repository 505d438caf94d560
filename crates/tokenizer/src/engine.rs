//! Tokenizer for files with the rules of the published Qwen tokenizers. It returns the same ids and
//! offsets as the `tokenizers` crate and is tens of times faster.
//!
//! ```text
//! text -> pieces between added tokens -> NFC -> pieces between added tokens that are normalised
//!      -> words -> merged bytes -> ids, offsets
//! ```

use std::sync::{Mutex, PoisonError};

use super::added::{AddedTokens, Piece};
use super::classes::{Classes, Letters};
use super::cuts::Cuts;
use super::file::{Vocabulary, byte_to_char};
use super::merges::{Merges, Workspace};
use super::normalise::{is_nfc, nfc};
use super::split::word_end;

/// A tokenised text of `T` tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokens {
    /// Token ids, `[T]`.
    pub ids: Vec<u32>,
    /// Start and end byte of each token in the text before normalisation, `[T]`. Tokens that share
    /// a character all span the whole character.
    pub offsets: Vec<(usize, usize)>,
}

/// Number of cached words per thread.
const CACHED_WORDS: usize = 1 << 15;
/// Maximum length of a cached word, in bytes.
const CACHED_BYTES: usize = 15;
/// Maximum number of tokens of a cached word.
const CACHED_TOKENS: usize = 3;

/// The tokenizer, shared by all threads.
pub(super) struct Engine {
    letters: Letters,
    merges: Merges,
    cuts: Cuts,
    added: AddedTokens,            // those that are found before NFC
    normalized: AddedTokens,       // those that are found after NFC
    tokens: Vec<Option<Box<str>>>, // by id; model tokens in the byte alphabet
    lengths: Vec<u32>,             // by id: number of bytes of a model token
    special: Vec<bool>,            // by id
    added_ids: Vec<u32>,
    idle: Mutex<Vec<Memory>>, // at most one per core
}

/// Cache and buffers of one call of [`Engine::encode`].
struct Memory {
    words: Vec<CachedWord>, // [CACHED_WORDS], by hash; a new word replaces the one in its place
    work: Workspace,
}

/// A word and its tokens.
#[derive(Clone, Copy, Default)]
struct CachedWord {
    key: u128, // the bytes of the word, and their number in the highest byte; 0 if empty
    ids: [u32; CACHED_TOKENS],
    num: u32,
}

impl Engine {
    pub(super) fn new(vocabulary: Vocabulary) -> Self {
        let Vocabulary { letters, byte_ids, merges, tokens: listed, added } = vocabulary;
        let num_ids = listed.iter().map(|(id, _)| *id as usize + 1).max().unwrap_or(0);
        let mut tokens: Vec<Option<Box<str>>> = vec![None; num_ids];
        let mut lengths = vec![0; num_ids];
        for (id, token) in listed {
            lengths[id as usize] = token.chars().count() as u32;
            tokens[id as usize] = Some(token);
        }
        let bytes = |token: &str| token.chars().map(char_to_byte).collect::<Option<Vec<u8>>>();
        let cuts = Cuts::new(tokens.iter().flatten().filter_map(|token| bytes(token)));
        let mut special = vec![false; num_ids];
        for token in &added {
            special[token.id as usize] = token.special;
        }
        let found = |after: bool| {
            let tokens = added.iter().filter(move |token| token.normalized == after);
            AddedTokens::new(tokens.map(|token| (token.content.as_str(), token.id)))
        };
        Self {
            letters,
            merges: Merges::new(byte_ids, &merges),
            cuts,
            added: found(false),
            normalized: found(true),
            tokens,
            lengths,
            special,
            added_ids: added.iter().map(|token| token.id).collect(),
            idle: Mutex::new(Vec::new()),
        }
    }

    /// Tokenises `text`. The result is incomplete if it has more than `most` tokens.
    pub(super) fn encode(&self, text: &str, most: usize) -> Tokens {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut memory = idle.unwrap_or_else(|| {
            let words = vec![CachedWord::default(); CACHED_WORDS];
            Memory { words, work: Workspace::default() }
        });
        let expected = (text.len() / 3).min(most); // a token has about three bytes or more
        let mut tokens =
            Tokens { ids: Vec::with_capacity(expected), offsets: Vec::with_capacity(expected) };
        let classes = Classes::get(self.letters);
        self.added.split(text, |piece| match piece {
            _ if tokens.ids.len() > most => {}
            Piece::Token(id, begin, end) => {
                tokens.ids.push(id);
                tokens.offsets.push((begin, end));
            }
            Piece::Text(begin, end) => {
                let piece = &text[begin..end];
                if is_nfc(classes, piece) {
                    // a token that starts or ends inside a character spans the whole character
                    let bytes = piece.as_bytes();
                    let inside = |at: usize| bytes.get(at).is_some_and(|byte| byte & 0xc0 == 0x80);
                    let span = |mut from: usize, mut to: usize| {
                        while inside(from) {
                            from -= 1;
                        }
                        while inside(to) {
                            to += 1;
                        }
                        (begin + from, begin + to)
                    };
                    self.encode_normal(classes, piece, span, most, &mut memory, &mut tokens);
                } else {
                    let normal = nfc(piece);
                    let spans = &normal.spans;
                    let span =
                        |from: usize, to: usize| (begin + spans[from].0, begin + spans[to - 1].1);
                    self.encode_normal(classes, &normal.text, span, most, &mut memory, &mut tokens);
                }
            }
        });
        memory.work.free_if_large();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // loader threads may outnumber the cores many times, and each `Memory` takes 1 MiB
        if idle.len() < rayon::current_num_threads() {
            idle.push(memory);
        }
        drop(idle);
        tokens
    }

    /// Appends the tokens of a text in NFC, and stops after more than `most`. `span` converts a
    /// non-empty byte range of the text to an offset in the original text.
    fn encode_normal(
        &self,
        classes: Classes,
        text: &str,
        span: impl Fn(usize, usize) -> (usize, usize),
        most: usize,
        memory: &mut Memory,
        tokens: &mut Tokens,
    ) {
        self.normalized.split(text, |piece| match piece {
            _ if tokens.ids.len() > most => {}
            Piece::Token(id, begin, end) => {
                tokens.ids.push(id);
                tokens.offsets.push(span(begin, end));
            }
            Piece::Text(begin, end) => {
                let span = |from: usize, to: usize| span(begin + from, begin + to);
                self.encode_piece(classes, &text[begin..end], span, most, memory, tokens);
            }
        });
    }

    /// As [`Self::encode_normal`], for a text without added tokens.
    fn encode_piece(
        &self,
        classes: Classes,
        text: &str,
        span: impl Fn(usize, usize) -> (usize, usize),
        most: usize,
        memory: &mut Memory,
        tokens: &mut Tokens,
    ) {
        let bytes = text.as_bytes();
        let (mut begin, mut at, mut end) = (0, 0, 0); // word `begin..end`; tokenised up to `at`
        while at < bytes.len() && tokens.ids.len() <= most {
            if at == end {
                begin = at;
                end = word_end(classes, bytes, at);
            }
            let mut to = end;
            if end - at > CACHED_BYTES {
                to = begin + self.cuts.next(&bytes[begin..end], at - begin);
            }
            for id in self.word(bytes, at, to, memory) {
                let from = at;
                at += self.lengths[*id as usize] as usize;
                tokens.ids.push(*id);
                tokens.offsets.push(span(from, at));
            }
        }
    }

    /// Returns the tokens of `text[at..end]`, which is a word or a part of one.
    fn word<'a>(&self, text: &[u8], at: usize, end: usize, memory: &'a mut Memory) -> &'a [u32] {
        let Memory { words, work } = memory;
        let word = &text[at..end];
        if word.len() > CACHED_BYTES {
            self.merges.apply(word, work);
            return &work.ids;
        }
        let key = word_key(text, at, word.len());
        let folded = (key as u64) ^ ((key >> 64) as u64).rotate_left(29);
        let hash = folded.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let cached = &mut words[(hash >> (64 - CACHED_WORDS.ilog2())) as usize];
        if cached.key != key {
            self.merges.apply(word, work);
            let num = work.ids.len();
            if num > CACHED_TOKENS {
                return &work.ids;
            }
            cached.key = key;
            cached.ids[..num].copy_from_slice(&work.ids);
            cached.num = num as u32;
        }
        &cached.ids[..cached.num as usize]
    }

    /// Converts ids to text. Unknown ids are skipped.
    pub(super) fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut bytes = Vec::new();
        for id in ids {
            let Some(Some(token)) = self.tokens.get(*id as usize) else { continue };
            if skip_special_tokens && self.special[*id as usize] {
                continue;
            }
            let begin = bytes.len();
            for c in token.chars() {
                let Some(byte) = char_to_byte(c) else {
                    bytes.truncate(begin);
                    bytes.extend_from_slice(token.as_bytes());
                    break;
                };
                bytes.push(byte);
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the text of a token as the file writes it.
    pub(super) fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize)?.as_deref()
    }

    /// Returns the id of a token. This is a linear search, meant for a few tokens.
    pub(super) fn id(&self, token: &str) -> Option<u32> {
        let mut added = self.added_ids.iter().copied();
        added.find(|id| self.token(*id) == Some(token)).or_else(|| {
            let matches = |listed: &Option<Box<str>>| listed.as_deref() == Some(token);
            self.tokens.iter().position(matches).map(|id| id as u32)
        })
    }

    pub(super) fn max_id(&self) -> u32 {
        self.tokens.len().saturating_sub(1) as u32
    }
}

/// Packs up to [`CACHED_BYTES`] bytes and their number into a key. It is never 0, because `len` is
/// at least 1.
fn word_key(text: &[u8], at: usize, len: usize) -> u128 {
    let bits = if let Some(sixteen) = text[at..].first_chunk() {
        u128::from_le_bytes(*sixteen) & ((1 << (8 * len)) - 1)
    } else {
        let mut sixteen = [0; 16];
        sixteen[..len].copy_from_slice(&text[at..at + len]);
        u128::from_le_bytes(sixteen)
    };
    bits | (len as u128) << 120
}

/// Returns the byte that a character of the byte alphabet represents; the inverse of
/// [`byte_to_char`].
fn char_to_byte(c: char) -> Option<u8> {
    let byte = match u32::from(c) {
        c @ 0x100..=0x120 => c - 0x100,
        c @ 0x121..=0x142 => c - 0x100 - 33 + 127,
        0x143 => 173,
        c => c,
    };
    u8::try_from(byte).ok().filter(|byte| byte_to_char(*byte) == c)
}
