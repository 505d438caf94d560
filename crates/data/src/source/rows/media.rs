//! The images and videos of a row, in the order of their appearance, and their placeholders.

use serde_json::{Map, Value};

use super::super::error::SampleFault;
use super::super::texts::texts;
use super::context::At;
use super::limits::rate;
use super::values::{list_in_text, not_supported, one_or_more, take};
use batch::{Content, FrameRate, Medium, MediumKind, Message, Part};

/// Placeholders in a text for the next image or video that the row lists.
const PLACEHOLDERS: [(MediumKind, &str); 2] =
    [(MediumKind::Image, "<image>"), (MediumKind::Video, "<video>")];

/// Tags around the path of an image or a sound in a text, as in the formats of Qwen-VL and
/// Qwen-Audio.
const NAMED: [[&str; 2]; 2] = [["<img>", "</img>"], ["<audio>", "</audio>"]];

/// Collects the images and videos of one row while its turns are parsed.
pub(super) struct RowMedia<'a> {
    pub(super) at: &'a At<'a>,
    images: List,
    videos: List,
    media: Vec<Medium>,
    /// Frames per second of videos that give no rate themselves.
    pub(super) fps: Option<FrameRate>,
}

/// Images or videos that a row lists outside of its turns, and their placeholders.
struct List {
    kind: MediumKind,
    /// Entries without a placeholder so far.
    rest: std::vec::IntoIter<Medium>,
    /// Number of entries.
    listed: usize,
    /// Number of placeholders so far: `<image>` or `<video>` in texts, and parts without a source.
    placeholders: usize,
    /// Whether `<image>` or `<video>` is plain text.
    is_literal: bool,
}

impl List {
    /// `literal`: whether placeholders are plain text if the row lists nothing.
    fn new(kind: MediumKind, media: Option<Vec<Medium>>, literal: bool) -> Self {
        let media = media.unwrap_or_default();
        let is_literal = media.is_empty() && literal;
        let rest = media.into_iter();
        Self { kind, listed: rest.len(), rest, placeholders: 0, is_literal }
    }

    /// Takes the entry of the next placeholder; `None` if the list is used up, which is an error at
    /// the end of the row.
    fn next(&mut self) -> Option<Medium> {
        self.placeholders += 1;
        self.rest.next()
    }
}

impl<'a> RowMedia<'a> {
    /// Takes the lists of images and videos from `row`.
    pub(super) fn of_row(
        at: &'a At<'a>,
        row: &mut Map<String, Value>,
    ) -> Result<Self, SampleFault> {
        let images = listed(row, ["images", "image"], "`image` together with `images` is")?;
        let images = images.map(|(key, value)| {
            let values = one_or_more(value).into_iter().enumerate();
            let image = |(index, value)| at.image(&format!("{key}[{index}]"), value);
            values.map(|entry| image(entry).map(Medium::Image)).collect::<Result<_, _>>()
        });
        let videos = listed(row, ["videos", "video"], "`video` together with `videos` is")?;
        let fps = rate("", row)?;
        let videos = videos.map(|(key, value)| {
            // A flat list under the singular key `video` is the frames of one video, as in a part.
            let is_flat = |list: &[Value]| list.iter().all(|entry| !entry.is_array());
            let values = match value {
                Value::Array(list) if key == "video" && is_flat(&list) => vec![Value::Array(list)],
                value => one_or_more(value),
            };
            let values = values.into_iter().enumerate();
            let video = |(index, value)| at.video(&format!("{key}[{index}]"), value, fps);
            values.map(|entry| video(entry).map(Medium::Video)).collect::<Result<_, _>>()
        });
        let literal = at.parser.rules.literal_placeholders;
        Ok(Self {
            at,
            images: List::new(MediumKind::Image, images.transpose()?, literal),
            videos: List::new(MediumKind::Video, videos.transpose()?, literal),
            media: Vec::new(),
            fps,
        })
    }

    /// Splits a text at its placeholders, in one pass: the time is linear in the length of the
    /// text.
    pub(super) fn text(&mut self, text: String) -> Content {
        let (mut parts, mut end) = (Vec::new(), 0);
        for (at, _) in text.match_indices('<') {
            let Some((kind, placeholder)) = self.placeholder_at(&text[at..]) else { continue };
            if at > end {
                parts.push(Part::Text(text[end..at].to_owned()));
            }
            parts.push(self.next_of(kind));
            end = at + placeholder.len();
        }
        if parts.is_empty() {
            return Content::Text(text);
        }
        if end < text.len() {
            parts.push(Part::Text(text[end..].to_owned()));
        }
        Content::Parts(parts)
    }

    /// The placeholder at the start of `text`, unless its kind is plain text.
    fn placeholder_at(&self, text: &str) -> Option<(MediumKind, &'static str)> {
        let is_literal = |kind| match kind {
            MediumKind::Image => self.images.is_literal,
            MediumKind::Video => self.videos.is_literal,
        };
        let is_here =
            |(kind, name): &(MediumKind, &str)| text.starts_with(name) && !is_literal(*kind);
        PLACEHOLDERS.into_iter().find(is_here)
    }

    /// Returns the part for the next listed image or video.
    pub(super) fn next_of(&mut self, kind: MediumKind) -> Part {
        let list = match kind {
            MediumKind::Image => &mut self.images,
            MediumKind::Video => &mut self.videos,
        };
        self.media.extend(list.next());
        part_of(kind)
    }

    /// The position in its list of the image or video of the next placeholder.
    pub(super) fn position(&self, kind: MediumKind) -> usize {
        match kind {
            MediumKind::Image => self.images.placeholders,
            MediumKind::Video => self.videos.placeholders,
        }
    }

    /// The image or video of the last placeholder.
    pub(super) fn last(&mut self) -> Option<&mut Medium> {
        self.media.last_mut()
    }

    /// Adds a medium that a part names itself.
    pub(super) fn add(&mut self, medium: Medium) -> Part {
        let part = part_of(medium.kind());
        self.media.push(medium);
        part
    }

    /// Returns all images and videos in the order of the text. Media of a row without placeholders
    /// are put in front of the first user turn of `messages`. Fails if the numbers of placeholders
    /// and of listed media differ otherwise.
    pub(super) fn finish(self, messages: &mut [Message]) -> Result<Vec<Medium>, SampleFault> {
        let Self { at, images, videos, mut media, fps: _ } = self;
        let names_file = |[open, close]: &&[&str; 2]| {
            let mut rests = texts(messages).filter_map(|text| text.split_once(*open));
            rests.any(|(_, rest)| rest.contains(*close))
        };
        if !at.parser.rules.literal_placeholders
            && let Some([tag, _]) = NAMED.iter().find(names_file)
        {
            let what =
                "a file between tags in a text (write `<image>`, and list it in `images`) is";
            return Err(not_supported(tag, what));
        }
        // as in ms-swift, videos are put before images
        for list in [images, videos] {
            let List { kind, rest, listed, placeholders, .. } = list;
            if placeholders > listed {
                let misnamed = None;
                return Err(SampleFault::MediaMissing {
                    kind,
                    placeholders,
                    media: listed,
                    misnamed,
                });
            }
            if placeholders == listed {
                continue;
            }
            // a list next to parts with sources could be the same media again
            let has_others = media.iter().any(|medium: &Medium| medium.kind() == kind);
            if placeholders > 0 || has_others || !put_in_front(messages, &mut media, kind, rest) {
                return Err(match kind {
                    MediumKind::Image => SampleFault::ImageCount { placeholders, images: listed },
                    MediumKind::Video => SampleFault::VideoCount { placeholders, videos: listed },
                });
            }
            at.note(
                "the images or videos of a row without placeholders are put in front of its first user turn",
            );
        }
        Ok(media)
    }
}

/// Inserts media at the start of the first user turn. Returns false if there is none.
fn put_in_front(
    messages: &mut [Message],
    media: &mut Vec<Medium>,
    kind: MediumKind,
    listed: std::vec::IntoIter<Medium>,
) -> bool {
    let Some(user) = messages.iter().position(|message| message.role == "user") else {
        return false;
    };
    let is_medium = |part: &&Part| !matches!(part, Part::Text(_));
    let earlier = messages[..user].iter().map(|message| match &message.content {
        Content::Text(_) => 0,
        Content::Parts(parts) => parts.iter().filter(is_medium).count(),
    });
    let first: usize = earlier.sum();
    let mut parts = vec![part_of(kind); listed.len()];
    media.splice(first..first, listed);
    let content = &mut messages[user].content;
    match std::mem::replace(content, Content::Parts(Vec::new())) {
        Content::Text(text) if text.is_empty() => {}
        Content::Text(text) => parts.push(Part::Text(text)),
        Content::Parts(rest) => parts.extend(rest),
    }
    *content = Content::Parts(parts);
    true
}

fn part_of(kind: MediumKind) -> Part {
    match kind {
        MediumKind::Image => Part::Image,
        MediumKind::Video => Part::Video,
    }
}

/// Takes the value of one of two keys. It is an error if the row has both; `both` is the text for
/// its message.
fn listed(
    row: &mut Map<String, Value>,
    keys: [&'static str; 2],
    both: &'static str,
) -> Result<Option<(&'static str, Value)>, SampleFault> {
    let mut values = keys.map(|key| (key, list_in_text(take(row, key)))).into_iter();
    let mut given = values.by_ref().filter(|(_, value)| !value.is_null());
    match (given.next(), given.next()) {
        (Some(_), Some(_)) => Err(not_supported(keys[1], both)),
        (first, _) => Ok(first),
    }
}
