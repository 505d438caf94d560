//! Adds tokens to a `tokenizer.json`, with the ids and the rules that transformers gives them.

use std::path::Path;

use serde_json::{Value, json};

use super::{TextTokenizer, TokenizerError};

/// A token that a vocabulary receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewToken {
    /// Its text. A special token is found in a text as it is, any other in the text after the
    /// normalisation of the tokenizer.
    pub content: String,
    /// Whether decoding can leave it out.
    pub special: bool,
}

/// A `tokenizer.json` with tokens that were added to it.
#[derive(Debug, Clone)]
pub struct GrownTokenizer {
    /// The file.
    pub bytes: Vec<u8>,
    /// The first id that is new. The others follow it.
    pub first_id: u32,
    /// The tokens that are new, in the order of their ids, each with its entry of the file.
    pub added: Vec<(NewToken, Value)>,
    /// For each new token, the ids of its text in the tokenizer before.
    pub pieces: Vec<Vec<u32>>,
    /// The tokens that the file had already.
    pub present: Vec<NewToken>,
}

/// The reason why a token cannot be added. Its number counts the tokens from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewTokenProblem {
    /// The tokenizer has this text as something else.
    Taken {
        token: usize,
        id: u32,
        as_what: &'static str,
    },
    /// A text with the token is encoded with other ids.
    NotFound {
        token: usize,
        ids: Vec<u32>,
    },
    /// Its text is encoded as no token.
    NoPieces {
        token: usize,
    },
    Tokenizer(TokenizerError),
}

impl From<TokenizerError> for NewTokenProblem {
    fn from(error: TokenizerError) -> Self {
        Self::Tokenizer(error)
    }
}

/// Adds `tokens`, which are all different, to the `tokenizer.json` with the content `bytes`. `path`
/// appears in messages only.
pub fn with_new_tokens(
    path: &Path,
    bytes: &[u8],
    tokens: &[NewToken],
) -> Result<GrownTokenizer, NewTokenProblem> {
    let before = TextTokenizer::from_bytes(path, bytes)?;
    let load = |error: serde_json::Error| TokenizerError::Load {
        path: path.to_owned(),
        problem: error.to_string(),
    };
    let mut file: Value = serde_json::from_slice(bytes).map_err(load)?;
    let list = file.as_object_mut().map(|file| file.entry("added_tokens").or_insert(json!([])));
    let mut unused = Vec::new(); // the file was parsed, so it has a list
    let list = list.and_then(Value::as_array_mut).unwrap_or(&mut unused);
    let first_id = before.max_id() + 1;
    let (mut added, mut pieces, mut present) = (Vec::new(), Vec::new(), Vec::new());
    for (index, token) in tokens.iter().enumerate() {
        let NewToken { content, special } = token;
        let Some(id) = before.id(content) else {
            let ids = before.encode(content)?.ids;
            if ids.is_empty() {
                return Err(NewTokenProblem::NoPieces { token: index });
            }
            let entry = json!({
                "id": first_id as usize + added.len(), "content": content, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": !special, "special": special,
            });
            list.push(entry.clone());
            added.push((token.clone(), entry));
            pieces.push(ids);
            continue;
        };
        let entry = list.iter().find(|entry| entry["content"] == content.as_str());
        let as_what = match entry.map(|entry| entry["special"] == true) {
            Some(is_special) if is_special == *special => {
                present.push(token.clone());
                continue;
            }
            Some(true) => "a special token",
            Some(false) => "an added token that is not special",
            None => "a token of its byte pair encoding",
        };
        return Err(NewTokenProblem::Taken { token: index, id, as_what });
    }
    let bytes = if added.is_empty() {
        bytes.to_vec()
    } else {
        serde_json::to_vec_pretty(&file).map_err(load)?
    };
    let after = TextTokenizer::from_bytes(path, &bytes)?;
    for (token, entry) in &added {
        let ids = after.encode(&token.content)?.ids;
        if ids.len() != 1 || entry["id"] != ids[0] {
            let token = tokens.iter().position(|of| of == token).unwrap_or_default();
            return Err(NewTokenProblem::NotFound { token, ids });
        }
    }
    Ok(GrownTokenizer { bytes, first_id, added, pieces, present })
}
