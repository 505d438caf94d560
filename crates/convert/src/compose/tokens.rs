//! Tokens that the vocabulary receives.

use super::adapter::Tuning;
use crate::conversion::{Conversion, OFF};
use crate::line::quoted;
use crate::tables::Role;
use crate::trainer::Trainer;
use crate::value::{Setting, Value};

/// Writes `model.add_tokens` and `model.add_special_tokens`, and trains the embedding with an adapter
/// as LLaMA-Factory does.
pub(super) fn tokens(conversion: &mut Conversion, tuning: Tuning) {
    let lists = [
        (Role::AddTokens, "model.add_tokens"),
        (Role::AddSpecialTokens, "model.add_special_tokens"),
    ];
    let mut first: Option<Setting> = None;
    for (role, key) in lists {
        let Some(setting) = conversion.consume_written(role) else { continue };
        if setting.value.is_off() {
            conversion.drop(&setting, OFF);
        } else if let Some(tokens) = listed(conversion.trainer, &setting.value) {
            let tokens: Vec<String> = tokens.iter().map(|token| quoted(token)).collect();
            conversion.write_setting(key, &format!("[{}]", tokens.join(", ")), &setting);
            first.get_or_insert(setting);
        } else {
            conversion.refuse(&setting, "expected tokens: write those of a file in its place");
        }
    }
    if let Some(setting) = conversion.consume_written(Role::ResizeVocab) {
        conversion.drop(&setting, "the embedding receives rows if tokens need them");
    }
    let Some(setting) = first else { return };
    conversion.note(format!(
        "new tokens start from the tokens of their texts (`model.new_token_rows`); {} draws rows around the mean of all \
         rows, and keeps the values of rows that the embedding has already",
        conversion.trainer.title()
    ));
    let is_new = !conversion.has("adapter.start_from") && !conversion.has("adapter.train_also");
    let trains_rows = conversion.trainer == Trainer::LlamaFactory && is_new;
    if matches!(tuning, Tuning::Adapter { .. }) && trains_rows {
        conversion.write_setting("adapter.train_also", "[\"*embed_tokens.*\"]", &setting);
        conversion.note(
            "add `lm_head.*` to `adapter.train_also` if the head of the model is not the embedding",
        );
    }
}

/// The tokens of a list, or of a text of LLaMA-Factory with commas.
fn listed(trainer: Trainer, value: &Value) -> Option<Vec<String>> {
    let texts: Option<Vec<&str>> = value.items().iter().map(Value::text).collect();
    let texts = texts?;
    let tokens: Vec<&str> = if trainer == Trainer::LlamaFactory {
        let parts = texts.iter().flat_map(|text| text.split(','));
        parts.map(str::trim).filter(|part| !part.is_empty()).collect()
    } else {
        texts
    };
    let is_file = |token: &&str| token.to_lowercase().ends_with(".txt");
    let tokens = Some(tokens).filter(|of| !of.is_empty() && !of.iter().any(is_file));
    Some(tokens?.into_iter().map(str::to_owned).collect())
}
