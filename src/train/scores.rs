//! Scores of a generated answer against the expected one.

use crate::data::marked_boxes;
use serde::{Deserialize, Serialize};
use settings::Choice;

/// How an answer is compared with the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Choice)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// 1 if both are equal without white space at their ends, otherwise 0.
    Exact,
    /// 1 if the answer contains the expected one, without white space at its ends, otherwise 0.
    Contains,
    /// F1 of the longest common subsequence of their words in lower case. A word is a run of
    /// letters and digits; Chinese and Japanese characters are words of their own.
    RougeL,
    /// Mean IoU of the boxes in both texts: `"bbox_2d": [x1, y1, x2, y2]`, or
    /// `<|box_start|>(x1,y1),(x2,y2)<|box_end|>`.
    BboxIou,
}

impl Score {
    /// From 0 to 1; `None` if the expected answer has nothing to compare: no word, no box.
    pub fn of(self, expected: &str, answered: &str) -> Option<f64> {
        let is = |holds: bool| Some(if holds { 1.0 } else { 0.0 });
        match self {
            Self::Exact => is(expected.trim() == answered.trim()),
            Self::Contains => is(answered.contains(expected.trim())),
            Self::RougeL => rouge_l(&words(expected), &words(answered)),
            Self::BboxIou => bbox_iou(&boxes(expected), &boxes(answered)),
        }
    }
}

/// Whether a character is a word of its own.
fn is_word(letter: char) -> bool {
    // kana, ideographs
    matches!(letter, '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}')
}

fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut open = false; // whether the last word may continue
    for letter in text.chars() {
        if !letter.is_alphanumeric() {
            open = false;
            continue;
        }
        if !open || is_word(letter) {
            words.push(String::new());
        }
        open = !is_word(letter);
        if let Some(word) = words.last_mut() {
            word.extend(letter.to_lowercase());
        }
    }
    words
}

fn rouge_l(expected: &[String], answered: &[String]) -> Option<f64> {
    if expected.is_empty() {
        return None;
    }
    let mut row = vec![0_usize; answered.len() + 1]; // lengths for the words of `expected` so far
    for word in expected {
        let mut diagonal = 0;
        for (at, other) in answered.iter().enumerate() {
            let above = row[at + 1];
            row[at + 1] = if word == other { diagonal + 1 } else { above.max(row[at]) };
            diagonal = above;
        }
    }
    let common = row.last().copied().unwrap_or(0) as f64;
    // 2 P R / (P + R)
    Some(2.0 * common / (expected.len() + answered.len()) as f64)
}

type Corners = [f64; 4];

/// The boxes of a text, also those between special tokens. It need not be JSON: a code fence may
/// surround it, and its end may be cut.
fn boxes(text: &str) -> Vec<Corners> {
    let of_numbers = |numbers: Vec<f64>| -> Option<Corners> {
        numbers.try_into().ok().filter(|corners: &Corners| corners.iter().all(|x| x.is_finite()))
    };
    let after_key = text.split("\"bbox_2d\"").skip(1);
    let list = |rest: &str| -> Option<Corners> {
        let list = rest.trim_start().strip_prefix(':')?.trim_start().strip_prefix('[')?;
        let (list, _) = list.split_once(']')?;
        let numbers = list.split(',').map(|number| number.trim().parse::<f64>());
        of_numbers(numbers.collect::<Result<_, _>>().ok()?)
    };
    after_key.filter_map(list).chain(marked_boxes(text).filter_map(of_numbers)).collect()
}

fn iou(a: &Corners, b: &Corners) -> f64 {
    let area = |[x1, y1, x2, y2]: Corners| (x2 - x1).max(0.0) * (y2 - y1).max(0.0);
    let both = area([a[0].max(b[0]), a[1].max(b[1]), a[2].min(b[2]), a[3].min(b[3])]);
    let union = area(*a) + area(*b) - both;
    if union > 0.0 { both / union } else { 0.0 }
}

/// Pairs boxes, those with the highest IoU first, each at most once. A box without a partner
/// counts 0.
fn bbox_iou(expected: &[Corners], answered: &[Corners]) -> Option<f64> {
    if expected.is_empty() {
        return None;
    }
    let mut pairs: Vec<(f64, usize, usize)> = Vec::new();
    for (at, a) in expected.iter().enumerate() {
        pairs.extend(answered.iter().enumerate().map(|(other, b)| (iou(a, b), at, other)));
    }
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (mut sum, mut left, mut right) =
        (0.0, vec![true; expected.len()], vec![true; answered.len()]);
    for (iou, at, other) in pairs {
        if left[at] && right[other] {
            (left[at], right[other]) = (false, false);
            sum += iou;
        }
    }
    Some(sum / expected.len().max(answered.len()) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exact_answer_may_have_white_space_around_it() {
        assert_eq!(Score::Exact.of("12", " 12\n"), Some(1.0));
        assert_eq!(Score::Exact.of("12", "120"), Some(0.0));
        assert_eq!(Score::Contains.of("12 ", "It is 120."), Some(1.0));
        assert_eq!(Score::Contains.of("12", "1 2"), Some(0.0));
    }

    #[test]
    fn rouge_l_is_the_f1_of_the_longest_common_subsequence_of_words() {
        let rouge = |expected, answered| Score::RougeL.of(expected, answered);
        assert_eq!(rouge("The cat sat.", "the CAT, sat"), Some(1.0));
        // common: police the gunman; P = 3/4, R = 3/4
        assert_eq!(rouge("police killed the gunman", "police end the gunman"), Some(0.75));
        assert_eq!(rouge("a b c", "c b a"), Some(2.0 / 6.0));
        assert_eq!(rouge("\u{732b}\u{5728}\u{5e8a}", "\u{732b}\u{5728}"), Some(0.8));
        assert_eq!(rouge("a", ""), Some(0.0));
        assert_eq!(rouge("?!", "a"), None);
    }

    #[test]
    fn boxes_are_paired_and_a_missing_or_additional_one_counts_0() {
        let iou = |expected, answered| Score::BboxIou.of(expected, answered);
        let one = r#"[{"bbox_2d": [0, 0, 10, 10], "label": "a"}]"#;
        assert_eq!(iou(one, one), Some(1.0));
        assert_eq!(iou(one, r#"{"bbox_2d": [0, 5, 10, 10]}"#), Some(0.5));
        // the other order, a code fence, and an end that is cut
        let two = r#"[{"bbox_2d": [20,20,30,30]}, {"bbox_2d": [0, 0, 10, 10]}, {"bbox_2d": [1, 2"#;
        let expected = r#"[{"bbox_2d": [0, 0, 10, 10]}, {"bbox_2d": [20, 20, 30, 30]}]"#;
        let fenced = format!("```json\n{two}");
        assert_eq!(Score::BboxIou.of(expected, &fenced), Some(1.0));
        assert_eq!(iou(one, two), Some(0.5));
        assert_eq!(iou(one, "no box"), Some(0.0));
        assert_eq!(iou("no box", one), None);
        assert_eq!(iou(one, r#"{"bbox_2d": [10, 10, 0, 0]}"#), Some(0.0));
        let marked = "a coin<|box_start|>(0,0),(10,10)<|box_end|>";
        assert_eq!(
            iou(marked, "<|box_start|>(0, 5), (10, 10)<|box_end|> <|box_start|>(1,2"),
            Some(0.5)
        );
        assert_eq!(iou("<|box_start|>(3,4)<|box_end|>", marked), None);
    }
}
