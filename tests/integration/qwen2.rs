//! Runs of Qwen2.5-VL and Qwen2-VL: ranks, shards, adapters, and the names of tensors in files. `parity` and `laws`
//! compare its values.

use super::harness::{Place, copy_folder, golden};
use super::ranks::{config, place, train};
use candle_core::{DType, Device, Tensor, safetensors};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use trainer::run::export_model;
use trainer::train::TrainOutcome;

const MODELS: [&str; 2] = ["small-qwen25vl", "small-qwen2vl"];
/// Steps over rows of text and images.
const SETTINGS: [&str; 7] = [
    "train.epochs=null",
    "train.max_steps=2",
    "train.gradient_accumulation_steps=2",
    "checkpoint.every_steps=0",
    "eval.every_steps=0",
    "data.packing_length=256",
    "optim.lr=1e-3",
];

pub(super) fn place_with(model: &str) -> Place {
    let place = place();
    std::fs::remove_dir_all(place.path("model")).unwrap();
    copy_folder(&golden("models").join(model), &place.path("model"));
    place
}

fn places() -> impl Iterator<Item = Place> {
    MODELS.into_iter().map(place_with)
}

pub(super) fn trained(place: &Place, name: &str, world: usize, settings: &[&str]) {
    let settings = [&SETTINGS[..], settings].concat();
    let outcomes = train(&config(place, name, &settings), world, None);
    assert!(outcomes.iter().all(|end| matches!(end, TrainOutcome::Finished { .. })), "{name}");
}

pub(super) fn tensors(place: &Place, folder: &str) -> HashMap<String, Tensor> {
    safetensors::load(place.path(&format!("{folder}/model.safetensors")), &Device::Cpu).unwrap()
}

/// Bits of each tensor.
pub(super) fn bits(tensors: &HashMap<String, Tensor>) -> BTreeMap<&str, Vec<u32>> {
    let bits = |tensor: &Tensor| {
        let values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        values.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    tensors.iter().map(|(name, tensor)| (name.as_str(), bits(tensor))).collect()
}

#[test]
fn ranks_and_shards_train_the_weights_of_one_rank() {
    places().for_each(|place| assert_ranks_agree(&place));
}

/// Every weight changes, and in the same way on one rank, on two, and with shards.
pub(super) fn assert_ranks_agree(place: &Place) {
    let start = tensors(place, "model");
    for precision in ["f32", "bf16"] {
        let precision = format!("model.precision={precision}");
        let name = |of: &str| format!("{of}-{}", &precision[precision.len() - 3..]);
        trained(place, &name("alone"), 1, &[&precision]);
        let alone = tensors(place, &format!("{}/final", name("alone")));
        let (found, before) = (bits(&alone), bits(&start));
        assert!(found.iter().all(|(name, values)| *values != before[name]), "{precision}");
        for shard in ["none", "full"] {
            let name = name(shard);
            trained(place, &name, 2, &[&precision, &format!("distributed.shard={shard}")]);
            let found = tensors(place, &format!("{name}/final"));
            assert_eq!(bits(&found), bits(&alone), "{precision}, {shard}");
        }
    }
}

/// Published folders have `visual.*` and `model.layers.*`, as has the folder of this test.
#[test]
fn folders_in_both_spellings_train_alike_and_are_saved_as_published() {
    for place in places() {
        assert_spellings_agree(&place, |name| match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => format!("model.{name}"),
        });
    }
}

/// A run saves the names of the folder, and equals one with the names of modules, which `module`
/// returns.
pub(super) fn assert_spellings_agree(place: &Place, module: impl Fn(&str) -> String) {
    let published = tensors(place, "model");
    trained(place, "published", 1, &[]);
    let found = tensors(place, "published/final");
    let names = |of: &HashMap<String, Tensor>| of.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(&found), names(&published));
    let modules: HashMap<String, Tensor> =
        published.iter().map(|(name, tensor)| (module(name), tensor.clone())).collect();
    assert!(modules.keys().all(|name| name.starts_with("model.") || name.starts_with("lm_head.")));
    assert!(modules.keys().all(|name| !published.contains_key(name)));
    safetensors::save(&modules, place.path("model/model.safetensors")).unwrap();
    trained(place, "modules", 1, &[]);
    assert_eq!(bits(&tensors(place, "modules/final")), bits(&found));
}

#[test]
fn an_adapter_of_all_parts_is_merged_under_the_published_names() {
    for (place, down) in places().zip(["mlp.down_proj", "mlp.fc2"]) {
        let of_vision = format!("visual.blocks.0.{down}");
        assert_adapters_merge(&place, ["language_model.layers.2.self_attn.v_proj", &of_vision]);
    }
}

/// An adapter has the layers; merged, it changes the weights of its layers
/// under the names of the folder.
pub(super) fn assert_adapters_merge(place: &Place, layers: [&str; 2]) {
    let settings = ["adapter.rank=2", "adapter.parts=[llm, vision, merger]", "adapter.dropout=0"];
    trained(place, "run", 1, &settings);
    let adapter = place.path("run/final");
    let file = adapter.join("adapter_model.safetensors");
    let names = safetensors::load(file, &Device::Cpu).unwrap();
    let peft = "base_model.model.model";
    for layer in layers {
        assert!(names.contains_key(&format!("{peft}.{layer}.lora_B.weight")), "{layer}");
    }
    let merged = export_model(&place.path("model"), Some(&adapter), None, &place.path("out"));
    assert_eq!(merged.unwrap().merged * 2, names.len());
    let (before, after) = (tensors(place, "model"), tensors(place, "out"));
    let (before, after) = (bits(&before), bits(&after));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    let changed = before.iter().filter(|(name, values)| after[*name] != **values).count();
    assert_eq!(changed * 2, names.len());
}

/// transformers before 4.52 named the modules as the published files do, and so does PEFT with it.
#[test]
fn an_adapter_with_the_older_names_of_modules_is_read() {
    let place = place_with("small-qwen25vl");
    let settings = ["adapter.rank=2", "adapter.parts=[llm, vision]", "adapter.dropout=0"];
    trained(&place, "run", 1, &settings);
    let merged = |adapter: &str, out: &str| {
        export_model(&place.path("model"), Some(&place.path(adapter)), None, &place.path(out))
            .unwrap();
        tensors(&place, out)
    };
    let json = place.read("run/final/adapter_config.json");
    let mut json: Value = serde_json::from_slice(&json).unwrap();
    // the factor of one layer is given by its name
    let pattern = |name: &str| json!({ name: 5.0 });
    json["alpha_pattern"] = pattern("model.language_model.layers.1.self_attn.v_proj");
    place.write("run/final/adapter_config.json", &json.to_string());
    let expected = merged("run/final", "expected");

    let old = |name: &str| match name.strip_prefix("base_model.model.model.visual.") {
        Some(rest) => format!("base_model.model.visual.{rest}"),
        None => name.replace("model.language_model.", "model."),
    };
    let file = "adapter_model.safetensors";
    let adapter = safetensors::load(place.path(&format!("run/final/{file}")), &Device::Cpu);
    let adapter = adapter.unwrap();
    let renamed = adapter.iter().map(|(name, tensor)| (old(name), tensor.clone()));
    let mut renamed: HashMap<String, Tensor> = renamed.collect();
    let layer = "model.layers.1.self_attn.v_proj";
    assert!(renamed.contains_key(&format!("base_model.model.{layer}.lora_A.weight")));
    json["alpha_pattern"] = pattern(layer);
    json["target_modules"] = json!("^(model|visual)(?=\\.).*");
    std::fs::create_dir(place.path("old")).unwrap();
    place.write("old/adapter_config.json", &json.to_string());
    safetensors::save(&renamed, place.path(&format!("old/{file}"))).unwrap();
    assert_eq!(bits(&merged("old", "found")), bits(&expected));
    // a run that starts from it saves the names of modules
    let start = format!("adapter.start_from={}", place.path("old").display());
    trained(&place, "next", 1, &[&start]);
    let next = safetensors::load(place.path(&format!("next/final/{file}")), &Device::Cpu).unwrap();
    assert_eq!(next.keys().collect::<BTreeSet<_>>(), adapter.keys().collect::<BTreeSet<_>>());
    let next: Value =
        serde_json::from_slice(&place.read("next/final/adapter_config.json")).unwrap();
    let modules = next["target_modules"].as_array().unwrap();
    assert!(modules.iter().all(|name| !name.as_str().unwrap().starts_with("model.layers")));
    assert_eq!(next["alpha_pattern"], pattern("model.language_model.layers.1.self_attn.v_proj"));

    // both spellings of a tensor
    let (name, twin) = adapter.iter().find(|(name, _)| name.contains(".layers.")).unwrap();
    renamed.insert(name.clone(), twin.clone());
    safetensors::save(&renamed, place.path(&format!("old/{file}"))).unwrap();
    let refused =
        export_model(&place.path("model"), Some(&place.path("old")), None, &place.path("no"));
    let said = chain(&refused.unwrap_err());
    assert!(
        said.contains(&format!("`{}`", old(name))) && said.contains(&format!("`{name}`")),
        "{said}"
    );
}

/// An error and its causes.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[test]
fn a_folder_with_both_spellings_of_a_tensor_is_refused() {
    for place in places() {
        let mut both = tensors(&place, "model");
        let twin = both["visual.merger.ln_q.weight"].clone();
        both.insert("model.visual.merger.ln_q.weight".to_owned(), twin);
        safetensors::save(&both, place.path("model/model.safetensors")).unwrap();
        let error = export_model(&place.path("model"), None, None, &place.path("out")).unwrap_err();
        let said = chain(&error);
        for spelling in ["`visual.merger.ln_q.weight`", "`model.visual.merger.ln_q.weight`"] {
            assert!(said.contains(spelling), "{said}");
        }
    }
}

#[test]
fn ranks_train_rows_with_videos_as_one_rank() {
    for place in places() {
        let data = format!("data.train=[{{path: '{}'}}]", golden("data/video_28.jsonl").display());
        trained(&place, "alone", 1, &[&data]);
        let expected = tensors(&place, "alone/final");
        for shard in ["none", "full"] {
            trained(&place, shard, 2, &[&data, &format!("distributed.shard={shard}")]);
            assert_eq!(
                bits(&tensors(&place, &format!("{shard}/final"))),
                bits(&expected),
                "{shard}"
            );
        }
    }
}
