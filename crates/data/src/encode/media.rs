//! The media of a sample: their text, their patches, and three-axis positions for M-RoPE.
//!
//! Text advances all axes by one. An image that starts at position `s` has `t = s`, `h = s + row`
//! and `w = s + column` on its merged grid; the text after it continues at `s` plus the longer
//! side. If the text has the times of a video, each group of frames is placed like an image.
//! Otherwise the groups follow each other: group `k` has `t = s + k * step`, rounded down, and the
//! text continues behind the largest position of the video on any axis. Shapes: `T` tokens, `M`
//! merged vision tokens.

use std::fmt::Write as _;
use std::ops::Range;

use super::folder::{MediaTokens, VideoTokens};
use crate::media::image::{ImageError, ImageGrid, ImageProcessor, ImageSize, SliceGrid};
use crate::media::video::{Clip, GroupTimes, VideoError, VideoMarks, VideoProcessor};
use crate::media::{NUMBER_MARKS, SLICE_MARKS, VideoForm};
use crate::source::SampleFault;
use batch::{Content, Medium, MediumKind, Message, Part, Patches};

/// Maximum number of pixels of the images and sampled frames of a row, before resizing: 16 times
/// those of the largest image. It bounds the time to decode a row.
const MAX_ROW_PIXELS: u64 = 1 << 32;

/// Reads media with the settings of a model.
pub(super) struct MediaReader {
    pub(super) images: ImageProcessor,
    pub(super) videos: VideoProcessor,
}

/// The size of a medium after resizing, from its header.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum MediumGrid {
    Image(ImageGrid),
    /// Patches per axis, and times.
    Video(Clip),
}

impl MediumGrid {
    /// The runs of visual tokens of this medium, each without text in it.
    pub(super) fn runs(&self) -> Vec<VisualRun> {
        let ([t, height, width], step) = match self {
            // Models with slices place visual tokens by their index, or on a canvas.
            Self::Image(grid) => (grid.whole, 0.0),
            Self::Video(Clip {
                grid_thw: [t, height, width],
                times: GroupTimes::Text(_) | GroupTimes::Numbers | GroupTimes::Untimed,
                ..
            }) => {
                return vec![VisualRun { grid: [1, *height, *width], step: 0.0 }; *t as usize];
            }
            Self::Video(Clip { grid_thw, times: GroupTimes::Positions(step), .. }) => {
                (*grid_thw, *step)
            }
        };
        vec![VisualRun { grid: [t, height, width], step }]
    }

    /// The image with its slices, or each frame of a video.
    pub(super) fn frames(&self) -> Vec<ImageGrid> {
        match self {
            Self::Image(grid) => vec![*grid],
            Self::Video(clip) => vec![clip.frame(); clip.grid_thw[0] as usize],
        }
    }

    /// Patches per axis, without slices.
    pub(super) fn grid(&self) -> [u32; 3] {
        match self {
            Self::Image(grid) => grid.whole,
            Self::Video(clip) => clip.grid_thw,
        }
    }

    /// Number of patches, those of slices included.
    pub(super) fn num_patches(&self) -> usize {
        match self {
            Self::Image(grid) => grid.num_patches(),
            Self::Video(clip) => clip.num_patches(),
        }
    }
}

/// The size of a medium before any limit on images, from its header.
pub(super) enum MediumHeader {
    /// Size in pixels and limits of the row.
    Image(ImageSize),
    /// Patches and times under the settings for videos.
    Video(Clip),
}

impl MediaReader {
    /// Reads the headers; images have their original sizes. A row whose media would take the time
    /// of many others to decode is an error.
    pub(super) fn headers(&self, media: &[Medium]) -> Result<Vec<MediumHeader>, SampleFault> {
        let read = each(media, |medium| {
            Ok(match medium {
                Medium::Image(image) => {
                    let (size, pixels) = self.images.size(image)?;
                    (MediumHeader::Image(size), pixels)
                }
                Medium::Video(video) => {
                    let clip = self.videos.clip(video)?;
                    let pixels = clip.source_pixels;
                    (MediumHeader::Video(clip), pixels)
                }
            })
        })?;
        let found = read.iter().fold(0u64, |sum, (_, pixels)| sum.saturating_add(*pixels));
        if found > MAX_ROW_PIXELS {
            let [found, most] = [found, MAX_ROW_PIXELS].map(|pixels| pixels as usize);
            return Err(SampleFault::MediaTooLarge { found, most });
        }
        Ok(read.into_iter().map(|(header, _)| header).collect())
    }

    /// Reads the headers and computes the grids.
    pub(super) fn grids(&self, media: &[Medium]) -> Result<Vec<MediumGrid>, SampleFault> {
        let headers = self.headers(media)?.into_iter();
        let grids = headers.map(|header| match header {
            MediumHeader::Image(size) => {
                let grid = self.images.grid_of_size(size);
                MediumGrid::Image(grid.expect("reading the header checked the aspect ratio"))
            }
            MediumHeader::Video(clip) => MediumGrid::Video(clip),
        });
        Ok(grids.collect())
    }

    /// Decodes the media and returns their grids and all patches.
    pub(super) fn load(
        &self,
        media: &[Medium],
    ) -> Result<(Vec<MediumGrid>, Vec<Patches>), SampleFault> {
        let loaded = each(media, |medium| {
            Ok(match medium {
                Medium::Image(image) => {
                    let (grid, patches) = self.images.load(image)?;
                    (MediumGrid::Image(grid), patches)
                }
                Medium::Video(video) => {
                    let (clip, patches) = self.videos.load(video)?;
                    (MediumGrid::Video(clip), patches)
                }
            })
        });
        let (grids, patches): (_, Vec<Vec<Patches>>) = loaded?.into_iter().unzip();
        Ok((grids, patches.into_iter().flatten().collect()))
    }

    /// Number of visual tokens of a medium.
    pub(super) fn num_tokens(&self, grids: &MediumGrid) -> usize {
        grids.num_patches() / (self.images.merge_size() as usize).pow(2)
    }

    /// Number of tokens that the slices of an image add to its text: their visual tokens, the special
    /// tokens around each, and a newline between their rows.
    pub(super) fn slice_tokens(&self, grid: &ImageGrid) -> usize {
        grid.slices.map_or(0, |slices| {
            let [count, ..] = slices.grid().map(|n| n as usize);
            self.images.num_tokens(slices.grid()) + 2 * count + slices.rows as usize - 1
        })
    }

    /// The kind and byte range of each placeholder in `text`, ascending. The range of a video may
    /// include the start and end token around it.
    pub(super) fn placeholders(
        &self,
        text: &str,
        tokens: &MediaTokens,
    ) -> Vec<(MediumKind, Range<usize>)> {
        let find = |token: &str, kind: MediumKind| -> Vec<(MediumKind, Range<usize>)> {
            let found = text.match_indices(token);
            found.map(|(at, token)| (kind, at..at + token.len())).collect()
        };
        let Some((image, _)) = &tokens.image else { return Vec::new() };
        let mut found = find(image, MediumKind::Image);
        let Some(video) = &tokens.video else { return found };
        let videos = find(&video.pad, MediumKind::Video);
        found.extend(videos.into_iter().map(|(kind, place)| {
            let VideoTokens { start, end, .. } = video;
            let before = text[..place.start].strip_suffix(start.as_str()).map(str::len);
            let after = text[place.end..].starts_with(end.as_str());
            match (self.videos.marks(), before, after) {
                (VideoMarks::Flat, Some(before), true) => (kind, before..place.end + end.len()),
                _ => (kind, place),
            }
        }));
        found.sort_by_key(|(_, place)| place.start);
        found
    }

    /// The texts that replace the placeholders of media.
    pub(super) fn texts(&self, grids: &[MediumGrid], tokens: &MediaTokens) -> Vec<String> {
        // each kind has its numbers
        let count = |is_numbered| 0..if is_numbered { usize::MAX } else { 0 };
        let is_numbered = self.images.numbers_images();
        let form = self.videos.family().videos;
        let videos = is_numbered && form == VideoForm::SlicedFrames { can_be_numbered: true };
        let (mut images, mut videos) = (count(is_numbered), count(videos));
        let text = |grid: &MediumGrid| {
            let number = match grid {
                MediumGrid::Image(_) => images.next(),
                MediumGrid::Video(_) => videos.next(),
            };
            let [start, end] = NUMBER_MARKS;
            let number = number.map(|number| format!("{start}{number}{end}"));
            number.unwrap_or_default() + &self.text(grid, tokens)
        };
        grids.iter().map(text).collect()
    }

    /// The text without the number of the medium.
    fn text(&self, grids: &MediumGrid, tokens: &MediaTokens) -> String {
        let image = tokens.image.as_ref().map_or("", |(pad, _)| pad);
        match (grids, &tokens.video) {
            (MediumGrid::Video(Clip { times: GroupTimes::Positions(_), .. }), Some(video)) => {
                video.pad.repeat(self.num_tokens(grids))
            }
            (
                MediumGrid::Video(Clip { grid_thw, times: GroupTimes::Text(times), .. }),
                Some(video),
            ) => {
                let VideoTokens { pad, start, end, .. } = video;
                let [_, height, width] = *grid_thw;
                let pads = pad.repeat(self.images.num_tokens([1, height, width]));
                let mut text = String::new();
                for time in times {
                    // writing to a String cannot fail
                    let _ = write!(text, "<{time:.1} seconds>{start}{pads}{end}");
                }
                text
            }
            (MediumGrid::Video(clip @ Clip { times: GroupTimes::Numbers, .. }), _) => {
                let pads = self.image_text(&clip.frame(), image);
                let frame = |number| format!("Frame{number}: {pads}");
                (1..=clip.grid_thw[0]).map(frame).collect::<Vec<_>>().join("\n")
            }
            (MediumGrid::Video(clip @ Clip { times: GroupTimes::Untimed, .. }), Some(video)) => {
                self.image_text(&clip.frame(), &video.pad).repeat(clip.grid_thw[0] as usize)
            }
            (MediumGrid::Image(grid), _) => self.image_text(grid, image),
            (MediumGrid::Video(_), None) => String::new(), // refused before
        }
    }

    /// The visual tokens `pad` of an image or frame with this grid, and the tokens around them that
    /// the chat template leaves out.
    fn image_text(&self, grid: &ImageGrid, pad: &str) -> String {
        let [start, end] = self.videos.family().image_marks.unwrap_or_default();
        let mut text = format!("{start}{}{end}", pad.repeat(self.images.num_tokens(grid.whole)));
        if let Some(SliceGrid { rows, columns, patches: [height, width] }) = grid.slices {
            let [start, end] = SLICE_MARKS;
            let pads = pad.repeat(self.images.num_tokens([1, height, width]));
            let row = format!("{start}{pads}{end}").repeat(columns as usize);
            text.push_str(&vec![row; rows as usize].join("\n"));
        }
        text
    }
}

/// Kinds of the media in the turns, in order.
pub(super) fn kinds(messages: &[Message]) -> Vec<MediumKind> {
    let kind = |part: &Part| match part {
        Part::Text(_) => None,
        Part::Image => Some(MediumKind::Image),
        Part::Video => Some(MediumKind::Video),
    };
    let parts = messages.iter().flat_map(|message| match &message.content {
        Content::Text(_) => [].as_slice(),
        Content::Parts(parts) => parts,
    });
    parts.filter_map(kind).collect()
}

/// The reason why a medium cannot be used.
enum Cause {
    Image(ImageError),
    Video(VideoError),
}

impl From<ImageError> for Cause {
    fn from(cause: ImageError) -> Self {
        Self::Image(cause)
    }
}

impl From<VideoError> for Cause {
    fn from(cause: VideoError) -> Self {
        Self::Video(cause)
    }
}

fn each<T>(
    media: &[Medium],
    read: impl Fn(&Medium) -> Result<T, Cause>,
) -> Result<Vec<T>, SampleFault> {
    let (mut images, mut videos) = (0, 0);
    let read_one = |medium: &Medium| {
        let index = match medium {
            Medium::Image(_) => &mut images,
            Medium::Video(_) => &mut videos,
        };
        *index += 1;
        let index = *index;
        read(medium).map_err(|cause| match cause {
            Cause::Image(cause) => SampleFault::Image { index, cause },
            Cause::Video(cause) => SampleFault::Video { index, cause },
        })
    };
    media.iter().map(read_one).collect()
}

/// Visual tokens that follow each other: an image, a group of frames, or a video.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct VisualRun {
    /// Frame groups, and patches along the height and width before merging.
    pub(crate) grid: [u32; 3],
    /// Distance of the temporal positions of two groups.
    pub(crate) step: f32,
}

/// Temporal, height and width position of each token; `[T]`.
///
/// `vision_rows` `[M]` is ascending. For each of `runs` it has `t * h * w / merge_size^2`
/// consecutive rows.
pub(crate) fn position_ids(
    num_tokens: usize,
    vision_rows: &[u32],
    runs: &[VisualRun],
    merge_size: u32,
) -> Vec<[u32; 3]> {
    let mut positions = Vec::with_capacity(num_tokens); // [T]
    let mut next: u32 = 0;
    let mut first = 0; // index of the current run in `vision_rows`
    for VisualRun { grid: [groups, height, width], step } in runs {
        let (rows, columns) = (height / merge_size, width / merge_size);
        let start = vision_rows[first] as usize;
        push_text(&mut positions, start, &mut next);
        let mut after = next.saturating_add(rows.max(columns));
        for group in 0..*groups {
            let time = next.saturating_add((group as f32 * step) as u32);
            for row in 0..rows {
                positions.extend((0..columns).map(|column| [time, next + row, next + column]));
            }
            after = after.max(time.saturating_add(1));
        }
        next = after;
        first += (groups * rows * columns) as usize;
        debug_assert_eq!(vision_rows[first - 1] as usize + 1, positions.len(), "one run");
    }
    push_text(&mut positions, num_tokens, &mut next);
    positions
}

/// Appends text positions up to row `end`.
pub(super) fn push_text(positions: &mut Vec<[u32; 3]>, end: usize, next: &mut u32) {
    while positions.len() < end {
        positions.push([*next; 3]);
        *next = next.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Images, or groups of frames between texts.
    fn runs(grids: &[[u32; 3]]) -> Vec<VisualRun> {
        grids.iter().map(|grid| VisualRun { grid: *grid, step: 0.0 }).collect()
    }

    #[test]
    fn text_advances_all_axes_together() {
        assert_eq!(position_ids(3, &[], &[], 2), [[0; 3], [1; 3], [2; 3]]);
    }

    #[test]
    fn an_image_counts_rows_and_columns_and_text_continues_after_its_longer_side() {
        // Two text tokens, an image of 4 x 6 patches (2 x 3 merged), two text tokens.
        let positions = position_ids(10, &[2, 3, 4, 5, 6, 7], &runs(&[[1, 4, 6]]), 2);
        let by_hand = [
            [0, 0, 0],
            [1, 1, 1],
            [2, 2, 2],
            [2, 2, 3],
            [2, 2, 4],
            [2, 3, 2],
            [2, 3, 3],
            [2, 3, 4],
            [5, 5, 5],
            [6, 6, 6],
        ];
        assert_eq!(positions, by_hand);
    }

    #[test]
    fn frames_of_a_video_are_placed_as_images_between_texts() {
        // Two groups of 4 x 2 patches (2 x 1 merged), text before, between and after.
        let positions = position_ids(7, &[1, 2, 4, 5], &runs(&[[1, 4, 2], [1, 4, 2]]), 2);
        let by_hand = [[0, 0, 0], [1, 1, 1], [1, 2, 1], [3, 3, 3], [4, 4, 4], [4, 5, 4], [6, 6, 6]];
        assert_eq!(positions, by_hand);
    }

    #[test]
    fn groups_of_one_run_have_their_times_and_text_continues_behind_the_latest_position() {
        // A text, three groups of 2 x 4 patches (1 x 2 merged) at a distance of 1.5, two texts.
        let run = VisualRun { grid: [3, 2, 4], step: 1.5 };
        let positions = position_ids(9, &[1, 2, 3, 4, 5, 6], &[run], 2);
        let by_hand = [
            [0, 0, 0],
            [1, 1, 1],
            [1, 1, 2],
            [2, 1, 1],
            [2, 1, 2],
            [4, 1, 1], // 1 + 2 * 1.5
            [4, 1, 2],
            [5, 5, 5],
            [6, 6, 6],
        ];
        assert_eq!(positions, by_hand);
        // at a short distance, the sides are longer
        let short = VisualRun { grid: [2, 2, 8], step: 0.4 };
        let positions = position_ids(10, &[1, 2, 3, 4, 5, 6, 7, 8], &[short], 2);
        assert_eq!(positions[4..], [[1, 1, 4], [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 1, 4], [5; 3]]);
    }

    #[test]
    fn two_images_each_start_after_what_stands_before_them() {
        // Image of 2 x 2 patches (1 x 1), one text token, image of 4 x 2 (2 x 1), one text token.
        let positions = position_ids(5, &[0, 2, 3], &runs(&[[1, 2, 2], [1, 4, 2]]), 2);
        assert_eq!(positions, [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 3, 2], [4, 4, 4]]);
    }
}
