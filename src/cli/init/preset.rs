//! The model shapes that `trainer init` writes.

use clap::ValueEnum;
use serde_json::Value;

/// Model shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Preset {
    /// 0.7 M parameters, for tests
    Debug,
    /// 1.6 M parameters, for the CPU
    Tiny,
    /// 0.9 M parameters, a mixture of experts for tests
    TinyMoe,
    /// Qwen3-VL 2B
    #[value(name = "2b")]
    B2,
    /// Qwen3-VL 4B
    #[value(name = "4b")]
    B4,
    /// Qwen3-VL 8B
    #[value(name = "8b")]
    B8,
    /// Qwen3-VL 32B
    #[value(name = "32b")]
    B32,
    /// Qwen3-VL 30B-A3B, a mixture of experts
    #[value(name = "30b-a3b")]
    B30A3,
    /// Qwen3-VL 235B-A22B, a mixture of experts
    #[value(name = "235b-a22b")]
    B235A22,
    /// Qwen3.5 0.8B
    #[value(name = "qwen3.5-0.8b")]
    Hybrid0B8,
    /// Qwen3.5 4B
    #[value(name = "qwen3.5-4b")]
    Hybrid4B,
    /// Qwen3.5 9B
    #[value(name = "qwen3.5-9b")]
    Hybrid9B,
    /// Qwen3.5 27B
    #[value(name = "qwen3.5-27b")]
    Hybrid27B,
    /// Qwen2.5-VL 3B
    #[value(name = "qwen2.5-vl-3b")]
    Windowed3B,
    /// Qwen2.5-VL 7B
    #[value(name = "qwen2.5-vl-7b")]
    Windowed7B,
    /// Qwen2.5-VL 32B
    #[value(name = "qwen2.5-vl-32b")]
    Windowed32B,
    /// Qwen2.5-VL 72B
    #[value(name = "qwen2.5-vl-72b")]
    Windowed72B,
}

impl Preset {
    /// The content of `config.json`. The vision encoders of Qwen3.5 0.8B and 4B were not confirmed with
    /// the published files.
    pub(super) fn config(self) -> Value {
        let text = match self {
            Self::Debug => include_str!("presets/debug.json"),
            Self::Tiny => include_str!("../../../data/quickstart/model/config.json"),
            Self::TinyMoe => include_str!("presets/tiny-moe.json"),
            Self::B2 => include_str!("presets/2b.json"),
            Self::B4 => include_str!("presets/4b.json"),
            Self::B8 => include_str!("presets/8b.json"),
            Self::B32 => include_str!("presets/32b.json"),
            Self::B30A3 => include_str!("presets/30b-a3b.json"),
            Self::B235A22 => include_str!("presets/235b-a22b.json"),
            Self::Hybrid0B8 => include_str!("presets/qwen3.5-0.8b.json"),
            Self::Hybrid4B => include_str!("presets/qwen3.5-4b.json"),
            Self::Hybrid9B => include_str!("presets/qwen3.5-9b.json"),
            Self::Hybrid27B => include_str!("presets/qwen3.5-27b.json"),
            Self::Windowed3B => include_str!("presets/qwen2.5-vl-3b.json"),
            Self::Windowed7B => include_str!("presets/qwen2.5-vl-7b.json"),
            Self::Windowed32B => include_str!("presets/qwen2.5-vl-32b.json"),
            Self::Windowed72B => include_str!("presets/qwen2.5-vl-72b.json"),
        };
        serde_json::from_str(text).expect("a file of ours")
    }

    /// Whether the preset has its own tokenizer and always gets weights.
    pub(super) fn is_small(self) -> bool {
        matches!(self, Self::Debug | Self::Tiny | Self::TinyMoe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::config_from_json;
    use candle_core::{DType, Device, Tensor};

    #[test]
    fn the_decoders_of_qwen35_have_as_many_parameters_as_their_names_say() {
        for (preset, expected) in [
            (Preset::Hybrid0B8, 0.75e9),
            (Preset::Hybrid4B, 4.2e9),
            (Preset::Hybrid9B, 8.95e9),
            (Preset::Hybrid27B, 26.9e9),
        ] {
            let config = config_from_json(&preset.config()).unwrap();
            let specs = config.param_specs();
            let decoder = specs.iter().filter(|spec| spec.component.name == "llm");
            let count: usize = decoder.map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert!((count as f64 / expected - 1.0).abs() < 0.02, "{preset:?}: {count}");
        }
    }

    #[test]
    fn models_with_experts_have_as_many_parameters_and_active_ones_as_their_names_say() {
        for (preset, all, active) in
            [(Preset::B30A3, 30.53e9, 3.35e9), (Preset::B235A22, 235.09e9, 22.19e9)]
        {
            let config = config_from_json(&preset.config()).unwrap();
            let specs = config.param_specs();
            let decoder = specs.iter().filter(|spec| spec.component.name == "llm");
            let count: usize = decoder.map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert!((count as f64 / all - 1.0).abs() < 1e-3, "{preset:?}: {count}");
            let count = count - config.text().idle_weights();
            assert!((count as f64 / active - 1.0).abs() < 1e-2, "{preset:?}: {count} active");
        }
    }

    #[test]
    fn the_shapes_of_qwen25_vl_have_as_many_parameters_as_the_published_models() {
        for (preset, expected) in [
            (Preset::Windowed3B, 3_754_622_976),
            (Preset::Windowed7B, 8_292_166_656),
            (Preset::Windowed32B, 33_452_718_336),
            (Preset::Windowed72B, 73_410_777_344),
        ] {
            let specs = config_from_json(&preset.config()).unwrap().param_specs();
            let count: usize = specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
            assert_eq!(count, expected, "{preset:?}");
        }
    }

    /// With `TRAINER_EMULATE_CUDA`, the ops run the CUDA kernels.
    #[test]
    fn the_norms_of_the_presets_have_a_width_that_their_ops_support() -> candle_core::Result<()> {
        let mut widths = std::collections::BTreeSet::new();
        for preset in Preset::value_variants() {
            let specs = config_from_json(&preset.config()).unwrap().param_specs();
            let has = |name: &str| specs.iter().any(|spec| spec.name == name);
            for spec in specs.iter().filter(|spec| spec.name.ends_with("weight")) {
                let [width] = spec.shape[..] else { continue };
                widths.insert((width, has(&spec.name.replace("weight", "bias"))));
            }
        }
        assert!(widths.contains(&(8192, false)) && widths.contains(&(4608, true)), "{widths:?}");
        for (width, bias) in widths {
            let x = Tensor::ones((2, width), DType::F32, &Device::Cpu)?;
            let w = Tensor::ones(width, DType::F32, &Device::Cpu)?;
            if bias {
                let (y, stats) = crate::ops::layer_norm(&x, &w, &w, 1e-6)?;
                crate::ops::layer_norm_backward(&x, &stats, &w, &y, None, None, None)?;
                continue;
            }
            let scale = crate::ops::NormScale::Weight;
            let (y, rstd) = crate::ops::rms_norm(&x, &w, scale, 1e-6)?;
            crate::ops::rms_norm_backward(&x, &rstd, &w, scale, &y, None, None)?;
        }
        Ok(())
    }
}
