//! Places of the weights and gradients of a single process in the memory of a GPU: those of a stage
//! follow one another, as on several ranks, so that ops compute linear layers of one input as one
//! product.

use super::load_model::LoadedModel;
use crate::ops;
use crate::tape::{Gradients, Layout, StageBuckets, Trainable};
use candle_core::{DType, Device, Result, Tensor};

fn layout(loaded: &LoadedModel, trainable: &[Trainable]) -> Layout {
    Layout::new(&loaded.model.stages(), &loaded.params, trainable, 1)
}

/// Moves the weights, except those of `visit`, which are kept elsewhere. Needs the memory of one
/// more stage for a moment.
pub(super) fn place_weights(
    loaded: &LoadedModel,
    trainable: &[Trainable],
    visit: &[bool],
    device: &Device,
) -> Result<()> {
    if !ops::joins_products(device) {
        return Ok(());
    }
    let layout = layout(loaded, trainable).without(visit);
    for bucket in layout.stages().iter().flat_map(StageBuckets::buckets) {
        if bucket.places().count() == 1 {
            continue; // such as the embedding, which is large
        }
        let flat = Tensor::zeros(bucket.len(), loaded.open.dtype(), device)?;
        for (param, view) in layout.views(bucket, &flat)? {
            let param = &loaded.params[param];
            view.flatten_all()?.slice_set(&param.tensor().flatten_all()?, 0, 0)?;
            param.set_tensor(view)?;
        }
    }
    Ok(())
}

/// Zeroed buffers for the gradients of the trained parameters.
pub(super) fn zeroed_gradients(
    loaded: &LoadedModel,
    trainable: &[Trainable],
    device: &Device,
) -> Result<Gradients> {
    if !ops::joins_products(device) {
        return Gradients::zeros(&loaded.params, trainable, device);
    }
    let layout = layout(loaded, trainable);
    let flat = layout.stages().iter().map(|stage| {
        let is_trained = !stage.trained.is_empty();
        is_trained.then(|| Tensor::zeros(stage.trained.len(), DType::F32, device)).transpose()
    });
    Gradients::in_buckets(&layout, &flat.collect::<Result<Vec<_>>>()?)
}

#[cfg(test)]
mod tests;
