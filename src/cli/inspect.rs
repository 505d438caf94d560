//! `trainer inspect`: shows what the model sees of each row, and which rows share a pack.

mod page;

use super::args::{ConfigArgs, OutputFile};
use super::logging::Logging;
use super::progress::SetupBars;
use super::terminal::{escaped, escaped_line, stdout};
use crate::batch::{EncodedSample, IGNORE_INDEX, MediumKind, Patches};
use crate::config::RunConfig;
use crate::data::{DatasetRows, Length, RowReader, SampleCounts, SampleIndex, first_epoch_packs};
use crate::run::{self, DataList};
use crate::train::{DatasetCounts, log_datasets};
use candle_core::{Device, Tensor};
use clap::{Args, ValueEnum};
use page::{Notes, Page, ShownMedium, described, grids, media_of, of_kind};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer inspect --config config.yaml --num 2\n  \
    trainer inspect --config config.yaml --format jsonl --packs\n  \
    trainer inspect --config config.yaml --num 20 --html rows.html")]
pub(super) struct InspectArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Number of rows to show; 0 shows all
    #[arg(long, default_value_t = 4)]
    num: usize,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Also write the tensors of the shown rows to this safetensors file
    #[arg(long, value_name = "FILE")]
    tensors: Option<PathBuf>,
    /// Also write an HTML page that shows these rows, their images and the packs
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Show packs instead of rows: one JSON object per pack, with its ids and lengths
    #[arg(long, conflicts_with_all = ["tensors", "html"])]
    packs: bool,
}

/// Format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Text with the supervised tokens in brackets
    Text,
    /// One JSON object per row
    Jsonl,
}

/// Prints rows in training order.
pub(super) fn run(args: &InspectArgs, logging: &Logging) -> anyhow::Result<()> {
    let html = OutputFile::open_given("--html", args.html.as_ref())?;
    let tensors_file = OutputFile::open_given("--tensors", args.tensors.as_ref())?;
    let config = args.config.load(logging)?;
    let located = |error| args.config.located(error);
    let encoder = run::encoder(&config).map_err(located)?;
    let rows = run::open_data(&config, DataList::Train, &encoder, &SetupBars(logging));
    let rows = Arc::new(rows.map_err(located)?);
    let num = if args.num == 0 { usize::MAX } else { args.num };
    let out = &mut stdout();
    if args.packs {
        return show_packs(&config, &rows, num, out);
    }
    let mut tensors = Vec::new();
    let mut page = html.is_some().then(|| Page::new(&config, rows.encoder(), num));
    let options = run::loader_options(&config, rows.encoder());
    let mut shown = BTreeMap::<String, DatasetCounts>::new();
    for row in run::order(&config, &rows)?.epoch(0).into_iter().take(num) {
        match rows.read_patiently(row)? {
            Err(rejection) => {
                tracing::warn!(row = %rejection, "this row is rejected");
                if let Some(page) = &mut page {
                    page.rejected(&rejection);
                }
            }
            Ok(sample) => {
                let label = rows.label(row);
                let name = rows.names()[row.dataset as usize].clone();
                *shown.entry(name).or_default() +=
                    DatasetCounts::of(&SampleCounts::of(row, &sample));
                let notes = Notes::of(&rows, row);
                match args.format {
                    Format::Text => show_text(&rows, &label, &sample, &notes, out)?,
                    Format::Jsonl => {
                        writeln!(out, "{}", as_json(&label, &sample))?;
                    }
                }
                // Rows that are too long are shown too, with the reason.
                let refused = options.check_length(Length::of(&sample), || rows.id(row)).err();
                if let Some(rejection) = &refused {
                    tracing::warn!(row = %rejection, "this row is rejected");
                }
                if let Some(page) = &mut page {
                    if let Some(rejection) = &refused {
                        page.rejected(rejection);
                    }
                    let dropped = rows.dropped(row).unwrap_or_default();
                    page.sample(&label, &sample, &dropped, &notes)?;
                }
                if tensors_file.is_some() {
                    tensors.extend(as_tensors(&label, &sample)?);
                }
            }
        }
    }
    log_datasets("inspected", &shown);
    if let (Some(file), Some(mut page)) = (html, page) {
        if config.data.packing {
            // Too many rejected rows stop a run, but the page shows them.
            match packs_of(&config, &rows) {
                Ok(packs) => page.packs(&packs, &rows),
                Err(error) => tracing::warn!(%error, "cannot show packs on the page"),
            }
        }
        file.write(page.finish().as_bytes())?;
    }
    if let Some(file) = tensors_file {
        let tensors: HashMap<String, Tensor> = tensors.into_iter().collect();
        file.write(&safetensors::serialize(&tensors, None)?)?;
    }
    Ok(())
}

/// Prints the decoded tokens: supervised ones in brackets with their weight, vision tokens as their
/// number.
fn show_text(
    rows: &DatasetRows,
    label: &str,
    sample: &EncodedSample,
    notes: &Notes,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let encoder = rows.encoder();
    let media = media_of(encoder, sample);
    let [images, videos] =
        [MediumKind::Image, MediumKind::Video].map(|kind| described(&media, kind));
    let label = escaped_line(label, false);
    write!(out, "{label}  {} tokens, {} targets", sample.len(), sample.num_targets())?;
    write!(out, ", image grids (t, h, w) [{images}]")?;
    if !videos.is_empty() {
        write!(out, ", video grids [{videos}]")?;
    }
    writeln!(out, "{}", notes.hidden_thoughts())?;
    let weight = |at: usize| sample.weights.as_ref().map_or(1.0, |weights| weights[at]);
    let mut start = 0;
    while start < sample.len() {
        let supervised = sample.labels[start] != IGNORE_INDEX;
        let image = sample.vision_rows.binary_search(&(start as u32)).is_ok();
        let same = |at: &usize| {
            (sample.labels[*at] != IGNORE_INDEX) == supervised
                && weight(*at).to_bits() == weight(start).to_bits()
                && sample.vision_rows.binary_search(&(*at as u32)).is_ok() == image
        };
        let end = (start..sample.len()).find(|at| !same(at)).unwrap_or(sample.len());
        if image {
            let has = |of: &&ShownMedium| of.rows.binary_search(&(start as u32)).is_ok();
            let kind = media.iter().find(has).map(|of| of.patches.kind);
            let what = if kind == Some(MediumKind::Video) { "video" } else { "image" };
            write!(out, "<{} {what} tokens>", end - start)?;
        } else {
            let text = encoder.decode_with_specials(&sample.input_ids[start..end])?;
            let text = escaped(&text);
            if supervised {
                write!(out, "[[{text}]]")?;
            } else {
                write!(out, "{text}")?;
            }
            if supervised && weight(start) != 1.0 {
                write!(out, " * {}", weight(start))?;
            }
        }
        start = end;
    }
    writeln!(out, "\n")?;
    Ok(())
}

/// The JSON object that `--format jsonl` prints for a row.
fn as_json(label: &str, sample: &EncodedSample) -> Value {
    let axis = |axis: usize| -> Vec<u32> { sample.position_ids.iter().map(|p| p[axis]).collect() };
    let pixels = || sample.media.iter().flat_map(|patches| &patches.pixel_values);
    let [images, videos] = grids(sample);
    let mut object = json!({
        "id": label,
        "length": sample.len(),
        "input_ids": sample.input_ids,
        "labels": sample.labels,
        "position_ids": [axis(0), axis(1), axis(2)],
        "image_grid_thw": images,
        "video_grid_thw": videos,
        "pixel_sum": pixels().map(|value| f64::from(*value)).sum::<f64>(),
        "pixel_abs_sum": pixels().map(|value| f64::from(value.abs())).sum::<f64>(),
    });
    if let Some(weights) = &sample.weights {
        object["weights"] = json!(weights);
    }
    object
}

/// The tensors of a row, named `<id>/input_ids` and so on as in transformers; integers are `i64`.
fn as_tensors(label: &str, sample: &EncodedSample) -> anyhow::Result<Vec<(String, Tensor)>> {
    let device = &Device::Cpu;
    let name = |what: &str| format!("{label}/{what}");
    let (tokens, integers) =
        (sample.len(), |ids: &[u32]| -> Vec<i64> { ids.iter().map(|id| i64::from(*id)).collect() });
    let positions: Vec<u32> =
        (0..3).flat_map(|axis| sample.position_ids.iter().map(move |p| p[axis])).collect();
    let mut tensors = vec![
        (name("input_ids"), Tensor::from_vec(integers(&sample.input_ids), tokens, device)?),
        (name("labels"), Tensor::from_vec(sample.labels.clone(), tokens, device)?),
        (name("position_ids"), Tensor::from_vec(integers(&positions), (3, tokens), device)?),
    ];
    for (kind, [pixels, grids]) in [
        (MediumKind::Image, ["pixel_values", "image_grid_thw"]),
        (MediumKind::Video, ["pixel_values_videos", "video_grid_thw"]),
    ] {
        let media: Vec<&Patches> = of_kind(sample, kind).collect();
        let rows: usize = media.iter().map(|patches| patches.num_patches()).sum();
        if rows == 0 {
            continue;
        }
        let values: Vec<f32> =
            media.iter().flat_map(|patches| patches.pixel_values.iter().copied()).collect();
        let width = values.len() / rows;
        let thw: Vec<u32> = media.iter().flat_map(|patches| patches.grid_thw).collect();
        let thw = Tensor::from_vec(integers(&thw), (media.len(), 3), device)?;
        tensors.push((name(pixels), Tensor::from_vec(values, (rows, width), device)?));
        tensors.push((name(grids), thw));
    }
    Ok(tensors)
}

/// Prints one JSON object per pack, in training order.
fn show_packs(
    config: &RunConfig,
    rows: &Arc<DatasetRows>,
    num: usize,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    for (index, pack) in packs_of(config, rows)?.into_iter().take(num).enumerate() {
        let ids: Vec<String> = pack.iter().map(|(row, _)| rows.label(*row)).collect();
        let lengths: Vec<usize> = pack.iter().map(|(_, length)| *length).collect();
        let length: usize = lengths.iter().sum();
        writeln!(
            out,
            "{}",
            json!({"pack": index, "length": length, "ids": ids, "lengths": lengths})
        )?;
    }
    Ok(())
}

/// The packs of the first epoch: rows and their numbers of tokens. Measures every row.
fn packs_of(
    config: &RunConfig,
    rows: &Arc<DatasetRows>,
) -> anyhow::Result<Vec<Vec<(SampleIndex, usize)>>> {
    let order = run::order(config, rows)?;
    let options = run::loader_options(config, rows.encoder());
    let reader: Arc<dyn RowReader> = rows.clone();
    Ok(first_epoch_packs(&reader, &order, &options, &|_, _| {})?)
}
