//! `data.train[].columns`: the columns of a data set under our names.

use serde_json::Value;
use settings::section;

use super::raw_row::RawRow;

/// Keys that would give a row other turns than those of [`ColumnNames`].
const OTHER_TURNS: [&str; 9] = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "query",
    "response",
    "instruction",
    "input",
    "output",
];

/// Names of the columns of a data set whose rows have another form.
#[section]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnNames {
    /// The question: a text. Without it, the user turn has the media alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// A text that follows the question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query: Option<String>,
    /// The answer: a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<String>,
    /// The turns, instead of `prompt` and `response`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<String>,
    /// Earlier pairs of questions and answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<String>,
    /// The system turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// Definitions of tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<String>,
    /// An image or a list of images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<String>,
    /// A video or a list of videos.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub videos: Option<String>,
}

impl ColumnNames {
    /// Our key and the column of each name that is given.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let Self { prompt, query, response, messages, history, system, tools, images, videos } =
            self;
        let pairs = [
            ("instruction", prompt),
            ("input", query),
            ("output", response),
            ("messages", messages),
            ("history", history),
            ("system", system),
            ("tools", tools),
            ("images", images),
            ("videos", videos),
        ];
        pairs.into_iter().filter_map(|(ours, theirs)| Some((ours, theirs.as_deref()?)))
    }

    /// Names that contradict each other: the key of the data set, its value, and what is expected.
    pub(crate) fn fault(&self) -> Option<(&'static str, String, &'static str)> {
        let is_asked = self.prompt.is_some() || self.query.is_some();
        match (&self.messages, &self.response) {
            (Some(name), response) if response.is_some() || is_asked => {
                let expected = "no `prompt`, `query` or `response` in addition";
                Some(("columns.messages", name.clone(), expected))
            }
            (None, None) => {
                let expected = "the column of the answers, or else `messages`";
                Some(("columns.response", "missing".to_owned(), expected))
            }
            _ => None,
        }
    }

    /// A list of images or videos that is dropped because a named column replaces it.
    pub(super) fn replaced(&self, row: &RawRow) -> Option<&'static str> {
        let is_named = |key: &str| self.pairs().any(|(_, theirs)| theirs == key);
        let is_there = |theirs: &str| row.object.get(theirs).is_some_and(|value| !value.is_null());
        let pairs = self.pairs().filter(|(_, theirs)| is_there(theirs));
        let keys = pairs.flat_map(|(ours, _)| match ours {
            "images" => &["images", "image"][..],
            "videos" => &["videos", "video"],
            _ => &[],
        });
        let mut keys = keys.filter(|key| !is_named(key));
        let is_given = |value: &Value| !value.is_null() && *value != Value::Array(Vec::new());
        keys.find(|key| row.object.get(**key).is_some_and(is_given)).copied()
    }

    /// Renames the columns of a row. Other columns stay, except [`OTHER_TURNS`].
    pub(super) fn apply(&self, row: &mut RawRow) {
        let object = &mut row.object;
        let named: Vec<_> = self
            .pairs()
            .filter_map(|(ours, theirs)| Some((ours, object.get(theirs)?.clone())))
            .filter(|(_, value)| !value.is_null())
            .collect();
        for (_, theirs) in self.pairs() {
            object.shift_remove(theirs);
        }
        if self.messages.is_none() {
            for other in OTHER_TURNS {
                object.shift_remove(other);
            }
            object.insert("instruction".to_owned(), "".into());
        }
        for (ours, value) in named {
            if ours == "images" || ours == "videos" {
                object.shift_remove(&ours[..5]); // the other spelling, `image` or `video`
            }
            object.insert(ours.to_owned(), value);
        }
    }
}
