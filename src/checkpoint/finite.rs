//! The search for values that are infinite or not a number: they never enter a checkpoint, and are
//! not loaded.

use candle_core::DType;
use half::{bf16, f16};
use simd::kernels;

/// A type of values with an exponent.
pub(super) trait Value: Copy {
    /// Bits of the smallest magnitude that is not finite as `dtype`. `f32` may be rounded to
    /// `bf16`.
    fn limit(dtype: DType) -> u32;
    /// The largest magnitude, as bits. Those of NaN are above those of infinity.
    fn largest(values: &[Self]) -> u32;
    /// The value.
    fn to_f32(self) -> f32;
}

kernels! {
    fn largest_f32(values: &[f32]) -> u32 {
        let mut largest = 0;
        for value in values {
            let bits = value.to_bits() & 0x7fff_ffff;
            largest = if bits > largest { bits } else { largest };
        }
        largest
    }

    fn largest_bf16(values: &[bf16]) -> u16 {
        let mut largest = 0;
        for value in values {
            let bits = value.to_bits() & 0x7fff;
            largest = if bits > largest { bits } else { largest };
        }
        largest
    }

    fn largest_f16(values: &[f16]) -> u16 {
        let mut largest = 0;
        for value in values {
            let bits = value.to_bits() & 0x7fff;
            largest = if bits > largest { bits } else { largest };
        }
        largest
    }
}

impl Value for f32 {
    fn limit(dtype: DType) -> u32 {
        // half way between the largest bf16 and the next power of two
        if dtype == DType::BF16 { 0x7f7f_8000 } else { 0x7f80_0000 }
    }

    fn largest(values: &[Self]) -> u32 {
        largest_f32(values)
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl Value for bf16 {
    fn limit(_: DType) -> u32 {
        0x7f80
    }

    fn largest(values: &[Self]) -> u32 {
        largest_bf16(values).into()
    }

    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

impl Value for f16 {
    fn limit(_: DType) -> u32 {
        0x7c00
    }

    fn largest(values: &[Self]) -> u32 {
        largest_f16(values).into()
    }

    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

/// The first value that is not finite as `dtype`, and its place.
pub(super) fn first_non_finite<T: Value>(values: &[T], dtype: DType) -> Option<(usize, f32)> {
    let limit = T::limit(dtype);
    if T::largest(values) < limit {
        return None;
    }
    let at = values.iter().position(|value| T::largest(&[*value]) >= limit)?;
    Some((at, values[at].to_f32()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_that_is_not_finite_is_found_anywhere() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 1, 31, 32, 63, 64, 70] {
                let mut values = vec![f32::MAX; 71];
                assert_eq!(first_non_finite(&values, DType::F32), None);
                values[at] = bad;
                values[70] = bad;
                let (found, value) = first_non_finite(&values, DType::F32).unwrap();
                assert_eq!((found, value.to_bits()), (at, bad.to_bits()));
                let narrow: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
                assert_eq!(first_non_finite(&narrow, DType::BF16).unwrap().0, 0, "of f32::MAX");
                let narrow: Vec<f16> = values.iter().map(|x| f16::from_f32(x / 1e38)).collect();
                assert_eq!(first_non_finite(&narrow, DType::F32).unwrap().0, at);
            }
        }
    }

    #[test]
    fn values_that_only_f32_can_represent_are_not_finite_as_bf16() {
        let limit = f32::from_bits(0x7f7f_8000);
        assert!(bf16::from_f32(limit).is_infinite());
        assert!(bf16::from_f32(limit.next_down()).is_finite());
        let values = [1.0, limit.next_down(), -limit];
        assert_eq!(first_non_finite(&values, DType::BF16), Some((2, -limit)));
        assert_eq!(first_non_finite(&values, DType::F32), None);
    }
}
