//! Target size of an image: both sides are multiples of a factor and the area is within limits.
//!
//! The arithmetic and its rounding equal those of the transformers processor.

/// Maximum ratio of the longer to the shorter side, as in the transformers processor.
const MAX_ASPECT_RATIO: u64 = 200;

/// Returns the target `[height, width]` in pixels of an image of `height` x `width` pixels.
///
/// Both are multiples of `factor` (`patch_size * merge_size`). The area is in
/// `min_pixels..=max_pixels` where the aspect ratio allows it. Returns `None` if the aspect ratio
/// is above 200.
///
/// Sides round half to even: a side of 80 with factor 32 becomes 64, not 96. A side of at most
/// half the factor rounds to 0; the image is then enlarged to `min_pixels`, whatever its area is.
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
    assert!(height > 0 && width > 0 && factor > 0, "sides and factor must be at least 1");
    if u64::from(height.max(width)) > MAX_ASPECT_RATIO * u64::from(height.min(width)) {
        return None;
    }
    let sides = [f64::from(height), f64::from(width)];
    Some(fit(sides, factor, Frames { shown: 1.0, counted: 1.0 }, min_pixels, max_pixels))
}

/// Number of frames of equal size whose pixels are limited together; 1 for an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frames {
    /// Number of frames, used to compute the scale.
    pub(crate) shown: f64,
    /// Number of frames that the transformers processor assumes when it compares the pixels with
    /// the limits.
    pub(crate) counted: f64,
}

/// Rounds `sides` to multiples of `factor`, and scales them if the pixels of all frames together
/// are outside of `min_pixels..=max_pixels`.
pub(crate) fn fit(
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
            serde_json::from_str(include_str!("../../../../../tests/golden/smart_resize.json"))
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
