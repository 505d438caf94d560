//! What stderr can show: colours, bars, and its width.

use clap::builder::styling::{AnsiColor, Style};
use std::borrow::Cow;
use std::ffi::OsString;
use std::io::{self, IsTerminal};

/// Maximum number of columns of a log line on a terminal.
pub(super) const MAX_COLUMNS: usize = 100;
/// Minimum number of columns of a terminal for which lines are broken at spaces.
const MIN_COLUMNS: usize = 30;
/// Columns of the time at the start of a log line; a broken line continues below its level.
const INDENT: &str = "         ";

/// The properties of stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Terminal {
    /// A person reads it.
    pub(super) is_tty: bool,
    /// Bars can be drawn again in place: not with `TERM=dumb`.
    pub(super) has_cursor: bool,
    /// Colours can be shown and are wanted: not with `NO_COLOR`.
    pub(super) colours: bool,
}

impl Terminal {
    /// The properties of stderr of this process.
    pub(super) fn stderr() -> Self {
        Self::of(io::stderr().is_terminal(), |name| std::env::var_os(name))
    }

    /// `variable` looks up the environment. The rules are those of clap.
    fn of(is_tty: bool, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let is_dumb = variable("TERM").is_none_or(|term| term == "dumb");
        let no_colours = variable("NO_COLOR").is_some_and(|value| !value.is_empty());
        let has_cursor = is_tty && !is_dumb;
        Self { is_tty, has_cursor, colours: has_cursor && !no_colours }
    }

    /// Number of columns of a log line; `None` if lines are not broken.
    pub(super) fn columns(self) -> Option<usize> {
        let size = self.is_tty.then(|| rustix::termios::tcgetwinsize(io::stderr()));
        let columns = usize::from(size?.ok()?.ws_col);
        (columns >= MIN_COLUMNS).then_some(columns.min(MAX_COLUMNS))
    }
}

/// `text` in the colours with which clap prints its errors.
pub(super) fn coloured_error(text: &str) -> String {
    let labels: [(&str, Style); 3] = [
        ("error:", AnsiColor::Red.on_default().bold()),
        ("caused by:", AnsiColor::Red.on_default()),
        ("hint:", AnsiColor::Green.on_default()),
    ];
    let coloured = |line: &str| {
        let found = labels
            .iter()
            .find_map(|(label, style)| Some((label, style, line.strip_prefix(label)?)));
        match found {
            Some((label, style, rest)) => format!("{style}{label}{style:#}{rest}"),
            None => line.to_owned(),
        }
    };
    text.split_inclusive('\n').map(coloured).collect()
}

/// Breaks lines of more than `columns` columns at spaces. Words longer than a line stay whole, so
/// that paths can be copied.
pub(super) fn wrapped(text: &str, columns: usize) -> Cow<'_, str> {
    if text.lines().all(|line| width(line) <= columns) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 64);
    for line in text.split_inclusive('\n') {
        let mut at = 0;
        for (index, word) in line.split(' ').enumerate() {
            let width = width(word);
            if index > 0 && at + 1 + width > columns && at > INDENT.len() {
                out.truncate(out.trim_end_matches(' ').len());
                out.push('\n');
                out.push_str(INDENT);
                at = INDENT.len();
            } else if index > 0 {
                out.push(' ');
                at += 1;
            }
            out.push_str(word);
            at += width;
        }
    }
    Cow::Owned(out)
}

/// A shell command. Its arguments continue in further lines if it has more than `columns` columns.
pub(super) fn command(program: &str, arguments: &[&str], columns: usize) -> String {
    let mut out = format!("  {program}");
    let mut at = width(&out);
    for argument in arguments {
        let width = width(argument);
        // a space and the sign of a continued line follow
        if at + 1 + width + 2 > columns {
            out.push_str(" \\\n     ");
            at = 5;
        }
        out.extend([" ", *argument]);
        at += 1 + width;
    }
    out + "\n"
}

/// Number of columns of `text`, without colours; letters of East Asian scripts have two.
fn width(text: &str) -> usize {
    let mut in_code = false;
    let columns = |c: char| match c {
        '\u{1b}' => {
            in_code = true;
            0
        }
        'm' if in_code => {
            in_code = false;
            0
        }
        _ if in_code || c == '\n' => 0,
        '\u{1100}'.. => 2,
        _ => 1,
    };
    text.chars().map(columns).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terminal(is_terminal: bool, variables: &[(&str, &str)]) -> Terminal {
        Terminal::of(is_terminal, |name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn colours_and_bars_need_a_terminal_that_can_show_them() {
        let shows = |of: Terminal| (of.has_cursor, of.colours);
        assert_eq!(shows(terminal(true, &[("TERM", "xterm")])), (true, true));
        assert_eq!(shows(terminal(true, &[("TERM", "dumb")])), (false, false));
        assert_eq!(shows(terminal(true, &[])), (false, false));
        assert_eq!(shows(terminal(false, &[("TERM", "xterm")])), (false, false));
        let no_color = terminal(true, &[("TERM", "xterm"), ("NO_COLOR", "1")]);
        assert_eq!(shows(no_color), (true, false));
        let empty = terminal(true, &[("TERM", "xterm"), ("NO_COLOR", "")]);
        assert_eq!(shows(empty), (true, true));
    }

    #[test]
    fn an_error_has_the_colours_of_clap() {
        let text = coloured_error("error: no `a`\n  error: quoted\nhint: write it\n");
        assert_eq!(
            text,
            "\u{1b}[1m\u{1b}[31merror:\u{1b}[0m no `a`\n  error: quoted\n\u{1b}[32mhint:\u{1b}[0m write it\n"
        );
    }

    #[test]
    fn a_long_command_continues_in_further_lines() {
        let arguments = ["--model runs/a/final", "--prompt \"What is this?\"", "--image cat.png"];
        let one = command("trainer generate", &arguments, 100);
        assert_eq!(
            one,
            "  trainer generate --model runs/a/final --prompt \"What is this?\" --image cat.png\n"
        );
        let three = command("trainer generate", &arguments, 50);
        assert_eq!(
            three,
            "  trainer generate --model runs/a/final \\\n      --prompt \"What is this?\" \
             --image cat.png\n"
        );
        assert!(three.lines().all(|line| width(line) <= 50));
        assert_eq!(three.replace(" \\\n     ", ""), one);
    }

    #[test]
    fn a_long_line_is_broken_at_spaces_and_colours_take_no_columns() {
        let line =
            "12:00:00 \u{1b}[32mINFO\u{1b}[0m train loss=1.5 lr=2e-3 /a/very/long/path/of/a/file\n";
        assert_eq!(wrapped("a row  with two  spaces\n", 19), "a row  with two\n         spaces\n");
        let text = wrapped(line, 30);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "12:00:00 \u{1b}[32mINFO\u{1b}[0m train loss=1.5",
                "         lr=2e-3",
                "         /a/very/long/path/of/a/file"
            ]
        );
        assert!(matches!(wrapped(line, 80), Cow::Borrowed(_)));
        assert!(text.ends_with('\n'));
        assert_eq!(width("\u{4e2d}\u{6587}"), 4);
    }
}
