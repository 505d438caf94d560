//! Buckets: the parameters of a stage, one after the other in a flat tensor that ranks divide into
//! equal shares.

use super::{Param, Trainable};
use candle_core::{Result, Shape, Tensor};
use std::ops::Range;

/// Each parameter and each share begins at a multiple of this number of elements. So a block of
/// this many elements of a parameter is always in one share, and sums of blocks do not depend on
/// the number of shares.
pub const BUCKET_ALIGNMENT: usize = 4096;

/// The places of some parameters in a flat tensor of `shares` equal shares. Elements between and
/// after the parameters are zero and have no meaning.
#[derive(Debug, Clone)]
pub struct Bucket {
    /// Index and place of each parameter, in order.
    places: Vec<(usize, Range<usize>)>,
    shares: usize,
    share_len: usize,
}

/// A part of a parameter that is in a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub param: usize,
    /// The elements of the flat parameter.
    pub elements: Range<usize>,
    /// The first of them in the share.
    pub at: usize,
}

impl Bucket {
    /// A bucket with parameters of these indexes and numbers of elements.
    pub fn new(params: impl IntoIterator<Item = (usize, usize)>, shares: usize) -> Self {
        let mut end = 0;
        let place = |(index, len): (usize, usize)| {
            let start = usize::next_multiple_of(end, BUCKET_ALIGNMENT);
            end = start + len;
            (index, start..end)
        };
        let places = params.into_iter().map(place).collect();
        let share_len = end.div_ceil(shares).next_multiple_of(BUCKET_ALIGNMENT);
        Self { places, shares, share_len }
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub fn len(&self) -> usize {
        self.shares * self.share_len
    }

    pub fn share_len(&self) -> usize {
        self.share_len
    }

    /// The elements of share `of` in the flat tensor.
    pub fn share(&self, of: usize) -> Range<usize> {
        of * self.share_len..(of + 1) * self.share_len
    }

    /// Index and place of each parameter, in order.
    pub fn places(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.places.iter().cloned()
    }

    /// The parts of parameters in share `of`, in order.
    pub fn parts(&self, of: usize) -> impl Iterator<Item = Part> + '_ {
        let share = self.share(of);
        self.places.iter().filter_map(move |(param, place)| {
            let (start, end) = (place.start.max(share.start), place.end.min(share.end));
            (start < end).then(|| Part {
                param: *param,
                elements: start - place.start..end - place.start,
                at: start - share.start,
            })
        })
    }

    /// A view of a parameter in the flat tensor.
    pub fn view(flat: &Tensor, place: &Range<usize>, shape: &Shape) -> Result<Tensor> {
        flat.narrow(0, place.start, place.len())?.reshape(shape)
    }
}

/// The trained and the frozen parameters of a stage.
#[derive(Debug, Clone)]
pub struct StageBuckets {
    /// Parameters with a gradient.
    pub trained: Bucket,
    /// The others.
    pub frozen: Bucket,
}

/// The lengths of two buffers of which each user needs one: `users` have the number of the buffer
/// and a length.
pub fn slot_lens(users: impl IntoIterator<Item = (usize, usize)>) -> [usize; 2] {
    let mut lens = [0; 2];
    for (slot, len) in users {
        lens[slot] = len.max(lens[slot]);
    }
    lens
}

impl StageBuckets {
    pub fn num_elements(&self) -> usize {
        self.trained.len() + self.frozen.len()
    }

    /// The buckets that have parameters.
    pub fn buckets(&self) -> impl Iterator<Item = &Bucket> {
        [&self.trained, &self.frozen].into_iter().filter(|bucket| !bucket.is_empty())
    }
}

/// The buckets of all stages of a model, in the order of backward.
#[derive(Debug, Clone)]
pub struct Layout {
    stages: Vec<StageBuckets>,
    stage_of: Vec<usize>, // by index of the parameter
    shapes: Vec<Shape>,
    num_shares: usize,
}

impl Layout {
    /// `stages` has the parameters of each stage, in the order of backward; `params` are all
    /// parameters, in order.
    pub fn new(
        stages: &[Vec<&Param>],
        params: &[Param],
        trainable: &[Trainable],
        num_shares: usize,
    ) -> Self {
        let mut stage_of = vec![0; params.len()];
        for (stage, params) in stages.iter().enumerate() {
            for param in params {
                stage_of[param.index()] = stage;
            }
        }
        let bucket = |stage: &[&Param], kind: Trainable| {
            let of_kind = stage.iter().filter(|param| trainable[param.index()] == kind);
            Bucket::new(
                of_kind.map(|param| (param.index(), param.shape().elem_count())),
                num_shares,
            )
        };
        let stages = stages.iter().map(|stage| StageBuckets {
            trained: bucket(stage, Trainable::Yes),
            frozen: bucket(stage, Trainable::Frozen),
        });
        let shapes = params.iter().map(Param::shape).collect();
        Self { stages: stages.collect(), stage_of, shapes, num_shares }
    }

    /// The same layout, except that the frozen parameters in `elsewhere` are in no bucket.
    #[must_use]
    pub fn without(mut self, elsewhere: &[bool]) -> Self {
        for stage in &mut self.stages {
            let kept = stage.frozen.places().filter(|(param, _)| !elsewhere[*param]);
            let kept = kept.map(|(param, place)| (param, place.len()));
            stage.frozen = Bucket::new(kept.collect::<Vec<_>>(), self.num_shares);
        }
        self
    }

    pub fn stages(&self) -> &[StageBuckets] {
        &self.stages
    }

    pub fn stage_of(&self, param: &Param) -> usize {
        self.stage_of[param.index()]
    }

    /// The stage of `head` if it is tied to another parameter: its gradient begins before the turn
    /// of its stage, because an own head is the first stage.
    pub fn tied_head(&self, head: &Param) -> Option<usize> {
        Some(self.stage_of(head)).filter(|stage| *stage > 0)
    }

    pub fn num_shares(&self) -> usize {
        self.num_shares
    }

    pub fn num_params(&self) -> usize {
        self.shapes.len()
    }

    /// Views of the parameters of `bucket` in its flat tensor, with their indexes.
    pub fn views(&self, bucket: &Bucket, flat: &Tensor) -> Result<Vec<(usize, Tensor)>> {
        let view = |(index, place): (usize, Range<usize>)| {
            Ok((index, Bucket::view(flat, &place, &self.shapes[index])?))
        };
        bucket.places().map(view).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const SIZES: [(usize, usize); 4] = [(3, 10_000), (0, 5), (7, 4096), (2, 12_289)];

    #[test]
    fn the_parts_of_all_shares_cover_each_parameter_once_in_whole_blocks() {
        for shares in 1..9 {
            let bucket = Bucket::new(SIZES, shares);
            assert_eq!(bucket.len(), shares * bucket.share_len());
            for (param, len) in SIZES {
                let mut end = 0;
                for of in 0..shares {
                    for part in bucket.parts(of).filter(|part| part.param == param) {
                        assert_eq!(part.elements.start, end);
                        assert_eq!(part.at % BUCKET_ALIGNMENT, 0);
                        assert_eq!(part.elements.start % BUCKET_ALIGNMENT, 0);
                        assert!(part.at + part.elements.len() <= bucket.share_len());
                        end = part.elements.end;
                    }
                }
                assert_eq!(end, len, "parameter {param}, {shares} shares");
            }
        }
    }

    #[test]
    fn a_frozen_parameter_that_is_elsewhere_has_no_place() {
        let param = |index| {
            let zeros = Tensor::zeros((10, index + 1), candle_core::DType::F32, &Device::Cpu);
            Param::new(format!("p{index}"), index, zeros.unwrap())
        };
        let params = [0, 1, 2].map(param);
        let kinds = [Trainable::Yes, Trainable::Frozen, Trainable::Frozen];
        let layout = Layout::new(&[params.iter().collect()], &params, &kinds, 2);
        let layout = layout.without(&[false, true, false]);
        let stage = &layout.stages()[0];
        let of = |bucket: &Bucket| bucket.places().collect::<Vec<_>>();
        assert_eq!((of(&stage.trained), of(&stage.frozen)), (vec![(0, 0..10)], vec![(2, 0..30)]));
    }

    #[test]
    fn a_part_is_where_the_view_of_its_parameter_is() {
        let bucket = Bucket::new(SIZES, 3);
        let flat = Tensor::arange(0u32, bucket.len() as u32, &Device::Cpu).unwrap();
        for (param, place) in bucket.places() {
            let view = Bucket::view(&flat, &place, &Shape::from(place.len())).unwrap();
            let view = view.to_vec1::<u32>().unwrap();
            for of in 0..3 {
                for part in bucket.parts(of).filter(|part| part.param == param) {
                    let share = flat.narrow(0, bucket.share(of).start, bucket.share_len()).unwrap();
                    let values = share.narrow(0, part.at, part.elements.len()).unwrap();
                    assert_eq!(values.to_vec1::<u32>().unwrap(), view[part.elements]);
                }
            }
        }
    }
}
