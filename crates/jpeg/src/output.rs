//! Samples to pixels: upsampling of chroma and conversion to RGB, equal to libjpeg-turbo's.
//!
//! Samples are kept for one row of MCUs at a time. An output row needs the chroma rows above and
//! below it, so the last rows of each row of MCUs are kept for the next one.

use super::segments::{Colours, Component, Frame};
use simd::kernels;

/// Number of row groups of a row of MCUs. A row group has `v` rows of each component, which make
/// `v_max` rows of the image.
const GROUPS: usize = 8;
/// Number of row groups kept from the row of MCUs above.
const KEPT: usize = 2;

/// How a component gets the size of the image.
#[derive(Debug, Clone, Copy)]
enum Upsampling {
    None,
    /// Triangle filter, twice the width.
    Across,
    /// Triangle filter, twice the height.
    Down,
    /// Triangle filter, twice the width and the height.
    Both,
    /// Each sample becomes this number of columns and rows.
    Repeat([usize; 2]),
}

/// Samples of a component.
#[derive(Debug)]
pub(super) struct Plane {
    /// `KEPT + GROUPS` row groups.
    pub(super) samples: Vec<u8>,
    pub(super) stride: usize,
    upsampling: Upsampling,
    /// Size of the component.
    width: usize,
    height: usize,
    v: usize,
    /// Row of the image per row of the component.
    v_scale: usize,
    /// An upsampled row.
    row: Vec<u8>,
    /// A row of sums of two rows, with its first and last value repeated.
    sums: Vec<u16>,
}

impl Plane {
    fn new(frame: &Frame, component: &Component) -> Self {
        let Component { h, v, width, height, .. } = *component;
        let stride = frame.mcus[0] * h * 8;
        let (h_scale, v_scale) = (frame.h_max / h, frame.v_max / v);
        let upsampling = match (h_scale, v_scale) {
            (1, 1) => Upsampling::None,
            (2, 1) if width > 2 => Upsampling::Across,
            (1, 2) => Upsampling::Down,
            (2, 2) if width > 2 => Upsampling::Both,
            _ => Upsampling::Repeat([h_scale, v_scale]),
        };
        Self {
            samples: vec![0; stride * v * (KEPT + GROUPS)],
            stride,
            upsampling,
            width,
            height,
            v,
            v_scale,
            row: vec![0; stride * h_scale],
            sums: vec![0; width + 2],
        }
    }

    /// Index in `samples` of the first sample of a block of the current row of MCUs.
    #[inline]
    pub(super) fn place(&self, column: usize, row: usize) -> usize {
        (KEPT * self.v + row * 8) * self.stride + column * 8
    }

    /// Computes row `y` of the image, and returns at least its width. `above` is the number of rows
    /// of the component above the current row of MCUs.
    fn upsample(&mut self, y: usize, above: usize) -> &[u8] {
        let Self { width, height, v_scale, stride, v, .. } = *self;
        let row_of = |y: usize| {
            let at = (y.min(height - 1) + KEPT * v - above) * stride;
            &self.samples[at..at + stride]
        };
        let near = y / v_scale;
        let is_upper = y.is_multiple_of(v_scale);
        let far = if is_upper { near.saturating_sub(1) } else { near + 1 };
        match self.upsampling {
            Upsampling::None => return row_of(near),
            Upsampling::Across => {
                double_width(&row_of(near)[..width], &mut self.sums, &mut self.row);
            }
            Upsampling::Down => {
                let (near, far) = (&row_of(near)[..width], &row_of(far)[..width]);
                blend(near, far, if is_upper { 1 } else { 2 }, &mut self.row);
            }
            Upsampling::Both => {
                let (near, far) = (&row_of(near)[..width], &row_of(far)[..width]);
                double_both(near, far, &mut self.sums, &mut self.row);
            }
            Upsampling::Repeat([columns, _]) => {
                let at = (near + KEPT * v - above) * stride;
                let samples = &self.samples[at..at + stride];
                for (target, sample) in self.row.chunks_mut(columns).zip(samples) {
                    target.fill(*sample);
                }
            }
        }
        &self.row
    }
}

/// Converts the samples of a frame to pixels, one row of MCUs after another.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) planes: Vec<Plane>,
    colours: Colours,
    width: usize,
    height: usize,
    v_max: usize,
    /// Number of rows of MCUs that are finished.
    mcu_rows: usize,
    pixels: Vec<u8>,
}

impl Output {
    pub(super) fn new(frame: &Frame, colours: Colours) -> Self {
        let Frame { width, height, v_max, .. } = *frame;
        let planes = frame.components.iter().map(|c| Plane::new(frame, c)).collect();
        let pixels = Vec::with_capacity(width * height * 3);
        Self { planes, colours, width, height, v_max, mcu_rows: 0, pixels }
    }

    /// Converts the rows of the image whose samples are complete, after a row of MCUs was written
    /// to the planes.
    pub(super) fn finish_mcu_row(&mut self) {
        let above = self.mcu_rows * GROUPS;
        self.mcu_rows += 1;
        let is_last = self.mcu_rows * GROUPS * self.v_max >= self.height;
        let end = if is_last { self.height } else { (above + GROUPS - 1) * self.v_max };
        let first = self.pixels.len() / (3 * self.width);
        for y in first..end {
            self.convert(y, above);
        }
        for plane in &mut self.planes {
            plane.samples.copy_within(GROUPS * plane.v * plane.stride.., 0);
        }
    }

    fn convert(&mut self, y: usize, above: usize) {
        let width = self.width;
        let start = self.pixels.len();
        self.pixels.resize(start + 3 * width, 0);
        let pixels = &mut self.pixels[start..];
        let mut rows = self.planes.iter_mut().map(|plane| {
            let above = above * plane.v;
            &plane.upsample(y, above)[..width]
        });
        let mut next = || rows.next().unwrap_or_default();
        let (a, b, c, k) = (next(), next(), next(), next());
        match self.colours {
            Colours::Grey => grey(a, pixels),
            Colours::Rgb | Colours::Cmyk => interleave(a, b, c, pixels),
            Colours::Ycc => ycc(a, b, c, pixels),
            Colours::Ycck => {
                ycc(a, b, c, pixels);
                invert(pixels);
            }
        }
        if !k.is_empty() {
            blacken(k, pixels);
        }
    }

    pub(super) fn into_pixels(self) -> Vec<u8> {
        self.pixels
    }
}

/// Mixes each value with its neighbours, 3 : 1. `padded` repeats the first and the last value.
#[expect(clippy::inline_always, reason = "must be compiled for the caller's SIMD level")]
#[inline(always)]
fn mix_neighbours(padded: &[u16], [left, right]: [u16; 2], shift: u32, target: &mut [u8]) {
    let len = padded.len() - 2;
    let (before, values, after) = (&padded[..len], &padded[1..=len], &padded[2..]);
    let target = &mut target.as_chunks_mut::<2>().0[..len];
    for i in 0..len {
        let value = 3 * values[i];
        target[i] = [
            ((value + before[i] + left) >> shift) as u8,
            ((value + after[i] + right) >> shift) as u8,
        ];
    }
}

/// One half in the fixed point of colours.
const HALF: i32 = 1 << 15;

/// A sample of Y, Cb and Cr as R, G and B, with the 16-bit fixed point of libjpeg-turbo.
#[expect(clippy::inline_always, reason = "must be compiled for the caller's SIMD level")]
#[inline(always)]
fn rgb([y, cb, cr]: [u8; 3]) -> [u8; 3] {
    let [y, cb, cr] = [i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128];
    let red = y + ((91881 * cr + HALF) >> 16);
    let green = y + ((HALF - 22554 * cb - 46802 * cr) >> 16);
    let blue = y + ((116130 * cb + HALF) >> 16);
    [red, green, blue].map(|value| value.clamp(0, 255) as u8)
}

kernels! {
/// Doubles the width of a row with a triangle filter.
fn double_width(row: &[u8], padded: &mut [u16], target: &mut [u8]) {
    let len = row.len();
    for (value, sample) in padded[1..=len].iter_mut().zip(row) {
        *value = u16::from(*sample);
    }
    padded[0] = padded[1];
    padded[len + 1] = padded[len];
    mix_neighbours(padded, [1, 2], 2, target);
}

/// Computes a row of doubled width, between the rows `near` and `far`, with a triangle filter.
fn double_both(near: &[u8], far: &[u8], padded: &mut [u16], target: &mut [u8]) {
    let len = near.len();
    for ((value, near), far) in padded[1..=len].iter_mut().zip(near).zip(far) {
        *value = 3 * u16::from(*near) + u16::from(*far);
    }
    padded[0] = padded[1];
    padded[len + 1] = padded[len];
    mix_neighbours(padded, [8, 7], 4, target);
}

/// Computes a row between the rows `near` and `far` with a triangle filter.
fn blend(near: &[u8], far: &[u8], bias: u16, target: &mut [u8]) {
    for ((target, near), far) in target.iter_mut().zip(near).zip(far) {
        *target = ((3 * u16::from(*near) + u16::from(*far) + bias) >> 2) as u8;
    }
}

fn grey(values: &[u8], pixels: &mut [u8]) {
    for (pixel, value) in pixels.as_chunks_mut::<3>().0.iter_mut().zip(values) {
        *pixel = [*value; 3];
    }
}

fn interleave(a: &[u8], b: &[u8], c: &[u8], pixels: &mut [u8]) {
    for (((pixel, a), b), c) in pixels.as_chunks_mut::<3>().0.iter_mut().zip(a).zip(b).zip(c) {
        *pixel = [*a, *b, *c];
    }
}

fn ycc(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]) {
    /// Number of pixels whose channels are computed before they are interleaved. Together, the
    /// compiler would write single bytes.
    const PIECE: usize = 64;
    let mut planes = [[0; PIECE]; 3];
    let pieces = y.chunks(PIECE).zip(cb.chunks(PIECE)).zip(cr.chunks(PIECE));
    for (((y, cb), cr), pixels) in pieces.zip(pixels.chunks_mut(3 * PIECE)) {
        let [red, green, blue] = &mut planes;
        let channels = red.iter_mut().zip(green.iter_mut()).zip(blue.iter_mut());
        for ((((red, green), blue), y), (cb, cr)) in channels.zip(y).zip(cb.iter().zip(cr)) {
            [*red, *green, *blue] = rgb([*y, *cb, *cr]);
        }
        let channels = red.iter().zip(green.iter()).zip(blue.iter());
        for (pixel, ((red, green), blue)) in pixels.as_chunks_mut::<3>().0.iter_mut().zip(channels) {
            *pixel = [*red, *green, *blue];
        }
    }
}

fn invert(pixels: &mut [u8]) {
    for value in pixels {
        *value = !*value;
    }
}

/// Applies inverted black to inverted CMY, which becomes RGB, with the rounding of Pillow.
fn blacken(black: &[u8], pixels: &mut [u8]) {
    for (pixel, black) in pixels.as_chunks_mut::<3>().0.iter_mut().zip(black) {
        let black = u16::from(*black);
        *pixel = pixel.map(|value| {
            let product = u16::from(255 - value) * black + 128;
            black.saturating_sub(((product >> 8) + product) >> 8) as u8
        });
    }
}
}
