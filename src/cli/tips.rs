//! Tips for command lines that other trainers would accept.

use crate::convert::our_key;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Commands of other trainers, and the command here.
const COMMANDS: [(&[&str], &str); 5] = [
    (&["train", "finetune", "fine-tune", "fit", "tune"], "trainer sft --config FILE"),
    (&["chat"], "trainer generate --model FOLDER --chat"),
    (&["infer", "inference", "predict", "run"], "trainer generate --model FOLDER --prompt TEXT"),
    (&["merge", "merge-lora"], "trainer export --adapter FOLDER --merge --out FOLDER"),
    (&["validate", "test", "evaluate"], "trainer eval --config FILE"),
];

/// The command line that the user may have meant.
pub(super) fn tip(error: &clap::Error) -> Option<String> {
    let found = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let name = found(ContextKind::InvalidSubcommand)?;
            let named = |(names, _): &&(&[&str], &str)| names.contains(&name);
            COMMANDS.iter().find(named).map(|(_, command)| format!("`{command}`"))
        }
        ErrorKind::UnknownArgument => argument(found(ContextKind::InvalidArg)?),
        _ => None,
    }
}

/// The tip for an argument that no command has.
fn argument(text: &str) -> Option<String> {
    let name = text.trim_start_matches('-');
    let (key, value) = name.split_once('=').unwrap_or((name, "VALUE"));
    let key_here = key.replace('-', "_");
    let is_file = [".yaml", ".yml"].iter().any(|ending| text.ends_with(ending));
    match our_key(&key_here) {
        Some(key) if text.starts_with("--") => Some(format!("`--set {key}={value}`")),
        _ if !text.starts_with('-') && is_file && !text.contains('=') => {
            Some(format!("`--config {text}`"))
        }
        // `a.b=c`, as OmegaConf writes it, and `--a.b=c`
        _ if key.contains('.') && (text.contains('=') || text.starts_with("--")) => {
            Some(format!("`--set {key}={value}`"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory as _;

    #[test]
    fn commands_and_options_of_other_trainers_lead_to_ours() {
        let of = |line: &str| {
            let words = line.split(' ');
            tip(&Cli::command().try_get_matches_from(words).unwrap_err())
        };
        for (line, expected) in [
            ("trainer train", "`trainer sft --config FILE`"),
            ("trainer finetune", "`trainer sft --config FILE`"),
            ("trainer chat", "`trainer generate --model FOLDER --chat`"),
            ("trainer merge", "`trainer export --adapter FOLDER --merge --out FOLDER`"),
            ("trainer sft a.yaml", "`--config a.yaml`"),
            ("trainer sft --config a.yaml optim.lr=1e-4", "`--set optim.lr=1e-4`"),
            ("trainer sft --config a.yaml --optim.lr 1e-4", "`--set optim.lr=VALUE`"),
            ("trainer sft --config a.yaml --lora_rank 8", "`--set adapter.rank=VALUE`"),
            ("trainer sft --config a.yaml --learning-rate=1", "`--set optim.lr=VALUE`"),
        ] {
            assert_eq!(of(line).as_deref(), Some(expected), "{line}");
        }
        assert_eq!(of("trainer sfft"), None, "clap names the similar command");
        assert_eq!(of("trainer sft --config a.yaml --unknown"), None);
    }
}
