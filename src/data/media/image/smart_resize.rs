//! The size that an image is resized to: sides divisible by the factor, area inside the budget.

/// Images more elongated than this are refused, as the model's own processor does.
const MAX_ASPECT_RATIO: u64 = 200;

/// Target `[height, width]` of a `height` x `width` image, both multiples of `factor`
/// (`patch_size * merge_size`), with an area inside `min_pixels..=max_pixels` where the aspect
/// ratio allows it. `None` if the ratio of the sides is over 200.
///
/// Rounds half to even: a side of 80 at factor 32 becomes 64, not 96. A side of at most half the
/// factor rounds to 0 and so takes the "too small" branch whatever the area is.
///
/// # Panics
/// If a side or `factor` is 0.
pub fn smart_resize(
    height: u32,
    width: u32,
    factor: u32,
    min_pixels: u64,
    max_pixels: u64,
) -> Option<[u32; 2]> {
    assert!(height > 0 && width > 0 && factor > 0, "a size or factor of 0 cannot be resized");
    if u64::from(height.max(width)) > MAX_ASPECT_RATIO * u64::from(height.min(width)) {
        return None;
    }
    let sides = [f64::from(height), f64::from(width)];
    Some(fit(sides, factor, Frames { shown: 1.0, counted: 1.0 }, min_pixels, max_pixels))
}

/// How many images of one size share a budget.
#[derive(Debug, Clone, Copy)]
pub(in crate::data) struct Frames {
    /// As they are: the scale goes by these.
    pub(in crate::data) shown: f64,
    /// As the model's own processor counts them to see whether they keep the budget.
    pub(in crate::data) counted: f64,
}

/// The multiples of `factor` nearest to `sides`, scaled where all frames together miss the budget.
pub(in crate::data) fn fit(
    sides: [f64; 2],
    factor: u32,
    frames: Frames,
    min_pixels: u64,
    max_pixels: u64,
) -> [u32; 2] {
    let ([h, w], f) = (sides, f64::from(factor));
    let rounded = sides.map(|side| (side / f).round_ties_even() * f);
    let pixels = frames.counted * rounded[0] * rounded[1];
    let resized = if pixels > max_pixels as f64 {
        let beta = (frames.shown * h * w / max_pixels as f64).sqrt();
        sides.map(|side| f.max((side / beta / f).floor() * f))
    } else if pixels < min_pixels as f64 {
        let beta = (min_pixels as f64 / (frames.shown * h * w)).sqrt();
        sides.map(|side| (side * beta / f).ceil() * f)
    } else {
        rounded
    };
    resized.map(|side| side as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_sizes_of_the_reference_table_agree() {
        let table: serde_json::Value =
            serde_json::from_str(include_str!("../../../../tests/golden/smart_resize.json"))
                .unwrap();
        let rows = table["image"].as_array().unwrap();
        assert_eq!(rows.len(), 600);
        for row in rows {
            let [h, w, factor, min, max] = std::array::from_fn(|i| row[i].as_u64().unwrap());
            let expected: Option<[u32; 2]> = serde_json::from_value(row[5].clone()).unwrap();
            let found = smart_resize(h as u32, w as u32, factor as u32, min, max);
            assert_eq!(found, expected, "{row}");
        }
    }

    #[test]
    fn sides_round_half_to_even() {
        let side = |n| smart_resize(n, 320, 32, 1, u64::MAX).unwrap()[0];
        assert_eq!([48, 80, 112].map(side), [64, 64, 128]);
    }

    #[test]
    fn a_ratio_of_200_passes_and_one_more_pixel_does_not() {
        assert!(smart_resize(3, 600, 32, 4096, 200_704).is_some());
        assert_eq!(smart_resize(3, 601, 32, 4096, 200_704), None);
    }
}
