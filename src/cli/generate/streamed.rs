//! The text of an answer while its tokens are made.

use crate::data::{Encoder, TokenizerError};

/// The text of ids.
type Decode<'a> = Box<dyn Fn(&[u32]) -> Result<String, TokenizerError> + 'a>;

/// The part of an answer that can be printed already. The pieces together are the text of all
/// tokens: bytes of an incomplete character and the beginning of a stop text wait for the next
/// tokens.
pub(super) struct Streamed<'a> {
    decode: Decode<'a>,
    stops: &'a [String],
    text: String,
    /// Number of bytes of `text` that were returned.
    shown: usize,
    has_stopped: bool,
}

impl<'a> Streamed<'a> {
    pub(super) fn new(encoder: &'a Encoder, stops: &'a [String]) -> Self {
        Self::with_decoder(move |ids| encoder.decode(ids), stops)
    }

    fn with_decoder(
        decode: impl Fn(&[u32]) -> Result<String, TokenizerError> + 'a,
        stops: &'a [String],
    ) -> Self {
        let decode = Box::new(decode);
        Self { decode, stops, text: String::new(), shown: 0, has_stopped: false }
    }

    /// Whether the answer has a stop text. Its text ends before it.
    pub(super) fn has_stopped(&self) -> bool {
        self.has_stopped
    }

    /// The next piece, given all ids so far.
    pub(super) fn update(&mut self, ids: &[u32]) -> Result<&str, TokenizerError> {
        self.text = (self.decode)(ids)?;
        let found = self.stops.iter().filter_map(|stop| self.text.find(stop.as_str())).min();
        if let Some(at) = found {
            self.text.truncate(at);
            self.has_stopped = true;
            return Ok(self.up_to(at));
        }
        // The decoder writes U+FFFD in place of an incomplete character.
        let complete = self.text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let end = complete.len() - started(complete, self.stops);
        Ok(self.up_to(end))
    }

    /// The last piece, after all ids.
    pub(super) fn finish(&mut self) -> &str {
        self.up_to(self.text.len())
    }

    /// The whole text.
    pub(super) fn into_text(self) -> String {
        self.text
    }

    fn up_to(&mut self, end: usize) -> &str {
        let start = self.shown.min(end);
        self.shown = self.shown.max(end);
        self.text.get(start..end).unwrap_or_default()
    }
}

/// Number of bytes at the end of `text` that may be the beginning of a stop text.
fn started(text: &str, stops: &[String]) -> usize {
    let of = |stop: &String| {
        let lengths = stop.char_indices().map(|(at, _)| at);
        lengths.rev().find(|length| text.ends_with(&stop[..*length])).unwrap_or(0)
    };
    stops.iter().map(of).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of `bytes`, of which each token is one.
    fn pieces(bytes: &[u8], stops: &[&str]) -> Vec<String> {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let decode = |ids: &[u32]| {
            let bytes: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let ids: Vec<u32> = bytes.iter().map(|byte| u32::from(*byte)).collect();
        let mut streamed = Streamed::with_decoder(decode, &stops);
        let mut pieces = Vec::new();
        for end in 1..=ids.len() {
            pieces.push(streamed.update(&ids[..end]).unwrap().to_owned());
            if streamed.has_stopped() {
                break;
            }
        }
        pieces.push(streamed.finish().to_owned());
        assert_eq!(pieces.concat(), streamed.into_text());
        pieces.retain(|piece| !piece.is_empty());
        pieces
    }

    #[test]
    fn a_character_is_printed_when_its_last_byte_is_there() {
        let text = "n\u{e4}\u{4e2d}\u{1f4bb}!";
        assert_eq!(pieces(text.as_bytes(), &[]), ["n", "\u{e4}", "\u{4e2d}", "\u{1f4bb}", "!"]);
    }

    #[test]
    fn bytes_that_are_no_text_are_printed_as_the_decoder_writes_them() {
        let bytes = [b'a', 0xe4, 0xb8, b'b', 0xff, 0xf0, 0x9f];
        assert_eq!(pieces(&bytes, &[]).concat(), String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn a_stop_text_is_not_printed_and_text_that_only_begins_like_it_is() {
        assert_eq!(pieces(b"one\n\ntwo", &["\n\n"]), ["o", "n", "e"]);
        assert_eq!(pieces(b"a\nb", &["\n\n"]), ["a", "\nb"]);
        assert_eq!(pieces(b"aab", &["aac", "xyz"]), ["aab"]);
        assert_eq!(pieces(b"ends in \n", &["\n\n"]).concat(), "ends in \n");
        assert_eq!(pieces(b"a stop b", &["b", "stop"]).concat(), "a ");
    }
}
