//! The page of `inspect --html`: one file without scripts, in which all text of the data is
//! escaped. A page has the turns of samples, with the tokens that truncation removed, and images
//! and frames of videos as figures.

use crate::batch::{EncodedSample, IGNORE_INDEX, MediumKind, Patches};
use crate::config::RunConfig;
use crate::data::{
    DatasetConfig, DatasetRows, DroppedTokens, Encoder, ImageBox, KeptEnd, Pixels, Rejection,
    SampleIndex, image_boxes,
};
use crate::report::{document, escaped, push, thumbnail, with_specials};
use std::ops::Range;

/// Maximum number of pixels of all images of a page: about 1 MB as PNG.
const PAGE_PIXELS: u64 = 350_000;
/// Minimum limit on the pixels of an image, even if the page then exceeds [`PAGE_PIXELS`].
const LEAST_PIXELS: u64 = 64 * 64;
const MAX_PACKS: usize = 16;

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
        let side = data.truncation_rule().map(|cut| side(cut.keep));
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
            let tokens = num_tokens(dropped);
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
        let pieces = pieces(runs(sample, &media), dropped);
        self.strip(&pieces);
        let mut turns = Turns { out: &mut self.body, open: false };
        let shown = media.iter().map(|medium| {
            let groups = medium.num_shown() as u64;
            if medium.patches.kind == MediumKind::Video { 2 * groups } else { groups }
        });
        let max_pixels = (self.pixels_a_sample / shown.sum::<u64>().max(1)).max(LEAST_PIXELS);
        let mut pixels: (usize, Vec<Pixels>) = (usize::MAX, Vec::new());
        for piece in pieces {
            let (run, range) = match piece {
                SamplePiece::Kept(run, range) => (run, range),
                SamplePiece::Cut(ids) => {
                    turns.text(&self.encoder.decode_with_specials(ids)?, Fate::Cut);
                    continue;
                }
            };
            match run {
                SpanKind::Text => {
                    let text = self.encoder.decode_with_specials(&sample.input_ids[range])?;
                    turns.text(&text, Fate::Kept);
                }
                SpanKind::Target => {
                    for (text, tokens) in whole_characters(self.encoder, &sample.input_ids[range])?
                    {
                        turns.target(&text, tokens);
                    }
                }
                SpanKind::Medium { index, group } => {
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
    pub(super) fn packs(&mut self, packs: &[Vec<(SampleIndex, usize)>], rows: &DatasetRows) {
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
    fn strip(&mut self, pieces: &[SamplePiece<'_, SpanKind>]) {
        self.body.push_str("<div class=\"strip\">");
        for piece in pieces {
            let (class, tokens) = match piece {
                SamplePiece::Kept(SpanKind::Text, range) => ("", range.len()),
                SamplePiece::Kept(SpanKind::Target, range) => (" class=\"target\"", range.len()),
                SamplePiece::Kept(SpanKind::Medium { .. }, range) => {
                    (" class=\"vision\"", range.len())
                }
                SamplePiece::Cut(ids) => (" class=\"cut\"", ids.len()),
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpanKind {
    Text,
    Target,
    /// An image, a group of frames of a video, or a slice of an image or frame, by their indexes.
    Medium {
        index: usize,
        group: usize,
    },
}

/// Divides the sample into runs of tokens of one kind.
pub(super) fn runs(sample: &EncodedSample, media: &[ShownMedium]) -> Vec<(SpanKind, Range<usize>)> {
    let label =
        |label: &i64| if *label == IGNORE_INDEX { SpanKind::Text } else { SpanKind::Target };
    let mut kinds: Vec<SpanKind> = sample.labels.iter().map(label).collect(); // [T]
    for (index, medium) in media.iter().enumerate() {
        let tokens = medium.rows.len() / medium.num_groups().max(1);
        for (at, row) in medium.rows.iter().enumerate() {
            kinds[*row as usize] = SpanKind::Medium { index, group: at / tokens.max(1) };
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
fn whole_characters(encoder: &Encoder, ids: &[u32]) -> anyhow::Result<Vec<(String, usize)>> {
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

/// Maximum number of groups of frames shown per video, and of slices of an image or frame.
const MAX_GROUPS: usize = 8;
/// Minimum side of a shown image, in CSS pixels; the browser enlarges smaller images.
const LEAST_SIDE: u32 = 128;

/// An image or a group of frames to show.
pub(super) struct Figure<'a> {
    pub(super) media: &'a [ShownMedium<'a>],
    pub(super) index: usize,
    /// Index of the group of frames, or of the slice; 0 for an image with all its tiles.
    pub(super) group: usize,
    /// Maximum number of pixels of each thumbnail.
    pub(super) max_pixels: u64,
    /// The boxes of all images of the sample.
    pub(super) boxes: &'a [ImageBox],
}

impl Figure<'_> {
    /// `frames` are all frames of the medium; `tokens` is the number of tokens of this group.
    pub(super) fn html(&self, frames: &[Pixels], tokens: usize) -> anyhow::Result<String> {
        let medium = &self.media[self.index];
        let alike = self.media[..=self.index]
            .iter()
            .filter(|of| of.patches.kind == medium.patches.kind && !of.patches.continues_medium);
        let (number, [times, rows, columns]) = (alike.count(), medium.patches.grid_thw);
        let groups = medium.num_groups().max(1);
        let name = match medium.patches.kind {
            MediumKind::Image if medium.patches.continues_medium => {
                format!("image {number}, slice {} of {groups}", self.group + 1)
            }
            MediumKind::Image => format!("image {number}"),
            MediumKind::Video => format!("video {number}, {}", self.place_in_video()),
        };
        let mut html =
            format!("<div class=\"medium\"><span class=\"chip\">{name}: {tokens} tokens</span>");
        if self.group < medium.num_shown() {
            let a_group = frames.len() / groups;
            let shown = &frames[self.group * a_group..(self.group + 1) * a_group];
            // Side, in patches, of the square that becomes one token.
            let patches = f64::from(times * rows * columns) / groups as f64;
            let cell = (patches / tokens.max(1) as f64).sqrt();
            let (c, r) = (f64::from(columns) / cell, f64::from(rows) / cell);
            let boxes = match medium.patches.kind {
                MediumKind::Image if !medium.patches.continues_medium => self.boxes_of(number - 1),
                MediumKind::Image | MediumKind::Video => String::new(),
            };
            html.push_str("<figure>");
            let mut caption = String::new();
            for frame in shown {
                let thumbnail = thumbnail(frame, self.max_pixels)?;
                let scale = (LEAST_SIDE / thumbnail.width.max(thumbnail.height).max(1)).max(1);
                push(
                    &mut html,
                    format_args!(
                        "<span style=\"--c:{c};--r:{r}\"><img src=\"{}\" width=\"{}\" height=\"{}\" style=\"width:{}px\" alt=\"{name}\">{boxes}</span>",
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

    /// The group of frames, or the frame or slice of a video whose frames have slices.
    fn place_in_video(&self) -> String {
        let medium = &self.media[self.index];
        let (number, groups) = (self.group + 1, medium.num_groups());
        let rest = self.media[self.index + 1..]
            .iter()
            .take_while(|of| of.patches.continues_medium)
            .count();
        let frame = medium.part / 2 + 1; // each frame is followed by its slices
        match (medium.part, rest) {
            (0, 0) => format!("group {number} of {groups}"),
            (part, _) if part % 2 == 0 => {
                format!("frame {frame} of {}", (part + 1 + rest) / 2)
            }
            _ => format!("frame {frame}, slice {number} of {groups}"),
        }
    }

    /// The boxes of an image, to be drawn over it.
    fn boxes_of(&self, image: usize) -> String {
        let mut html = String::new();
        for ImageBox { corners, name, .. } in self.boxes.iter().filter(|of| of.image == image) {
            let [left, top, right, bottom] = corners.map(|at| f64::from(at) / 10.0);
            push(
                &mut html,
                format_args!(
                    "<b class=\"box\" style=\"left:{left}%;top:{top}%;width:{}%;height:{}%\" title=\"{corners:?}\">{}</b>",
                    right - left,
                    bottom - top,
                    escaped(name.as_deref().unwrap_or_default()),
                ),
            );
        }
        html
    }
}

/// A piece of a sample before truncation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SamplePiece<'a, R> {
    /// A run of tokens of the truncated sample.
    Kept(R, Range<usize>),
    Cut(&'a [u32]),
}

/// The runs of the truncated sample with the dropped tokens between them. A run is split where
/// tokens were dropped inside it.
pub(super) fn pieces<R: Copy>(
    runs: Vec<(R, Range<usize>)>,
    dropped: &[DroppedTokens],
) -> Vec<SamplePiece<'_, R>> {
    let mut pieces = Vec::with_capacity(runs.len() + dropped.len());
    let mut dropped = dropped.iter().peekable();
    for (run, mut range) in runs {
        while let Some(cut) = dropped.next_if(|cut| cut.before < range.end) {
            if range.start < cut.before {
                pieces.push(SamplePiece::Kept(run, range.start..cut.before));
                range.start = cut.before;
            }
            pieces.push(SamplePiece::Cut(&cut.ids));
        }
        pieces.push(SamplePiece::Kept(run, range));
    }
    pieces.extend(dropped.map(|cut| SamplePiece::Cut(&cut.ids)));
    pieces
}

pub(super) fn num_tokens(dropped: &[DroppedTokens]) -> usize {
    dropped.iter().map(|cut| cut.ids.len()).sum()
}

/// The side at which truncation removes text: `left` or `right`, as in `data.truncation`.
pub(super) fn side(keep: KeptEnd) -> &'static str {
    match keep {
        KeptEnd::Beginning => "right",
        KeptEnd::End => "left",
    }
}

pub(super) struct ShownMedium<'a> {
    pub(super) patches: &'a Patches,
    /// Positions of its tokens in the sample.
    pub(super) rows: &'a [u32],
    /// Index among the patches of its image or video, of which there are several with slices.
    part: usize,
}

impl ShownMedium<'_> {
    /// Number of runs of tokens: an image is one, with all its tiles; a video has one for each group
    /// of frames, and slices are one each.
    fn num_groups(&self) -> usize {
        match self.patches.kind {
            MediumKind::Image if !self.patches.continues_medium => 1,
            MediumKind::Image | MediumKind::Video => self.patches.grid_thw[0] as usize,
        }
    }

    /// Number of runs of tokens whose pixels are shown.
    fn num_shown(&self) -> usize {
        let is_late = self.patches.kind == MediumKind::Video && self.part / 2 >= MAX_GROUPS;
        if is_late { 0 } else { self.num_groups().min(MAX_GROUPS) }
    }
}

/// The images and videos of a sample, in order. Slices are a medium of their own, and so is each frame
/// that has slices.
pub(super) fn media_of<'a>(encoder: &Encoder, sample: &'a EncodedSample) -> Vec<ShownMedium<'a>> {
    let (mut rest, mut part) = (sample.vision_rows.as_slice(), 0);
    let show = |patches: &'a Patches| {
        let count = encoder.image_processor().num_tokens(patches.grid_thw);
        let (rows, after) = rest.split_at(count);
        rest = after;
        part = if patches.continues_medium { part + 1 } else { 0 };
        ShownMedium { patches, rows, part }
    };
    sample.media.iter().map(show).collect()
}

/// Patches of the media of a kind.
pub(super) fn of_kind(sample: &EncodedSample, kind: MediumKind) -> impl Iterator<Item = &Patches> {
    sample.media.iter().filter(move |patches| patches.kind == kind)
}

pub(super) fn grids(sample: &EncodedSample) -> [Vec<[u32; 3]>; 2] {
    [MediumKind::Image, MediumKind::Video]
        .map(|kind| of_kind(sample, kind).map(|patches| patches.grid_thw).collect())
}

/// The grid of each image or video of a kind, with that of its slices. A video of frames that have
/// slices is one grid of all frames and one of all slices.
pub(super) fn described(media: &[ShownMedium], kind: MediumKind) -> String {
    let mut shown: Vec<[[u32; 3]; 2]> = Vec::new();
    for medium in media.iter().filter(|medium| medium.patches.kind == kind) {
        if !medium.patches.continues_medium {
            shown.push(Default::default());
        }
        if let Some(grids) = shown.last_mut() {
            let grid = &mut grids[medium.part % 2]; // each image or frame is followed by its slices
            let [count, height, width] = medium.patches.grid_thw;
            *grid = [grid[0] + count, height, width];
        }
    }
    let text = |[whole, slices]: [[u32; 3]; 2]| match slices[0] {
        0 => format!("{whole:?}"),
        _ => format!("{whole:?} with slices {slices:?}"),
    };
    shown.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

/// The boxes of a row, and its thoughts that the model does not see.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) boxes: Vec<ImageBox>,
    /// Turns with thoughts that the template does not render.
    hidden_thoughts: Vec<usize>,
}

impl Notes {
    /// The notes of a row that can be encoded.
    pub(super) fn of(rows: &DatasetRows, row: SampleIndex) -> Self {
        let Some(Ok(sample)) = rows.sample(row) else { return Self::default() };
        let hidden_thoughts = rows.encoder().hidden_thoughts(&sample).unwrap_or_default();
        Self {
            boxes: image_boxes(rows.encoder().image_processor(), &sample).unwrap_or_default(),
            hidden_thoughts,
        }
    }

    /// A text about thoughts that are not rendered, to be appended to a list; empty without any.
    pub(super) fn hidden_thoughts(&self) -> String {
        if self.hidden_thoughts.is_empty() {
            return String::new();
        }
        let turns: Vec<String> = self.hidden_thoughts.iter().map(ToString::to_string).collect();
        format!(", thoughts not rendered: turns {}", turns.join(", "))
    }
}

#[cfg(test)]
mod tests;
