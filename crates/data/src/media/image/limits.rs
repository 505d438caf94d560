//! Limits on the area of an image: those of its row precede those of the config.

use std::num::NonZeroU32;

use batch::{AreaLimits, ImageLimits};

/// The size of an image before the limits of the config apply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImageSize {
    /// Upright `[height, width]` in pixels, or the size that the row gives in its place.
    pub pixels: [u32; 2],
    /// Limits that the row gives.
    pub limits: AreaLimits,
}

impl ImageSize {
    /// `pixels` is the upright size of an image with these limits. As in qwen-vl-utils, limits on
    /// the area have no effect if the row also gives a size.
    pub(super) fn new(pixels: [u32; 2], ImageLimits { resized, area }: ImageLimits) -> Self {
        match resized {
            Some(resized) => {
                Self { pixels: resized.map(NonZeroU32::get), limits: AreaLimits::default() }
            }
            None => Self { pixels, limits: area },
        }
    }
}

/// Minimum and maximum area: `limits` where they are given, else those of the config. If one limit
/// of the row contradicts the other limit of the config, both have the value of the row.
pub(crate) fn over(limits: AreaLimits, config: [u64; 2]) -> [u64; 2] {
    let value = |limit: Option<NonZeroU32>| limit.map(|limit| u64::from(limit.get()));
    let (min, max) = (value(limits.min_pixels), value(limits.max_pixels));
    match (min, max) {
        (Some(min), Some(max)) => [min, max],
        (Some(min), None) => [min, config[1].max(min)],
        (None, Some(max)) => [config[0].min(max), max],
        (None, None) => config,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_row_precede_those_of_the_config() {
        let of = |min, max| {
            let limits =
                AreaLimits { min_pixels: NonZeroU32::new(min), max_pixels: NonZeroU32::new(max) };
            over(limits, [100, 1000])
        };
        assert_eq!(of(0, 0), [100, 1000]);
        assert_eq!(of(50, 0), [50, 1000]);
        assert_eq!(of(2000, 0), [2000, 2000]);
        assert_eq!(of(0, 5000), [100, 5000]);
        assert_eq!(of(0, 30), [30, 30]);
        assert_eq!(of(7, 9), [7, 9]);
    }
}
