//! Data sets, their mixture, and how their rows are read.

use crate::convert::output::{Line, quoted};
use crate::convert::rule::Role;
use crate::convert::trainer::Trainer;
use crate::convert::value::{Setting, Value};
use crate::convert::work::Work;
use crate::data::DatasetInfo;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// Endings of data files.
const ENDINGS: &[&str] =
    &["jsonl", "json", "parquet", "arrow", "csv", "tsv", "txt", "tar", "gz", "zst"];

/// Why image paths of lmms-engine start from the working folder.
const LMMS_ROOT: &str = "lmms-engine: from the working folder";

/// A data set of the other trainer.
#[derive(Debug)]
struct Source {
    /// `path` or `dataset_info`.
    key: &'static str,
    value: String,
    /// The file with the rows, if it is known.
    file: Option<PathBuf>,
    /// Number of rows that weight 1 uses; `None`: all rows of the file.
    num_rows: Option<u64>,
    image_root: Option<(String, String)>,
    /// Number of rows to use, and the setting that says so.
    samples: Option<(u64, String)>,
    weight: Option<(f64, String)>,
    comment: String,
}

/// Writes `data.train`, `data.eval`, the mixture and the keys of reading. Returns the number of
/// rows of an epoch, if they can be counted.
pub(super) fn data_sets(work: &mut Work) -> Option<u64> {
    reading(work);
    let media = work.given(Role::MediaDir);
    let (mut train, eval) = match work.trainer {
        Trainer::MsSwift => (swift(work, Role::Dataset), swift(work, Role::EvalDataset)),
        Trainer::LlamaFactory => llama_factory(work),
        Trainer::LmmsEngine => lmms_engine(work),
    };
    if train.is_empty() && work.refused.is_empty() {
        work.need("dataset", "the files name no training data");
    }
    let is_mixed = mixture(work, &mut train);
    let mut rows = Some(0);
    for (list, sources) in [(0, train), (1, eval)] {
        for mut source in sources {
            if let Some(media) = &media {
                let folder = media.value.text().unwrap_or_default().to_owned();
                source.image_root = Some((folder, work.from(media)));
            }
            let used = weight(work, &mut source, list == 0 && !is_mixed);
            if list == 0 {
                rows = rows.zip(used).map(|(sum, used)| sum + used);
            }
            let lines = lines(&source);
            if list == 0 { work.out.train.push(lines) } else { work.out.eval.push(lines) }
        }
    }
    rows.filter(|_| !is_mixed)
}

/// `data.workers`, `data.on_error` and the seed of the data.
fn reading(work: &mut Work) {
    if let Some((workers, setting)) = work.count(Role::Workers) {
        work.write_from("data.workers", &workers.max(1).to_string(), &setting);
    }
    if let Some((strict, setting)) = work.flag(Role::Strict) {
        work.write_from("data.on_error", if strict { "stop" } else { "skip" }, &setting);
    }
    if let Some(setting) = work.take(Role::LossScale) {
        match setting.value.text() {
            Some(scale @ ("default" | "last_round" | "all" | "ignore_empty_think")) => {
                let scale = scale.to_owned();
                work.write_from("data.loss_scale", &scale, &setting);
            }
            // a `<think>` of the prompt is never supervised here
            Some("ignore_think_prefix") => work.write_from("data.loss_scale", "default", &setting),
            _ => work.refuse(&setting, "write the weights into the rows (docs/data-format.md)"),
        }
    }
    if let Some((is_last, setting)) = work.flag(Role::LastTurn) {
        let scale = if is_last { "last_round" } else { "default" };
        work.write_from("data.loss_scale", scale, &setting);
    }
    while let Some(setting) = work.given(Role::DataSeed) {
        work.drop(&setting, "`seed` also decides the order of the rows");
    }
}

/// `path:subset#rows` for each entry.
fn swift(work: &mut Work, role: Role) -> Vec<Source> {
    let Some(setting) = work.given(role) else { return Vec::new() };
    let mut sources = Vec::new();
    for item in setting.value.items() {
        let text = item.text().unwrap_or_default().to_owned();
        let (name, samples) = match text.rsplit_once('#') {
            Some((name, samples)) => (name, Some(samples)),
            None => (text.as_str(), None),
        };
        let samples = samples.map(str::parse::<u64>);
        if !is_local(name) || matches!(samples, Some(Err(_))) {
            work.refuse(&setting, &format!(
                "`{text}` is not a file: download the data set and give the path of its file, or write `hf://datasets/OWNER/NAME/FILE` for a data set of the Hugging Face Hub"
            ));
            continue;
        }
        let samples = samples.and_then(Result::ok).map(|samples| (samples, work.from(&setting)));
        let image_root = Some((".".to_owned(), "ms-swift: from the working folder".to_owned()));
        let comment = work.from(&setting);
        sources.push(Source::file(name, image_root, samples, comment));
    }
    work.note("image paths of ms-swift rows may be absolute; here they must lie inside `image_root`, so set it to a common folder");
    sources
}

/// Names of `dataset_info.json`.
fn llama_factory(work: &mut Work) -> (Vec<Source>, Vec<Source>) {
    let setting = work.take(Role::DatasetDir);
    let folder = setting.as_ref().and_then(|setting| setting.value.text()).unwrap_or_default();
    let folder = folder.to_owned();
    let beside = setting.filter(Setting::is_given).map(|setting| work.from(&setting));
    let samples = work.count(Role::MaxSamples);
    let samples = samples.map(|(samples, setting)| (samples, work.from(&setting)));
    let mut lists = [Role::Dataset, Role::EvalDataset].map(|role| {
        let mut sources = Vec::new();
        let Some(setting) = work.given(role) else { return sources };
        let names = setting.value.items().iter().filter_map(Value::text);
        let names: Vec<String> =
            names.flat_map(|names| names.split(',')).map(|name| name.trim().to_owned()).collect();
        for name in names {
            let info = Path::new(&folder).join("dataset_info.json");
            let (mut file, mut num_rows) = (None, None);
            // A folder of another machine cannot be checked here; the run checks it.
            if info.is_file() {
                match DatasetInfo::read(&info, &name) {
                    Ok(found) => {
                        (file, num_rows) = (Some(found.path().to_owned()), found.num_samples());
                    }
                    Err(error) => work.refuse(&setting, &error.to_string()),
                }
            }
            sources.push(Source {
                key: "dataset_info",
                value: format!("{}#{name}", info.display()),
                file,
                num_rows,
                image_root: None,
                samples: samples.clone(),
                weight: None,
                comment: match &beside {
                    Some(folder) => format!("{}, {folder}", work.from(&setting)),
                    None => work.from(&setting),
                },
            });
        }
        sources
    });
    (std::mem::take(&mut lists[0]), std::mem::take(&mut lists[1]))
}

/// A list of data sets, or a file with such a list.
fn lmms_engine(work: &mut Work) -> (Vec<Source>, Vec<Source>) {
    let list = work.given(Role::Dataset);
    let path = work.given(Role::DatasetDir);
    let format = work.take(Role::DatasetFormat);
    let is_list = format.as_ref().is_some_and(|format| format.value.text() == Some("yaml"));
    if let Some(format) = &format {
        work.drop(format, "the format of a file is recognised by its content");
    }
    let mut train = Vec::new();
    if let Some(setting) = &list {
        train.extend(lmms_list(work, setting, &setting.value.clone()));
        if let Some(path) = &path {
            work.drop(path, "`datasets` is used instead");
        }
    } else if let Some(setting) = &path {
        train = lmms_path(work, setting, is_list);
    }
    let eval = match work.given(Role::EvalDataset) {
        Some(setting) => lmms_path(work, &setting, is_list),
        None => Vec::new(),
    };
    (train, eval)
}

fn lmms_path(work: &mut Work, setting: &Setting, is_list: bool) -> Vec<Source> {
    let path = setting.value.text().unwrap_or_default().to_owned();
    let ending = Path::new(&path).extension().and_then(|ending| ending.to_str());
    if !is_list || !matches!(ending, Some("yaml" | "yml")) {
        if !is_local(&path) {
            work.refuse(
                setting,
                "it is not a file: download the data set and give the path of its file",
            );
        }
        let root = Some((".".to_owned(), LMMS_ROOT.to_owned()));
        return vec![Source::file(&path, root, None, work.from(setting))];
    }
    match settings::parse_file(Path::new(&path)) {
        Ok(root) => {
            let value = Value::of(&root);
            if let Some(list) = value.get("datasets") {
                lmms_list(work, setting, list)
            } else {
                work.refuse(setting, "the file has no list `datasets`");
                Vec::new()
            }
        }
        Err(error) => {
            work.refuse(setting, &format!("the list of data sets cannot be read: {error}"));
            Vec::new()
        }
    }
}

fn lmms_list(work: &mut Work, setting: &Setting, list: &Value) -> Vec<Source> {
    let mut sources = Vec::new();
    for item in list.items() {
        let Value::Map(entries) = item else {
            work.refuse(setting, "expected a list of mappings with `path`");
            continue;
        };
        let comment = work.from(setting);
        let text = |key: &str| item.get(key).and_then(Value::text).filter(|text| !text.is_empty());
        let Some(path) = text("path").map(str::to_owned) else {
            work.refuse(setting, "a data set has no `path`");
            continue;
        };
        let root = text("data_folder")
            .map(|folder| (folder.to_owned(), format!("data_folder: {comment}")));
        let root = root.unwrap_or_else(|| (".".to_owned(), LMMS_ROOT.to_owned()));
        let mut source = Source::file(&path, Some(root), None, comment);
        for (key, value) in entries {
            match (key.as_str(), value.number()) {
                ("path" | "data_folder" | "data_type", _) => {}
                ("ratio", Some(ratio)) => source.weight = Some((ratio, work.from(setting))),
                _ if value.is_off() => {}
                _ => {
                    work.refuse(
                        setting,
                        &format!("`{key}: {value}` of `{path}` has no equivalent"),
                    );
                }
            }
        }
        if !is_local(&path) {
            work.refuse(setting, &format!("`{path}` is not a file: download the data set and give the path of its file, or write `hf://datasets/OWNER/NAME/FILE`"));
        }
        sources.push(source);
    }
    sources
}

/// Writes the mixture, and gives the data sets their shares. Returns whether shares are mixed.
fn mixture(work: &mut Work, train: &mut [Source]) -> bool {
    let mix = work.take(Role::Mix);
    let probabilities = work.given(Role::Probabilities);
    let stopping = work.take(Role::Stopping);
    let name = mix.as_ref().and_then(|mix| mix.value.text()).unwrap_or("concat").to_owned();
    let is_mixed = match work.trainer {
        Trainer::LlamaFactory => name != "concat",
        Trainer::MsSwift | Trainer::LmmsEngine => probabilities.is_some(),
    };
    if !is_mixed {
        for setting in [mix, probabilities, stopping].into_iter().flatten() {
            work.drop(&setting, "the data sets are joined");
        }
        return false;
    }
    let comment = [&mix, &probabilities].into_iter().flatten().map(|setting| work.from(setting));
    let comment = comment.collect::<Vec<_>>().join(", ");
    work.write("data.mixture", "share", &comment);
    let (stop, setting) = match (name.as_str(), mix, stopping) {
        ("interleave_under", Some(mix), _) => ("first_exhausted", mix),
        ("interleave_over", Some(mix), _) => ("all_exhausted", mix),
        ("concat", _, Some(stopping)) => match stopping.value.text() {
            Some("first_exhausted") => ("first_exhausted", stopping),
            Some("all_exhausted") => ("all_exhausted", stopping),
            _ => {
                work.refuse(&stopping, "expected `first_exhausted` or `all_exhausted`");
                return true;
            }
        },
        (_, Some(mix), _) => {
            work.refuse(&mix, "expected `concat`, `interleave_under` or `interleave_over`");
            return true;
        }
        _ => return true,
    };
    work.write_from("data.stopping_strategy", stop, &setting);
    let Some(setting) = probabilities else { return true };
    let shares: Vec<Option<f64>> = match &setting.value {
        Value::Text(text) => text.split(',').map(|share| share.trim().parse().ok()).collect(),
        other => other.items().iter().map(Value::number).collect(),
    };
    if shares.len() != train.len() || shares.iter().any(Option::is_none) {
        work.refuse(&setting, &format!("expected {} numbers, one for each data set", train.len()));
        return true;
    }
    for (source, share) in train.iter_mut().zip(shares.into_iter().flatten()) {
        source.weight = Some((share, work.from(&setting)));
    }
    true
}

/// Turns a number of rows into a weight. Returns the rows of an epoch, if they can be counted.
fn weight(work: &mut Work, source: &mut Source, is_joined: bool) -> Option<u64> {
    let rows = source.num_rows.or_else(|| source.file.as_deref().and_then(count_rows));
    let Some((samples, comment)) = source.samples.take() else { return rows };
    let is_swift = work.trainer == Trainer::MsSwift;
    let name = source.value.clone();
    let Some(rows) = rows.filter(|rows| *rows > 0) else {
        work.need(&name, &format!(
            "{comment} limits it to {samples} rows, and the rows of the file cannot be counted here: convert where the file is, or leave the limit out and set `weight`"
        ));
        return None;
    };
    if samples == rows || (samples > rows && !is_swift) {
        // LLaMA-Factory's `max_samples` never repeats rows
        work.note(format!("{comment} has no effect: `{name}` has {rows} rows"));
        return Some(rows);
    }
    if !is_joined {
        work.need(&name, &format!("{comment}: a number of rows of a data set that is evaluated or mixed by share has no equivalent"));
        return None;
    }
    let weight = samples as f64 / rows as f64;
    source.weight = Some((weight, format!("{samples} of {rows} rows: {comment}")));
    work.note("a data set with a weight below 1 uses other rows in each epoch; the other trainer draws them once");
    Some(samples)
}

impl Source {
    fn file(
        path: &str,
        image_root: Option<(String, String)>,
        samples: Option<(u64, String)>,
        comment: String,
    ) -> Self {
        let (key, value) = ("path", path.to_owned());
        let (file, num_rows) = (Some(path.into()), None);
        Self { key, file, num_rows, value, image_root, samples, weight: None, comment }
    }
}

fn lines(source: &Source) -> Vec<Line> {
    let line = |key: &str, value: String, comment: &str| Line {
        key: key.to_owned(),
        value,
        comment: comment.to_owned(),
    };
    let mut lines = vec![line(source.key, quoted(&source.value), &source.comment)];
    if let Some((folder, comment)) = &source.image_root {
        lines.push(line("image_root", quoted(folder), comment));
    }
    if let Some((weight, comment)) = &source.weight {
        lines.push(line("weight", weight.to_string(), comment));
    }
    lines
}

/// Whether a data set is a file or a folder, and not an id of a hub.
fn is_local(name: &str) -> bool {
    let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
    ENDINGS.contains(&ending)
        || name.starts_with(['/', '.'])
        || name.starts_with("hf://")
        || name.ends_with('/')
        || Path::new(name).exists()
}

/// Number of rows of a JSONL file or a JSON array; `None` for other files.
fn count_rows(path: &Path) -> Option<u64> {
    let file = BufReader::new(crate::files::open(path).ok()?);
    match path.extension()?.to_str()? {
        "jsonl" => {
            let mut rows = 0;
            for line in file.lines() {
                rows += u64::from(!line.ok()?.trim().is_empty());
            }
            Some(rows)
        }
        "json" => {
            let rows: Vec<serde::de::IgnoredAny> = serde_json::from_reader(file).ok()?;
            Some(rows.len() as u64)
        }
        _ => None,
    }
}
