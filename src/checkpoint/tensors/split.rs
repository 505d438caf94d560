//! A tensor that is written in pieces.

use super::{Held, SavedTensor};
use crate::checkpoint::CheckpointError;
use candle_core::{Result, Tensor};
use std::ops::Range;
use std::sync::Arc;

impl SavedTensor {
    /// The tensors of these names and shapes, which have the elements of this one, one after the
    /// other. They share its memory.
    pub fn split(self, pieces: &[(String, Vec<usize>)]) -> Result<Vec<Self>> {
        let mut end = 0;
        let piece = |(name, shape): &(String, Vec<usize>)| {
            let start = end;
            end += shape.iter().product::<usize>();
            let held = self.held.piece(name, &(start..end), shape)?;
            let (name, shape) = (name.clone(), shape.clone());
            Ok(Self { name, shape, held, dtype: self.dtype, is_fixed: self.is_fixed })
        };
        pieces.iter().map(piece).collect()
    }
}

impl Held {
    /// What the rank holds of the elements `of`, the tensor `name` of `shape`.
    fn piece(&self, name: &str, of: &Range<usize>, shape: &[usize]) -> Result<Self> {
        let narrow = |tensor: &Tensor, start, len| tensor.flatten_all()?.narrow(0, start, len);
        Ok(match self {
            Self::Whole(tensor) => Self::Whole(narrow(tensor, of.start, of.len())?.reshape(shape)?),
            Self::Parts(parts) => {
                let inside = |(range, values): &(Range<usize>, Tensor)| {
                    let (start, end) = (range.start.max(of.start), range.end.min(of.end));
                    let part = || {
                        let values = narrow(values, start - range.start, end - start)?;
                        Ok((start - of.start..end - of.start, values))
                    };
                    (start < end).then(part)
                };
                Self::Parts(parts.iter().filter_map(inside).collect::<Result<_>>()?)
            }
            Self::Made(make) => {
                let (make, of, shape) = (Arc::clone(make), of.clone(), shape.to_vec());
                let name = name.to_owned();
                let made = move || {
                    let tensor = make()?;
                    let piece = tensor.flatten_all().and_then(|flat| {
                        flat.narrow(0, of.start, of.len())?.reshape(shape.as_slice())
                    });
                    let tensor = name.clone();
                    piece.map_err(|source| CheckpointError::Tensor { tensor, source })
                };
                Self::Made(Arc::new(made))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn parts_of_ranks_are_in_the_pieces_that_have_their_elements() {
        let part = |range: Range<usize>| {
            let values: Vec<f32> = range.clone().map(|i| i as f32).collect();
            (range.clone(), Tensor::from_vec(values, range.len(), &Device::Cpu).unwrap())
        };
        let parts = vec![part(1..4), part(5..11)];
        let tensor = SavedTensor::parts("w", &[3, 4], DType::F32, parts);
        let pieces = [4, 2, 6].map(|len| (format!("{len}"), vec![len]));
        let found = tensor.split(&pieces).unwrap().into_iter().map(|piece| {
            let Held::Parts(parts) = &piece.held else { panic!("{piece:?}") };
            let values = |(range, values): &(Range<usize>, Tensor)| {
                (range.clone(), values.to_vec1::<f32>().unwrap())
            };
            parts.iter().map(values).collect::<Vec<_>>()
        });
        let expected: [Vec<(Range<usize>, Vec<f32>)>; 3] = [
            vec![(1..4, vec![1.0, 2.0, 3.0])],
            vec![(1..2, vec![5.0])],
            vec![(0..5, vec![6.0, 7.0, 8.0, 9.0, 10.0])],
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
