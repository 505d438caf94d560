//! The gradient norm of ranks that have a share of the gradients each.

use super::shared_sums::SharedSums;
use crate::dist::{Collective, Gather};
use crate::ops;
use crate::tape::{BUCKET_ALIGNMENT, Layout, Param};
use crate::train::TrainError;
use candle_core::{Device, Tensor};

const BYTES: usize = size_of::<f64>();
const _: () = assert!(BUCKET_ALIGNMENT == ops::SQUARES_BLOCK, "a block is in one share");

/// The sums of squares of all elements of each of the `trained` parameters, from the flat gradients
/// `own` of this rank. Blocks of [`BUCKET_ALIGNMENT`] elements are added up in order, so the bits
/// do not depend on the number of ranks; they are those of [`ops::sums_of_squares_in_order`].
pub(in super::super) fn squares(
    sums: &SharedSums,
    own: &[Tensor],
    trained: &[Param],
) -> Result<Vec<f64>, TrainError> {
    let (layout, member) = (sums.layout(), sums.member());
    let firsts = first_blocks(layout);
    let num_blocks = firsts.last().copied().unwrap_or_default();
    let members = layout.num_shares();
    let mut blocks = vec![0.0; num_blocks * members];
    let mut own_sums = own.iter();
    for (stage, first) in layout.stages().iter().zip(&firsts) {
        for part in stage.trained.parts(member) {
            let Some(gradient) = own_sums.next() else { continue };
            let start = member * num_blocks + first + part.at / BUCKET_ALIGNMENT;
            let sums = ops::squares_of_blocks(gradient)?.to_vec1::<f64>()?;
            blocks[start..start + sums.len()].copy_from_slice(&sums);
        }
    }
    let blocks = exchange(&blocks, sums.collective(), sums.device())?;
    let mut squares = vec![0.0; layout.num_params()];
    for (stage, first) in layout.stages().iter().zip(&firsts) {
        let in_share = stage.trained.share_len() / BUCKET_ALIGNMENT;
        for (param, place) in stage.trained.places() {
            let of_param = place.start / BUCKET_ALIGNMENT..place.end.div_ceil(BUCKET_ALIGNMENT);
            let block = |block: usize| {
                let (of, at) = (block / in_share, block % in_share);
                blocks[of * num_blocks + first + at]
            };
            squares[param] = of_param.map(block).sum();
        }
    }
    Ok(trained.iter().map(|param| squares[param.index()]).collect())
}

/// The number of the first block of each stage in a share, and the number of all blocks.
fn first_blocks(layout: &Layout) -> Vec<usize> {
    let mut firsts = vec![0];
    for stage in layout.stages() {
        let first = firsts[firsts.len() - 1];
        firsts.push(first + stage.trained.share_len() / BUCKET_ALIGNMENT);
    }
    firsts
}

/// Fills in the blocks of the other ranks.
fn exchange(
    blocks: &[f64],
    collective: &dyn Collective,
    device: &Device,
) -> Result<Vec<f64>, TrainError> {
    let bytes: Vec<u8> = blocks.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    let len = bytes.len();
    let all = Tensor::from_vec(bytes, len, device)?;
    collective.start_gather(Gather { own: None, all: all.clone() })?;
    collective.wait()?;
    let bytes = all.to_vec1::<u8>()?;
    let (blocks, _) = bytes.as_chunks::<BYTES>();
    Ok(blocks.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect())
}
