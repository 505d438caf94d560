//! `trainer inspect`: what the model will see of each row, and which rows share a pack.

use super::ConfigArgs;
use super::report::{Exit, Failure};
use crate::batch::{EncodedSample, IGNORE_INDEX};
use crate::config::RunConfig;
use crate::data::{RowReader, first_epoch_packs};
use crate::train::JsonlRows;
use candle_core::{Device, Tensor};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainer inspect --config configs/quickstart.yaml --num 2\n  \
    trainer inspect --config configs/quickstart.yaml --format jsonl --packs")]
pub(super) struct InspectArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Rows to show (all: 0)
    #[arg(long, default_value_t = 4)]
    num: usize,
    /// Form of the output
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Also store tensors of the shown rows in this safetensors file
    #[arg(long, value_name = "FILE")]
    tensors: Option<PathBuf>,
    /// Show packs instead of rows: one object a pack, the ids and lengths in it
    #[arg(long, conflicts_with = "tensors")]
    packs: bool,
}

/// Form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people: turns, supervised tokens marked
    Text,
    /// One JSON object a sample
    Jsonl,
}

/// Prints rows in training order.
pub(super) fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let config = args.config.load()?;
    let encoder = args.config.encoder(&config)?;
    let rows = Arc::new(args.config.open_rows("train", &config, &encoder)?);
    let num = if args.num == 0 { usize::MAX } else { args.num };
    let out = &mut super::stdout::stdout();
    if args.packs {
        return show_packs(&config, &rows, num, out);
    }
    let mut tensors = Vec::new();
    for row in super::sft::order(&config, &rows)?.epoch(0).into_iter().take(num) {
        match rows.read(row) {
            Err(rejection) => tracing::warn!(row = %rejection, "rejected"),
            Ok(sample) => {
                let label = rows.label(row);
                match args.format {
                    Format::Text => show_text(&rows, &label, &sample, out)?,
                    Format::Jsonl => writeln!(out, "{}", as_json(&label, &sample))?,
                }
                if args.tensors.is_some() {
                    tensors.extend(as_tensors(&label, &sample)?);
                }
            }
        }
    }
    if let Some(path) = &args.tensors {
        let tensors: HashMap<String, Tensor> = tensors.into_iter().collect();
        candle_core::safetensors::save(&tensors, path).map_err(|error| {
            let message = format!("cannot write `{}`: {error}", path.display());
            Failure::new(Exit::CannotWrite, message).hint("check `--tensors`")
        })?;
    }
    Ok(())
}

/// Rendered tokens, supervised ones between brackets, runs of one token shortened.
fn show_text(
    rows: &JsonlRows,
    label: &str,
    sample: &EncodedSample,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let encoder = rows.encoder();
    let grids: Vec<[u32; 3]> = sample.media.iter().map(|patches| patches.grid_thw).collect();
    writeln!(
        out,
        "{label}  {} tokens, {} targets, image grids (t, h, w) {grids:?}",
        sample.len(),
        sample.num_targets()
    )?;
    let mut start = 0;
    while start < sample.len() {
        let supervised = sample.labels[start] != IGNORE_INDEX;
        let picture = sample.vision_rows.binary_search(&(start as u32)).is_ok();
        let same = |at: &usize| {
            (sample.labels[*at] != IGNORE_INDEX) == supervised
                && sample.vision_rows.binary_search(&(*at as u32)).is_ok() == picture
        };
        let end = (start..sample.len()).find(|at| !same(at)).unwrap_or(sample.len());
        if picture {
            write!(out, "<{} picture tokens>", end - start)?;
        } else {
            let text = encoder.decode_with_specials(&sample.input_ids[start..end])?;
            if supervised { write!(out, "[[{text}]]")? } else { write!(out, "{text}")? }
        }
        start = end;
    }
    writeln!(out, "\n")?;
    Ok(())
}

/// One object of `--format jsonl`, as the contract has it.
fn as_json(label: &str, sample: &EncodedSample) -> Value {
    let axis = |axis: usize| -> Vec<u32> { sample.position_ids.iter().map(|p| p[axis]).collect() };
    let pixels = || sample.media.iter().flat_map(|patches| &patches.pixel_values);
    let grids: Vec<[u32; 3]> = sample.media.iter().map(|patches| patches.grid_thw).collect();
    json!({
        "id": label,
        "length": sample.len(),
        "input_ids": sample.input_ids,
        "labels": sample.labels,
        "position_ids": [axis(0), axis(1), axis(2)],
        "image_grid_thw": grids,
        "video_grid_thw": [],
        "pixel_sum": pixels().map(|value| f64::from(*value)).sum::<f64>(),
        "pixel_abs_sum": pixels().map(|value| f64::from(value.abs())).sum::<f64>(),
    })
}

/// `<id>/input_ids` and so on, for a safetensors file; integers as `i64`.
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
    if !sample.media.is_empty() {
        let rows: usize = sample.media.iter().map(crate::batch::Patches::num_patches).sum();
        let values: Vec<f32> =
            sample.media.iter().flat_map(|patches| patches.pixel_values.clone()).collect();
        let width = values.len() / rows;
        let grids: Vec<u32> = sample.media.iter().flat_map(|patches| patches.grid_thw).collect();
        let grids = Tensor::from_vec(integers(&grids), (sample.media.len(), 3), device)?;
        tensors.push((name("pixel_values"), Tensor::from_vec(values, (rows, width), device)?));
        tensors.push((name("image_grid_thw"), grids));
    }
    Ok(tensors)
}

/// One object a pack: the ids and lengths in it, in training order.
fn show_packs(
    config: &RunConfig,
    rows: &Arc<JsonlRows>,
    num: usize,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let order = super::sft::order(config, rows)?;
    let options = super::sft::loader_options(config, rows.encoder());
    let reader: Arc<dyn RowReader> = rows.clone();
    let packs = first_epoch_packs(&reader, &order, &options, &|_, _| {})?;
    for (index, pack) in packs.into_iter().take(num).enumerate() {
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
