//! The texts of messages, in the order in which placeholders count.

use batch::{Content, Message, Part};

/// Placeholder in a text for the next box that the row lists.
pub(crate) const BOX_PLACEHOLDER: &str = "<bbox>";
/// Placeholder in a text for the next name of an object that the row lists.
pub(crate) const NAME_PLACEHOLDER: &str = "<ref-object>";

/// The thoughts and the contents of the messages, in order.
pub fn texts(messages: &[Message]) -> impl Iterator<Item = &String> {
    messages.iter().flat_map(|message| {
        let (whole, parts) = match &message.content {
            Content::Text(text) => (Some(text), [].as_slice()),
            Content::Parts(parts) => (None, parts.as_slice()),
        };
        let parts = parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text),
            Part::Image | Part::Video => None,
        });
        message.reasoning_content.iter().chain(whole).chain(parts)
    })
}

/// [`texts`], to be changed.
pub(crate) fn texts_mut(messages: &mut [Message]) -> impl Iterator<Item = &mut String> {
    messages.iter_mut().flat_map(|message| {
        let (whole, parts) = match &mut message.content {
            Content::Text(text) => (Some(text), [].as_mut_slice()),
            Content::Parts(parts) => (None, parts.as_mut_slice()),
        };
        let parts = parts.iter_mut().filter_map(|part| match part {
            Part::Text(text) => Some(text),
            Part::Image | Part::Video => None,
        });
        message.reasoning_content.iter_mut().chain(whole).chain(parts)
    })
}
