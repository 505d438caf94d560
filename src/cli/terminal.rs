//! What stderr can show: colours, bars, and its width; stdout, whose errors can be distinguished
//! from errors of other files; and control characters as text, so that they cannot control the
//! terminal.

use clap::builder::styling::{AnsiColor, Style};
use std::borrow::Cow;
use std::error::Error;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};

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
    /// Colours can be shown and are wanted: not with `NO_COLOR`, but in a file with `CLICOLOR_FORCE`.
    pub(super) colours: bool,
}

impl Terminal {
    /// The properties of stderr of this process.
    pub(super) fn stderr() -> Self {
        Self::of(io::stderr().is_terminal(), |name| std::env::var_os(name))
    }

    /// `variable` looks up the environment. The rules are those of clap, <https://no-color.org> and
    /// <https://bixense.com/clicolors>.
    fn of(is_tty: bool, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let is_dumb = variable("TERM").is_none_or(|term| term == "dumb");
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let is_off = given("CLICOLOR").is_some_and(|value| value == "0");
        let is_forced = given("CLICOLOR_FORCE").is_some_and(|value| value != "0");
        let has_cursor = is_tty && !is_dumb;
        let colours = given("NO_COLOR").is_none() && (is_forced || has_cursor && !is_off);
        Self { is_tty, has_cursor, colours }
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

/// Fields of the line of a step, the first to be left out first.
const LESS_IMPORTANT: [&str; 4] = ["epoch=", "wait=", "grad=", "lr="];

/// The line of a step in at most `columns` columns, if it is longer: without its less important
/// fields, which `train.log` and `metrics.jsonl` have. Other lines stay.
pub(super) fn fitted(line: &str, columns: usize) -> Cow<'_, str> {
    if width(line) <= columns || !without_colours(line).contains(" train step=") {
        return Cow::Borrowed(line);
    }
    let mut words: Vec<&str> = line.trim_end_matches('\n').split(' ').collect();
    for field in LESS_IMPORTANT {
        words.retain(|word| !without_colours(word).starts_with(field));
        if width(&words.join(" ")) <= columns {
            break;
        }
    }
    Cow::Owned(words.join(" ") + "\n")
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
    let columns = |c: char| match c {
        '\n' => 0,
        '\u{1100}'.. => 2,
        _ => 1,
    };
    without_colours(text).chars().map(columns).sum()
}

/// The beginning of a text, at most `columns` columns wide.
pub(super) fn shortened(text: &str, columns: usize) -> String {
    let mut left = columns;
    let fits = |c: &char| {
        let columns = width(c.encode_utf8(&mut [0; 4]));
        let fits = columns <= left;
        left = left.saturating_sub(columns);
        fits
    };
    text.chars().take_while(fits).collect()
}

/// The text without the codes that set colours.
fn without_colours(text: &str) -> String {
    let mut in_code = false;
    let is_shown = |c: &char| {
        let is_code = in_code || *c == '\u{1b}';
        in_code = is_code && *c != 'm';
        !is_code
    };
    text.chars().filter(is_shown).collect()
}

/// A failed write to stdout.
#[derive(Debug, thiserror::Error, fault::Fault)]
#[error("cannot write to stdout")]
#[fault(
    exit = CannotWrite,
    hint = "free space on the disk that stdout is redirected to, or redirect it to another disk"
)]
pub(super) struct StdoutError(#[source] io::Error);

/// Locked stdout; [`is_stdout_error`] recognises its errors.
#[derive(Debug)]
pub(super) struct Stdout(io::StdoutLock<'static>);

pub(super) fn stdout() -> Stdout {
    Stdout(io::stdout().lock())
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(wrap)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(wrap)
    }
}

/// Marks an error as an error of stdout.
pub(super) fn wrap(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), StdoutError(error))
}

impl StdoutError {
    pub(super) fn find_in<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e Self> {
        error.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref()
    }
}

/// Whether the reader of stdout closed the pipe (`trainer inspect .. | head`), which is not an
/// error.
pub(super) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut errors = error.chain().filter_map(StdoutError::find_in);
    errors.any(|StdoutError(cause)| cause.kind() == io::ErrorKind::BrokenPipe)
}

pub(super) fn is_stdout_error(error: &(dyn Error + 'static)) -> bool {
    StdoutError::find_in(error).is_some()
}

/// The codes with which the log sets colours: styles that hide nothing.
const COLOURS: [&str; 11] =
    ["[0m", "[1m", "[2m", "[3m", "[31m", "[32m", "[33m", "[34m", "[35m", "[36m", "[37m"];

/// Returns `text` with its control characters written as `\u{1b}`. Ends of lines and tabs stay.
pub(super) fn escaped(text: &str) -> Cow<'_, str> {
    escape(text, |c, _| matches!(c, '\n' | '\t'))
}

/// [`escaped`] for a log line, which stays one line whatever its fields contain. With `colours`, the
/// codes of colours stay.
pub(super) fn escaped_line(line: &str, colours: bool) -> Cow<'_, str> {
    let end = line.len() - usize::from(line.ends_with('\n'));
    escape(line, |c, at| {
        let is_colour = || COLOURS.iter().any(|code| line[at + 1..].starts_with(code));
        at == end || c == '\t' || (colours && c == '\u{1b}' && is_colour())
    })
}

/// [`escaped`] for a part of a message: lines after the first one begin with a space, as in excerpts
/// of files, so that no name in it can look like a line of its own.
pub(super) fn escaped_part(text: &str) -> Cow<'_, str> {
    escape(text, |c, at| c == '\t' || (c == '\n' && text[at + 1..].starts_with([' ', '\n'])))
}

/// `stays` receives a character and its place.
fn escape(text: &str, stays: impl Fn(char, usize) -> bool) -> Cow<'_, str> {
    // Besides control characters: ends of lines and of paragraphs, and changes of direction.
    let is_raw = |at: usize, c: char| {
        (c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'))
            && !stays(c, at)
    };
    if !text.char_indices().any(|(at, c)| is_raw(at, c)) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for (at, c) in text.char_indices() {
        if is_raw(at, c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
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
    fn the_variables_for_colours_have_their_usual_meaning() {
        let colours = |is_tty, variables: &[(&str, &str)]| {
            terminal(is_tty, &[&[("TERM", "xterm")], variables].concat()).colours
        };
        // without a terminal: forced only
        assert!(colours(false, &[("CLICOLOR_FORCE", "1")]));
        assert!(!colours(false, &[("CLICOLOR", "1")]));
        for off in ["0", ""] {
            assert!(!colours(false, &[("CLICOLOR_FORCE", off)]));
            assert!(colours(true, &[("CLICOLOR_FORCE", off)]));
        }
        // `NO_COLOR` counts more than the others, whatever its value is
        for value in ["1", "0"] {
            assert!(!colours(true, &[("NO_COLOR", value), ("CLICOLOR_FORCE", "1")]));
        }
        assert!(!colours(true, &[("CLICOLOR", "0")]) && colours(true, &[("CLICOLOR", "1")]));
        assert!(colours(true, &[("CLICOLOR", "0"), ("CLICOLOR_FORCE", "1")]));
        let forced = terminal(false, &[("CLICOLOR_FORCE", "1")]);
        assert!(forced.colours && !forced.has_cursor, "colours, and no bars in a file");
    }

    #[test]
    fn the_line_of_a_step_leaves_out_fields_until_it_fits() {
        let line = "12:00:00 train step=123456 epoch=12.50 loss=12.2500 grad=123.45 lr=1.00e-5 \
                    tok/s=123456 wait=50% rejected=3\n";
        assert_eq!(
            fitted(line, 90),
            "12:00:00 train step=123456 loss=12.2500 grad=123.45 lr=1.00e-5 tok/s=123456 rejected=3\n"
        );
        let narrow = "12:00:00 train step=123456 loss=12.2500 lr=1.00e-5 tok/s=123456 rejected=3\n";
        assert_eq!(fitted(line, 80), narrow);
        let colours = |line: &str| {
            line.replace('=', "\u{1b}[0m\u{1b}[2m=\u{1b}[0m").replace(" s", " \u{1b}[3ms")
        };
        assert_eq!(fitted(&colours(line), 80), colours(narrow));
        assert!(matches!(fitted(line, 120), Cow::Borrowed(same) if same == line));
        let other = line.replace("train step", "checkpoint step");
        assert_eq!(fitted(&other, 80), other);
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
        assert_eq!(shortened("a\u{4e2d}\u{6587}b", 4), "a\u{4e2d}");
        assert_eq!(shortened("abc", 4), "abc");
    }

    #[test]
    fn control_characters_are_shown_and_all_other_text_stays() {
        let text = "\u{1b}[2J\u{1b}[31mred\r\u{7}\u{9b}2J\u{7f}";
        let shown = r"\u{1b}[2J\u{1b}[31mred\r\u{7}\u{9b}2J\u{7f}";
        assert_eq!(escaped(text), shown);
        assert_eq!(escaped("\u{202e}fdp.exe"), r"\u{202e}fdp.exe");
        let plain = "two\nlines\t\u{4e2d} \u{1f4bb} \\u{1b}";
        assert!(matches!(escaped(plain), Cow::Borrowed(same) if same == plain));
    }

    #[test]
    fn a_log_line_stays_one_line_and_keeps_its_colours_only() {
        let line = "\u{1b}[33m WARN\u{1b}[0m \u{1b}[8mhidden\u{1b}]0;title\u{7}";
        let shown = "\u{1b}[33m WARN\u{1b}[0m \\u{1b}[8mhidden\\u{1b}]0;title\\u{7}";
        assert_eq!(escaped_line(line, true), shown);
        let forged = "no file `a\nhint: b`\n   |\n\n 2 | c: d";
        assert_eq!(escaped_part(forged), forged.replacen('\n', "\\n", 1));
        let forged = "INFO data file=a\n12:00:00 INFO finished\u{2028}\r\n\n";
        let shown = "INFO data file=a\\n12:00:00 INFO finished\\u{2028}\\r\\n\n";
        assert_eq!(escaped_line(forged, false), shown);
    }
}
