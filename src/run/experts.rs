//! Settings that depend on whether the model has experts.

use super::load_model::OpenModel;
use super::setup_error::SetupError;
use crate::config::RunConfig;
use crate::train::DeviceChoice;

/// Fails if the config has an auxiliary loss that the model or the device cannot compute.
pub(super) fn check_experts(config: &RunConfig, open: &OpenModel) -> Result<(), SetupError> {
    let has_experts = open.text().moe.is_some();
    let aux_loss = config.model.aux_loss;
    if aux_loss != 0.0 && !has_experts {
        return Err(SetupError::NoExperts { aux_loss });
    }
    if aux_loss != 0.0 && matches!(config.device, DeviceChoice::Cuda(_)) {
        return Err(SetupError::AuxLossOnGpu);
    }
    Ok(())
}
