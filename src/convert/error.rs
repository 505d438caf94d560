//! The reasons why a config of another trainer cannot be converted.

use crate::config::ConfigError;
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
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// A file cannot be read.
    #[error("cannot read `{}`: {source}", .path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file is not valid YAML or JSON.
    #[error(transparent)]
    Syntax(#[from] ConfigError),
    /// A YAML or JSON file is not a mapping.
    #[error("`{}` is not a mapping from settings to values", .path.display())]
    NotSettings {
        /// Path of the file.
        path: PathBuf,
    },
    /// A script does not start a training.
    #[error("`{}` has no command `{expected}`", .path.display())]
    NoCommand {
        /// Path of the file.
        path: PathBuf,
        /// The command.
        expected: &'static str,
    },
    /// An argument of a script does not belong to its command.
    #[error("{}:{line}: `{word}` does not belong to the command", .path.display())]
    OutsideCommand {
        /// Path of the file.
        path: PathBuf,
        /// Line of the argument.
        line: usize,
        /// The argument.
        word: String,
    },
    /// A script starts several trainings.
    #[error("`{}` has several training commands", .path.display())]
    TwoCommands {
        /// Path of the file.
        path: PathBuf,
    },
    /// Some settings have no equivalent.
    #[error("{} of {trainer} cannot be converted{}", count(.refusals), listed(.refusals))]
    Refused {
        /// Name of the trainer.
        trainer: &'static str,
        /// All settings that have no equivalent.
        refusals: Vec<Refusal>,
    },
    /// The values of the settings contradict each other, or are out of range.
    #[error("the converted config is not valid: {problem}")]
    Invalid {
        /// Message of the check of the config.
        problem: String,
    },
    /// The converted config cannot be read.
    #[error("the converted config cannot be read: {problem}")]
    Bug {
        /// Message of the config reader.
        problem: String,
    },
}

impl ConvertError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> String {
        let hint = match self {
            Self::Read { .. } => "check the path",
            Self::Syntax(error) => return error.hint(),
            Self::NotSettings { .. } => {
                "give a config file, or the script that starts the training"
            }
            Self::NoCommand { .. } => {
                "give the script that starts the training, or a config file that ends in `.yaml` or `.json`"
            }
            Self::OutsideCommand { .. } => {
                "end the line before it with `\\`, without a space or a comment behind it"
            }
            Self::TwoCommands { .. } => "convert them one by one: remove all but one",
            Self::Refused { .. } => {
                "change or remove these settings in a copy of the file, and convert again"
            }
            Self::Invalid { .. } => "change the setting that the message names",
            Self::Bug { .. } => "this is a bug in trainer: please report it with the file",
        };
        hint.to_owned()
    }
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
