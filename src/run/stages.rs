//! The names of the stages of a model.

use crate::models::Model;
use crate::nn::AdapterTensor;
use crate::tape::Param;

/// Name of each stage in the order of forward, and the indices of its parameters.
pub(super) fn stages(model: &dyn Model) -> Vec<(String, Vec<usize>)> {
    let mut stages = model.stages();
    stages.reverse();
    let stage = |params: Vec<&Param>| {
        let names: Vec<&str> = params.iter().map(|param| module(param.name())).collect();
        (stage_name(&names), params.iter().map(|param| param.index()).collect())
    };
    stages.into_iter().map(stage).collect()
}

/// The name of the layer of an adapter's tensor, or of the parameter itself.
fn module(name: &str) -> &str {
    AdapterTensor::of(name).map_or(name, |(_, module)| module)
}

/// The common beginning of the names of a stage's parameters.
fn stage_name(names: &[&str]) -> String {
    let parts: Vec<Vec<&str>> = names.iter().map(|name| name.split('.').collect()).collect();
    let Some(first) = parts.first() else { return String::new() };
    let is_common = |at: &usize| parts.iter().all(|name| name.get(*at) == first.get(*at));
    let mut common = (0..first.len()).take_while(is_common).count();
    if common < 3 {
        common = 3; // patch and position embeddings have no module in common
    }
    let name = first[..common.min(first.len())].join(".");
    name.strip_suffix(".weight").unwrap_or(&name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_the_name_of_its_module() {
        for (names, expected) in [
            (
                &["model.visual.blocks.3.attn.qkv.weight", "model.visual.blocks.3.norm1.bias"][..],
                "model.visual.blocks.3",
            ),
            (
                &["model.visual.patch_embed.proj.weight", "model.visual.pos_embed.weight"],
                "model.visual.patch_embed",
            ),
            (&["lm_head.weight"], "lm_head"),
            (&["model.language_model.embed_tokens.weight"], "model.language_model.embed_tokens"),
            (&["model.language_model.norm.weight"], "model.language_model.norm"),
        ] {
            assert_eq!(stage_name(names), expected);
        }
    }
}
