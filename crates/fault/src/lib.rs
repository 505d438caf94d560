//! What a program does with an error, besides printing its message: the code it exits with, the fix
//! that it suggests, and the key under which it counts the error.
//!
//! ```ignore
//! #[derive(Debug, thiserror::Error, Fault)]
//! #[fault(exit = Data)]
//! pub enum LoaderError {
//!     #[error("cannot start a loader thread: {message}")]
//!     #[fault(exit = Resources, hint = "lower `data.workers`, or raise the limits (`ulimit -u`)")]
//!     Spawn { message: String },
//!     #[error(transparent)]
//!     Ranks(#[from] DistError),
//!     #[error("cannot read row {row}: {cause}")]
//!     #[fault(from = cause)]
//!     Row { row: u64, cause: RowError },
//! }
//! ```
//!
//! - `exit`: a variant of [`Exit`], `None`, or an expression of the type `Exit` or `Option<Exit>`.
//! - `hint`: a text, which may contain fields as `{field}`, `None`, or an expression of the type
//!   `&'static str`, `String` or [`Hint`].
//! - `reason`: a text. If one variant has a reason, all must.
//! - `from = FIELD`: the rest comes from the error in this field; `from` alone if it is the only
//!   field. A variant with `#[error(transparent)]` has `from`, unless it gives `exit` or `hint`.
//!
//! An attribute on the enum is the default of its variants; it does not apply to variants with
//! `from`. Each variant needs an exit code and a hint from one of the three.
//!
//! Expressions see each field as a reference: by its name, or as `_0`, `_1` and so on.

use std::borrow::Cow;
use std::process::ExitCode;

// The derived code names this crate as others do.
#[cfg(test)]
extern crate self as fault;

pub use derive::Fault;

/// Exit code of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Wrong arguments or config.
    Usage = 64,
    /// Bad data, a damaged file, or a loss or gradient that is not finite.
    Data = 65,
    /// A bug of this program: a panic, or an error without an exit code.
    Software = 70,
    /// Memory or another resource of the process is used up.
    Resources = 71,
    /// A file cannot be written: the disk is full or read-only, or a permission is missing. All errors
    /// of writing have it (`exit = CannotWrite`).
    CannotWrite = 73,
    /// A rank was lost or hung, a GPU was lost, a disk failed while data was read, or the Hub
    /// cannot be reached.
    Ranks = 74,
    /// Stopped by a signal after a checkpoint was saved: the same command continues the run.
    Stopped = 75,
    /// Stopped at once by a second Ctrl-C.
    Interrupted = 130,
    /// The reader of stdout closed the pipe (`.. | head`): the code of a process that SIGPIPE
    /// ended.
    ClosedPipe = 141,
}

impl Exit {
    /// The exit code of another process; `None` if it is not a code of this program.
    pub fn from_code(code: i32) -> Option<Self> {
        use Exit::{
            CannotWrite, ClosedPipe, Data, Interrupted, Ranks, Resources, Software, Stopped, Usage,
        };
        let all = [
            Usage,
            Data,
            Software,
            Resources,
            CannotWrite,
            Ranks,
            Stopped,
            Interrupted,
            ClosedPipe,
        ];
        all.into_iter().find(|exit| *exit as i32 == code)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The fix that an error message suggests; `None` if the message alone is enough.
pub type Hint = Option<Cow<'static, str>>;

/// An error, or its cause, with an exit code, a hint and a reason.
pub trait Fault {
    /// The exit code of a process that this error ends; `None` if a cause decides, or if it is a
    /// bug.
    fn exit(&self) -> Option<Exit>;

    /// The fix that the error message suggests; `None` if the message alone is enough.
    fn hint(&self) -> Hint;

    /// The key under which rows with this error are counted, such as `wrong_type`; empty if rows
    /// have no such error.
    fn reason(&self) -> &'static str {
        ""
    }
}

/// The types of `hint` in an attribute; for the derived code only.
#[doc(hidden)]
pub trait IntoHint {
    fn into_hint(self) -> Hint;
}

impl IntoHint for &'static str {
    fn into_hint(self) -> Hint {
        Some(self.into())
    }
}

impl IntoHint for String {
    fn into_hint(self) -> Hint {
        Some(self.into())
    }
}

impl IntoHint for Hint {
    fn into_hint(self) -> Hint {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::{Exit, Fault, Hint};

    #[derive(Debug, thiserror::Error, Fault)]
    #[error("inner")]
    #[fault(exit = Data, hint = "fix it", reason = "inner")]
    struct Inner;

    #[derive(Debug, thiserror::Error, Fault)]
    #[fault(exit = Usage, hint = None)]
    enum Outer {
        #[error("plain")]
        #[fault(reason = "plain")]
        Plain,
        #[error("fields")]
        #[fault(exit = exit_of(*code), hint = "write {name:?} as {{name}}", reason = "fields")]
        Fields { name: &'static str, code: i32 },
        #[error("expression")]
        #[fault(hint = longer(_0, _1), reason = "expression")]
        Expression(&'static str, &'static str),
        #[error("without")]
        #[fault(exit = None, reason = "without")]
        Without,
        #[error(transparent)]
        Inner(#[from] Inner),
        #[error("boxed")]
        #[fault(exit = Ranks, from = cause)]
        Boxed { place: u8, cause: Box<Inner> },
    }

    fn exit_of(code: i32) -> Option<Exit> {
        Exit::from_code(code)
    }

    fn longer(first: &str, second: &'static str) -> Hint {
        (second.len() > first.len()).then(|| second.into())
    }

    #[test]
    fn each_variant_has_its_own_exit_code_hint_and_reason_or_those_of_its_cause() {
        let fields = |code| Outer::Fields { name: "a", code };
        let boxed = Outer::Boxed { place: 0, cause: Box::new(Inner) };
        for (error, exit, hint, reason) in [
            (Outer::Plain, Some(Exit::Usage), None, "plain"),
            (fields(71), Some(Exit::Resources), Some("write \"a\" as {name}"), "fields"),
            (fields(0), None, Some("write \"a\" as {name}"), "fields"),
            (Outer::Expression("", "b"), Some(Exit::Usage), Some("b"), "expression"),
            (Outer::Expression("b", ""), Some(Exit::Usage), None, "expression"),
            (Outer::Without, None, None, "without"),
            (Inner.into(), Some(Exit::Data), Some("fix it"), "inner"),
            (boxed, Some(Exit::Ranks), Some("fix it"), "inner"),
        ] {
            assert_eq!(error.exit(), exit, "{error:?}");
            assert_eq!(error.hint().as_deref(), hint, "{error:?}");
            assert_eq!(error.reason(), reason, "{error:?}");
        }
    }
}
