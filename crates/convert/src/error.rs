//! The reasons why a config of another trainer cannot be converted.

use settings::ConfigError;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// A setting that has no equivalent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// File and line; empty for a default or an argument of the command.
    pub place: String,
    /// The setting with its value.
    pub setting: String,
    /// The reason, and what to do.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.place.is_empty() { "" } else { ": " };
        write!(f, "{}{place}`{}`: {}", self.place, self.setting, self.reason)
    }
}

/// The reason why a config of another trainer cannot be converted.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum ConvertError {
    #[error("cannot read `{}`: {source}", .path.display())]
    #[fault(hint = "check the path")]
    Read { path: PathBuf, source: io::Error },
    #[error(transparent)]
    #[fault(from)]
    Syntax(#[from] ConfigError),
    #[error("`{}` is not a mapping from settings to values", .path.display())]
    #[fault(hint = "give a config file, or the script that starts the training")]
    NotSettings { path: PathBuf },
    #[error("`{}` has no command `{expected}`", .path.display())]
    #[fault(
        hint = "give the script that starts the training, or a config file that ends in `.yaml` or `.json`"
    )]
    NoCommand { path: PathBuf, expected: &'static str },
    #[error("{}:{line}: `{word}` does not belong to the command", .path.display())]
    #[fault(hint = "end the line before it with `\\`, without a space or a comment behind it")]
    OutsideCommand { path: PathBuf, line: usize, word: String },
    #[error("`{}` has several training commands", .path.display())]
    #[fault(hint = "convert them one by one: remove all but one")]
    TwoCommands { path: PathBuf },
    #[error("{} of {trainer} cannot be converted{}", count(.refusals), listed(.refusals))]
    #[fault(hint = "change or remove these settings in a copy of the file, and convert again")]
    Refused { trainer: &'static str, refusals: Vec<Refusal> },
    #[error("the converted config is not valid: {problem}")]
    #[fault(hint = "change the setting that the message names")]
    Invalid { problem: String },
    #[error("the converted config cannot be read: {problem}")]
    #[fault(hint = "this is a bug in trainer: please report it with the file")]
    Bug { problem: String },
}

fn count(refusals: &[Refusal]) -> String {
    match refusals.len() {
        1 => "1 setting".to_owned(),
        many => format!("{many} settings"),
    }
}

fn listed(refusals: &[Refusal]) -> String {
    let mut text = String::new();
    for refusal in refusals {
        text.push_str("\n  ");
        text.push_str(&refusal.to_string());
    }
    text
}
