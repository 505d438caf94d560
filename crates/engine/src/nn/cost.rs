//! Operations and memory of a decoder.

use super::adapter::AdapterTensor;
use super::config::{DecoderConfig, LayerSpec, LinearAttentionSpec, MixerSpec, MlpSpec};
use super::experts::{EXPERTS, MoeConfig};
use super::{attention, linear_attention, mlp, moe};
use crate::cost::{ActivationMemory, PartWork, RowKind};
use crate::tape::{Param, Recompute};
use candle_core::DType;

/// Rows of a block of which a GPU stores the largest values of columns, and the maximum bytes of the
/// sums of a product in FP8 (`crates/kernels/src/e4m3_linear.rs`).
const FP8_BLOCK_ROWS: f64 = 64.0;
const FP8_SUMS_BYTES: f64 = (32 << 20) as f64;

/// Number of elements of the matrices among `params`, without `tables`, the rows of which are not
/// multiplied.
pub(crate) fn matrix_elements(params: &[&Param], tables: &[&Param]) -> f64 {
    let is_table = |p: &Param| tables.iter().any(|table| table.index() == p.index());
    let is_matrix = |p: &&&Param| p.shape().rank() > 1 && !is_table(p);
    params.iter().filter(is_matrix).map(|p| p.shape().elem_count()).sum::<usize>() as f64
}

fn expert_adapters<'a>(params: &'a [&Param]) -> impl Iterator<Item = &'a Param> {
    let is_adapter = |param: &&Param| {
        let module = AdapterTensor::of(param.name()).map(|(_, module)| module);
        let module = module.map(|name| name.strip_suffix(".base_layer").unwrap_or(name));
        module.is_some_and(|name| name.ends_with(EXPERTS))
    };
    params.iter().copied().filter(is_adapter)
}

/// Indexes of `params`, for [`PartWork::params`].
pub(crate) fn indexes(params: &[&Param]) -> Vec<usize> {
    params.iter().map(|param| param.index()).collect()
}

impl DecoderConfig {
    /// Sizes that decide the number of operations of the decoder and of the head.
    pub(crate) fn work(
        &self,
        decoder: &[&Param],
        embedding: &Param,
        head: &Param,
    ) -> [PartWork; 2] {
        let heads = (self.num_attention_heads * self.head_dim) as f64;
        let windows = self.layers.iter().filter_map(LayerSpec::attention).map(|spec| spec.window);
        let num_causal = windows.clone().filter(Option::is_none).count();
        let linear = self.layers.iter().filter_map(LayerSpec::linear_attention);
        // a token reads the state of each head, changes it and reads it again
        let states: usize = linear.map(|spec| 3 * spec.value_width() * spec.key_head_dim).sum();
        let idle = self.idle_weights() as f64 + self.idle_adapters(decoder);
        [
            PartWork {
                params: indexes(decoder),
                weights: matrix_elements(decoder, &[embedding]) - idle + states as f64,
                attention: num_causal as f64 * heads,
                windows: windows.flatten().map(|window| (window, heads)).collect(),
                rows: RowKind::Tokens,
            },
            PartWork {
                params: vec![head.index()],
                weights: (self.vocab_size * self.hidden_size) as f64,
                attention: 0.0,
                windows: Vec::new(),
                rows: RowKind::Targets,
            },
        ]
    }

    /// Number of elements of the adapters of experts that a token is not multiplied with.
    fn idle_adapters(&self, params: &[&Param]) -> f64 {
        let Some(moe) = self.moe() else { return 0.0 };
        let all: usize = expert_adapters(params).map(|param| param.shape().elem_count()).sum();
        let idle = moe.num_experts - moe.experts_per_token;
        all as f64 * idle as f64 / moe.num_experts as f64
    }

    /// Bytes of the temporary buffers of a token that adapters of experts add to those of backward:
    /// the products of an adapter have buffers of their own, so there are twice as many rows.
    pub(crate) fn expert_adapter_bytes(&self, params: &[&Param], element: f64) -> f64 {
        let Some(moe) = self.moe().filter(|_| expert_adapters(params).next().is_some()) else {
            return 0.0;
        };
        let (hidden, k) = (self.hidden_size as f64, moe.experts_per_token as f64);
        let inner = k * moe.intermediate_size as f64;
        // and the normed rows, or the activated ones
        let with_adapter = 2.0 * k * hidden + hidden.max(inner);
        element * (with_adapter - k * hidden - 2.0 * inner).max(0.0)
    }

    /// Width of the MLP of a layer, or of the experts that compute a token together.
    fn inner_width(&self, layer: &LayerSpec) -> usize {
        let of_experts = |moe: &MoeConfig| {
            moe.experts_per_token * moe.intermediate_size + moe.shared_size.unwrap_or(0)
        };
        layer.experts().map_or(self.intermediate_size, of_experts)
    }

    /// Bytes of the largest temporary buffers of the second half of a layer in backward: the
    /// output of SwiGLU or its gradient. Experts have the rows of a token as often as they compute
    /// it, and both.
    fn inner_bytes(&self, layer: &LayerSpec, element: f64) -> f64 {
        let inner = self.inner_width(layer) as f64;
        layer.experts().map_or(element * inner, |moe| {
            let rows = moe.experts_per_token * self.hidden_size;
            element * (rows as f64 + 2.0 * inner) + 4.0 * (2 * moe.num_experts) as f64
        })
    }

    /// Bytes that backward needs of a layer and a token.
    fn saved_bytes(&self, layer: &LayerSpec, element: f64, recompute: Recompute) -> f64 {
        let mixer = match &layer.mixer {
            MixerSpec::Attention(spec) => attention::saved_bytes(self, *spec, element, recompute),
            MixerSpec::LinearAttention(spec) => linear_attention::saved_bytes(self, spec, element),
        };
        let mlp = match &layer.mlp {
            MlpSpec::Dense => mlp::saved_bytes(self, element, recompute),
            MlpSpec::Experts(moe) => moe::saved_bytes(self, moe, element),
        };
        mixer + mlp
    }

    /// Temporary bytes of a linear layer in FP8 on a GPU, for each token and in all: the codes of the
    /// widest activation (with `all` of both operands of a weight gradient, and the largest values
    /// of columns of blocks of rows), those of the largest weight, and the sums.
    pub fn fp8_bytes(&self, all: bool) -> [f64; 2] {
        let queries = self.num_attention_heads * self.head_dim;
        let (hidden, widest) =
            (self.hidden_size as f64, self.intermediate_size.max(queries).max(self.hidden_size));
        let widest = widest as f64;
        let token = if all { hidden + widest * (1.0 + 4.0 / FP8_BLOCK_ROWS) } else { widest };
        [token, hidden * widest + FP8_SUMS_BYTES]
    }

    /// Memory of activations without images, for elements of `element` bytes. Counts all layers,
    /// as if a parameter of the first layer or before it is trained.
    pub(crate) fn memory(&self, element: f64, recompute: Recompute) -> ActivationMemory {
        let hidden = self.hidden_size as f64;
        let inner = self.layers.iter().map(|layer| self.inner_bytes(layer, element));
        let intermediate = inner.fold(0.0, f64::max);
        let saved = |recompute| {
            self.layers.iter().map(move |layer| self.saved_bytes(layer, element, recompute))
        };
        let (tape, again) = match recompute {
            Recompute::Nothing => (saved(Recompute::Nothing).sum(), 0.0),
            Recompute::Cheap => (saved(Recompute::Cheap).sum(), 0.0),
            // and the output of SwiGLU, which nothing saves
            Recompute::Stage => {
                let largest = saved(Recompute::Cheap).fold(0.0, f64::max);
                let tape = self.layers.len() as f64 * element * hidden;
                (tape, largest - element * hidden + intermediate)
            }
        };
        let delta = self.linear_attention().map(LinearAttentionSpec::heads);
        let dtype = if element > 2.0 { DType::F32 } else { DType::BF16 };
        ActivationMemory {
            token_context: 4.0 * self.rotary_dim as f64,
            token_tape: tape,
            // `dy` and the gradient of SwiGLU's output
            token_backward: element * hidden + intermediate,
            layer_backward: 0.0,
            token_recomputed: again,
            token_delta_head: delta.map_or(0.0, |heads| heads.gpu_bytes_per_token(dtype)),
            delta_heads: delta.map_or(0.0, |heads| heads.key_heads as f64),
            patch_values: 0.0,
            patch: 0.0,
            patch_buffers: 0.0,
            patch_recomputed: 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::AttentionSpec;
    use super::super::experts::ExpertFiles;
    use super::super::{
        Component, Decoder, DecoderContext, Inputs, ParamMap, decoder_specs, rope_table,
    };
    use super::*;
    use crate::tape::{Pass, Stage};
    use batch::CuSeqlens;
    use candle_core::{DType, Device, Tensor};
    use kernels::{AttentionBackend, Flash, NormScale, Segments};
    use std::num::NonZeroUsize;
    use std::sync::Arc;

    const NORMED: AttentionSpec =
        AttentionSpec { qk_norm: true, qkv_bias: false, output_gate: false, window: None };
    const BIASED: AttentionSpec =
        AttentionSpec { qk_norm: false, qkv_bias: true, output_gate: false, window: None };

    /// Three equal layers.
    fn config(attention: AttentionSpec, mlp: MlpSpec) -> DecoderConfig {
        DecoderConfig {
            vocab_size: 100,
            hidden_size: 10,
            intermediate_size: 30,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 5,
            rotary_dim: 5,
            attention_scale: 0.5,
            rms_norm_eps: 1e-6,
            rope_theta: 1e4,
            mrope: None,
            tie_word_embeddings: true,
            initializer_range: 0.02,
            norm_scale: NormScale::Weight,
            layers: vec![LayerSpec { mixer: MixerSpec::Attention(attention), mlp }; 3],
        }
    }

    fn dense() -> DecoderConfig {
        config(NORMED, MlpSpec::Dense)
    }

    #[test]
    fn a_token_costs_its_tape_and_the_working_set_of_one_layer() {
        let memory = dense().memory(4.0, Recompute::Cheap);
        // x, x1: 10 each; q, o: 20; k, v: 10; gate, up: 30; two rstd and four lse
        let layer = 4.0 * (20.0 + 40.0 + 20.0 + 60.0) + 4.0 * 6.0;
        assert_eq!(memory.token_tape, 3.0 * layer);
        assert_eq!(memory.token_backward, 4.0 * (10.0 + 30.0));
        assert_eq!(memory.token_context, 4.0 * 5.0);
    }

    #[test]
    fn the_work_of_a_decoder_counts_causal_layers_and_windows_apart() {
        let window = NonZeroUsize::new(7);
        let mut config = dense();
        let windowed = AttentionSpec { window, ..NORMED };
        config.layers[1].mixer = MixerSpec::Attention(windowed);
        let param = Param::new("embed", 0, Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap());
        let [decoder, _] = config.work(&[], &param, &param);
        assert_eq!(decoder.attention, 2.0 * 20.0);
        assert_eq!(decoder.windows, [(window.unwrap(), 20.0)]);
    }

    #[test]
    fn a_layer_in_fp8_needs_codes_and_sums_on_a_gpu() {
        let sums = f64::from(32 << 20);
        assert_eq!(dense().fp8_bytes(false), [30.0, 300.0 + sums]);
        assert_eq!(dense().fp8_bytes(true), [10.0 + 30.0 + 30.0 / 16.0, 300.0 + sums]);
        let wide = DecoderConfig { num_attention_heads: 40, ..dense() };
        assert_eq!(wide.fp8_bytes(false)[0], 200.0);
    }

    #[test]
    fn recomputing_least_also_keeps_what_is_cheap_to_compute_again() {
        let [least, all] = [Recompute::Nothing, Recompute::Cheap].map(|r| dense().memory(4.0, r));
        // the output of SwiGLU: 30; rotated q: 20, k: 10; an `rstd` for each of the 6 heads
        let layer = 4.0 * (30.0 + 20.0 + 10.0) + 4.0 * 6.0;
        assert_eq!(least.token_tape, all.token_tape + 3.0 * layer);
        assert_eq!(least.token_backward, all.token_backward);
        let biased = config(BIASED, MlpSpec::Dense);
        let [least, all] = [Recompute::Nothing, Recompute::Cheap].map(|r| biased.memory(4.0, r));
        assert_eq!(least.token_tape, all.token_tape + 3.0 * 4.0 * 30.0);
    }

    #[test]
    fn recomputing_keeps_one_tensor_a_layer_and_one_layer() {
        let (all, input) =
            (dense().memory(4.0, Recompute::Cheap), dense().memory(4.0, Recompute::Stage));
        assert_eq!(input.token_tape, 3.0 * 40.0);
        let layer = all.token_tape / 3.0;
        assert_eq!(input.token_recomputed, layer - 40.0 + 4.0 * 30.0);
        assert_eq!((input.token_backward, all.token_recomputed), (all.token_backward, 0.0));
    }

    #[test]
    fn adapters_of_experts_cost_rows_and_those_of_a_tokens_experts_compute() {
        let moe = MoeConfig {
            num_experts: 8,
            experts_per_token: 2,
            intermediate_size: 6,
            shared_size: None,
            files: ExpertFiles::OutIn,
        };
        let config = config(NORMED, MlpSpec::Experts(moe));
        let zeros = |name: &str, index| {
            let zeros = Tensor::zeros((16, 10), DType::F32, &Device::Cpu).unwrap();
            Param::new(AdapterTensor::A.name(&format!("model.layers.0.{name}")), index, zeros)
        };
        let names = ["mlp.experts", "mlp.experts.base_layer", "self_attn.q_proj"];
        let params: Vec<Param> = (0..).zip(names).map(|(at, name)| zeros(name, at)).collect();
        let params: Vec<&Param> = params.iter().collect();
        // 6 of 8 experts of two tensors
        assert_eq!(config.idle_adapters(&params), 0.75 * 2.0 * 160.0);
        // two times the rows, and the activated ones, in place of rows and twice the activated ones
        assert_eq!(config.expert_adapter_bytes(&params, 4.0), 4.0 * (40.0 + 12.0 - 20.0 - 24.0));
        assert_eq!(config.expert_adapter_bytes(&params[2..], 4.0), 0.0);
    }

    #[test]
    fn a_token_costs_the_rows_of_the_experts_that_compute_it() {
        let moe = MoeConfig {
            num_experts: 8,
            experts_per_token: 2,
            intermediate_size: 6,
            shared_size: None,
            files: ExpertFiles::InOut,
        };
        let config = config(NORMED, MlpSpec::Experts(moe));
        assert_eq!(config.idle_weights(), 3 * (6 * 3 * 6 * 10));
        let memory = config.memory(4.0, Recompute::Cheap);
        // x, x1: 10 each; q, o: 20; k, v: 10; gate, up: 2 * 6; two rstd and four lse; routing
        let layer = 4.0 * (20.0 + 40.0 + 20.0 + 24.0) + 4.0 * 6.0 + 32.0;
        assert_eq!(memory.token_tape, 3.0 * layer);
        // dy; rows, the output of SwiGLU and its gradient; logits and their gradient
        assert_eq!(memory.token_backward, 4.0 * (10.0 + 20.0 + 24.0 + 16.0));
    }

    /// Bytes of the tensors that the layers of a decoder save for backward, for `num_tokens`.
    fn saved(config: &DecoderConfig, num_tokens: usize, recompute: Recompute) -> f64 {
        let device = &Device::Cpu;
        let specs = decoder_specs(config, "model", Component { name: "llm", inputs: Inputs::All });
        let params = specs.iter().enumerate().map(|(index, spec)| {
            let zeros = Tensor::zeros(spec.shape.as_slice(), DType::F32, device).unwrap();
            Param::new(spec.name.as_str(), index, zeros)
        });
        let params: Vec<Param> = params.collect();
        let attention: Arc<dyn AttentionBackend> = Arc::new(Flash);
        let decoder =
            Decoder::new(&ParamMap::new(&params, None), "model", config, &attention).unwrap();
        let lengths = CuSeqlens::from_lengths(&[num_tokens as u32]).unwrap();
        let context = DecoderContext {
            rope: rope_table(config, &vec![[0; 3]; num_tokens]).upload(num_tokens, device).unwrap(),
            segments: Segments::new(lengths.clone(), lengths).unwrap(),
        };
        let x = Tensor::zeros((num_tokens, config.hidden_size), DType::F32, device).unwrap();
        let of_layer = |layer: &dyn Stage<Context = DecoderContext>| {
            layer.forward(&x, &context, recompute, &Pass::default()).unwrap().1.bytes() as f64
        };
        decoder.layers().map(of_layer).sum()
    }

    #[test]
    fn the_saved_bytes_of_a_token_are_those_of_the_tensors() {
        let moe = |shared_size| MoeConfig {
            num_experts: 4,
            experts_per_token: 2,
            intermediate_size: 6,
            shared_size,
            files: ExpertFiles::OutIn,
        };
        let linear = MixerSpec::LinearAttention(LinearAttentionSpec {
            num_key_heads: 2,
            num_value_heads: 4,
            key_head_dim: 6,
            value_head_dim: 10,
            conv_kernel: 4,
        });
        let gated = AttentionSpec { output_gate: true, ..NORMED };
        let attention = [NORMED, BIASED, gated].map(MixerSpec::Attention);
        let mlps = [MlpSpec::Dense, MlpSpec::Experts(moe(None)), MlpSpec::Experts(moe(Some(8)))];
        for mixer in attention.into_iter().chain([linear]) {
            for (mlp, recompute) in
                mlps.iter().flat_map(|mlp| [(mlp, Recompute::Nothing), (mlp, Recompute::Cheap)])
            {
                let layers = vec![LayerSpec { mixer, mlp: *mlp }];
                let config = DecoderConfig { head_dim: 6, rotary_dim: 6, layers, ..dense() };
                let expected = config.saved_bytes(&config.layers[0], 4.0, recompute);
                let found = (saved(&config, 20, recompute) - saved(&config, 8, recompute)) / 12.0;
                assert_eq!(found, expected, "{:?} {recompute:?}", config.layers[0]);
            }
        }
    }
}
