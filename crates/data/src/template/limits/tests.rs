//! Templates that would hang, use up memory or overflow the stack, and long chats, which render.

use std::fs;
use std::path::Path;

use crate::template::{ChatTemplate, GenerationPrompt};
use batch::{Content, Message};

/// The template of the quickstart.
const PUBLISHED: &str = include_str!("../../../../../data/quickstart/model/chat_template.jinja");

fn compiled(source: &str) -> Result<ChatTemplate, String> {
    ChatTemplate::new(source, Vec::new()).map_err(|error| error.to_string())
}

/// The first line of each file has the expected error as a comment; the second line is hostile.
#[test]
fn hostile_templates_fail_with_their_line() {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/templates/hostile");
    let mut num_files = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let source = fs::read_to_string(&path).unwrap();
        let expected = source.lines().next().unwrap();
        let expected = expected.strip_prefix("{# ").unwrap().strip_suffix(" -#}").unwrap();
        let found = compiled(&source).err().unwrap_or_default();
        assert!(found.contains(expected), "{}: {found}", path.display());
        let has_line = found.contains("(line 2)");
        assert!(has_line || expected.contains("recursion"), "{}: {found}", path.display());
        num_files += 1;
    }
    assert!(num_files >= 30, "{num_files}");
}

#[test]
fn a_long_error_is_cut() {
    let source = format!("{{{{ raise_exception('{}') }}}}", "x".repeat(10_000));
    assert!(compiled(&source).unwrap_err().len() < 400);
}

#[test]
fn chats_with_many_turns_or_long_texts_render() {
    let template = compiled(PUBLISHED).unwrap();
    let message = |role: &str, text: &str| Message::new(role, Content::Text(text.to_owned()));
    let short: Vec<Message> = (0..1500)
        .flat_map(|_| [message("user", "question"), message("assistant", "answer")])
        .collect();
    let chat = template.render_with_answers(&short, None, |_| true).unwrap();
    assert_eq!(chat.answers.len(), 1500);
    for answer in &chat.answers {
        assert_eq!(&chat.text[answer.range.clone()], "answer<|im_end|>");
    }
    let long = "word ".repeat(1_000_000);
    let messages = [message("user", &long), message("assistant", &long)];
    let text = template.render(&messages, None, GenerationPrompt::Omit).unwrap();
    assert!(text.len() > 10_000_000);
}
