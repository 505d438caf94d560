//! Runs of Qwen2.5-VL: ranks, shards, adapters, and the names of tensors in files. `parity` and `laws`
//! compare its values.

use super::harness::{Place, copy_folder, golden};
use super::parity::rows_for;
use super::ranks::{config, place, train};
use candle_core::{DType, Device, Tensor, safetensors};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use trainer::data::RowReader;
use trainer::run::export_model;
use trainer::train::Outcome;

const MODEL: &str = "small-qwen25vl";
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

fn qwen25() -> Place {
    let place = place();
    std::fs::remove_dir_all(place.path("model")).unwrap();
    copy_folder(&golden("models").join(MODEL), &place.path("model"));
    place
}

fn trained(place: &Place, name: &str, world: usize, settings: &[&str]) {
    let settings = [&SETTINGS[..], settings].concat();
    let outcomes = train(&config(place, name, &settings), world, None);
    assert!(outcomes.iter().all(|end| matches!(end, Outcome::Finished { .. })), "{name}");
}

fn tensors(place: &Place, folder: &str) -> HashMap<String, Tensor> {
    safetensors::load(place.path(&format!("{folder}/model.safetensors")), &Device::Cpu).unwrap()
}

/// Bits of each tensor.
fn bits(tensors: &HashMap<String, Tensor>) -> BTreeMap<&str, Vec<u32>> {
    let bits = |tensor: &Tensor| {
        let values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        values.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    tensors.iter().map(|(name, tensor)| (name.as_str(), bits(tensor))).collect()
}

#[test]
fn ranks_and_shards_train_the_weights_of_one_rank() {
    let place = qwen25();
    let start = tensors(&place, "model");
    for precision in ["f32", "bf16"] {
        let precision = format!("model.precision={precision}");
        let name = |of: &str| format!("{of}-{}", &precision[precision.len() - 3..]);
        trained(&place, &name("alone"), 1, &[&precision]);
        let alone = tensors(&place, &format!("{}/final", name("alone")));
        let (found, before) = (bits(&alone), bits(&start));
        assert!(found.iter().all(|(name, values)| *values != before[name]), "{precision}");
        for shard in ["none", "full"] {
            let name = name(shard);
            trained(&place, &name, 2, &[&precision, &format!("distributed.shard={shard}")]);
            let found = tensors(&place, &format!("{name}/final"));
            assert_eq!(bits(&found), bits(&alone), "{precision}, {shard}");
        }
    }
}

/// Published folders have `visual.*` and `model.layers.*`, as has the folder of this test.
#[test]
fn folders_in_both_spellings_train_alike_and_are_saved_as_published() {
    let place = qwen25();
    let published = tensors(&place, "model");
    trained(&place, "published", 1, &[]);
    let found = tensors(&place, "published/final");
    assert_eq!(found.keys().collect::<BTreeSet<_>>(), published.keys().collect::<BTreeSet<_>>());
    let module = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => format!("model.{name}"),
    };
    let modules: HashMap<String, Tensor> =
        published.iter().map(|(name, tensor)| (module(name), tensor.clone())).collect();
    assert!(modules.contains_key("model.visual.merger.ln_q.weight"));
    safetensors::save(&modules, place.path("model/model.safetensors")).unwrap();
    trained(&place, "modules", 1, &[]);
    assert_eq!(bits(&tensors(&place, "modules/final")), bits(&found));
}

#[test]
fn an_adapter_of_all_parts_is_merged_under_the_published_names() {
    let place = qwen25();
    let settings = ["adapter.rank=2", "adapter.parts=[llm, vision, merger]", "adapter.dropout=0"];
    trained(&place, "run", 1, &settings);
    let adapter = place.path("run/final");
    let file = adapter.join("adapter_model.safetensors");
    let names = safetensors::load(file, &Device::Cpu).unwrap();
    let peft = "base_model.model.model";
    for layer in ["language_model.layers.2.self_attn.v_proj", "visual.blocks.0.mlp.down_proj"] {
        assert!(names.contains_key(&format!("{peft}.{layer}.lora_B.weight")), "{layer}");
    }
    let merged = export_model(&place.path("model"), Some(&adapter), None, &place.path("out"));
    assert_eq!(merged.unwrap().merged * 2, names.len());
    let (before, after) = (tensors(&place, "model"), tensors(&place, "out"));
    let (before, after) = (bits(&before), bits(&after));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    let changed = before.iter().filter(|(name, values)| after[*name] != **values).count();
    assert_eq!(changed * 2, names.len());
}

#[test]
fn rows_with_videos_are_rejected_with_their_reason() {
    let rows = rows_for(MODEL, "video");
    let rejection = rows.read(rows.rows().next().unwrap()).unwrap_err();
    assert_eq!(rejection.reason, "not_supported");
    assert!(
        rejection.message.contains("with Qwen2.5-VL, a video is not supported"),
        "{}",
        rejection.message
    );
}
