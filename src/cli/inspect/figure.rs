//! An image, or a group of frames of a video, as a figure.

use super::media::ShownMedium;
use crate::batch::MediumKind;
use crate::data::{ImageBox, Pixels};
use crate::report::{escaped, push, thumbnail};

/// Maximum number of groups of frames shown per video.
pub(super) const MAX_GROUPS: usize = 8;
/// Minimum side of a shown image, in CSS pixels; the browser enlarges smaller images.
const LEAST_SIDE: u32 = 128;

/// An image or a group of frames to show.
pub(super) struct Figure<'a> {
    pub(super) media: &'a [ShownMedium<'a>],
    /// Index in `media`.
    pub(super) index: usize,
    /// Index of the group of frames; 0 for an image.
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
            .filter(|other| other.patches.kind == medium.patches.kind);
        let (number, [times, rows, columns]) = (alike.count(), medium.patches.grid_thw);
        let name = match medium.patches.kind {
            MediumKind::Image => format!("image {number}"),
            MediumKind::Video => format!("video {number}, group {} of {times}", self.group + 1),
        };
        let mut html =
            format!("<div class=\"medium\"><span class=\"chip\">{name}: {tokens} tokens</span>");
        if self.group < MAX_GROUPS {
            let a_group = frames.len() / (times as usize).max(1);
            let shown = &frames[self.group * a_group..(self.group + 1) * a_group];
            // Side, in patches, of the square that becomes one token.
            let cell = (f64::from(rows * columns) / tokens.max(1) as f64).sqrt();
            let (c, r) = (f64::from(columns) / cell, f64::from(rows) / cell);
            let boxes = match medium.patches.kind {
                MediumKind::Image => self.boxes_of(number - 1),
                MediumKind::Video => String::new(),
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
