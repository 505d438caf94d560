//! The model card: the `README.md` of a model folder, as the Hugging Face Hub shows it.

use super::facts::method;
use super::folder::RunFolder;
use super::html::push;
use super::tables::fact;
use crate::checkpoint::ADAPTER_CONFIG;
use crate::files;
use crate::net::hub::Repo;
use crate::train::{AdapterKind, Quantize, Weights};
use serde_json::Value;
use std::path::Path;

/// Facts of the run that the card has: none that differs between equal runs, so that their folders
/// `final` are equal.
const FACTS: [&str; 6] = ["Method", "Data", "eval.loss", "loss", "eval.accuracy", "Tokens"];
/// Beginnings of the keys of the settings that the card has.
const SETTINGS: [&str; 18] = [
    "adapter.",
    "data.max_length",
    "data.packing_length",
    "model.freeze",
    "model.precision",
    "optim.betas",
    "optim.kind",
    "optim.lr",
    "optim.min_lr",
    "optim.schedule",
    "optim.warmup",
    "optim.weight_decay",
    "seed",
    "train.batch_size",
    "train.epochs",
    "train.gradient_accumulation_steps",
    "train.max_grad_norm",
    "train.max_steps",
];

/// The card of the model or adapter in `folder`, which is made from the model `base`: a folder or an
/// id on the hub. `run` has trained it; `made` says how the folder was made.
///
/// It names no license, as the program does not know that of the model.
pub fn model_card(folder: &Path, base: &str, run: Option<&RunFolder>, made: &str) -> String {
    let config = run.and_then(|run| run.config.as_ref().ok());
    let base = config.map_or(base.into(), |config| config.model.path.to_string_lossy());
    // as `config.yaml` has a model of the hub
    let id = Repo::model(&base).filter(Repo::is_at_commit).map(|repo| repo.id);
    let id = id.as_deref();
    let name = || {
        let name = Path::new(&*base).file_name().or(folder.file_name());
        name.unwrap_or_default().to_string_lossy()
    };
    let shown = id.map_or_else(|| escape(&name()), str::to_owned);
    let is_random = config.is_some_and(|config| config.model.weights == Weights::Random);
    let is_adapter = folder.join(ADAPTER_CONFIG).exists();
    let adapter = config.and_then(|config| config.adapter.as_ref());
    let quantize = adapter.map_or(Quantize::None, |adapter| adapter.quantize);
    let sees = sees_images(folder);

    let mut card = String::from("---\n");
    if let Some(id) = id.filter(|_| !is_random) {
        push(&mut card, format_args!("base_model: {id}\n"));
    }
    let library = if is_adapter { "peft" } else { "transformers" };
    let task = if sees { "image-text-to-text" } else { "text-generation" };
    push(&mut card, format_args!("library_name: {library}\npipeline_tag: {task}\ntags:\n- sft\n"));
    card += match adapter.map(|adapter| adapter.kind) {
        Some(AdapterKind::Lora) => "- lora\n",
        Some(AdapterKind::Dora) => "- dora\n",
        None => "",
    };
    let tuned = if config.is_some() && !is_random { ", fine-tuned" } else { "" };
    push(&mut card, format_args!("---\n\n# {shown}{tuned}\n\n{made}\n"));
    if let Some(config) = config {
        let from = if is_random {
            "started from random weights, in the shape of"
        } else {
            "is fine-tuned from"
        };
        let code = id.map_or_else(|| name().replace(['`', '\n', '\r'], "'"), str::to_owned);
        push(&mut card, format_args!("It {from} `{code}`: {}.\n", escape(&method(config))));
    }
    let whole = id.unwrap_or("path/of/the/model");
    let nf4 = is_adapter && quantize == Quantize::Nf4;
    push(&mut card, format_args!("\n## How to load it\n\n{}", code(sees, is_adapter, nf4, whole)));
    if let Some(run) = run {
        card += "\n## Training\n\n| | |\n|---|---|\n";
        for (name, value) in FACTS.iter().filter_map(|key| fact(run, key)) {
            push(&mut card, format_args!("| {name} | {} |\n", escape(&value)));
        }
    }
    if let Some(config) = config {
        card += "\n## Settings\n\n| | |\n|---|---|\n";
        let settings = config.settings();
        // a folder of the machine
        let is_path = |key: &str| key == "adapter.start_from";
        let is_shown =
            |key: &str| !is_path(key) && SETTINGS.iter().any(|start| key.starts_with(start));
        for (key, value) in settings.iter().filter(|(key, value)| is_shown(key) && *value != "null")
        {
            push(&mut card, format_args!("| `{key}` | {} |\n", escape(value)));
        }
    }
    let version = env!("CARGO_PKG_VERSION");
    card + &format!("\nThis card was written by trainer {version}.\n")
}

/// Whether the model in a folder, or that of the adapter there, has images as inputs.
fn sees_images(folder: &Path) -> bool {
    let config = files::read(folder.join("config.json")).unwrap_or_default();
    let config: Value = serde_json::from_slice(&config).unwrap_or_default();
    let processors = ["preprocessor_config.json", "processor_config.json"];
    config["vision_config"].is_object() || processors.iter().any(|name| folder.join(name).exists())
}

/// Python that loads the folder `path/of/this/folder`.
fn code(sees_images: bool, is_adapter: bool, in_4_bits: bool, base: &str) -> String {
    let (model, inputs, name) = if sees_images {
        ("AutoModelForImageTextToText", "AutoProcessor", "processor")
    } else {
        ("AutoModelForCausalLM", "AutoTokenizer", "tokenizer")
    };
    let load = match (is_adapter, in_4_bits) {
        (false, _) => format!("model = {model}.from_pretrained(folder, dtype=\"auto\")\n"),
        (true, false) => format!(
            "model = {model}.from_pretrained(\"{base}\", dtype=\"auto\")\n\
             model = PeftModel.from_pretrained(model, folder)\n"
        ),
        (true, true) => format!(
            "nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=\"nf4\", bnb_4bit_use_double_quant=True)\n\
             model = {model}.from_pretrained(\"{base}\", dtype=\"auto\", quantization_config=nf4)\n\
             model = PeftModel.from_pretrained(model, folder)\n"
        ),
    };
    // a processor needs `config.json`, which the folder of an adapter does not have
    let source = if is_adapter { format!("\"{base}\"") } else { "folder".to_owned() };
    let peft = if is_adapter { "from peft import PeftModel\n" } else { "" };
    let bits = if is_adapter && in_4_bits { ", BitsAndBytesConfig" } else { "" };
    format!(
        "```python\n{peft}from transformers import {model}, {inputs}{bits}\n\n\
         folder = \"path/of/this/folder\"\n{load}\
         {name} = {inputs}.from_pretrained({source})\n```\n"
    )
}

/// Text in a line or a table of Markdown.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '|' | '`' | '<' | '[' | '*' | '\\' => out.extend(['\\', c]),
            '\n' | '\r' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
