//! Three-axis positions of images on a canvas (MiniCPM-V 4.7). The canvas of an image has the
//! tokens of its slices side by side, or those of the whole image if it has no slices.
//!
//! An image that starts at position `o` has `t = o` in all its tokens. A token of a slice has
//! `h = o + row` and `w = o + column` on the canvas. The tokens of the whole image are stretched
//! over the canvas. Special tokens are at the corners of what they enclose, or next to them. The
//! text continues at `o` plus the longer side of the canvas plus one. Shapes: `T` tokens, `M` merged
//! vision tokens.

use super::media::push_text;
use crate::media::CanvasTokens;
use crate::media::image::{ImageGrid, SliceGrid};

/// Temporal, height and width position of each of `ids`; `[T]`.
///
/// `vision_rows` `[M]` is ascending. It has those of each of `images` and its slices, in order.
pub(super) fn position_ids(
    ids: &[u32],
    vision_rows: &[u32],
    images: impl Iterator<Item = ImageGrid>,
    merge_size: u32,
    tokens: CanvasTokens,
) -> Vec<[u32; 3]> {
    let mut positions = Vec::with_capacity(ids.len()); // [T]
    let mut next: u32 = 0;
    let mut first = 0; // index of the current image in `vision_rows`
    // The start token of the image whose visual tokens start at this index of `vision_rows`.
    let start = |first: usize| vision_rows.get(first).map(|row| *row as usize - 1);
    for image in images {
        let canvas = Canvas::new(image, merge_size);
        push_text(&mut positions, start(first).unwrap_or(ids.len()), &mut next);
        canvas.push(&mut positions, next);
        first += canvas.num_visual();
        debug_assert_eq!(vision_rows[first - 1] as usize + 2, positions.len(), "one end token");
        // A newline of the chat template directly behind an image is like one between its slices.
        let end = start(first).unwrap_or(ids.len());
        let is_marker = |id: &&u32| tokens.contains(**id);
        let behind = ids[positions.len()..end].iter().take_while(is_marker).count();
        positions.extend(vec![[next; 3]; behind]);
        next += canvas.size.into_iter().fold(0, u32::max) + 1;
    }
    push_text(&mut positions, ids.len(), &mut next);
    positions
}

/// The tokens of an image and its slices.
struct Canvas {
    /// Height and width of the whole image in tokens.
    whole: [u32; 2],
    /// Rows and columns of slices, if there are slices.
    slices: Option<[u32; 2]>,
    /// Height and width of a slice in tokens, or of the whole image.
    slice: [u32; 2],
    /// Height and width of the canvas in tokens.
    size: [u32; 2],
}

impl Canvas {
    fn new(image: ImageGrid, merge_size: u32) -> Self {
        let tokens = |patches: [u32; 2]| patches.map(|side| side / merge_size);
        let [_, height, width] = image.whole;
        let whole = tokens([height, width]);
        match image.slices {
            Some(SliceGrid { rows, columns, patches }) => {
                let slice @ [height, width] = tokens(patches);
                let size = [rows * height, columns * width];
                Self { whole, slices: Some([rows, columns]), slice, size }
            }
            None => Self { whole, slices: None, slice: whole, size: whole },
        }
    }

    fn num_visual(&self) -> usize {
        let area = |[height, width]: [u32; 2]| height as usize * width as usize;
        area(self.whole) + self.slices.map_or(0, area) * area(self.slice)
    }

    /// Appends the positions of an image that starts at `origin`.
    fn push(&self, positions: &mut Vec<[u32; 3]>, origin: u32) {
        let at = |row: u32, column: u32| [origin, origin + row, origin + column];
        let before = origin.saturating_sub(1);
        positions.push([origin, before, before]);
        let columns = stretched(self.whole[1], self.size[1]);
        for row in stretched(self.whole[0], self.size[0]) {
            positions.extend(columns.iter().map(|column| at(row, *column)));
        }
        positions.push(at(self.size[0], self.size[1]));
        let [height, width] = self.slice;
        let [rows, columns] = self.slices.unwrap_or_default();
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |of| (row, of))) {
            let (top, left) = (row * height, column * width);
            if column == 0 && row > 0 {
                positions.push(at(top - 1, self.size[1])); // the newline after the row before
            }
            positions.push(at(top, left));
            for y in top..top + height {
                positions.extend((left..left + width).map(|x| at(y, x)));
            }
            positions.push(at(top + height - 1, left + width - 1));
        }
    }
}

/// The places of `tokens` tokens that are stretched over `size` places.
///
/// It computes `torch.linspace` in the order of its operations: from the nearer end, in `f32`. The
/// exact numbers round to other places for some sizes.
fn stretched(tokens: u32, size: u32) -> Vec<u32> {
    let end = (size - 1) as f32;
    let step = end / tokens.saturating_sub(1).max(1) as f32;
    let place = |token: u32| {
        if token < tokens / 2 || tokens == 1 {
            token as f32 * step
        } else {
            end - (tokens - 1 - token) as f32 * step
        }
    };
    (0..tokens).map(|token| place(token).round_ties_even() as u32).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn golden() -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/minicpm_47.json");
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn tokens_of_the_whole_image_are_at_the_places_of_the_reference() {
        let cases = golden()["linspace"].as_array().unwrap().clone();
        assert!(cases.len() >= 300);
        for case in cases {
            let [size, tokens] = [0, 1].map(|at| case[at].as_u64().unwrap() as u32);
            assert_eq!(json!(stretched(tokens, size)), case[2], "{tokens} over {size}");
        }
    }

    /// The images of a case: each has its grid and, if slices follow it in `ids`, theirs.
    fn images(ids: &[u32], case: &Value, [start, end, slice, newline]: [u32; 4]) -> Vec<ImageGrid> {
        let grids =
            |key: &str| -> Vec<[u32; 3]> { serde_json::from_value(case[key].clone()).unwrap() };
        let mut left = ["image_grid_thw", "video_grid_thw"].map(|key| grids(key).into_iter());
        let mut images = Vec::new();
        let starts = (0..ids.len()).filter(|at| ids[*at] == start);
        for at in starts {
            let of_kind = &mut left[usize::from(ids[at + 1] != 2029)];
            let whole = of_kind.next().unwrap();
            let behind = at + ids[at..].iter().position(|id| *id == end).unwrap() + 1;
            let slices = (ids.get(behind) == Some(&slice)).then(|| {
                let [count, height, width] = of_kind.next().unwrap();
                let rest = &ids[behind..];
                let inside = rest.iter().position(|id| *id == start).unwrap_or(rest.len());
                let rows = rest[..inside].windows(2).filter(|two| *two == [newline, slice]).count();
                let rows = rows as u32 + 1;
                SliceGrid { rows, columns: count / rows, patches: [height, width] }
            });
            images.push(ImageGrid { whole, slices });
        }
        assert!(left.iter_mut().all(|grids| grids.next().is_none()));
        images
    }

    /// Ids without a chat around them: images at the very start, side by side, and before newlines.
    #[test]
    fn positions_of_any_ids_are_those_of_the_reference() {
        let golden = golden();
        let id = |key: &str| golden["changes"]["config.json"][key].as_u64().unwrap() as u32;
        let tokens = CanvasTokens::KEYS.map(|(key, _)| id(key));
        let [start, end, slice, _, newline] = tokens;
        let cases = golden["positions"].as_array().unwrap();
        assert!(cases.len() > 10);
        for case in cases {
            let ids: Vec<u32> = serde_json::from_value(case["input_ids"].clone()).unwrap();
            let is_visual = |row: &u32| [2029, 2030].contains(&ids[*row as usize]);
            let rows: Vec<u32> = (0..ids.len() as u32).filter(is_visual).collect();
            let images = images(&ids, case, [start, end, slice, newline]);
            let images = images.into_iter();
            let found = position_ids(&ids, &rows, images, 4, CanvasTokens(tokens));
            let axes = [0, 1, 2].map(|axis| found.iter().map(|of| of[axis]).collect::<Vec<_>>());
            assert_eq!(json!(axes), case["position_ids"], "{}", case["case"]);
            let last = found.iter().flatten().max().unwrap();
            assert_eq!(json!(last + 1), case["next"], "{}", case["case"]);
        }
    }
}
