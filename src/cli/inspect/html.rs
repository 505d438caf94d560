//! The page of `inspect --html`: one file without scripts, in which nothing of the data is markup.

use super::cut::{self, Piece};
use super::media::{ShownMedium, media_of};
use super::thumbnail::thumbnail;
use crate::batch::{EncodedSample, IGNORE_INDEX, MediumKind};
use crate::config::RunConfig;
use crate::data::{DroppedTokens, Encoder, Pixels, Rejection, Row};
use crate::train::JsonlRows;
use std::fmt::Write as _;
use std::ops::Range;

/// Pixels that the images of a page may have together: about 1 MB as PNG.
const PAGE_PIXELS: u64 = 350_000;
/// Pixels that one image always may have.
const LEAST_PIXELS: u64 = 64 * 64;
/// Groups of frames shown of a video.
const SHOWN_GROUPS: usize = 8;
/// Packs drawn.
const SHOWN_PACKS: usize = 16;
/// Side to which a small image is enlarged by the browser.
const LEAST_SIDE: u32 = 128;

/// A page that grows sample by sample.
pub(super) struct Page<'a> {
    encoder: &'a Encoder,
    pixels_a_sample: u64,
    /// Upper bound on one pack, in tokens.
    packing_length: u32,
    samples: u64,
    /// Where text gives way to `max_length`; none if it does not.
    side: Option<&'static str>,
    /// Samples that are cut, and the tokens that they lose.
    cut: (u64, usize),
    /// What the first list says.
    head: String,
    body: String,
}

impl<'a> Page<'a> {
    /// A page for about `num` samples.
    pub(super) fn new(config: &RunConfig, encoder: &'a Encoder, num: usize) -> Self {
        let data = &config.data;
        let mut head = String::new();
        let or_none = |limit: Option<String>| limit.unwrap_or_else(|| "none".to_owned());
        let files: Vec<String> =
            data.train.iter().map(|set| set.path.display().to_string()).collect();
        for (name, value) in [
            ("model", config.model.path.display().to_string()),
            ("data", files.join(", ")),
            ("packing_length", data.packing_length.to_string()),
            ("max_length", or_none(data.max_length.map(|length| length.to_string()))),
            ("image.max_pixels", or_none(data.image.max_pixels.map(|limit| limit.to_string()))),
            ("video.max_pixels", or_none(data.video.max_pixels.map(|limit| limit.to_string()))),
        ] {
            push(&mut head, format_args!("<dt>{name}</dt><dd>{}</dd>\n", escaped(&value)));
        }
        let body = String::from(
            "<p class=\"legend\">Supervised tokens are <mark class=\"legend\">marked</mark>, one box a token. In the strips:\
             <i></i>text<i style=\"background:#3aa657\"></i>supervised<i style=\"background:#8a6ff0\"></i>images<i class=\"cut\"></i>cut away</p>\n",
        );
        let pixels_a_sample = PAGE_PIXELS / num.clamp(1, 1 << 20) as u64;
        let packing_length = data.packing_length.get();
        let side = data.cut().map(|cut| cut::side(cut.keep));
        Self { encoder, pixels_a_sample, packing_length, samples: 0, side, cut: (0, 0), head, body }
    }

    /// A row that trains, by its name, and what was cut from it.
    pub(super) fn sample(
        &mut self,
        label: &str,
        sample: &EncodedSample,
        dropped: &[DroppedTokens],
    ) -> anyhow::Result<()> {
        self.samples += 1;
        let mut cut_away = String::new();
        if let (Some(side), false) = (self.side, dropped.is_empty()) {
            let tokens = cut::num_tokens(dropped);
            self.cut = (self.cut.0 + 1, self.cut.1 + tokens);
            cut_away = format!(", cut from the {side}: {tokens} tokens");
        }
        let media = media_of(self.encoder, sample);
        push(
            &mut self.body,
            format_args!(
                "<article class=\"sample\" id=\"s{}\">\n<h3>{}</h3>\n<p class=\"facts\">{} tokens, {} targets, {} vision tokens{cut_away}</p>\n",
                self.samples,
                escaped(label),
                sample.len(),
                sample.num_targets(),
                sample.vision_rows.len(),
            ),
        );
        let pieces = cut::pieces(runs(sample, &media), dropped);
        self.strip(&pieces);
        let mut turns = Turns { out: &mut self.body, open: false };
        let shown = media.iter().map(|medium| match medium.kind {
            MediumKind::Image => 1,
            MediumKind::Video => 2 * SHOWN_GROUPS.min(medium.patches.grid_thw[0] as usize) as u64,
        });
        let max_pixels = (self.pixels_a_sample / shown.sum::<u64>().max(1)).max(LEAST_PIXELS);
        let mut pixels: (usize, Vec<Pixels>) = (usize::MAX, Vec::new());
        for piece in pieces {
            let (run, range) = match piece {
                Piece::Kept(run, range) => (run, range),
                Piece::Cut(ids) => {
                    turns.text(&self.encoder.decode_with_specials(ids)?, Fate::Cut);
                    continue;
                }
            };
            match run {
                Run::Text => {
                    let text = self.encoder.decode_with_specials(&sample.input_ids[range])?;
                    turns.text(&text, Fate::Kept);
                }
                Run::Target => {
                    for (text, tokens) in whole_characters(self.encoder, &sample.input_ids[range])?
                    {
                        turns.target(&text, tokens);
                    }
                }
                Run::Medium { index, group } => {
                    if pixels.0 != index {
                        pixels = (index, pixels_of(self.encoder, &media[index]));
                    }
                    let figure = Figure { media: &media, index, group, max_pixels };
                    turns.medium(&figure.html(&pixels.1, range.len())?);
                }
            }
        }
        turns.close();
        self.body.push_str("</article>\n");
        Ok(())
    }

    /// A row that does not train.
    pub(super) fn rejected(&mut self, rejection: &Rejection) {
        push(
            &mut self.body,
            format_args!(
                "<article class=\"bad\">\n<h3>{}:{}</h3>\n<p><b>{}</b> {}</p>\n</article>\n",
                escaped(&rejection.file),
                rejection.row,
                escaped(&rejection.reason),
                escaped(&rejection.message)
            ),
        );
    }

    /// The first packs of an epoch: rows and their tokens.
    pub(super) fn packs(&mut self, packs: &[Vec<(Row, usize)>], rows: &JsonlRows) {
        let limit = self.packing_length as usize;
        let total: usize = packs.iter().flatten().map(|(_, length)| length).sum();
        let fill = total as f64 / (packs.len().max(1) * limit) as f64;
        push(
            &mut self.body,
            format_args!(
                "<h2>Packs</h2>\n<p>{} packs of at most {limit} tokens in the first epoch, {:.1} % full; the first {} of them.</p>\n",
                packs.len(),
                100.0 * fill,
                packs.len().min(SHOWN_PACKS)
            ),
        );
        for pack in packs.iter().take(SHOWN_PACKS) {
            let mut ends = vec![0];
            self.body.push_str("<div class=\"pack\">");
            for (index, (row, length)) in pack.iter().enumerate() {
                ends.push(ends[index] + length);
                let id = escaped(&rows.label(*row));
                push(
                    &mut self.body,
                    format_args!(
                        "<i style=\"flex:{length} 0 0;--i:{index}\" title=\"{id}: {length} tokens\">{length}</i>"
                    ),
                );
            }
            let used = ends[pack.len()];
            if used < limit {
                let room = limit - used;
                push(
                    &mut self.body,
                    format_args!(
                        "<i class=\"room\" style=\"flex:{room} 0 0\" title=\"{room} tokens of room\"></i>"
                    ),
                );
            }
            push(
                &mut self.body,
                format_args!("</div>\n<p class=\"facts\">cu_seqlens <code>{ends:?}</code></p>\n"),
            );
        }
    }

    /// The whole document.
    pub(super) fn finish(self) -> String {
        // Nothing is loaded and nothing runs, whatever a row says.
        let policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
        let (rows, tokens) = self.cut;
        let truncation = self.side.map_or_else(String::new, |side| {
            let of = self.samples;
            format!(
                "<dt>truncation</dt><dd>{side}: {rows} of {of} rows cut, {tokens} tokens</dd>\n"
            )
        });
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
             <meta name=\"viewport\" content=\"width=device-width\">\n<title>trainer inspect</title>\n<style>\n{}</style>\n</head>\n<body>\n<h1>What the model sees</h1>\n<dl>\n{}{truncation}</dl>\n{}</body>\n</html>\n",
            include_str!("page.css"),
            self.head,
            self.body
        )
    }

    /// The whole sample in one line, to scale.
    fn strip(&mut self, pieces: &[Piece<'_, Run>]) {
        self.body.push_str("<div class=\"strip\">");
        for piece in pieces {
            let (class, tokens) = match piece {
                Piece::Kept(Run::Text, range) => ("", range.len()),
                Piece::Kept(Run::Target, range) => (" class=\"target\"", range.len()),
                Piece::Kept(Run::Medium { .. }, range) => (" class=\"vision\"", range.len()),
                Piece::Cut(ids) => (" class=\"cut\"", ids.len()),
            };
            push(&mut self.body, format_args!("<i{class} style=\"flex:{tokens} 0 0\"></i>"));
        }
        self.body.push_str("</div>\n");
    }
}

fn pixels_of(encoder: &Encoder, medium: &ShownMedium) -> Vec<Pixels> {
    match medium.kind {
        MediumKind::Image => encoder.image_processor().pixels(medium.patches),
        MediumKind::Video => encoder.video_processor().pixels(medium.patches),
    }
}

/// What neighbouring tokens have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    Text,
    Target,
    /// An image, or a group of frames of a video.
    Medium {
        index: usize,
        group: usize,
    },
}

/// The sample as runs of alike tokens; together they are all of it.
fn runs(sample: &EncodedSample, media: &[ShownMedium]) -> Vec<(Run, Range<usize>)> {
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

/// The text of each token; tokens that share a character stay together, with their number.
fn whole_characters(encoder: &Encoder, ids: &[u32]) -> anyhow::Result<Vec<(String, usize)>> {
    let mut texts = Vec::new();
    let mut start = 0;
    for end in 1..=ids.len() {
        let text = encoder.decode_with_specials(&ids[start..end])?;
        // A character has at most four bytes, and so at most four tokens.
        if !text.ends_with(char::REPLACEMENT_CHARACTER) || end - start == 4 || end == ids.len() {
            texts.push((text, end - start));
            start = end;
        }
    }
    Ok(texts)
}

/// Whether a text is part of the sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Kept,
    Cut,
}

/// Writes the turns of a sample.
struct Turns<'a> {
    out: &'a mut String,
    open: bool,
}

/// What begins a turn in the templates of this family; others are shown as one block.
const TURN: &str = "<|im_start|>";

impl Turns<'_> {
    fn text(&mut self, text: &str, fate: Fate) {
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

    fn target(&mut self, text: &str, tokens: usize) {
        let marked = with_specials(text);
        self.inline(&match tokens {
            1 => format!("<mark>{marked}</mark>"),
            _ => format!("<mark data-tokens=\"{tokens}\">{marked}</mark>"),
        });
    }

    fn medium(&mut self, figure: &str) {
        self.inline(figure);
    }

    fn inline(&mut self, html: &str) {
        if !self.open && !html.is_empty() {
            self.out.push_str("<section class=\"turn other\"><h4></h4><div>");
            self.open = true;
        }
        self.out.push_str(html);
    }

    fn close(&mut self) {
        if self.open {
            self.out.push_str("</div></section>\n");
        }
        self.open = false;
    }
}

/// An image or a group of frames.
struct Figure<'a> {
    media: &'a [ShownMedium<'a>],
    index: usize,
    group: usize,
    max_pixels: u64,
}

impl Figure<'_> {
    /// `frames` are all of the medium, `tokens` those of this group.
    fn html(&self, frames: &[Pixels], tokens: usize) -> anyhow::Result<String> {
        let medium = &self.media[self.index];
        let alike = self.media[..=self.index].iter().filter(|other| other.kind == medium.kind);
        let (number, [times, rows, columns]) = (alike.count(), medium.patches.grid_thw);
        let name = match medium.kind {
            MediumKind::Image => format!("image {number}"),
            MediumKind::Video => format!("video {number}, group {} of {times}", self.group + 1),
        };
        let mut html =
            format!("<div class=\"medium\"><span class=\"chip\">{name}: {tokens} tokens</span>");
        if self.group < SHOWN_GROUPS {
            let a_group = frames.len() / (times as usize).max(1);
            let shown = &frames[self.group * a_group..(self.group + 1) * a_group];
            // Cells are what becomes one token.
            let cell = (f64::from(rows * columns) / tokens.max(1) as f64).sqrt();
            let (c, r) = (f64::from(columns) / cell, f64::from(rows) / cell);
            html.push_str("<figure>");
            let mut caption = String::new();
            for frame in shown {
                let thumbnail = thumbnail(frame, self.max_pixels)?;
                let scale = (LEAST_SIDE / thumbnail.width.max(thumbnail.height).max(1)).max(1);
                push(
                    &mut html,
                    format_args!(
                        "<span style=\"--c:{c};--r:{r}\"><img src=\"{}\" width=\"{}\" height=\"{}\" style=\"width:{}px\" alt=\"{name}\"></span>",
                        thumbnail.uri,
                        thumbnail.width,
                        thumbnail.height,
                        thumbnail.width * scale,
                    ),
                );
                caption = format!(
                    "{} x {} px, grid (t, h, w) {times} x {rows} x {columns}",
                    frame.width, frame.height
                );
                if thumbnail.reduced > 1 {
                    push(&mut caption, format_args!(", shown 1 : {}", thumbnail.reduced));
                }
            }
            push(&mut html, format_args!("<figcaption>{caption}</figcaption></figure>"));
        }
        html.push_str("</div>");
        Ok(html)
    }
}

/// Escaped text whose special tokens, such as `<|im_end|>`, are set back.
fn with_specials(text: &str) -> String {
    let mut html = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(start) = rest.find("<|") {
        let Some(end) = rest[start..].find("|>").map(|end| start + end + 2) else { break };
        push(
            &mut html,
            format_args!(
                "{}<span class=\"sp\">{}</span>",
                escaped(&rest[..start]),
                escaped(&rest[start..end])
            ),
        );
        rest = &rest[end..];
    }
    html.push_str(&escaped(rest));
    html
}

/// Text that is no markup, in elements and in attributes.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            // Not allowed in a document, or turns the reading around.
            c if c.is_control()
                || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
            {
                push(&mut out, format_args!("\\u{{{:x}}}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text); // a String takes every write
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_text_is_markup() {
        let nasty = "<script>alert('1')</script> & \"x\" <|im_end|> <| \u{202e}\u{0}";
        let html = with_specials(nasty);
        assert_eq!(
            html,
            "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt; &amp; &quot;x&quot; \
             <span class=\"sp\">&lt;|im_end|&gt;</span> &lt;| \\u{202e}\\u{0}"
        );
    }

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
