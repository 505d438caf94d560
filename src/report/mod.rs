//! Pages for people: the report of a run, and what all pages share.
//!
//! A page is one file without scripts that loads nothing. All text of runs and rows is escaped.

mod answers;
mod card;
mod charts;
mod facts;
mod folder;
mod html;
mod numbers;
mod page;
mod series;
mod svg_chart;
mod tables;
#[cfg(test)]
mod tests;
mod thumbnail;

pub use card::model_card;
pub use facts::{Outcome, duration, thousands};
pub use folder::{ReportError, RunFolder};
pub use page::report;

pub(crate) use html::{document, escaped, push, with_specials};
pub(crate) use thumbnail::thumbnail;
