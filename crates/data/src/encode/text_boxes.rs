//! Boxes that the texts of a row write themselves, in the forms of Qwen: `"bbox_2d": [x1, y1, x2,
//! y2]`, `"point_2d": [x, y]`, and `(x1,y1),(x2,y2)` between special tokens, or of InternVL:
//! `<box>[[x1, y1, x2, y2]]</box>`. Their numbers are trained as they are, so a wrong unit is
//! reported.

use std::collections::BTreeSet;

use super::Encoder;
use super::grounding::{BOX_MARKS, BOX_TAGS, SIDE};
use crate::media::BoxForm;
use crate::source::texts;
use batch::Sample;
use fault::Fault;
use serde_json::Value;

/// Keys of a box and of a point in a text, between quotes.
const KEYS: [&str; 2] = ["bbox_2d", "point_2d"];

/// What is wrong with boxes in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Fault)]
#[fault(exit = None)]
pub enum BoxFault {
    /// Fractions of the image, where the model writes whole numbers.
    #[fault(hint = UNIT)]
    Fractions,
    /// Not inside of any image or video of the row.
    #[fault(hint = UNIT)]
    Outside,
    /// The corners of a box are swapped.
    #[fault(hint = "a box is `[x1, y1, x2, y2]` with x1 < x2 and y1 < y2")]
    Swapped,
    /// The corners of a box have the same x or y.
    #[fault(hint = "a box is `[x1, y1, x2, y2]` with x1 < x2 and y1 < y2")]
    NoArea,
}

/// Hint for numbers in another unit than that of the model.
const UNIT: &str = "the model writes thousandths of the sides (Qwen2.5-VL: pixels of the resized image); `objects` with `<bbox>` converts boxes";

impl BoxFault {
    /// What a row has, for a message.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Fractions => "have boxes with fractions in a text",
            Self::Outside => "have boxes outside of the image in a text",
            Self::Swapped => "have boxes with swapped corners in a text",
            Self::NoArea => "have boxes without an area in a text",
        }
    }
}

impl Encoder {
    /// What is wrong with the boxes that the texts of a row write themselves. If the model writes
    /// pixels, reads the headers of the media of a row that has a box.
    pub fn box_faults(&self, sample: &Sample) -> BTreeSet<BoxFault> {
        let calls = sample.messages.iter().filter_map(|message| message.tool_calls.as_ref());
        let calls: Vec<String> = calls.map(Value::to_string).collect();
        let lists = texts(&sample.messages).chain(&calls).flat_map(|text| {
            let of_key = |key| text.match_indices(key).map(|(at, key)| &text[at + key.len()..]);
            KEYS.into_iter().flat_map(of_key).flat_map(numbers).chain(marked_boxes(text))
        });
        let lists: Vec<Vec<f64>> = lists.collect();
        if lists.is_empty() {
            return BTreeSet::new();
        }
        let sides = self.sides_of_boxes(sample);
        lists.iter().filter_map(|numbers| fault(numbers, &sides)).collect()
    }

    /// `[width, height]`, in the unit of boxes, of everything that a box of this row may be in.
    fn sides_of_boxes(&self, sample: &Sample) -> Vec<[f64; 2]> {
        if self.media.videos.family().boxes != Some(BoxForm::Pixels) {
            return vec![[f64::from(SIDE); 2]];
        }
        // A row whose media cannot be read is reported elsewhere.
        let grids = self.media.grids(&sample.media);
        let grids = grids.unwrap_or_default();
        if grids.is_empty() {
            return vec![[f64::INFINITY; 2]];
        }
        let side = |patches: u32| f64::from(patches * self.media.images.patch_size());
        grids.iter().map(|of| [of.grid()[2], of.grid()[1]].map(side)).collect()
    }
}

/// The numbers of each box and point that is written as `(x1,y1),(x2,y2)` or `(x,y)` between the special
/// tokens `<|box_start|>` and `<|box_end|>`, or in a list of lists between `<box>` and `</box>`.
pub fn marked_boxes(text: &str) -> impl Iterator<Item = Vec<f64>> {
    let marked = text.split(BOX_MARKS[0]).skip(1).filter_map(|rest| {
        let (points, _) = rest.split_once(BOX_MARKS[1])?;
        let numbers = points.split(',').map(|part| part.trim_matches([' ', '(', ')']).parse());
        numbers.collect::<Result<_, _>>().ok()
    });
    let tagged = text.split(BOX_TAGS[0]).skip(1).filter_map(|rest| {
        let (lists, _) = rest.split_once(BOX_TAGS[1])?;
        serde_json::from_str::<Vec<Vec<f64>>>(lists).ok()
    });
    marked.chain(tagged.flatten())
}

/// The numbers of the box, or of each box of a list, in front of `rest`, the text after a key.
fn numbers(rest: &str) -> Vec<Vec<f64>> {
    let after_quote = rest.strip_prefix(['"', '\'']).map(str::trim_start);
    let list = after_quote.and_then(|rest| rest.strip_prefix(':')?.trim_start().strip_prefix('['));
    let mut rest = list.unwrap_or_default().trim_start();
    let is_list = rest.starts_with('[');
    let mut found = Vec::new();
    while let Some((list, after)) = rest.trim_start_matches('[').split_once(']') {
        let numbers = list.split(',').map(|number| number.trim().parse());
        let Ok(numbers) = numbers.collect::<Result<_, _>>() else { break };
        found.push(numbers);
        let next = after.trim_start().strip_prefix(',').map(str::trim_start);
        match next.filter(|next| is_list && next.starts_with('[')) {
            Some(next) => rest = next,
            None => break,
        }
    }
    found
}

/// The fault of a box or point in one of the images with these `[width, height]`.
fn fault(numbers: &[f64], sides: &[[f64; 2]]) -> Option<BoxFault> {
    let is_fraction = |number: &f64| (0.0..=1.0).contains(number);
    if numbers.iter().all(is_fraction) && numbers.iter().any(|number| number.fract() != 0.0) {
        return Some(BoxFault::Fractions);
    }
    let is_inside = |[width, height]: &[f64; 2]| {
        let limits = [*width, *height].into_iter().cycle();
        numbers.iter().zip(limits).all(|(number, limit)| (0.0..=limit).contains(number))
    };
    if !sides.iter().any(is_inside) {
        return Some(BoxFault::Outside);
    }
    let [x1, y1, x2, y2] = numbers[..] else { return None };
    match (x1 > x2 || y1 > y2, x1 == x2 || y1 == y2) {
        (true, _) => Some(BoxFault::Swapped),
        (_, true) => Some(BoxFault::NoArea),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_between_special_tokens_are_read() {
        let text = "<|box_start|>(1,2),(30, 4.5)<|box_end|>, <|box_start|>(7,8)<|box_end|>, \
                    <|box_start|>a box<|box_end|>, <|box_start|>(1,2),(3";
        let found: Vec<_> = marked_boxes(text).collect();
        assert_eq!(found, [vec![1.0, 2.0, 30.0, 4.5], vec![7.0, 8.0]]);
        let text = "<box>[[1, 2, 30, 4.5], [7, 8]]</box> <box>[1, 2]</box> <box>a</box> <box>[[1]]";
        let found: Vec<_> = marked_boxes(text).collect();
        assert_eq!(found, [vec![1.0, 2.0, 30.0, 4.5], vec![7.0, 8.0]]);
    }

    #[test]
    fn boxes_of_another_unit_and_boxes_without_an_area_are_found() {
        let thousandths = [[1000.0; 2]];
        let pixels = [[1288.0, 28.0], [56.0, 84.0]];
        for (list, in_thousandths, in_pixels) in [
            (": [1, 2, 3, 4]", None, None),
            (":[0, 0, 1, 1]", None, None),
            (": [0.1, 0.2, 0.5, 1]", Some(BoxFault::Fractions), Some(BoxFault::Fractions)),
            (": [0.5, 0.5]", Some(BoxFault::Fractions), Some(BoxFault::Fractions)),
            (": [1, 2, 1001, 4]", Some(BoxFault::Outside), None),
            (": [1, 2, 1000, 4]", None, None),
            (" : [1001, 4]", Some(BoxFault::Outside), None),
            // each corner is inside of an image, and no image has both
            (": [1000, 2, 1001, 29]", Some(BoxFault::Outside), Some(BoxFault::Outside)),
            (": [56, 84]", None, None),
            (": [57, 84]", None, Some(BoxFault::Outside)),
            (": [-1, 2, 3, 4]", Some(BoxFault::Outside), Some(BoxFault::Outside)),
            (": [3, 2, 1, 4]", Some(BoxFault::Swapped), Some(BoxFault::Swapped)),
            (": [1, 2, 1, 4]", Some(BoxFault::NoArea), Some(BoxFault::NoArea)),
        ] {
            for list in
                [format!("\"{list}"), format!("'{}", list.replace('[', "[[").replace(']', "]]"))]
            {
                let numbers = &numbers(&list)[..];
                let [numbers] = numbers else { panic!("{list}: {numbers:?}") };
                assert_eq!(fault(numbers, &thousandths), in_thousandths, "{list}");
                assert_eq!(fault(numbers, &pixels), in_pixels, "{list}");
            }
        }
        assert_eq!(numbers("\": [[1, 2], [3, 4]], [5]"), [[1.0, 2.0], [3.0, 4.0]]);
        for text in ["\": [1, 2", "\": [a, b, c, d]", "\"; [0.5, 0.5]", ": [1, 2]"] {
            assert_eq!(numbers(text), Vec::<Vec<f64>>::new(), "{text}");
        }
    }
}
