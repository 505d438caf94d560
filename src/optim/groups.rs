//! Which parameters a pattern means: a part by name, or a glob over parameter names.

/// What the patterns of a config say of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setting {
    /// Not trained.
    pub frozen: bool,
    /// Factor of the learning rate.
    pub lr_multiplier: f64,
    /// Whether weight decay applies: tensors with one dimension are spared.
    pub decay: bool,
}

/// The settings of all parameters, in their order.
#[derive(Debug, Clone, PartialEq)]
pub struct Groups(Vec<Setting>);

/// A pattern that cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GroupError {
    /// It names no parameter.
    #[error(
        "`{key}`: `{pattern}` matches no part and no parameter; the nearest name is `{nearest}`"
    )]
    NoMatch {
        /// Config key.
        key: &'static str,
        /// As written.
        pattern: String,
        /// A part or parameter that the user may have meant.
        nearest: String,
    },
    /// It is no glob.
    #[error("`{key}`: `{pattern}` is not a glob: {reason}")]
    NotAGlob {
        /// Config key.
        key: &'static str,
        /// As written.
        pattern: String,
        /// Why.
        reason: String,
    },
    /// A factor that makes no sense.
    #[error(
        "`optim.lr_multipliers`: `{pattern}` is `{found}`, expected a finite number of 0 or more"
    )]
    Factor {
        /// As written.
        pattern: String,
        /// Its value.
        found: f64,
    },
    /// Nothing is left to train.
    #[error("`model.freeze` freezes every parameter: there is nothing to train")]
    AllFrozen,
}

impl GroupError {
    /// The key of the config and, if one is to blame, the pattern in it.
    pub fn origin(&self) -> (&'static str, Option<&str>) {
        match self {
            Self::NoMatch { key, pattern, .. } | Self::NotAGlob { key, pattern, .. } => {
                (key, Some(pattern))
            }
            Self::Factor { pattern, .. } => ("optim.lr_multipliers", Some(pattern)),
            Self::AllFrozen => ("model.freeze", None),
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoMatch { .. } => {
                "name a part (`vision`, `merger`, `llm`), or write a glob such as `model.visual.blocks.0.*`"
            }
            Self::NotAGlob { .. } => {
                "`*` stands for any text, `?` for one character, `[ab]` for one of them"
            }
            Self::Factor { .. } => {
                "1.0 is the plain learning rate; to keep a part as it is, use `model.freeze`"
            }
            Self::AllFrozen => "take at least one part out of `model.freeze`",
        }
    }
}

/// A parameter as patterns see it.
#[derive(Debug, Clone, Copy)]
pub struct Named<'a> {
    /// Published name.
    pub name: &'a str,
    /// Name of its part.
    pub part: &'a str,
    /// Number of dimensions.
    pub rank: usize,
}

impl Groups {
    /// Applies `model.freeze` and `optim.lr_multipliers`.
    pub fn new<'a>(
        params: &[Named<'_>],
        freeze: &[String],
        lr_multipliers: impl IntoIterator<Item = (&'a String, &'a f64)>,
    ) -> Result<Self, GroupError> {
        let mut settings: Vec<Setting> = params
            .iter()
            .map(|param| Setting { frozen: false, lr_multiplier: 1.0, decay: param.rank > 1 })
            .collect();
        for pattern in freeze {
            for index in matches("model.freeze", pattern, params)? {
                settings[index].frozen = true;
            }
        }
        for (pattern, factor) in lr_multipliers {
            if !factor.is_finite() || *factor < 0.0 {
                return Err(GroupError::Factor { pattern: pattern.clone(), found: *factor });
            }
            for index in matches("optim.lr_multipliers", pattern, params)? {
                settings[index].lr_multiplier = *factor;
            }
        }
        if settings.iter().all(|setting| setting.frozen) {
            return Err(GroupError::AllFrozen);
        }
        Ok(Self(settings))
    }

    /// Settings in the order of the parameters.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Setting> {
        self.0.iter()
    }
}

/// Indexes of the parameters that a pattern means; at least one.
fn matches(
    key: &'static str,
    pattern: &str,
    params: &[Named<'_>],
) -> Result<Vec<usize>, GroupError> {
    let indexes = |keep: &dyn Fn(&Named<'_>) -> bool| -> Vec<usize> {
        (0..params.len()).filter(|index| keep(&params[*index])).collect()
    };
    let found = match pattern {
        "vision" | "merger" | "llm" => indexes(&|param| param.part == pattern),
        glob => {
            let glob = glob::Pattern::new(glob).map_err(|error| GroupError::NotAGlob {
                key,
                pattern: pattern.to_owned(),
                reason: error.to_string(),
            })?;
            indexes(&|param| glob.matches(param.name))
        }
    };
    if found.is_empty() {
        let name = |param: &Named<'_>| (common_pieces(pattern, param.name), param.name.to_owned());
        let part = |part: &str| (2 * common_pieces(pattern, part), part.to_owned());
        let parts = ["vision", "merger", "llm"].map(part).into_iter();
        // A word alone is more likely a part than a piece of a long name.
        let parts = parts.filter(|_| !pattern.contains(['.', '*']));
        let best = params.iter().map(name).chain(parts).max_by_key(|(shared, _)| *shared);
        let nearest = best.map_or_else(String::new, |(_, name)| name);
        return Err(GroupError::NoMatch { key, pattern: pattern.to_owned(), nearest });
    }
    Ok(found)
}

/// How much of a name's dotted pieces a pattern mentions, in characters.
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
        Named { name: "model.visual.blocks.0.attn.qkv.weight", part: "vision", rank: 2 },
        Named { name: "model.visual.merger.norm.weight", part: "merger", rank: 1 },
        Named { name: "model.language_model.layers.0.mlp.up_proj.weight", part: "llm", rank: 2 },
        Named { name: "model.language_model.norm.weight", part: "llm", rank: 1 },
    ];

    #[test]
    fn parts_and_globs_freeze_what_they_name() {
        let freeze = ["vision".to_owned(), "*.layers.0.*".to_owned()];
        let groups = Groups::new(&PARAMS, &freeze, []).unwrap();
        let frozen: Vec<bool> = groups.iter().map(|setting| setting.frozen).collect();
        assert_eq!(frozen, [true, false, true, false]);
    }

    #[test]
    fn the_last_matching_factor_holds_and_norms_do_not_decay() {
        let factors = [("llm".to_owned(), 0.5), ("*.norm.*".to_owned(), 2.0)];
        let factors = factors.iter().map(|(pattern, factor)| (pattern, factor));
        let groups = Groups::new(&PARAMS, &[], factors).unwrap();
        let found: Vec<(f64, bool)> = groups.iter().map(|s| (s.lr_multiplier, s.decay)).collect();
        assert_eq!(found, [(1.0, true), (2.0, false), (0.5, true), (2.0, false)]);
    }

    #[test]
    fn a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name() {
        let error = Groups::new(&PARAMS, &["*.layer.0.mlp.up*".to_owned()], []).unwrap_err();
        assert!(error.to_string().contains("layers.0.mlp.up_proj"), "{error}");
        let all = ["*".to_owned()];
        assert_eq!(Groups::new(&PARAMS, &all, []).unwrap_err(), GroupError::AllFrozen);
        let negative = [("llm".to_owned(), -1.0)];
        let negative = negative.iter().map(|(pattern, factor)| (pattern, factor));
        assert!(matches!(Groups::new(&PARAMS, &[], negative), Err(GroupError::Factor { .. })));
    }
}
