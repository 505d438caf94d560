//! Three-axis positions for interleaved M-RoPE.
//!
//! Text advances all axes by one. An image that starts at position `s` has `t = s`, `h = s + row` and
//! `w = s + column` on its merged grid; the text after it continues at `s` plus the longer side. Each
//! group of frames of a video is placed like an image: its timestamp is in the text before it.
//! Shapes: `T` tokens, `M` merged vision tokens.

/// Temporal, height and width position of each token; `[T]`.
///
/// `vision_rows` `[M]` is ascending. For each of `grids` (patches per axis, before merging) it has `t`
/// runs of `h * w / merge_size^2` tokens.
pub(in crate::data) fn position_ids(
    num_tokens: usize,
    vision_rows: &[u32],
    grids: &[[u32; 3]],
    merge_size: u32,
) -> Vec<[u32; 3]> {
    let mut positions = Vec::with_capacity(num_tokens); // [T]
    let mut next = 0;
    let mut first = 0; // index of the current run in `vision_rows`
    let frames = grids.iter().flat_map(|[t, h, w]| std::iter::repeat_n([h, w], *t as usize));
    for [height, width] in frames {
        let (rows, columns) = (height / merge_size, width / merge_size);
        let start = vision_rows[first] as usize;
        push_text(&mut positions, start, &mut next);
        for row in 0..rows {
            positions.extend((0..columns).map(|column| [next, next + row, next + column]));
        }
        next += rows.max(columns);
        first += (rows * columns) as usize;
        debug_assert_eq!(vision_rows[first - 1] as usize + 1, positions.len(), "one run a frame");
    }
    push_text(&mut positions, num_tokens, &mut next);
    positions
}

/// Appends text positions up to row `end`.
fn push_text(positions: &mut Vec<[u32; 3]>, end: usize, next: &mut u32) {
    while positions.len() < end {
        positions.push([*next; 3]);
        *next += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_advances_all_axes_together() {
        assert_eq!(position_ids(3, &[], &[], 2), [[0; 3], [1; 3], [2; 3]]);
    }

    #[test]
    fn an_image_counts_rows_and_columns_and_text_continues_after_its_longer_side() {
        // Two text tokens, an image of 4 x 6 patches (2 x 3 merged), two text tokens.
        let positions = position_ids(10, &[2, 3, 4, 5, 6, 7], &[[1, 4, 6]], 2);
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
        let positions = position_ids(7, &[1, 2, 4, 5], &[[2, 4, 2]], 2);
        let by_hand = [[0, 0, 0], [1, 1, 1], [1, 2, 1], [3, 3, 3], [4, 4, 4], [4, 5, 4], [6, 6, 6]];
        assert_eq!(positions, by_hand);
        let as_images = position_ids(7, &[1, 2, 4, 5], &[[1, 4, 2], [1, 4, 2]], 2);
        assert_eq!(positions, as_images);
    }

    #[test]
    fn two_images_each_start_after_what_stands_before_them() {
        // Image of 2 x 2 patches (1 x 1), one text token, image of 4 x 2 (2 x 1), one text token.
        let positions = position_ids(5, &[0, 2, 3], &[[1, 2, 2], [1, 4, 2]], 2);
        assert_eq!(positions, [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 3, 2], [4, 4, 4]]);
    }
}
