use super::config::{ModelConfigError, Section};
use crate::nn::{DecoderConfig, ExpertFiles, MlpSpec, MoeConfig};
use serde_json::Value;

/// Weights of experts that do not sum to 1 are not implemented.
const NORMED: &str = "`true`: the weights of a token's experts sum to 1";
/// The loss is a setting of the run.
const NO_LOGITS: &str = "`false`: losses of the router are no part of the model";

/// What a family says about its experts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Family {
    /// How its published files have the tensors of the experts.
    pub(super) published: ExpertFiles,
    /// Whether `norm_topk_prob` is false if the file does not have it. transformers does not read
    /// the key of the other families and always divides the weights by their sum.
    pub(super) must_have_norm: bool,
    /// Whether each layer has experts, and one of them computes every token.
    pub(super) has_shared: bool,
}

impl Section<'_> {
    /// `sizes`, with experts in some layers.
    pub(super) fn with_experts(
        &self,
        mut sizes: DecoderConfig,
        family: Family,
    ) -> Result<DecoderConfig, ModelConfigError> {
        let moe = self.experts(family)?;
        let sparse = self.sparse_layers(sizes.layers.len(), family)?;
        for layer in sizes.layers.iter_mut().zip(sparse).filter_map(|(l, s)| s.then_some(l)) {
            layer.mlp = MlpSpec::Experts(moe);
        }
        Ok(sizes)
    }

    fn experts(&self, family: Family) -> Result<MoeConfig, ModelConfigError> {
        if family.must_have_norm && self.value["norm_topk_prob"].is_null() {
            let (key, found) = ("norm_topk_prob", "missing, which means `false`".to_owned());
            return Err(ModelConfigError::Unsupported { key, found, known: NORMED });
        }
        self.expect("norm_topk_prob", &Value::Bool(true), NORMED)?;
        self.expect("output_router_logits", &Value::Bool(false), NO_LOGITS)?;
        // transformers 5 names the number of experts `num_local_experts` too
        let names = ["num_experts", "num_local_experts"];
        let named = names.into_iter().filter(|name| !self.value[*name].is_null());
        let named: Vec<&str> = named.collect();
        let num_experts = self.size(named.first().copied().unwrap_or(names[0]))?;
        if let [first, second] = named[..]
            && self.size(second)? != num_experts
        {
            let what = format!(
                "`{}` is {num_experts}, but `{}` is {}",
                self.key(first),
                self.key(second),
                self.value[second]
            );
            return Err(ModelConfigError::Shape { what });
        }
        let experts_per_token = self.size("num_experts_per_tok")?;
        if experts_per_token > num_experts {
            return Err(
                self.range("num_experts_per_tok", format!("at most {num_experts}, all experts"))
            );
        }
        let shared = "shared_expert_intermediate_size";
        Ok(MoeConfig {
            num_experts,
            experts_per_token,
            intermediate_size: self.size("moe_intermediate_size")?,
            shared_size: family.has_shared.then(|| self.size(shared)).transpose()?,
            files: family.published,
        })
    }

    /// Whether each layer has experts.
    fn sparse_layers(
        &self,
        num_layers: usize,
        family: Family,
    ) -> Result<Vec<bool>, ModelConfigError> {
        let dense = match &self.value["mlp_only_layers"] {
            Value::Null => Vec::new(),
            _ => self.sizes("mlp_only_layers")?,
        };
        let every = self.size_or("decoder_sparse_step", 1)?;
        let is_sparse = |k: usize| !dense.contains(&k) && (k + 1).is_multiple_of(every);
        let layers: Vec<bool> = (0..num_layers).map(is_sparse).collect();
        if layers.contains(&false) {
            if family.has_shared {
                let expected = "no layer: all layers of the family have experts".to_owned();
                return Err(self.range("mlp_only_layers", expected));
            }
            self.size("intermediate_size")?; // of the layers without experts
        }
        if layers.contains(&true) {
            return Ok(layers);
        }
        let what = format!(
            "`mlp_only_layers` and `decoder_sparse_step` leave none of the {num_layers} layers with \
             experts"
        );
        Err(ModelConfigError::Shape { what })
    }
}
