//! The rule of each setting of the other trainers: one table per trainer.

mod llama_factory;
mod lmms_engine;
mod swift;
pub(super) mod transformers;

use super::rule::Row;
use super::trainer::Trainer;

fn own(trainer: Trainer) -> &'static [Row] {
    match trainer {
        Trainer::MsSwift => swift::ROWS,
        Trainer::LlamaFactory => llama_factory::ROWS,
        Trainer::LmmsEngine => lmms_engine::ROWS,
    }
}

/// Section of the settings that all three trainers take from transformers.
fn section(trainer: Trainer) -> &'static str {
    match trainer {
        Trainer::MsSwift | Trainer::LlamaFactory => "",
        Trainer::LmmsEngine => "trainer_args.",
    }
}

/// The key as it stands in the tables: two spellings of one key become one.
pub(super) fn normal(trainer: Trainer, key: &str) -> String {
    if trainer != Trainer::LmmsEngine {
        return key.replace('-', "_");
    }
    if let Some(rest) = key.strip_prefix("processor_config.") {
        return format!("dataset_config.processor_config.{rest}");
    }
    // older configs of lmms-engine have the keys of `trainer_args` at the top
    let of_trainer = format!("{}{key}", section(trainer));
    let is_flat = row_of(trainer, key).is_none() && row_of(trainer, &of_trainer).is_some();
    if is_flat { of_trainer } else { key.to_owned() }
}

/// Whether the tables have rows for keys inside of this one.
pub(super) fn is_section(trainer: Trainer, key: &str) -> bool {
    own(trainer)
        .iter()
        .any(|row| row.key.strip_prefix(key).is_some_and(|rest| rest.starts_with('.')))
}

/// The row of a setting; `None` if the trainer has no such setting.
pub(super) fn row_of(trainer: Trainer, key: &str) -> Option<&'static Row> {
    let find = |rows: &'static [Row], key: &str| rows.iter().find(|row| row.key == key);
    find(own(trainer), key)
        .or_else(|| find(transformers::ROWS, key.strip_prefix(section(trainer))?))
}

/// All rows with their full keys.
pub(super) fn rows(trainer: Trainer) -> impl Iterator<Item = (String, &'static Row)> {
    let shared = transformers::ROWS.iter().map(move |row| {
        let key = format!("{}{}", section(trainer), row.key);
        (key, row)
    });
    let shared = shared.filter(move |(key, _)| !own(trainer).iter().any(|row| row.key == key));
    own(trainer).iter().map(|row| (row.key.to_owned(), row)).chain(shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::our_key;
    use crate::convert::rule::Rule;
    use std::collections::BTreeSet;

    #[test]
    fn every_row_is_unique_and_every_copied_setting_has_a_key_here() {
        for trainer in Trainer::ALL {
            let mut keys = BTreeSet::new();
            for (key, row) in rows(trainer) {
                assert!(keys.insert(key.clone()), "{}: `{key}` twice", trainer.name());
                let name = key.rsplit('.').next().unwrap();
                let copied = matches!(row.rule, Rule::Copy(_));
                assert!(!copied || our_key(name).is_some(), "`{key}` leads nowhere");
            }
        }
    }
}
