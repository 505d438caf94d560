//! Boxes that the texts of a row write themselves, in the form of Qwen: `"bbox_2d": [x1, y1, x2,
//! y2]` and `"point_2d": [x, y]`. Their numbers are trained as they are, so a wrong unit is
//! reported.

use std::collections::BTreeSet;

use super::Encoder;
use crate::batch::Sample;
use crate::data::media::family::MediaFamily;
use crate::data::source::texts;

/// Keys of a box and of a point in a text.
const KEYS: [&str; 2] = ["\"bbox_2d\"", "\"point_2d\""];

/// What is wrong with boxes in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BoxFault {
    /// Fractions of the image, where the model writes whole numbers.
    Fractions,
    /// A number above 1000, where the model writes thousandths.
    Beyond,
    /// The corners of a box are swapped.
    Swapped,
    /// The corners of a box have the same x or y.
    NoArea,
}

impl BoxFault {
    /// What a row has, for a message.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Fractions => "have boxes with fractions in a text",
            Self::Beyond => "have boxes with numbers above 1000 in a text",
            Self::Swapped => "have boxes with swapped corners in a text",
            Self::NoArea => "have boxes without an area in a text",
        }
    }

    /// Returns the fix that the message suggests.
    pub fn hint(self) -> &'static str {
        match self {
            Self::Fractions | Self::Beyond => {
                "the model writes thousandths of the sides (Qwen2.5-VL: pixels of the resized image); `objects` with `<bbox>` converts boxes"
            }
            Self::Swapped | Self::NoArea => "a box is `[x1, y1, x2, y2]` with x1 < x2 and y1 < y2",
        }
    }
}

impl Encoder {
    /// What is wrong with the boxes that the texts of a row write themselves.
    pub fn box_faults(&self, sample: &Sample) -> BTreeSet<BoxFault> {
        let family = self.media.videos.family();
        let mut faults = BTreeSet::new();
        for text in texts(&sample.messages) {
            for key in KEYS {
                let places = text.match_indices(key).map(|(at, _)| at + key.len());
                faults.extend(places.filter_map(|end| fault(&text[end..], family)));
            }
        }
        faults
    }
}

/// The fault of the box in front of `rest`, the text after its key.
fn fault(rest: &str, family: MediaFamily) -> Option<BoxFault> {
    let list = rest.trim_start().strip_prefix(':')?.trim_start().strip_prefix('[')?;
    let numbers = list.split_once(']')?.0.split(',').map(|number| number.trim().parse::<f64>());
    let numbers = numbers.collect::<Result<Vec<_>, _>>().ok()?;
    let is_fraction = |number: &f64| (0.0..=1.0).contains(number);
    if numbers.iter().all(is_fraction) && numbers.iter().any(|number| number.fract() != 0.0) {
        return Some(BoxFault::Fractions);
    }
    if family == MediaFamily::Qwen3Vl && numbers.iter().any(|number| *number > 1000.0) {
        return Some(BoxFault::Beyond);
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
    fn boxes_of_another_unit_and_boxes_without_an_area_are_found() {
        let pixels = MediaFamily::Qwen25Vl { tokens_per_second: 2.0 };
        for (list, thousandths, in_pixels) in [
            (": [1, 2, 3, 4]", None, None),
            (":[0, 0, 1, 1]", None, None),
            (": [0.1, 0.2, 0.5, 1]", Some(BoxFault::Fractions), Some(BoxFault::Fractions)),
            (": [0.5, 0.5]", Some(BoxFault::Fractions), Some(BoxFault::Fractions)),
            (": [1, 2, 1001, 4]", Some(BoxFault::Beyond), None),
            (" : [1001, 4]", Some(BoxFault::Beyond), None),
            (": [1, 2, 1000, 4]", None, None),
            (": [3, 2, 1, 4]", Some(BoxFault::Swapped), Some(BoxFault::Swapped)),
            (": [1, 2, 1, 4]", Some(BoxFault::NoArea), Some(BoxFault::NoArea)),
            (": [1, 2", None, None),
            (": [a, b, c, d]", None, None),
            ("; [0.5, 0.5]", None, None),
        ] {
            assert_eq!(fault(list, MediaFamily::Qwen3Vl), thousandths, "{list}");
            assert_eq!(fault(list, pixels), in_pixels, "{list}");
        }
    }
}
