//! Tensors that files have in pieces, such as one tensor of each expert.

use super::super::shard::Values;
use super::{CheckpointError, WeightFiles};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

/// A tensor whose elements are those of its pieces, one after the other.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) shape: Vec<usize>,
    /// Name and elements of each piece.
    pieces: Vec<(String, Range<usize>)>,
}

impl WeightFiles {
    /// From now on, the files have the tensor `name` of `shape`. Its elements in row-major order
    /// are those of `pieces`, one after the other, which are not listed any more. The files have
    /// the pieces, with as many elements.
    #[must_use]
    pub fn joined(mut self, name: &str, shape: &[usize], pieces: &[(String, Vec<usize>)]) -> Self {
        let mut end = 0;
        let piece = |(name, shape): &(String, Vec<usize>)| {
            let start = end;
            end += shape.iter().product::<usize>();
            (name.clone(), start..end)
        };
        let pieces = pieces.iter().map(piece).collect::<Vec<_>>();
        self.in_pieces.extend(pieces.iter().map(|(name, _)| name.clone()));
        self.joined.insert(name.to_owned(), Joined { shape: shape.to_vec(), pieces });
        self
    }

    /// The dtype of all pieces, or `F32` if they differ; `None` if one has a dtype that is not
    /// read.
    pub(super) fn dtype_of_pieces(&self, joined: &Joined) -> Option<DType> {
        let mut dtypes = joined.pieces.iter().map(|(name, _)| self.dtype(name));
        let first = dtypes.next()??;
        dtypes.try_fold(first, |common, dtype| {
            Some(if dtype? == common { common } else { DType::F32 })
        })
    }

    /// Elements of a joined tensor, in one dimension. Pieces of one dtype are copied once.
    pub(super) fn load_pieces(
        &self,
        name: &str,
        joined: &Joined,
        range: &Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, CheckpointError> {
        let failed = |source| CheckpointError::Tensor { tensor: name.to_owned(), source };
        let inside = |(piece, elements): &'_ (String, Range<usize>)| {
            let (start, end) = (range.start.max(elements.start), range.end.min(elements.end));
            (start < end).then(|| (piece.clone(), start - elements.start..end - elements.start))
        };
        let parts: Vec<_> = joined.pieces.iter().filter_map(inside).collect();
        let stored = self.dtype_of_pieces(joined).and_then(Values::of);
        let is_plain = |piece: &str| {
            let values = stored.as_ref().map(Values::dtype);
            !self.quantized.contains_key(piece) && self.dtype(piece) == values
        };
        if let Some(mut values) =
            stored.clone().filter(|_| parts.iter().all(|(of, _)| is_plain(of)))
        {
            values.reserve(range.len());
            for (piece, elements) in &parts {
                let Some((shard, info)) = self.find(piece) else { continue };
                shard.append(piece, info, elements, dtype, &mut values)?;
            }
            let tensor = values.into_tensor().and_then(|tensor| tensor.to_dtype(dtype));
            return tensor.and_then(|tensor| tensor.to_device(device)).map_err(failed);
        }
        let load = |(piece, elements): &(String, Range<usize>)| {
            self.load_part(piece, elements.clone(), dtype, device)
        };
        let tensors = parts.iter().map(load).collect::<Result<Vec<_>, _>>()?;
        if tensors.is_empty() {
            return Tensor::zeros(0, dtype, device).map_err(failed);
        }
        Tensor::cat(&tensors, 0).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{CarriedFiles, FolderLayout, ModelFiles, SavedTensor};
    use super::*;

    #[test]
    fn the_elements_of_a_joined_tensor_are_those_of_its_pieces_in_order() {
        let values: Vec<f32> = (0..24).map(|i| (i as f32 * 0.37).sin()).collect();
        let whole = Tensor::from_vec(values, (2, 3, 4), &Device::Cpu).unwrap();
        let pieces: Vec<(String, Vec<usize>)> =
            (0..4).map(|piece| (format!("piece.{}", 3 - piece), vec![6])).collect();
        for (wide, all) in [(true, DType::F32), (false, DType::BF16)] {
            let saved = SavedTensor::whole("whole", whole.to_dtype(all).unwrap());
            let mut saved = saved.split(&pieces).unwrap();
            if wide {
                // pieces of several dtypes
                let narrow = whole.flatten_all().unwrap().narrow(0, 6, 6).unwrap();
                let narrow = narrow.to_dtype(DType::BF16).unwrap();
                saved[1] = SavedTensor::whole("piece.2", narrow);
            }
            saved.push(SavedTensor::whole("other", whole.clone()));
            let folder = tempfile::tempdir().unwrap();
            let files = ModelFiles {
                layout: FolderLayout::Model,
                weights: &saved,
                config_json: &serde_json::json!({}),
                carried: &CarriedFiles::default(),
                max_shard_bytes: 50,
            };
            files.write_into(folder.path()).unwrap();
            let files = WeightFiles::open(folder.path()).unwrap().joined("w", &[2, 3, 4], &pieces);
            assert_eq!(files.names().collect::<Vec<_>>(), ["other", "w"]);
            assert_eq!(files.shape("w").unwrap(), [2, 3, 4]);
            assert_eq!(files.dtype("w"), Some(all));
            let bits = |tensor: Tensor| -> Vec<u32> {
                let tensor = tensor.to_dtype(DType::F32).unwrap();
                tensor.to_vec1().unwrap().into_iter().map(f32::to_bits).collect()
            };
            let mut expected = bits(whole.to_dtype(all).unwrap().flatten_all().unwrap());
            if wide {
                let narrow = whole.flatten_all().unwrap().to_dtype(DType::BF16).unwrap();
                expected[6..12].copy_from_slice(&bits(narrow)[6..12]);
            }
            for range in [0..24, 0..1, 5..7, 6..12, 3..20, 23..24, 9..9] {
                let part = files.load_part("w", range.clone(), DType::F32, &Device::Cpu).unwrap();
                assert_eq!(bits(part), expected[range.clone()], "{range:?}");
            }
            let error = files.load_part("w", 0..25, DType::F32, &Device::Cpu).unwrap_err();
            assert!(error.to_string().contains("24 elements"), "{error}");
        }
    }
}
