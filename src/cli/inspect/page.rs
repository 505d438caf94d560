//! The page of `inspect --html`: one file without scripts, in which all text of the data is
//! escaped.

use super::cut::{self, Piece};
use super::figure::{Figure, MAX_GROUPS};
use super::media::{ShownMedium, media_of};
use super::notes::Notes;
use super::turns::{Fate, Run, Turns, runs, whole_characters};
use crate::batch::{EncodedSample, MediumKind};
use crate::config::RunConfig;
use crate::data::{
    DatasetConfig, DroppedTokens, Encoder, JsonlRows, Pixels, Rejection, SampleIndex,
};
use crate::report::{document, escaped, push};

/// Maximum number of pixels of all images of a page: about 1 MB as PNG.
const PAGE_PIXELS: u64 = 350_000;
/// Minimum limit on the pixels of an image, even if the page then exceeds [`PAGE_PIXELS`].
const LEAST_PIXELS: u64 = 64 * 64;
/// Maximum number of packs shown.
const MAX_PACKS: usize = 16;

/// A page to which samples are added one by one.
pub(super) struct Page<'a> {
    encoder: &'a Encoder,
    pixels_a_sample: u64,
    /// Maximum number of tokens of a pack.
    packing_length: u32,
    samples: u64,
    /// `data.truncation`, if it is set: `left` or `right`.
    side: Option<&'static str>,
    /// Number of truncated samples, and number of tokens removed from them.
    cut: (u64, usize),
    /// HTML of the list at the top of the page.
    head: String,
    body: String,
}

impl<'a> Page<'a> {
    /// A page for about `num` samples.
    pub(super) fn new(config: &RunConfig, encoder: &'a Encoder, num: usize) -> Self {
        let data = &config.data;
        let mut head = String::new();
        let or_none = |limit: Option<String>| limit.unwrap_or_else(|| "none".to_owned());
        let file = |set: &DatasetConfig| {
            let entry = set.dataset_info.as_ref().map(|entry| entry.display().to_string());
            entry.unwrap_or_else(|| set.path.to_string())
        };
        let files: Vec<String> = data.train.iter().map(file).collect();
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
        let side = data.truncation_rule().map(|cut| cut::side(cut.keep));
        Self { encoder, pixels_a_sample, packing_length, samples: 0, side, cut: (0, 0), head, body }
    }

    /// Adds a usable row, and the tokens that truncation removed from it.
    pub(super) fn sample(
        &mut self,
        label: &str,
        sample: &EncodedSample,
        dropped: &[DroppedTokens],
        notes: &Notes,
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
                "<article class=\"sample\" id=\"s{}\">\n<h3>{}</h3>\n<p class=\"facts\">{} tokens, {} targets, {} vision tokens{cut_away}{}</p>\n",
                self.samples,
                escaped(label),
                sample.len(),
                sample.num_targets(),
                sample.vision_rows.len(),
                notes.hidden_thoughts(),
            ),
        );
        let pieces = cut::pieces(runs(sample, &media), dropped);
        self.strip(&pieces);
        let mut turns = Turns { out: &mut self.body, open: false };
        let shown = media.iter().map(|medium| match medium.patches.kind {
            MediumKind::Image => 1,
            MediumKind::Video => 2 * MAX_GROUPS.min(medium.patches.grid_thw[0] as usize) as u64,
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
                    let boxes = &notes.boxes;
                    let figure = Figure { media: &media, index, group, max_pixels, boxes };
                    turns.inline(&figure.html(&pixels.1, range.len())?);
                }
            }
        }
        turns.close();
        self.body.push_str("</article>\n");
        Ok(())
    }

    /// Adds a rejected row.
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

    /// Adds the first packs of an epoch: rows and their numbers of tokens.
    pub(super) fn packs(&mut self, packs: &[Vec<(SampleIndex, usize)>], rows: &JsonlRows) {
        let limit = self.packing_length as usize;
        let total: usize = packs.iter().flatten().map(|(_, length)| length).sum();
        let fill = total as f64 / (packs.len().max(1) * limit) as f64;
        push(
            &mut self.body,
            format_args!(
                "<h2>Packs</h2>\n<p>{} packs of at most {limit} tokens in the first epoch, {:.1} % full; the first {} of them.</p>\n",
                packs.len(),
                100.0 * fill,
                packs.len().min(MAX_PACKS)
            ),
        );
        for pack in packs.iter().take(MAX_PACKS) {
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

    /// Returns the HTML document.
    pub(super) fn finish(self) -> String {
        let (rows, tokens) = self.cut;
        let truncation = self.side.map_or_else(String::new, |side| {
            let of = self.samples;
            format!(
                "<dt>truncation</dt><dd>{side}: {rows} of {of} rows cut, {tokens} tokens</dd>\n"
            )
        });
        let body = format!(
            "<h1>What the model sees</h1>\n<dl>\n{}{truncation}</dl>\n{}",
            self.head, self.body
        );
        document("trainer inspect", include_str!("page.css"), &body)
    }

    /// Draws the whole sample as one line, to scale.
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
    match medium.patches.kind {
        MediumKind::Image => encoder.image_processor().pixels(medium.patches),
        MediumKind::Video => encoder.video_processor().pixels(medium.patches),
    }
}
