//! `trainer generate --chat`: reads turns and commands from stdin until its end.

use super::super::escaped::escaped;
use super::super::failure::{Exit, Failure};
use super::super::report;
use super::super::stdout::is_stdout_error;
use super::Session;
use super::conversation::Conversation;
use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::path::Path;

const COMMANDS: &str = "`/image FILE`, `/video PATH`, `/reset`, `/help`, `/exit`";

/// A line of the user.
#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Image(&'a Path),
    Video(&'a Path),
    Reset,
    Help,
    Exit,
    /// Text of a turn.
    Text(&'a str),
    /// Only white space.
    Empty,
}

/// The text of a line.
fn text(line: &[u8]) -> Result<&str, Failure> {
    str::from_utf8(line).map_err(|_| {
        let found = String::from_utf8_lossy(line);
        let message = format!("the line is not UTF-8: `{}`", found.trim_end());
        Failure::new(Exit::Usage, message).hint("set the terminal, or the file, to UTF-8")
    })
}

/// Reads a line. A command is a word that begins with `/` at the start of the line.
fn parse(line: &str) -> Result<Line<'_>, Failure> {
    let line = line.trim_end();
    if line.trim_start().is_empty() {
        return Ok(Line::Empty);
    }
    if !line.starts_with('/') {
        return Ok(Line::Text(line.trim_start()));
    }
    let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim_start();
    let wrong = |problem: String| {
        let hint = format!("the commands are {COMMANDS}; a turn may begin with a space and `/`");
        Failure::new(Exit::Usage, problem).hint(hint)
    };
    match (command, rest) {
        ("/image" | "/video", "") => Err(wrong(format!("`{command}` needs a path"))),
        ("/image", path) => Ok(Line::Image(Path::new(path))),
        ("/video", path) => Ok(Line::Video(Path::new(path))),
        ("/reset", "") => Ok(Line::Reset),
        ("/help", "") => Ok(Line::Help),
        ("/exit", "") => Ok(Line::Exit),
        ("/reset" | "/help" | "/exit", _) => Err(wrong(format!("`{command}` takes no argument"))),
        _ => Err(wrong(format!("unknown command `{command}`"))),
    }
}

fn help() -> String {
    format!("Commands: {COMMANDS}. Ctrl-C ends an answer, Ctrl-D the conversation.\n")
}

/// Answers turns until `/exit` or the end of stdin. On a terminal, an error is printed, and
/// the next line is read; otherwise it ends the command.
pub(super) fn run(session: &mut Session<'_>, mut conversation: Conversation) -> anyhow::Result<()> {
    let is_terminal = io::stdin().is_terminal();
    if is_terminal {
        note(&help());
    }
    let mut line = Vec::new();
    loop {
        if is_terminal {
            note("> ");
        }
        line.clear();
        if io::stdin().lock().read_until(b'\n', &mut line)? == 0 {
            if is_terminal {
                note("\n");
            }
            return Ok(());
        }
        match take(session, &mut conversation, &line) {
            Ok(Next::Line) => {}
            Ok(Next::End) => return Ok(()),
            Err(error) if is_terminal && !error.chain().any(is_stdout_error) => {
                note(&report::text(&error));
            }
            Err(error) => return Err(error),
        }
    }
}

enum Next {
    Line,
    End,
}

fn take(
    session: &mut Session<'_>,
    conversation: &mut Conversation,
    line: &[u8],
) -> anyhow::Result<Next> {
    match parse(text(line)?)? {
        Line::Empty => {}
        Line::Image(path) => conversation.add_image(path)?,
        Line::Video(path) => conversation.add_video(path)?,
        Line::Reset => conversation.reset(),
        Line::Help => note(&help()),
        Line::Exit => return Ok(Next::End),
        Line::Text(text) => {
            conversation.add_user_turn(text);
            match session.answer(conversation) {
                Ok(answer) => conversation.answered(answer),
                Err(error) => {
                    conversation.take_back();
                    return Err(error);
                }
            }
        }
    }
    Ok(Next::Line)
}

/// Writes to stderr: stdout has answers only.
fn note(text: &str) {
    // A conversation must not end because stderr is closed.
    let _ = io::stderr().lock().write_all(escaped(text).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_turns_or_commands() {
        let of = |line| parse(line).unwrap();
        assert_eq!(of("What is 1/2?\r\n"), Line::Text("What is 1/2?"));
        assert_eq!(of(" /etc is a folder\n"), Line::Text("/etc is a folder"));
        assert_eq!(of("/image a cat.png \n"), Line::Image(Path::new("a cat.png")));
        assert_eq!(of("/video  frames\n"), Line::Video(Path::new("frames")));
        assert_eq!(
            [of("/reset\n"), of("/help"), of("/exit"), of(" \t\n")],
            [Line::Reset, Line::Help, Line::Exit, Line::Empty]
        );
    }

    #[test]
    fn a_wrong_command_is_not_sent_as_a_turn() {
        for (line, problem) in [
            ("/imaeg cat.png\n", "unknown command `/imaeg`"),
            ("/image\n", "`/image` needs a path"),
            ("/reset all\n", "`/reset` takes no argument"),
        ] {
            assert_eq!(parse(line).unwrap_err().to_string(), problem);
        }
    }
}
