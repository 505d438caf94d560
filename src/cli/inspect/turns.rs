//! The turns of a sample, and the runs of tokens that they consist of.

use super::media::ShownMedium;
use crate::batch::{EncodedSample, IGNORE_INDEX};
use crate::data::Encoder;
use crate::report::{escaped, push, with_specials};
use std::ops::Range;

/// Kind of a run of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Run {
    Text,
    Target,
    /// An image, or a group of frames of a video, by their indexes.
    Medium {
        index: usize,
        group: usize,
    },
}

/// Divides the sample into runs of tokens of one kind.
pub(super) fn runs(sample: &EncodedSample, media: &[ShownMedium]) -> Vec<(Run, Range<usize>)> {
    let label = |label: &i64| if *label == IGNORE_INDEX { Run::Text } else { Run::Target };
    let mut kinds: Vec<Run> = sample.labels.iter().map(label).collect(); // [T]
    for (index, medium) in media.iter().enumerate() {
        let tokens = medium.rows.len() / (medium.patches.grid_thw[0] as usize).max(1);
        for (at, row) in medium.rows.iter().enumerate() {
            kinds[*row as usize] = Run::Medium { index, group: at / tokens.max(1) };
        }
    }
    let mut start = 0;
    let chunks = kinds.chunk_by(|a, b| a == b);
    chunks
        .map(|chunk| {
            let range = start..start + chunk.len();
            start = range.end;
            (chunk[0], range)
        })
        .collect()
}

/// The text of each token. Tokens that share a character are returned together, with their number.
pub(super) fn whole_characters(
    encoder: &Encoder,
    ids: &[u32],
) -> anyhow::Result<Vec<(String, usize)>> {
    let mut texts = Vec::new();
    let mut start = 0;
    for end in 1..=ids.len() {
        let text = encoder.decode_with_specials(&ids[start..end])?;
        // A character has at most four bytes, so at most four tokens share it.
        if !text.ends_with(char::REPLACEMENT_CHARACTER) || end - start == 4 || end == ids.len() {
            texts.push((text, end - start));
            start = end;
        }
    }
    Ok(texts)
}

/// Whether truncation removed a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Kept,
    Cut,
}

/// Writes the turns of a sample.
pub(super) struct Turns<'a> {
    pub(super) out: &'a mut String,
    /// Whether the element of a turn is open.
    pub(super) open: bool,
}

/// Text that begins a turn in Qwen's chat templates. Text of other templates is shown as one block.
const TURN: &str = "<|im_start|>";

impl Turns<'_> {
    pub(super) fn text(&mut self, text: &str, fate: Fate) {
        let shown = |text: &str| match (with_specials(text), fate) {
            (html, Fate::Cut) if !html.is_empty() => format!("<span class=\"cut\">{html}</span>"),
            (html, _) => html,
        };
        for (index, piece) in text.split(TURN).enumerate() {
            if index == 0 {
                self.inline(&shown(piece));
                continue;
            }
            self.close();
            let (role, rest) = piece.split_once('\n').unwrap_or((piece, ""));
            let class = ["system", "user", "assistant", "tool"].into_iter().find(|r| *r == role);
            push(
                self.out,
                format_args!(
                    "<section class=\"turn {}{}\"><h4>{}</h4><div>",
                    class.unwrap_or("other"),
                    if fate == Fate::Cut { " gone" } else { "" },
                    escaped(role)
                ),
            );
            self.open = true;
            self.inline(&shown(rest));
        }
    }

    pub(super) fn target(&mut self, text: &str, tokens: usize) {
        let marked = with_specials(text);
        self.inline(&match tokens {
            1 => format!("<mark>{marked}</mark>"),
            _ => format!("<mark data-tokens=\"{tokens}\">{marked}</mark>"),
        });
    }

    pub(super) fn inline(&mut self, html: &str) {
        if !self.open && !html.is_empty() {
            self.out.push_str("<section class=\"turn other\"><h4></h4><div>");
            self.open = true;
        }
        self.out.push_str(html);
    }

    pub(super) fn close(&mut self) {
        if self.open {
            self.out.push_str("</div></section>\n");
        }
        self.open = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_begins_where_the_template_begins_one() {
        let mut out = String::new();
        let mut turns = Turns { out: &mut out, open: false };
        turns.text("<|im_start|>user\nHi<b><|im_end|>\n<|im_start|>assistant\n", Fate::Kept);
        turns.target("Yes", 1);
        turns.target("\u{e9}", 2);
        turns.text(" No<|im_end|>\n<|im_start|>user\n", Fate::Cut);
        turns.close();
        assert_eq!(
            out,
            "<section class=\"turn user\"><h4>user</h4><div>Hi&lt;b&gt;<span class=\"sp\">&lt;|im_end|&gt;</span>\n</div></section>\n\
             <section class=\"turn assistant\"><h4>assistant</h4><div><mark>Yes</mark><mark data-tokens=\"2\">\u{e9}</mark><span class=\"cut\"> No<span class=\"sp\">&lt;|im_end|&gt;</span>\n</span></div></section>\n\
             <section class=\"turn user gone\"><h4>user</h4><div></div></section>\n"
        );
    }
}
