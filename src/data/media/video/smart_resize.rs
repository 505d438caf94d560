//! The size that the frames of a video are resized to: the budget is of the whole video.

use crate::data::media::image::{Frames, fit};

/// Videos more elongated than this are refused, as the model's own processor does.
const MAX_ASPECT_RATIO: f64 = 200.0;

/// Pixels of a whole video, all frames together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Budget {
    pub(super) min_pixels: u64,
    pub(super) max_pixels: u64,
}

/// Target `[height, width]` of `num_frames` frames of `height` x `width`, both multiples of
/// `factor` (`patch_size * merge_size`); `None` if the ratio of the sides is over 200.
///
/// Sides below the factor are first scaled up. Frames count in multiples of `temporal`, rounded
/// half to even; when the area is over or under the budget, as they are.
pub(super) fn smart_resize(
    num_frames: usize,
    [height, width]: [u32; 2],
    temporal: usize,
    factor: u32,
    budget: Budget,
) -> Option<[u32; 2]> {
    let (f, shown) = (f64::from(factor), num_frames as f64);
    let mut sides = [height, width].map(f64::from);
    if height < factor || width < factor {
        let scale = (f / sides[0]).max(f / sides[1]);
        sides = sides.map(|side| (side * scale).trunc());
    }
    let [h, w] = sides;
    if h.max(w) / h.min(w) > MAX_ASPECT_RATIO {
        return None;
    }
    let counted = (shown / temporal as f64).round_ties_even() * temporal as f64;
    Some(fit(sides, factor, Frames { shown, counted }, budget.min_pixels, budget.max_pixels))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Made by `scripts/golden/video_cases.py`.
    #[test]
    fn all_sizes_of_the_reference_table_agree() {
        let golden: Value =
            serde_json::from_str(include_str!("../../../../tests/golden/video.json")).unwrap();
        let rows = golden["sizes"].as_array().unwrap();
        let mut refused = 0;
        for row in rows {
            let [frames, height, width, factor, min_pixels, max_pixels] =
                std::array::from_fn(|i| row[i].as_u64().unwrap());
            let budget = Budget { min_pixels, max_pixels };
            let expected: Option<[u32; 2]> = serde_json::from_value(row[6].clone()).unwrap();
            let size = [height as u32, width as u32];
            let found = smart_resize(frames as usize, size, 2, factor as u32, budget);
            assert_eq!(found, expected, "{row}");
            refused += usize::from(expected.is_none());
        }
        assert!(rows.len() == 300 && refused > 10, "{refused} of {}", rows.len());
    }

    #[test]
    fn the_published_sizes_agree() {
        let table: Value =
            serde_json::from_str(include_str!("../../../../tests/golden/smart_resize.json"))
                .unwrap();
        for row in table["video"].as_array().unwrap() {
            let [frames, height, width, temporal, factor, min_pixels, max_pixels] =
                std::array::from_fn(|i| row[i].as_u64().unwrap());
            let Ok(expected) = serde_json::from_value::<[u32; 2]>(row[7].clone()) else { continue };
            let budget = Budget { min_pixels, max_pixels };
            let size = [height as u32, width as u32];
            let found =
                smart_resize(frames as usize, size, temporal as usize, factor as u32, budget);
            assert_eq!(found, Some(expected), "{row}");
        }
    }
}
