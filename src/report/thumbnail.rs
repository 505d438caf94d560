//! Images of a page, as data URIs of limited size.

use crate::data::Pixels;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::{ExtendedColorType, ImageEncoder as _};

/// An image for an `img` element.
pub(crate) struct Thumbnail {
    /// `data:image/png;base64,..`
    pub(crate) uri: String,
    /// Width of the PNG, in pixels.
    pub(crate) width: u32,
    /// Height of the PNG, in pixels.
    pub(crate) height: u32,
    /// Side, in pixels of the original, of the square that becomes one pixel.
    pub(crate) reduced: u32,
}

/// Reduces the image by the smallest whole factor that leaves at most `max_pixels` pixels.
pub(crate) fn thumbnail(pixels: &Pixels, max_pixels: u64) -> anyhow::Result<Thumbnail> {
    let area =
        |by: u32| u64::from(pixels.width.div_ceil(by)) * u64::from(pixels.height.div_ceil(by));
    let longest = pixels.width.max(pixels.height).max(1);
    let reduced = (1..longest).find(|by| area(*by) <= max_pixels).unwrap_or(longest);
    let small = mean_of_squares(pixels, reduced);
    let mut png = Vec::new();
    PngEncoder::new_with_quality(&mut png, CompressionType::Best, FilterType::Adaptive)
        .write_image(&small.rgb, small.width, small.height, ExtendedColorType::Rgb8)?;
    let uri = format!("data:image/png;base64,{}", STANDARD.encode(png));
    Ok(Thumbnail { uri, width: small.width, height: small.height, reduced })
}

/// Replaces each square of `side` pixels by its mean; squares at the right and bottom edge may be
/// smaller.
fn mean_of_squares(pixels: &Pixels, side: u32) -> Pixels {
    if side == 1 {
        return pixels.clone();
    }
    let Pixels { width, height, rgb } = pixels;
    let (small_width, small_height) = (width.div_ceil(side), height.div_ceil(side));
    let mut small = Vec::with_capacity((small_width * small_height * 3) as usize);
    for top in (0..*height).step_by(side as usize) {
        for left in (0..*width).step_by(side as usize) {
            let (bottom, right) = ((top + side).min(*height), (left + side).min(*width));
            for c in 0..3 {
                let row = |y: u32| (left..right).map(move |x| ((y * width + x) * 3 + c) as usize);
                let sum: u32 = (top..bottom).flat_map(row).map(|at| u32::from(rgb[at])).sum();
                let count = (bottom - top) * (right - left);
                small.push(((sum + count / 2) / count) as u8);
            }
        }
    }
    Pixels { width: small_width, height: small_height, rgb: small }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(width: u32, height: u32) -> Pixels {
        let rgb = (0..width * height * 3).map(|at| (at % 251) as u8).collect();
        Pixels { width, height, rgb }
    }

    fn decoded(thumbnail: &Thumbnail) -> image::RgbImage {
        let text = thumbnail.uri.strip_prefix("data:image/png;base64,").unwrap();
        image::load_from_memory(&STANDARD.decode(text).unwrap()).unwrap().into_rgb8()
    }

    #[test]
    fn a_small_image_keeps_every_pixel() {
        let pixels = ramp(13, 7);
        let found = thumbnail(&pixels, 91).unwrap();
        assert_eq!((found.width, found.height, found.reduced), (13, 7, 1));
        assert_eq!(decoded(&found).into_raw(), pixels.rgb);
    }

    #[test]
    fn a_large_image_is_reduced_to_the_limit_by_means_of_squares() {
        let found = thumbnail(&ramp(13, 7), 90).unwrap();
        assert_eq!((found.width, found.height, found.reduced), (7, 4, 2));
        let grey = Pixels {
            width: 3,
            height: 2,
            rgb: [[0; 3], [10; 3], [40; 3], [20; 3], [30; 3], [60; 3]].concat(),
        };
        let small = thumbnail(&grey, 2).unwrap();
        assert_eq!(decoded(&small).into_raw(), [15, 15, 15, 50, 50, 50]);
        assert_eq!(thumbnail(&ramp(64, 64), 1).unwrap().width, 1);
    }
}
