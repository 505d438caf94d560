//! Parses a `tokenizer.json` for [`Engine`](super::engine::Engine), which supports NFC, the split
//! patterns of Qwen, byte-level byte pair encoding without further rules, and plain added tokens.
//!
//! Every key is checked, so that a file with any other rule is passed to the `tokenizers` crate.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Value, json};

use super::classes::Letters;
use super::merges::MAX_IDS;
use super::normalise::nfc;
use super::split::PATTERNS;

#[derive(Debug)]
pub(super) struct Vocabulary {
    /// The letters of the split pattern.
    pub letters: Letters,
    /// Token id of each byte, `[256]`.
    pub byte_ids: Box<[u32; 256]>,
    /// Pairs of token ids and the id they merge into, by ascending rank.
    pub merges: Vec<((u32, u32), u32)>,
    /// Id and text of every token; tokens of the model are in the byte alphabet, added tokens are
    /// not.
    pub tokens: Vec<(u32, Box<str>)>,
    pub added: Vec<Added>,
}

/// A token that is found before the text is split into words.
#[derive(Debug)]
pub(super) struct Added {
    pub id: u32,
    pub content: String,
    pub special: bool,
    /// It is found in the text after NFC; otherwise in the text as it is.
    pub normalized: bool,
}

/// Parses a vocabulary. The error describes the first unsupported rule or defect.
pub(super) fn read(bytes: &[u8]) -> Result<Vocabulary, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let file: File = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if file.version != "1.0" {
        return Err(format!("`version` is `{}`", file.version));
    }
    check("normalizer", &file.normalizer, &json!({"type": "NFC"}))?;
    let letters = letters(&without_trim(file.pre_tokenizer))?;
    if file.decoder.get("type") != Some(&json!("ByteLevel")) {
        return Err("`decoder` is not `ByteLevel`".to_owned());
    }
    file.model.check()?;
    vocabulary(letters, file.model, file.added_tokens)
}

fn check(key: &str, found: &Value, expected: &Value) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("`{key}` is not `{expected}`"))
}

/// The letters of a pre-tokenizer that is supported.
fn letters(pre_tokenizer: &Value) -> Result<Letters, String> {
    let expected = PATTERNS.map(|(letters, pattern)| {
        let pattern = json!({"Regex": pattern});
        let split =
            json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false});
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
        (letters, json!({"type": "Sequence", "pretokenizers": [split, bytes]}))
    });
    if let Some((letters, _)) = expected.iter().find(|(_, expected)| pre_tokenizer == expected) {
        return Ok(*letters);
    }
    let [(_, first), (_, second)] = expected;
    Err(format!("`pre_tokenizer` is neither `{first}` nor `{second}`"))
}

/// Removes `trim_offsets`, which only affects post-processing; no post-processor is used.
fn without_trim(mut value: Value) -> Value {
    if let Some(list) = value.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        for entry in list.iter_mut().filter_map(Value::as_object_mut) {
            entry.shift_remove("trim_offsets");
        }
    }
    value
}

fn vocabulary(
    letters: Letters,
    model: Model,
    added_tokens: Vec<AddedToken>,
) -> Result<Vocabulary, String> {
    let tokens = &model.vocab.0;
    let mut ids: HashMap<&str, u32, BuildHasherDefault<TextHasher>> =
        HashMap::with_capacity_and_hasher(tokens.len(), BuildHasherDefault::default());
    let mut seen = vec![false; tokens.iter().map(|(_, id)| *id as usize + 1).max().unwrap_or(0)];
    for (token, id) in tokens {
        let twice = std::mem::replace(&mut seen[*id as usize], true);
        if twice || ids.insert(&token.0, *id).is_some() {
            return Err(format!("token `{}` or its id `{id}` occurs twice", token.0));
        }
    }
    let id_of = |token: &str| {
        ids.get(token).copied().ok_or_else(|| format!("token `{token}` is not in `model.vocab`"))
    };

    let mut byte_ids = Box::new([0; 256]);
    let mut buffer = [0; 4];
    for (byte, id) in (0..=u8::MAX).zip(byte_ids.iter_mut()) {
        *id = id_of(byte_to_char(byte).encode_utf8(&mut buffer))?;
    }
    if model.merges.len() > MAX_IDS {
        let found = model.merges.len();
        return Err(format!("`model.merges` has `{found}` entries, expected at most `{MAX_IDS}`"));
    }
    let mut joined = String::new();
    let mut merges = Vec::with_capacity(model.merges.len());
    for Merge(left, right) in &model.merges {
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        merges.push(((id_of(left)?, id_of(right)?), id_of(&joined)?));
    }

    // the `tokenizers` crate ignores the listed ids and numbers new added tokens itself
    let mut next = tokens.len() as u32;
    let mut added: Vec<Added> = Vec::new();
    for token in added_tokens {
        let AddedToken { id, content, single_word, lstrip, rstrip, normalized, special } = token;
        if single_word || lstrip || rstrip || content.is_empty() {
            return Err(format!("added token `{content}` is empty or has matching rules"));
        }
        if normalized && nfc(&content).text != content {
            return Err(format!("added token `{content}` is not in NFC"));
        }
        let expected = ids.get(content.as_str()).copied().unwrap_or_else(|| {
            next += 1;
            next - 1
        });
        if id != expected || added.iter().any(|other| other.content == content) {
            return Err(format!(
                "added token `{content}` occurs twice or its id is not `{expected}`"
            ));
        }
        added.push(Added { id, content, special, normalized });
    }
    let mut tokens: Vec<(u32, Box<str>)> =
        model.vocab.0.into_iter().map(|(token, id)| (id, Box::from(token.0))).collect();
    tokens.extend(added.iter().map(|token| (token.id, Box::from(token.content.as_str()))));
    Ok(Vocabulary { letters, byte_ids, merges, tokens, added })
}

/// Returns the character that represents a byte in the byte alphabet: the byte itself if it is
/// printable, otherwise a character from U+0100 on.
pub(super) fn byte_to_char(byte: u8) -> char {
    let rest = match byte {
        0..=32 => u32::from(byte),
        127..=160 => u32::from(byte) - 127 + 33,
        173 => 67,
        _ => return char::from(byte),
    };
    char::from_u32(0x100 + rest).expect("below U+0144")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File<'a> {
    version: String,
    #[serde(rename = "truncation", default)]
    _truncation: IgnoredAny, // truncation and padding happen elsewhere
    #[serde(rename = "padding", default)]
    _padding: IgnoredAny,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Value,
    pre_tokenizer: Value,
    #[serde(rename = "post_processor", default)]
    _post_processor: IgnoredAny, // the chat template writes all special tokens
    decoder: Value,
    #[serde(borrow)]
    model: Model<'a>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "the fields are the keys of the file")]
struct AddedToken {
    id: u32,
    content: String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Model<'a> {
    r#type: String,
    dropout: Option<f64>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(borrow)]
    vocab: Vocab<'a>,
    #[serde(borrow)]
    merges: Vec<Merge<'a>>,
}

impl Model<'_> {
    fn check(&self) -> Result<(), String> {
        let affix = |affix: &Option<String>| affix.as_ref().is_some_and(|text| !text.is_empty());
        let rule = if self.r#type != "BPE" {
            "type"
        } else if self.dropout.is_some_and(|share| share != 0.0) {
            "dropout"
        } else if self.unk_token.is_some() {
            "unk_token"
        } else if affix(&self.continuing_subword_prefix) {
            "continuing_subword_prefix"
        } else if affix(&self.end_of_word_suffix) {
            "end_of_word_suffix"
        } else if self.fuse_unk {
            "fuse_unk"
        } else if self.byte_fallback {
            "byte_fallback"
        } else if self.ignore_merges {
            "ignore_merges"
        } else {
            return Ok(());
        };
        Err(format!("the value of `model.{rule}` is not supported"))
    }
}

/// A string of the file, borrowed unless it contains escapes.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(TextVisitor)
    }
}

/// Tokens and ids, in the order of the file.
struct Vocab<'a>(Vec<(Text<'a>, u32)>);

impl<'de: 'a, 'a> Deserialize<'de> for Vocab<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VocabVisitor;
        impl<'de> Visitor<'de> for VocabVisitor {
            type Value = Vocab<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tokens and ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab<'de>, A::Error> {
                let mut tokens = Vec::new();
                while let Some((token, id)) = map.next_entry()? {
                    if id as usize >= MAX_IDS {
                        return Err(Error::custom(format!(
                            "token id is `{id}`, expected below `{MAX_IDS}`"
                        )));
                    }
                    tokens.push((token, id));
                }
                Ok(Vocab(tokens))
            }
        }
        deserializer.deserialize_map(VocabVisitor)
    }
}

/// The two tokens of a merge: a list of two, or a string with a space between them.
struct Merge<'a>(Cow<'a, str>, Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MergeVisitor;
        impl<'de> Visitor<'de> for MergeVisitor {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two tokens")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merge<'de>, A::Error> {
                let mut token = || {
                    let token: Option<Text> = list.next_element()?;
                    token
                        .map(|token| token.0)
                        .ok_or_else(|| Error::custom("a merge has fewer than two tokens"))
                };
                let pair = Merge(token()?, token()?);
                match list.next_element::<IgnoredAny>()? {
                    None => Ok(pair),
                    Some(_) => Err(Error::custom("a merge has more than two tokens")),
                }
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Merge<'de>, E> {
                match text.split_once(' ') {
                    Some((left, right))
                        if !right.contains(' ') && !text.starts_with("#version") =>
                    {
                        Ok(Merge(Cow::Owned(left.to_owned()), Cow::Owned(right.to_owned())))
                    }
                    _ => Err(E::custom(format!(
                        "merge `{text}` is not two tokens with a space between them"
                    ))),
                }
            }
        }
        deserializer.deserialize_any(MergeVisitor)
    }
}

/// A fast hash of short strings. It is not safe against crafted collisions; model folders are
/// trusted.
#[derive(Default)]
struct TextHasher(u64);

impl Hasher for TextHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            let mixed = self.0.rotate_left(23) ^ u64::from_le_bytes(word);
            let product = u128::from(mixed) * 0x9e37_79b9_7f4a_7c15;
            self.0 = (product >> 64) as u64 ^ product as u64;
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
