//! `~` and environment variables in the paths of arguments and configs.
//!
//! A shell replaces them only at the start of a word: `--config=~/a.yaml` and the paths of a config
//! reach the program as they are written.

use super::args::ConfigArgs;
use crate::config::{ConfigError, LeftOut, RunConfig};
use clap::builder::{OsStringValueParser, TypedValueParser, ValueParser};
use fault::Fault;
use std::any::TypeId;
use std::ffi::OsString;
use std::path::PathBuf;

/// A path that cannot be expanded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub(super) enum PathError {
    /// `~name`.
    #[error("`{0}` begins with the home folder of another user")]
    #[fault(hint = "write the whole path, or `./~` for a file with this name")]
    OtherUser(String),
    /// A variable without a value.
    #[error("the environment variable `{0}` is not set")]
    #[fault(hint = "set `{_0}`, or write `$$` for the letter `$`")]
    NotSet(String),
    /// `${` without `}`.
    #[error("`{0}` has `${{` without `}}`")]
    #[fault(hint = "close it, or write `$$` for the letter `$`")]
    Open(String),
}

/// Replaces `~` at the start, `$NAME`, `${NAME}` and `$$`. `variable` looks up the environment.
fn expanded(path: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<String, PathError> {
    let get = |name: &str| {
        let value = variable(name).filter(|value| !value.is_empty());
        value.ok_or_else(|| PathError::NotSet(name.to_owned()))
    };
    let mut out = String::with_capacity(path.len());
    let mut rest = path;
    if let Some(after) = path.strip_prefix('~') {
        if !after.is_empty() && !after.starts_with('/') {
            return Err(PathError::OtherUser(path.to_owned()));
        }
        out.push_str(&get("HOME")?);
        rest = after;
    }
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        rest = if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            after
        } else if let Some(after) = after.strip_prefix('{') {
            let (name, after) =
                after.split_once('}').ok_or_else(|| PathError::Open(path.to_owned()))?;
            out.push_str(&get(name)?);
            after
        } else if after.starts_with(|c: char| is_name(c) && !c.is_ascii_digit()) {
            let end = after.find(|c| !is_name(c)).unwrap_or(after.len());
            out.push_str(&get(&after[..end])?);
            &after[end..]
        } else {
            out.push('$');
            after
        };
    }
    out.push_str(rest);
    Ok(out)
}

/// Expands with the environment of this process.
pub(super) fn expand(path: &str) -> Result<String, PathError> {
    expanded(path, &|name| std::env::var(name).ok())
}

/// Expands the paths among the arguments of all commands.
pub(super) fn expand_arguments(command: clap::Command) -> clap::Command {
    let read = |text: OsString| match text.to_str() {
        Some(text) => expand(text).map(PathBuf::from).map_err(|error| {
            let hint = error.hint().unwrap_or_default();
            format!("{error}\n\nhint: {hint}")
        }),
        None => Ok(PathBuf::from(text)), // not text, so it cannot name a variable
    };
    command.mut_subcommands(move |command| {
        command.mut_args(|argument| {
            if argument.get_value_parser().type_id() != TypeId::of::<PathBuf>() {
                return argument;
            }
            argument.value_parser(ValueParser::new(OsStringValueParser::new().try_map(read)))
        })
    })
}

impl ConfigArgs {
    /// Expands the paths of the config, which lacks `left_out`. The errors have the lines of the
    /// paths that cannot be expanded.
    pub(super) fn expand(&self, config: &mut RunConfig, left_out: &LeftOut) -> Vec<ConfigError> {
        let refuse = |(keys, error): (Vec<String>, PathError)| {
            self.refuse(&left_out.in_file(&keys), error.to_string(), error.hint())
        };
        config.expand_paths(&expand).into_iter().map(refuse).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(path: &str) -> Result<String, PathError> {
        expanded(path, &|name| match name {
            "HOME" => Some("/u/ada".to_owned()),
            "RUNS" => Some("/scratch/runs".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        })
    }

    #[test]
    fn home_and_variables_are_replaced() {
        for (path, expanded) in [
            ("~", "/u/ada"),
            ("~/a.yaml", "/u/ada/a.yaml"),
            ("$RUNS/x", "/scratch/runs/x"),
            ("${RUNS}-2/$RUNS", "/scratch/runs-2//scratch/runs"),
            ("a~/b", "a~/b"),
            ("./~/b", "./~/b"),
            ("a$$RUNS", "a$RUNS"),
            ("price$5$", "price$5$"),
            ("hf://datasets/a/b", "hf://datasets/a/b"),
        ] {
            assert_eq!(with(path).unwrap(), expanded);
        }
    }

    #[test]
    fn what_cannot_be_replaced_is_refused() {
        assert_eq!(with("~bob/x"), Err(PathError::OtherUser("~bob/x".to_owned())));
        assert_eq!(with("$NONE/x"), Err(PathError::NotSet("NONE".to_owned())));
        assert_eq!(with("$EMPTY/x"), Err(PathError::NotSet("EMPTY".to_owned())));
        assert_eq!(with("${RUNS/x"), Err(PathError::Open("${RUNS/x".to_owned())));
    }
}
