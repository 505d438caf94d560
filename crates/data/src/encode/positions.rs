//! Three-axis positions for M-RoPE.
//!
//! Text advances all axes by one. An image that starts at position `s` has `t = s`, `h = s + row`
//! and `w = s + column` on its merged grid; the text after it continues at `s` plus the longer
//! side. If the text has the times of a video, each group of frames is placed like an image.
//! Otherwise the groups follow each other: group `k` has `t = s + k * step`, rounded down, and the
//! text continues behind the largest position of the video on any axis. Shapes: `T` tokens, `M`
//! merged vision tokens.

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
fn push_text(positions: &mut Vec<[u32; 3]>, end: usize, next: &mut u32) {
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
