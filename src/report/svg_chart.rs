//! A chart of values over steps, as an SVG image in the page.

use super::html::{escaped, push};
use super::series::{Bucket, Means, Series};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Number,
    /// A share, shown in percent.
    Share,
    Bytes,
}

impl Unit {
    /// Value of one unit of the axis labels (1 or a power of ten, 0.01, MiB or GiB) if the largest
    /// value is `high`.
    fn size(self, high: f64) -> f64 {
        match self {
            Self::Number if high > 0.0 && high < 0.01 => 10_f64.powf(high.log10().floor()),
            Self::Number => 1.0,
            Self::Share => 0.01,
            Self::Bytes if high >= GIB => GIB,
            Self::Bytes => MIB,
        }
    }

    fn suffix(self, axis: &Axis) -> String {
        match self {
            Self::Number if axis.unit == 1.0 => String::new(),
            Self::Number => format!("in {}", power_of_ten(axis.unit)),
            Self::Share => "%".to_owned(),
            Self::Bytes if axis.unit >= GIB => "GiB".to_owned(),
            Self::Bytes => "MiB".to_owned(),
        }
    }
}

const MIB: f64 = 1_048_576.0;
const GIB: f64 = 1024.0 * MIB;

#[derive(Debug)]
pub(super) struct ChartLine<'a> {
    /// Name in the legend.
    pub(super) label: String,
    /// Number of its colour.
    pub(super) colour: usize,
    pub(super) series: &'a Series,
    pub(super) dots: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Mark {
    pub(super) step: u64,
    /// `restart`, `bad` or `spike`.
    pub(super) class: &'static str,
    pub(super) title: String,
}

#[derive(Debug)]
pub(super) struct Chart<'a> {
    pub(super) title: String,
    /// A sentence about the number.
    pub(super) meaning: String,
    pub(super) unit: Unit,
    pub(super) lines: Vec<ChartLine<'a>>,
    pub(super) marks: Vec<Mark>,
    /// Whether the axis is logarithmic if the values differ much.
    pub(super) may_be_log: bool,
    /// Whether long lines are smoothed; the values are drawn lighter behind them.
    pub(super) is_noisy: bool,
    pub(super) has_legend: bool,
    /// Maximum number of places of a line.
    pub(super) places: usize,
    /// The right end of the axis of steps.
    pub(super) last_step: u64,
}

/// Colours of the style sheet; further lines are dashed.
pub(super) const COLOURS: usize = 8;
const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 210.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 428.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 182.0;
const MAX_MARKS: usize = 200;

impl Chart<'_> {
    /// The figure; nothing if no line has a finite value.
    pub(super) fn html(&self) -> String {
        let lines: Vec<&ChartLine<'_>> =
            self.lines.iter().filter(|line| line.series.finite().next().is_some()).collect();
        let Some(y) = Axis::of_values(self, &lines) else { return String::new() };
        let x = Axis { low: 0.0, high: self.last_step.max(1) as f64, log: false, unit: 1.0 };
        let log = if y.log { ", logarithmic" } else { "" };
        let suffix = self.unit.suffix(&y);
        let unit = if suffix.is_empty() { String::new() } else { format!(" ({suffix})") };
        let smooth =
            lines.iter().filter_map(|line| self.smoothed(line)).map(|(_, over)| over).max();
        let smooth =
            smooth.map_or_else(String::new, |over| format!(" Line: mean of {over} steps."));
        let (title, meaning) = (escaped(&self.title), escaped(&self.meaning));
        let mut out = format!(
            "<figure class=\"chart\"><figcaption>{title}<small>{unit}{log}</small></figcaption>\n\
             <p class=\"what\">{meaning}{smooth}</p>\n<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\n"
        );
        for tick in y.ticks(5) {
            let at = place(y.of(tick), BOTTOM, TOP);
            push(
                &mut out,
                format_args!(
                    "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{RIGHT}\"/><text class=\"y\" x=\"{}\" y=\"{:.1}\">{}</text>\n",
                    LEFT - 6.0,
                    at + 4.0,
                    y.label(tick)
                ),
            );
        }
        for tick in x.ticks(5).into_iter().filter(|tick| tick.fract() == 0.0) {
            let at = place(x.of(tick), LEFT, RIGHT);
            push(
                &mut out,
                format_args!(
                    "<path class=\"grid\" d=\"M{at:.1} {BOTTOM}v4\"/><text class=\"x\" x=\"{at:.1}\" y=\"{}\">{}</text>\n",
                    BOTTOM + 18.0,
                    number(tick)
                ),
            );
        }
        for mark in self.marks.iter().take(MAX_MARKS) {
            let at = place(x.of(mark.step as f64), LEFT, RIGHT);
            let top = if mark.class == "restart" { TOP } else { BOTTOM - 10.0 };
            push(
                &mut out,
                format_args!(
                    "<path class=\"{}\" d=\"M{at:.1} {top}V{BOTTOM}\"><title>{}</title></path>\n",
                    mark.class,
                    escaped(&mark.title)
                ),
            );
        }
        for line in &lines {
            self.line(line, &x, &y, &mut out);
        }
        out.push_str("</svg>\n");
        if self.has_legend {
            legend(lines.iter().map(|line| (line.label.as_str(), line.colour)), &mut out);
        }
        out.push_str("</figure>\n");
        out
    }

    fn line(&self, line: &ChartLine<'_>, x: &Axis, y: &Axis, out: &mut String) {
        let buckets = line.series.buckets(self.places);
        let is_reduced = buckets.len() < line.series.0.len();
        let at = |step: f64, value: f64| {
            format!("{:.1} {:.1}", place(x.of(step), LEFT, RIGHT), place(y.of(value), BOTTOM, TOP))
        };
        let class = class(line.colour);
        let dot = |bucket: &Bucket, out: &mut String| {
            let place = at(bucket.step, bucket.mean);
            let (cx, cy) = place.split_once(' ').unwrap_or_default();
            let value = number(bucket.mean * if self.unit == Unit::Share { 100.0 } else { 1.0 });
            push(
                out,
                format_args!(
                    "<circle class=\"{class}\" cx=\"{cx}\" cy=\"{cy}\" r=\"2.6\"><title>step {}: {value}</title></circle>",
                    bucket.step
                ),
            );
        };
        let (mut path, mut band, mut dots) = (String::new(), String::new(), String::new());
        for part in buckets.split(Option::is_none) {
            let part: Vec<_> = part.iter().flatten().collect();
            for (index, bucket) in part.iter().enumerate() {
                let command = if index == 0 { 'M' } else { 'L' };
                push(&mut path, format_args!("{command}{}", at(bucket.step, bucket.mean)));
            }
            if let ([only], false) = (part.as_slice(), line.dots) {
                dot(only, &mut dots); // a path of one point draws nothing
            }
            if is_reduced && part.len() > 1 {
                let edges = part.iter().map(|bucket| at(bucket.step, bucket.max));
                let back = part.iter().rev().map(|bucket| at(bucket.step, bucket.min));
                let corners: Vec<String> = edges.chain(back).collect();
                push(&mut band, format_args!("M{}Z", corners.join("L")));
            }
        }
        for bucket in buckets.iter().flatten().filter(|_| line.dots && !is_reduced) {
            dot(bucket, &mut dots);
        }
        if !band.is_empty() {
            push(out, format_args!("<path class=\"band {class}\" d=\"{band}\"/>\n"));
        }
        if let Some((means, _)) = self.smoothed(line) {
            push(out, format_args!("<path class=\"raw {class}\" d=\"{path}\"/>\n"));
            path.clear();
            for part in means.split(Option::is_none) {
                for (index, (step, mean)) in part.iter().flatten().enumerate() {
                    let command = if index == 0 { 'M' } else { 'L' };
                    push(&mut path, format_args!("{command}{}", at(*step, *mean)));
                }
            }
        }
        push(out, format_args!("<path class=\"line {class}\" d=\"{path}\"/>{dots}\n"));
    }

    /// Steps and smoothed values of a line, and over how many steps, if it is smoothed.
    fn smoothed(&self, line: &ChartLine<'_>) -> Option<(Means, usize)> {
        let is_smoothed = self.is_noisy && !line.dots;
        is_smoothed.then(|| line.series.smoothed(self.places))?
    }
}

/// Appends a list of names with their colours.
pub(super) fn legend<'a>(names: impl Iterator<Item = (&'a str, usize)>, out: &mut String) {
    out.push_str("<p class=\"legend\">");
    for (name, colour) in names {
        push(
            out,
            format_args!(
                "<span><svg viewBox=\"0 0 22 8\"><path class=\"line {}\" d=\"M1 4H21\"/></svg>{}</span> ",
                class(colour),
                escaped(name)
            ),
        );
    }
    out.push_str("</p>\n");
}

fn class(colour: usize) -> String {
    let dashed = if colour >= COLOURS { " dashed" } else { "" };
    format!("c{}{dashed}", colour % COLOURS)
}

fn place(share: f64, from: f64, to: f64) -> f64 {
    from + share * (to - from)
}

struct Axis {
    low: f64,
    high: f64,
    log: bool,
    /// The shown numbers are multiples of it.
    unit: f64,
}

impl Axis {
    /// The range with round ends.
    fn linear(low: f64, high: f64, unit: f64) -> Self {
        let step = Self { low, high, log: false, unit }.step(5);
        let (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        Self { low, high: if high > low { high } else { low + step }, log: false, unit }
    }

    /// The values of all lines; `None` without values.
    fn of_values(chart: &Chart<'_>, lines: &[&ChartLine<'_>]) -> Option<Self> {
        let values = || lines.iter().flat_map(|line| line.series.finite());
        let (low, high) = (values().reduce(f64::min)?, values().reduce(f64::max)?);
        let usual = lines.iter().filter_map(|line| line.series.median()).fold(0.0, f64::max);
        if chart.may_be_log && low > 0.0 && high > 30.0 * usual {
            let low = 10_f64.powf(low.log10().floor());
            return Some(Self {
                low,
                high: 10_f64.powf(high.log10().ceil()),
                log: true,
                unit: 1.0,
            });
        }
        // Small changes of a large value are not drawn large.
        let from_zero = low < 0.6 * high || low == high || chart.unit != Unit::Number;
        let low = if low > 0.0 && from_zero { 0.0 } else { low };
        let above = if low == 0.0 { 1.0 } else { low.abs() }; // an axis of zeros ends at 1
        let high = if high > low { high } else { low + above };
        Some(Self::linear(low, high, chart.unit.size(high.max(-low))))
    }

    fn label(&self, tick: f64) -> String {
        if self.log && tick < 1e-3 { power_of_ten(tick) } else { number(tick / self.unit) }
    }

    /// The place of a value, from 0 to 1.
    fn of(&self, value: f64) -> f64 {
        let scaled = |value: f64| if self.log { value.log10() } else { value };
        (scaled(value) - scaled(self.low)) / (scaled(self.high) - scaled(self.low))
    }

    /// Distance of about `count` round values.
    fn step(&self, count: usize) -> f64 {
        let rough = (self.high - self.low) / self.unit / count as f64;
        let power = 10_f64.powf(rough.log10().floor());
        let round = [1.0, 2.0, 2.5, 5.0].into_iter().find(|by| by * power >= rough * 0.999);
        round.unwrap_or(10.0) * power * self.unit
    }

    fn ticks(&self, count: usize) -> Vec<f64> {
        if self.log {
            let decades = self.low.log10().round() as i32..=self.high.log10().round() as i32;
            let every = (decades.clone().count() / count).max(1);
            return decades.step_by(every).map(|power| 10_f64.powi(power)).collect();
        }
        let step = self.step(count);
        let first = (self.low / step).ceil() as i64;
        let ticks = (first..).map(|index| index as f64 * step);
        ticks.take_while(|tick| *tick <= self.high + 1e-9 * step).take(20).collect()
    }
}

/// A power of ten as 10⁻⁵.
fn power_of_ten(value: f64) -> String {
    let digits = ["⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"];
    let power = format!("{:.0}", value.log10());
    let digit = |c: char| c.to_digit(10).map_or("⁻", |digit| digits[digit as usize]);
    format!("10{}", power.chars().map(digit).collect::<String>())
}

/// A number in few characters.
pub(super) fn number(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let trimmed = |text: String| {
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        }
    };
    match value.abs() {
        size if size >= 1e9 => format!("{}G", trimmed(format!("{:.2}", value / 1e9))),
        size if size >= 1e6 => format!("{}M", trimmed(format!("{:.2}", value / 1e6))),
        size if size >= 1e4 => format!("{}k", trimmed(format!("{:.1}", value / 1e3))),
        size if size >= 100.0 => trimmed(format!("{value:.1}")),
        size if size >= 1e-3 => {
            let digits = (3.0 - size.log10().floor()).max(0.0) as usize;
            trimmed(format!("{value:.digits$}"))
        }
        _ => {
            let text = format!("{value:.2e}");
            let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
            format!("{}e{power}", trimmed(digits.to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: &Series) -> String {
        let line = ChartLine { label: "a<b".into(), colour: 0, series, dots: false };
        let chart = Chart {
            title: "Loss".into(),
            meaning: "a<b".into(),
            unit: Unit::Number,
            lines: vec![line],
            marks: Vec::new(),
            may_be_log: true,
            is_noisy: true,
            has_legend: true,
            places: 100,
            last_step: series.0.last().map_or(0, |point| point.0),
        };
        chart.html()
    }

    #[test]
    fn a_line_is_interrupted_where_a_value_is_missing() {
        let value = |step: u64| if step == 5 { f64::NAN } else { step as f64 };
        let html = chart(&Series((1..10).map(|step| (step, value(step))).collect()));
        let path = html.split("class=\"line c0\" d=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(path.matches('M').count(), 2);
        assert!(html.contains("a&lt;b"), "{html}");
        assert!(!html.contains("NaN"), "{html}");
    }

    #[test]
    fn a_long_run_is_drawn_in_few_places_with_its_range() {
        let series = Series((0..100_000).map(|step| (step, (step % 7) as f64)).collect());
        let html = chart(&series);
        assert!(html.len() < 8_000 && html.contains("class=\"band c0\""), "{}", html.len());
    }

    #[test]
    fn a_value_between_missing_ones_has_a_dot_and_its_axis_begins_at_zero() {
        let html = chart(&Series(vec![(1, 8.1), (2, f64::NAN), (3, f64::NAN)]));
        assert!(html.contains("<title>step 1: 8.1</title></circle>"), "{html}");
        assert!(html.contains(">0</text>"), "{html}");
    }

    #[test]
    fn a_chart_without_values_is_left_out() {
        assert_eq!(chart(&Series(vec![(1, f64::NAN)])), "");
    }

    #[test]
    fn a_single_value_and_values_of_any_size_have_an_axis() {
        for values in [
            vec![0.0],
            vec![-2.0, -2.0],
            vec![1e-9],
            vec![1.0, 1e30],
            vec![1e-300, 5.0],
            vec![2e-5, 0.0],
            vec![2e-3, 2e-3],
            vec![1e-6, 1e-6, 1e-6, 0.5],
        ] {
            let series = Series((0..).zip(values).collect());
            let html = chart(&series);
            let labels: Vec<&str> = html.split("class=\"y\"").skip(1).collect();
            let labels = labels.iter().map(|rest| rest.split(['>', '<']).nth(1).unwrap());
            let labels: Vec<&str> = labels.collect();
            assert!(labels.len() >= 2, "{html}");
            assert!(!labels.iter().any(|label| label.contains("e-")), "{labels:?}");
            assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
        }
    }

    #[test]
    fn zeros_and_small_values_have_an_axis_that_can_be_read() {
        let labels = |values: &[f64]| {
            let html = chart(&Series((0..).zip(values.iter().copied()).collect()));
            let labels = html.split("class=\"y\"").skip(1);
            let labels = labels.map(|rest| rest.split(['>', '<']).nth(1).unwrap().to_owned());
            let unit = html.split(['>', '<']).skip_while(|part| *part != "small").nth(1).unwrap();
            (labels.collect::<Vec<_>>().join(" "), unit.to_owned())
        };
        assert_eq!(labels(&[0.0, 0.0]), ("0 0.2 0.4 0.6 0.8 1".to_owned(), String::new()));
        let lr = labels(&[2e-5, 1e-5, 0.0]);
        assert_eq!(lr, ("0 0.5 1 1.5 2".to_owned(), " (in 10⁻⁵)".to_owned()));
        assert_eq!(labels(&[2e-3, 0.0]).1, " (in 10⁻³)");
        let log = labels(&[1e-6, 1e-6, 1e-6, 0.5]);
        assert_eq!(log.1, ", logarithmic");
        assert!(log.0.starts_with("10⁻⁶ "), "{log:?}");
    }

    #[test]
    fn a_noisy_line_is_smoothed_in_front_of_its_values() {
        let noisy = Series((1..=100).map(|step| (step, (step % 2 * 2) as f64)).collect());
        let html = chart(&noisy);
        assert!(html.contains("class=\"raw c0\"") && html.contains("mean of 5 steps"), "{html}");
        let path = |class: &str| {
            let start = html.find(&format!("class=\"{class}\" d=\"M")).unwrap();
            let path = html[start..].split('"').nth(3).unwrap().to_owned();
            let heights = path[1..].split('L').map(|at| at.split(' ').nth(1).unwrap());
            heights.map(|height| height.parse::<f64>().unwrap()).collect::<Vec<_>>()
        };
        let spread = |heights: &[f64]| {
            let middle = &heights[20..80];
            let max = middle.iter().copied().fold(f64::MIN, f64::max);
            max - middle.iter().copied().fold(f64::MAX, f64::min)
        };
        let (raw, line) = (path("raw c0"), path("line c0"));
        assert_eq!((raw.len(), line.len()), (100, 100));
        assert!(spread(&line) < 0.3 * spread(&raw), "{line:?}");
    }

    #[test]
    fn numbers_have_few_characters() {
        let values = [0.0, 1.0, 0.25, 2e-3, 2.5e-6, 416.0, 12_500.0, 3.4e6, -0.5];
        let shown = values.map(number).join(" ");
        assert_eq!(shown, "0 1 0.25 0.002 2.5e-6 416 12.5k 3.4M -0.5");
    }
}
