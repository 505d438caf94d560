//! Settings of parameters by pattern: a component's name, or a glob over parameter names.

use super::Kind;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParamGroup {
    /// Whether the parameter keeps its value.
    pub frozen: bool,
    /// Factor of the learning rate.
    pub lr_multiplier: f64,
    /// Whether weight decay applies: only to tensors with two or more dimensions.
    pub decay: bool,
    /// Whether it is a matrix between hidden states, which `optim.kind: muon` updates.
    pub hidden_matrix: bool,
}

/// The settings of all parameters, in their order.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamGroups(Vec<ParamGroup>);

/// A pattern that cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum GroupError {
    #[error(
        "`{key}`: `{pattern}` matches no component and no parameter; the nearest name is \
         `{nearest}`"
    )]
    #[fault(hint = components_hint(components))]
    NoMatch {
        key: &'static str,
        pattern: String,
        /// A component or parameter with a similar name.
        nearest: String,
        components: Vec<String>,
    },
    #[error("`{key}`: `{pattern}` is not a valid glob: {reason}")]
    #[fault(hint = "`*` matches any text, `?` one character, `[ab]` one of them")]
    NotAGlob { key: &'static str, pattern: String, reason: String },
    #[error(
        "`optim.lr_multipliers`: `{pattern}` is `{found}`, expected a finite number of 0 or more"
    )]
    #[fault(hint = "1.0 keeps the learning rate; to freeze a component, use `model.freeze`")]
    Factor { pattern: String, found: f64 },
    #[error("`optim.lr_multipliers`: `{pattern}` matches only parameters that are not trained")]
    #[fault(
        hint = "remove the factor; `model.freeze`, or `adapter.parts`, decides what is trained"
    )]
    Frozen { pattern: String },
    #[error(
        "`optim.kind` is `muon`, but no trained parameter is a matrix between hidden states: AdamW \
         would update all of them"
    )]
    #[fault(hint = "remove `optim.kind`, or set it to `adamw` or `adamw_8bit`")]
    NoMatrix,
    #[error("`model.freeze` freezes every parameter: there is nothing to train")]
    #[fault(hint = "remove at least one component from `model.freeze`")]
    AllFrozen,
}

fn components_hint(components: &[String]) -> String {
    let names: Vec<String> = components.iter().map(|name| format!("`{name}`")).collect();
    let names = names.join(", ");
    format!("name a component ({names}), or write a glob such as `*.layers.0.*`")
}

impl GroupError {
    /// The config key and, if the cause is one pattern, that pattern.
    pub fn origin(&self) -> (&'static str, Option<&str>) {
        match self {
            Self::NoMatch { key, pattern, .. } | Self::NotAGlob { key, pattern, .. } => {
                (key, Some(pattern))
            }
            Self::Factor { pattern, .. } | Self::Frozen { pattern } => {
                ("optim.lr_multipliers", Some(pattern))
            }
            Self::NoMatrix => ("optim.kind", None),
            Self::AllFrozen => ("model.freeze", None),
        }
    }
}

/// The properties of a parameter that a pattern or a rule depends on.
#[derive(Debug, Clone, Copy)]
pub struct Named<'a> {
    /// Published name of the parameter.
    pub name: &'a str,
    pub component: &'a str,
    /// Number of dimensions.
    pub rank: usize,
}

impl Named<'_> {
    /// Whether it is a matrix and neither a table of embeddings, nor a head, nor a router, nor a
    /// part of an adapter.
    fn is_hidden_matrix(&self) -> bool {
        let others = ["embed", "lm_head", "lora_", "mlp.gate.", "expert_gate."];
        self.rank == 2 && !others.iter().any(|part| self.name.contains(part))
    }
}

impl ParamGroups {
    /// Applies `model.freeze` and `optim.lr_multipliers`.
    pub fn new<'a>(
        params: &[Named<'_>],
        freeze: &[String],
        lr_multipliers: impl IntoIterator<Item = (&'a String, &'a f64)>,
    ) -> Result<Self, GroupError> {
        let mut frozen = vec![false; params.len()];
        for pattern in freeze {
            for index in matches("model.freeze", pattern, params)? {
                frozen[index] = true;
            }
        }
        Self::with_frozen(params, frozen, lr_multipliers)
    }

    /// Freezes the parameters of `frozen`, and applies `optim.lr_multipliers`.
    pub fn with_frozen<'a>(
        params: &[Named<'_>],
        frozen: Vec<bool>,
        lr_multipliers: impl IntoIterator<Item = (&'a String, &'a f64)>,
    ) -> Result<Self, GroupError> {
        let group = |(param, frozen): (&Named<'_>, bool)| ParamGroup {
            frozen,
            lr_multiplier: 1.0,
            decay: param.rank > 1,
            hidden_matrix: param.is_hidden_matrix(),
        };
        let mut groups: Vec<ParamGroup> = params.iter().zip(frozen).map(group).collect();
        if groups.iter().all(|group| group.frozen) {
            return Err(GroupError::AllFrozen);
        }
        for (pattern, factor) in lr_multipliers {
            if !factor.is_finite() || *factor < 0.0 {
                return Err(GroupError::Factor { pattern: pattern.clone(), found: *factor });
            }
            let matched = matches("optim.lr_multipliers", pattern, params)?;
            if matched.iter().all(|index| groups[*index].frozen) {
                return Err(GroupError::Frozen { pattern: pattern.clone() });
            }
            for index in matched {
                groups[index].lr_multiplier = *factor;
            }
        }
        Ok(Self(groups))
    }

    /// Fails if `kind` differs from `adamw` for no trained parameter.
    pub fn check_kind(&self, kind: Kind) -> Result<(), GroupError> {
        let is_used = |group: &ParamGroup| !group.frozen && group.hidden_matrix;
        if kind == Kind::Muon && !self.iter().any(is_used) {
            return Err(GroupError::NoMatrix);
        }
        Ok(())
    }

    /// Settings in the order of the parameters.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &ParamGroup> {
        self.0.iter()
    }
}

/// Indexes of the parameters that a pattern matches, a component's name or a glob; at least one.
/// Errors are about `key`.
pub fn matches(
    key: &'static str,
    pattern: &str,
    params: &[Named<'_>],
) -> Result<Vec<usize>, GroupError> {
    let indexes = |keep: &dyn Fn(&Named<'_>) -> bool| -> Vec<usize> {
        (0..params.len()).filter(|index| keep(&params[*index])).collect()
    };
    let mut found = indexes(&|param| param.component == pattern);
    if found.is_empty() {
        let glob = glob::Pattern::new(pattern).map_err(|error| GroupError::NotAGlob {
            key,
            pattern: pattern.to_owned(),
            reason: error.to_string(),
        })?;
        found = indexes(&|param| glob.matches(param.name));
    }
    if !found.is_empty() {
        return Ok(found);
    }
    let mut components: Vec<String> = Vec::new();
    for param in params {
        if !components.iter().any(|name| name == param.component) {
            components.push(param.component.to_owned());
        }
    }
    let by_name = |param: &Named<'_>| (common_pieces(pattern, param.name), param.name.to_owned());
    // A single word is more likely a component than a piece of a long name.
    let by_component = |name: &String| (2 * common_pieces(pattern, name), name.clone());
    let by_component =
        components.iter().map(by_component).filter(|_| !pattern.contains(['.', '*']));
    let best = params.iter().map(by_name).chain(by_component).max_by_key(|(shared, _)| *shared);
    let nearest = best.map_or_else(String::new, |(_, name)| name);
    Err(GroupError::NoMatch { key, pattern: pattern.to_owned(), nearest, components })
}

/// Number of characters that the dotted pieces of a name share with those of a pattern.
fn common_pieces(pattern: &str, name: &str) -> usize {
    let pieces: Vec<&str> = pattern.split(['.', '*']).filter(|piece| !piece.is_empty()).collect();
    name.split('.')
        .map(|piece| {
            let shared =
                |p: &&str| piece.chars().zip(p.chars()).take_while(|(a, b)| a == b).count();
            pieces.iter().map(shared).max().unwrap_or(0)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: [Named<'_>; 4] = [
        Named { name: "model.visual.blocks.0.attn.qkv.weight", component: "vision", rank: 2 },
        Named { name: "model.visual.merger.norm.weight", component: "merger", rank: 1 },
        Named {
            name: "model.language_model.layers.0.mlp.up_proj.weight",
            component: "llm",
            rank: 2,
        },
        Named { name: "model.language_model.norm.weight", component: "llm", rank: 1 },
    ];

    #[test]
    fn components_and_globs_freeze_what_they_name() {
        let freeze = ["vision".to_owned(), "*.layers.0.*".to_owned()];
        let groups = ParamGroups::new(&PARAMS, &freeze, []).unwrap();
        let frozen: Vec<bool> = groups.iter().map(|group| group.frozen).collect();
        assert_eq!(frozen, [true, false, true, false]);
    }

    #[test]
    fn hidden_matrices_are_neither_tables_nor_heads_nor_routers_nor_adapters_nor_vectors() {
        let named = |name, rank| Named { name, component: "llm", rank };
        for (name, rank, expected) in [
            ("model.language_model.layers.0.mlp.up_proj.weight", 2, true),
            ("model.visual.blocks.0.attn.qkv.weight", 2, true),
            ("model.visual.merger.linear_fc1.weight", 2, true),
            ("model.visual.blocks.0.attn.qkv.bias", 1, false),
            ("model.visual.patch_embed.proj.weight", 5, false),
            ("model.visual.pos_embed.weight", 2, false),
            ("model.language_model.embed_tokens.weight", 2, false),
            ("lm_head.weight", 2, false),
            ("model.layers.0.mlp.gate.weight", 2, false),
            ("model.layers.0.mlp.shared_expert_gate.weight", 2, false),
            ("model.layers.0.mlp.shared_expert.gate_proj.weight", 2, true),
            ("model.layers.0.mlp.experts.gate_up_proj", 3, false),
            ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", 2, false),
        ] {
            assert_eq!(named(name, rank).is_hidden_matrix(), expected, "{name}");
        }
    }

    #[test]
    fn the_last_matching_factor_holds_and_norms_do_not_decay() {
        let factors = [("llm".to_owned(), 0.5), ("*.norm.*".to_owned(), 2.0)];
        let factors = factors.iter().map(|(pattern, factor)| (pattern, factor));
        let groups = ParamGroups::new(&PARAMS, &[], factors).unwrap();
        let found: Vec<(f64, bool)> = groups.iter().map(|s| (s.lr_multiplier, s.decay)).collect();
        assert_eq!(found, [(1.0, true), (2.0, false), (0.5, true), (2.0, false)]);
    }

    #[test]
    fn a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name() {
        let error = ParamGroups::new(&PARAMS, &["*.layer.0.mlp.up*".to_owned()], []).unwrap_err();
        assert!(error.to_string().contains("layers.0.mlp.up_proj"), "{error}");
        let all = ["*".to_owned()];
        assert_eq!(ParamGroups::new(&PARAMS, &all, []).unwrap_err(), GroupError::AllFrozen);
        let negative = [("llm".to_owned(), -1.0)];
        let negative = negative.iter().map(|(pattern, factor)| (pattern, factor));
        assert!(matches!(ParamGroups::new(&PARAMS, &[], negative), Err(GroupError::Factor { .. })));
    }
}
