//! `trainer generate --chat`: reads turns and commands from stdin until its end. The turns of a
//! conversation are a row that the encoder renders.

use super::super::error_report;
use super::super::failure::{Exit, Failure};
use super::super::terminal::{escaped, is_stdout_error};
use super::Session;
use crate::batch::{
    Content, MediaRef, MediaSource, Medium, Message, Objects, Part, Sample, SampleId, VideoLimits,
    VideoRef,
};
use crate::data::UrlConfig;
use crate::net::{UrlError, UrlImages, for_messages, is_web_address};
use std::fs;
use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const COMMANDS: &str = "`/image FILE`, `/video PATH`, `/reset`, `/help`, `/exit`";

#[derive(Debug, PartialEq, Eq)]
enum UserInput<'a> {
    Image(&'a Path),
    Video(&'a Path),
    Reset,
    Help,
    Exit,
    Text(&'a str),
    /// Only white space.
    Empty,
}

fn text(line: &[u8]) -> Result<&str, Failure> {
    str::from_utf8(line).map_err(|_| {
        let found = String::from_utf8_lossy(line);
        let message = format!("the line is not UTF-8: `{}`", found.trim_end());
        Failure::new(Exit::Usage, message).hint("set the terminal, or the file, to UTF-8")
    })
}

/// Reads a line. A command is a word that begins with `/` at the start of the line.
fn parse(line: &str) -> Result<UserInput<'_>, Failure> {
    let line = line.trim_end();
    if line.trim_start().is_empty() {
        return Ok(UserInput::Empty);
    }
    if !line.starts_with('/') {
        return Ok(UserInput::Text(line.trim_start()));
    }
    let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim_start();
    let wrong = |problem: String| {
        let hint = format!("the commands are {COMMANDS}; a turn may begin with a space and `/`");
        Failure::new(Exit::Usage, problem).hint(hint)
    };
    match (command, rest) {
        ("/image" | "/video", "") => Err(wrong(format!("`{command}` needs a path"))),
        ("/image", path) => Ok(UserInput::Image(Path::new(path))),
        ("/video", path) => Ok(UserInput::Video(Path::new(path))),
        ("/reset", "") => Ok(UserInput::Reset),
        ("/help", "") => Ok(UserInput::Help),
        ("/exit", "") => Ok(UserInput::Exit),
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
                note(&error_report::text(&error));
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
        UserInput::Empty => {}
        UserInput::Image(path) => conversation.add_image(path)?,
        UserInput::Video(path) => conversation.add_video(path)?,
        UserInput::Reset => conversation.reset(),
        UserInput::Help => note(&help()),
        UserInput::Exit => return Ok(Next::End),
        UserInput::Text(text) => {
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

/// A system message and turns. The row that it becomes is always rendered as a whole.
pub(super) struct Conversation {
    messages: Vec<Message>,
    media: Vec<Medium>,
    /// Media that belong to the next turn of the user.
    next: Vec<Medium>,
    is_chat: bool,
}

impl Conversation {
    pub(super) fn new(system: Option<String>, is_chat: bool) -> Self {
        let system = system.map(|text| Message::new("system", Content::Text(text)));
        let messages = system.into_iter().collect();
        Self { messages, media: Vec::new(), next: Vec::new(), is_chat }
    }

    pub(super) fn is_chat(&self) -> bool {
        self.is_chat
    }

    /// Adds an image, a file or a URL, to the next turn of the user.
    pub(super) fn add_image(&mut self, path: &Path) -> anyhow::Result<()> {
        let url = path.to_str().filter(|text| is_web_address(text));
        let source = if let Some(url) = url {
            MediaSource::Bytes(download(url)?.into())
        } else {
            let (root, path) = found(path)?;
            MediaSource::File { root, path }
        };
        self.next.push(Medium::Image(MediaRef::from(source)));
        Ok(())
    }

    /// Adds a video to the next turn of the user: a file, or a folder of frames.
    pub(super) fn add_video(&mut self, path: &Path) -> anyhow::Result<()> {
        let (root, path) = found(path)?;
        let limits = VideoLimits::default();
        let video = if path.is_dir() {
            VideoRef::Frames { frames: frames(&path)?, fps: None, limits }
        } else {
            VideoRef::File { root, path, fps: None, limits }
        };
        self.next.push(Medium::Video(video));
        Ok(())
    }

    pub(super) fn add_user_turn(&mut self, text: &str) {
        let part = |medium: &Medium| match medium {
            Medium::Image(_) => Part::Image,
            Medium::Video(_) => Part::Video,
        };
        let mut parts: Vec<Part> = self.next.iter().map(part).collect();
        parts.push(Part::Text(text.to_owned()));
        self.media.append(&mut self.next);
        self.messages.push(Message::new("user", Content::Parts(parts)));
    }

    pub(super) fn answered(&mut self, text: String) {
        self.messages.push(Message::new("assistant", Content::Text(text)));
    }

    /// Removes the last turn of the user and its media, which could not be answered.
    fn take_back(&mut self) {
        let Some(Message { content: Content::Parts(parts), .. }) = self.messages.pop() else {
            return;
        };
        let media = parts.iter().filter(|part| !matches!(part, Part::Text(_))).count();
        self.media.truncate(self.media.len() - media);
    }

    /// Removes all turns, and all media.
    fn reset(&mut self) {
        self.messages.retain(|message| message.role == "system");
        self.media.clear();
        self.next.clear();
    }

    /// The row whose last, empty turn is to be generated.
    pub(super) fn sample(&self) -> Sample {
        let mut messages = self.messages.clone();
        messages.push(Message::new("assistant", Content::Text(String::new())));
        Sample {
            id: SampleId { file: Path::new("--prompt").into(), line: 1 },
            messages,
            media: self.media.clone(),
            tools: None,
            objects: Objects::default(),
        }
    }
}

/// The bytes of an image by URL, which are not kept.
fn download(url: &str) -> Result<Vec<u8>, Failure> {
    let limits = UrlConfig::default().limits().expect("valid defaults");
    let images = UrlImages::new(Path::new(""), limits).map_err(UrlError::from);
    images.and_then(|images| images.download(url)).map_err(|error| {
        let message = format!("cannot download `{}`: {error}", for_messages(url));
        Failure::new(Exit::Data, message)
            .hint("check the address, or download the image and give its path")
    })
}

/// The folder and the path of a file that exists.
fn found(path: &Path) -> anyhow::Result<(Arc<Path>, PathBuf)> {
    let path = path.canonicalize().map_err(|error| cannot_read(path, &error))?;
    Ok((path.parent().unwrap_or(Path::new("/")).into(), path))
}

fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    let message = format!("cannot read `{}`: {error}", path.display());
    Failure::new(Exit::Data, message).hint("check the path")
}

/// The files of a folder in the order of their names.
fn frames(folder: &Path) -> anyhow::Result<Vec<MediaRef>> {
    let read = || -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
    };
    let mut paths = read().map_err(|error| cannot_read(folder, &error))?;
    paths.retain(|path| path.is_file());
    paths.sort();
    if paths.is_empty() {
        let message = format!("the folder `{}` has no files", folder.display());
        let hint = "name a video file, or a folder of frames";
        return Err(Failure::new(Exit::Data, message).hint(hint).into());
    }
    let root: Arc<Path> = folder.into();
    let frame = |path| MediaRef::from(MediaSource::File { root: Arc::clone(&root), path });
    Ok(paths.into_iter().map(frame).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_turns_or_commands() {
        let of = |line| parse(line).unwrap();
        assert_eq!(of("What is 1/2?\r\n"), UserInput::Text("What is 1/2?"));
        assert_eq!(of(" /etc is a folder\n"), UserInput::Text("/etc is a folder"));
        assert_eq!(of("/image a cat.png \n"), UserInput::Image(Path::new("a cat.png")));
        assert_eq!(of("/video  frames\n"), UserInput::Video(Path::new("frames")));
        assert_eq!(
            [of("/reset\n"), of("/help"), of("/exit"), of(" \t\n")],
            [UserInput::Reset, UserInput::Help, UserInput::Exit, UserInput::Empty]
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

    fn roles(conversation: &Conversation) -> Vec<String> {
        conversation.sample().messages.into_iter().map(|message| message.role).collect()
    }

    #[test]
    fn a_turn_that_could_not_be_answered_leaves_with_its_media_only() {
        let image = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/data/digits/1400.png");
        let mut conversation = Conversation::new(Some("Be brief.".to_owned()), true);
        conversation.add_image(Path::new(image)).unwrap();
        conversation.add_user_turn("What is this?");
        conversation.answered("A digit.".to_owned());
        let before = conversation.sample();
        conversation.add_image(Path::new(image)).unwrap();
        conversation.add_image(Path::new(image)).unwrap();
        conversation.add_user_turn("And these?");
        assert_eq!(conversation.sample().media.len(), 3);
        conversation.take_back();
        assert_eq!(conversation.sample(), before);
    }

    #[test]
    fn a_reset_leaves_the_system_message() {
        let mut conversation = Conversation::new(Some("Be brief.".to_owned()), true);
        conversation.add_user_turn("Hello");
        conversation.answered("Hi".to_owned());
        assert_eq!(roles(&conversation), ["system", "user", "assistant", "assistant"]);
        conversation.reset();
        assert_eq!(roles(&conversation), ["system", "assistant"]);
    }

    #[test]
    fn a_folder_is_a_video_whose_frames_are_ordered_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b.png", "a.png", "c.png"] {
            std::fs::File::create(folder.path().join(name)).unwrap();
        }
        let mut conversation = Conversation::new(None, false);
        conversation.add_video(folder.path()).unwrap();
        conversation.add_user_turn("What happens?");
        let media = conversation.sample().media;
        let [Medium::Video(VideoRef::Frames { frames, .. })] = &media[..] else {
            panic!("{media:?}")
        };
        let name = |frame: &MediaRef| match &frame.source {
            MediaSource::File { path, .. } => path.file_name().unwrap().to_owned(),
            other => panic!("{other:?}"),
        };
        assert_eq!(frames.iter().map(name).collect::<Vec<_>>(), ["a.png", "b.png", "c.png"]);
    }
}
