//! Files for llama.cpp, read with the reader of candle. `scripts/gguf/test.sh` runs llama.cpp itself.

use super::harness::{Place, binary, copy_folder, finish, golden, tensors, write_adapter};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use half::f16;
use serde_json::json;
use std::collections::HashMap;
use std::fs::File;
use std::process::Command;

/// A file: its content, and its tensors by name.
struct Gguf {
    metadata: HashMap<String, Value>,
    tensors: HashMap<String, QTensor>,
}

impl Gguf {
    /// Also checks the version, the places of the tensors, and that nothing follows them.
    fn read(place: &Place, name: &str) -> Self {
        let bytes = place.read(name);
        assert_eq!(bytes[..8], *b"GGUF\x03\0\0\0", "{name}");
        let mut file = File::open(place.path(name)).unwrap();
        let content = Content::read(&mut file).unwrap();
        assert!(content.tensor_data_offset.is_multiple_of(32), "{name}");
        let mut infos: Vec<_> = content.tensor_infos.iter().collect();
        infos.sort_by_key(|(_, info)| info.offset);
        let mut places = Vec::new();
        let mut tensors = HashMap::new();
        for (tensor, info) in infos {
            let found = content.tensor(&mut file, tensor, &Device::Cpu).unwrap();
            places.push((info.offset as usize, found.storage_size_in_bytes()));
            tensors.insert(tensor.clone(), found);
        }
        let mut end = 0;
        for (offset, size) in places {
            assert_eq!(offset, end, "{name}");
            end = (offset + size).next_multiple_of(32);
        }
        assert_eq!(content.tensor_data_offset as usize + end, bytes.len(), "{name}");
        Self { metadata: content.metadata, tensors }
    }

    fn dtype(&self, name: &str) -> GgmlDType {
        self.tensors[name].dtype()
    }

    fn values(&self, name: &str) -> Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("{name}")).dequantize(&Device::Cpu).unwrap()
    }

    fn number(&self, key: &str) -> u32 {
        self.metadata.get(key).unwrap_or_else(|| panic!("{key}")).to_u32().unwrap()
    }

    fn text(&self, key: &str) -> &str {
        self.metadata[key].to_string().unwrap()
    }

    fn list<T>(&self, key: &str, of: impl Fn(&Value) -> T) -> Vec<T> {
        self.metadata[key].to_vec().unwrap().iter().map(of).collect()
    }

    fn num_elements(&self) -> usize {
        self.tensors.values().map(|tensor| tensor.shape().elem_count()).sum()
    }
}

fn model(name: &str) -> Place {
    let place = Place::empty();
    copy_folder(&golden("models").join(name), &place.path("model"));
    place
}

fn export(place: &Place, out: &str, arguments: &[&str]) -> serde_json::Value {
    let all = [&["export", "--model", "model", "--gguf", out], arguments].concat();
    serde_json::from_str(&place.trainer(&all).ends_with(0).stdout).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Asserts that a matrix of the file is the rounded matrix `expected`, or an equal vector.
#[track_caller]
fn assert_stored(file: &Gguf, name: &str, expected: &Tensor) {
    let found = file.values(name);
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let is_half = file.dtype(name) == GgmlDType::F16;
    assert!(is_half || file.dtype(name) == GgmlDType::F32, "{name}");
    let round = |value: &f32| if is_half { f16::from_f32(*value).to_f32() } else { *value };
    let expected: Vec<f32> = flat(expected).iter().map(round).collect();
    assert!(expected.iter().any(|value| *value != 0.0), "{name}: a test of zeros shows nothing");
    assert_eq!(flat(&found), expected, "{name}");
}

#[test]
fn a_vision_language_model_has_the_names_and_sizes_of_llama_cpp() {
    let place = model("small-tied");
    let report = export(&place, "out", &[]);
    assert_eq!(place.names("out"), ["mmproj-f16.gguf", "model-f16.gguf"]);
    let (text, vision) =
        (Gguf::read(&place, "out/model-f16.gguf"), Gguf::read(&place, "out/mmproj-f16.gguf"));
    let stored = tensors(&place, "model/model.safetensors");
    let count: usize = stored.values().map(Tensor::elem_count).sum();
    assert_eq!(text.num_elements() + vision.num_elements(), count);
    // the kernel of the patches becomes two
    assert_eq!(text.tensors.len() + vision.tensors.len(), stored.len() + 1);
    assert_eq!(report["tensors"], stored.len() + 1);

    assert_eq!(text.text("general.architecture"), "qwen3vl");
    for (key, value) in [
        ("qwen3vl.block_count", 4),
        ("qwen3vl.context_length", 262_144),
        ("qwen3vl.embedding_length", 128),
        ("qwen3vl.attention.head_count_kv", 2),
        ("qwen3vl.attention.key_length", 32),
        ("qwen3vl.n_deepstack_layers", 3),
        ("general.file_type", 1),
        ("tokenizer.ggml.eos_token_id", 2019),
        ("tokenizer.ggml.padding_token_id", 2017),
    ] {
        assert_eq!(text.number(key), value, "{key}");
    }
    let sections = text.list("qwen3vl.rope.dimension_sections", |axis| axis.to_i32().unwrap());
    assert_eq!(sections, [6, 5, 5, 0]);
    assert_eq!(text.metadata["qwen3vl.rope.freq_base"].to_f32().unwrap(), 5e6);
    assert_eq!(text.text("tokenizer.ggml.pre"), "qwen2");
    let template = String::from_utf8(place.read("model/chat_template.jinja")).unwrap();
    assert_eq!(text.text("tokenizer.chat_template"), template);
    let tokens = text.list("tokenizer.ggml.tokens", |token| token.to_string().unwrap().clone());
    let kinds = text.list("tokenizer.ggml.token_type", |kind| kind.to_i32().unwrap());
    assert_eq!((tokens.len(), kinds.len()), (2048, 2048));
    let kind = |token: &str| kinds[tokens.iter().position(|found| found == token).unwrap()];
    assert_eq!(["!", "<|im_end|>", "<think>", "[PAD2047]"].map(kind), [1, 3, 4, 5]);
    let merges = text.list("tokenizer.ggml.merges", |merge| merge.to_string().unwrap().clone());
    assert_eq!((merges.len(), merges[0].as_str()), (1761, "\u{120} \u{120}"));

    assert_eq!(vision.text("clip.projector_type"), "qwen3vl_merger");
    assert_eq!(vision.number("clip.vision.image_size"), 48 * 16);
    let deepstack = vision.list("clip.vision.is_deepstack_layers", |on| on.to_bool().unwrap());
    assert_eq!(deepstack, [true, true, true, false]);
    let mean = vision.list("clip.vision.image_mean", |mean| mean.to_f32().unwrap());
    assert_eq!(mean, [0.5, 0.5, 0.5]);
}

#[test]
fn tensors_of_a_vision_language_model_have_the_names_of_llama_cpp() {
    let place = model("small-tied");
    export(&place, "out", &[]);
    let (text, vision) =
        (Gguf::read(&place, "out/model-f16.gguf"), Gguf::read(&place, "out/mmproj-f16.gguf"));
    let stored = tensors(&place, "model/model.safetensors");
    let decoder = |name: &str| &stored[&format!("model.language_model.{name}")];
    let visual = |name: &str| &stored[&format!("model.visual.{name}")];
    for (name, ours) in [
        ("token_embd.weight", "embed_tokens.weight"),
        ("output_norm.weight", "norm.weight"),
        ("blk.3.attn_norm.weight", "layers.3.input_layernorm.weight"),
        ("blk.3.ffn_norm.weight", "layers.3.post_attention_layernorm.weight"),
        ("blk.0.attn_q.weight", "layers.0.self_attn.q_proj.weight"),
        ("blk.1.attn_k_norm.weight", "layers.1.self_attn.k_norm.weight"),
        ("blk.2.attn_output.weight", "layers.2.self_attn.o_proj.weight"),
        ("blk.2.ffn_down.weight", "layers.2.mlp.down_proj.weight"),
    ] {
        assert_stored(&text, name, decoder(ours));
    }
    for (name, ours) in [
        ("v.position_embd.weight", "pos_embed.weight"),
        ("v.patch_embd.bias", "patch_embed.proj.bias"),
        ("v.blk.3.attn_qkv.weight", "blocks.3.attn.qkv.weight"),
        ("v.blk.0.ln2.bias", "blocks.0.norm2.bias"),
        ("v.blk.1.ffn_up.weight", "blocks.1.mlp.linear_fc1.weight"),
        ("v.blk.1.ffn_down.bias", "blocks.1.mlp.linear_fc2.bias"),
        ("v.post_ln.weight", "merger.norm.weight"),
        ("mm.0.weight", "merger.linear_fc1.weight"),
        ("mm.2.bias", "merger.linear_fc2.bias"),
        ("v.deepstack.2.fc2.weight", "deepstack_merger_list.2.linear_fc2.weight"),
        ("v.deepstack.1.norm.weight", "deepstack_merger_list.1.norm.weight"),
    ] {
        assert_stored(&vision, name, visual(ours));
    }
    let kernel = visual("patch_embed.proj.weight");
    for (frame, name) in ["v.patch_embd.weight", "v.patch_embd.weight.1"].into_iter().enumerate() {
        assert_stored(&vision, name, &kernel.narrow(2, frame, 1).unwrap().squeeze(2).unwrap());
    }
    assert_eq!(vision.dtype("v.position_embd.weight"), GgmlDType::F32);
    assert_eq!(text.dtype("blk.0.attn_q.weight"), GgmlDType::F16);
}

#[test]
fn qwen2_5_vl_has_queries_keys_and_values_apart() {
    let place = model("small-qwen25vl");
    export(&place, "out", &["--quant", "bf16"]);
    let (text, vision) =
        (Gguf::read(&place, "out/model-bf16.gguf"), Gguf::read(&place, "out/mmproj-bf16.gguf"));
    assert_eq!(text.text("general.architecture"), "qwen2vl");
    assert_eq!(vision.text("clip.projector_type"), "qwen2.5vl_merger");
    assert_eq!(vision.number("clip.vision.n_wa_pattern"), 2);
    let stored = tensors(&place, "model/model.safetensors");
    let count: usize = stored.values().map(Tensor::elem_count).sum();
    assert_eq!(text.num_elements() + vision.num_elements(), count);
    let bf16 = |tensor: &Tensor| flat(&tensor.to_dtype(DType::BF16).unwrap());
    let matrix = &stored["visual.blocks.2.attn.qkv.weight"];
    for (k, part) in ["q", "k", "v"].into_iter().enumerate() {
        let name = format!("v.blk.2.attn_{part}.weight");
        assert_eq!(vision.dtype(&name), GgmlDType::BF16);
        assert_eq!(flat(&vision.values(&name)), bf16(&matrix.narrow(0, 32 * k, 32).unwrap()));
        let bias = &stored["visual.blocks.2.attn.qkv.bias"].narrow(0, 32 * k, 32).unwrap();
        assert_eq!(flat(&vision.values(&format!("v.blk.2.attn_{part}.bias"))), flat(bias));
    }
    assert_stored(&text, "blk.1.attn_k.bias", &stored["model.layers.1.self_attn.k_proj.bias"]);
    assert_stored(&vision, "v.post_ln.weight", &stored["visual.merger.ln_q.weight"]);
    assert_eq!(vision.dtype("v.patch_embd.weight"), GgmlDType::F32);
}

#[test]
fn linear_attention_has_the_order_and_the_decays_of_llama_cpp() {
    let place = model("small-qwen35");
    place.trainer(&["export", "--model", "model", "--gguf", "out"]).ends_with(0).says("left out");
    let text = Gguf::read(&place, "out/model-f16.gguf");
    let stored = tensors(&place, "model/model.safetensors");
    assert_eq!(text.text("general.architecture"), "qwen35");
    assert_eq!(text.text("tokenizer.ggml.pre"), "qwen35");
    for (key, value) in [
        ("block_count", 8),
        ("full_attention_interval", 4),
        ("rope.dimension_count", 16),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 32),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 128),
    ] {
        assert_eq!(text.number(&format!("qwen35.{key}")), value, "{key}");
    }
    let layer = |name: &str| &stored[&format!("model.language_model.layers.0.{name}")];
    // heads 0 and 1 have the first key head, and heads 2 and 3 the second one
    let order = [0_u32, 2, 1, 3];
    let rows = |start: u32, size: u32| -> Vec<u32> {
        let head = |head: u32| (0..size).map(move |row| start + head * size + row);
        (0..start).chain(order.into_iter().flat_map(head)).collect()
    };
    let take = |tensor: &Tensor, dim: usize, rows: Vec<u32>| {
        let count = rows.len();
        tensor.index_select(&Tensor::from_vec(rows, count, &Device::Cpu).unwrap(), dim).unwrap()
    };
    for (name, ours, dim, start, size) in [
        ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", 0, 128, 32),
        ("attn_gate.weight", "linear_attn.in_proj_z.weight", 0, 0, 32),
        ("ssm_alpha.weight", "linear_attn.in_proj_a.weight", 0, 0, 1),
        ("ssm_beta.weight", "linear_attn.in_proj_b.weight", 0, 0, 1),
        ("ssm_dt.bias", "linear_attn.dt_bias", 0, 0, 1),
        ("ssm_out.weight", "linear_attn.out_proj.weight", 1, 0, 32),
    ] {
        assert_stored(&text, &format!("blk.0.{name}"), &take(layer(ours), dim, rows(start, size)));
    }
    let kernel = layer("linear_attn.conv1d.weight").squeeze(1).unwrap();
    assert_stored(&text, "blk.0.ssm_conv1d.weight", &take(&kernel, 0, rows(128, 32)));
    assert_eq!(text.dtype("blk.0.ssm_conv1d.weight"), GgmlDType::F32);
    let decays = layer("linear_attn.A_log").exp().unwrap().neg().unwrap();
    assert_stored(&text, "blk.0.ssm_a", &take(&decays, 0, rows(0, 1)));
    // norms add one to their weights, but that of linear attention does not
    let plus_one = |name: &str| (layer(name) + 1.0).unwrap();
    assert_stored(&text, "blk.0.attn_norm.weight", &plus_one("input_layernorm.weight"));
    let after = plus_one("post_attention_layernorm.weight");
    assert_stored(&text, "blk.0.post_attention_norm.weight", &after);
    assert_stored(&text, "blk.0.ssm_norm.weight", layer("linear_attn.norm.weight"));
}

#[test]
fn quantised_values_are_within_a_step_and_short_rows_stay_in_f16() {
    for (quant, dtype, range) in
        [("q8_0", GgmlDType::Q8_0, 127.0), ("q4_0", GgmlDType::Q4_0, 8.0_f32)]
    {
        let place = model("small-tied");
        let report = export(&place, "out", &["--quant", quant]);
        assert_eq!(report["quantized"], 4 * 7 + 1, "{report}");
        assert_eq!(place.names("out"), ["mmproj-f16.gguf", &format!("model-{quant}.gguf")]);
        let text = Gguf::read(&place, &format!("out/model-{quant}.gguf"));
        let stored = tensors(&place, "model/model.safetensors");
        let name = "blk.1.ffn_gate.weight";
        assert_eq!(text.dtype(name), dtype);
        assert_eq!(text.dtype("token_embd.weight"), GgmlDType::Q8_0);
        let expected = flat(&stored["model.language_model.layers.1.mlp.gate_proj.weight"]);
        let found = flat(&text.values(name));
        let mut is_exact = true;
        for (expected, found) in expected.chunks(32).zip(found.chunks(32)) {
            let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            // the largest positive value of 4 bits is one step less than the largest negative one;
            // the scale is rounded to f16
            let steps = if quant == "q4_0" { 1.01 } else { 0.57 };
            let step = steps * largest / range;
            for (expected, found) in expected.iter().zip(found) {
                assert!((expected - found).abs() <= step, "{expected} {found} {step}");
                is_exact &= expected == found;
            }
        }
        assert!(!is_exact);
        // rows of 24 values
        let place = model("qwen3-text");
        export(&place, "out", &["--quant", quant]);
        assert_eq!(place.names("out"), [format!("model-{quant}.gguf")]);
        let text = Gguf::read(&place, &format!("out/model-{quant}.gguf"));
        let stored = tensors(&place, "model/model.safetensors");
        assert_stored(&text, "output.weight", &stored["lm_head.weight"]);
        assert_eq!(text.dtype("blk.0.ffn_up.weight"), GgmlDType::F16);
        assert_eq!(text.dtype("blk.0.ffn_down.weight"), dtype);
    }
}

#[test]
fn an_adapter_is_merged_first() {
    let place = model("small-tied");
    let layer = "model.language_model.layers.0.mlp.up_proj";
    write_adapter(&place, layer, (256, 128));
    let with_adapter = ["--model", "model", "--adapter", "peft"];
    let to = |out: &[&str]| place.trainer(&[&["export"], &with_adapter[..], out].concat());
    to(&["--gguf", "no"]).ends_with(64).says("not adapters").says("hint: add `--merge`");
    let report = to(&["--merge", "--gguf", "out"]).ends_with(0).stdout;
    assert!(report.contains("\"merged\":1"), "{report}");
    to(&["--merge", "--out", "merged"]).ends_with(0);
    place.trainer(&["export", "--model", "merged", "--gguf", "again"]).ends_with(0);
    export(&place, "plain", &[]);
    let bytes = |folder: &str| place.read(&format!("{folder}/model-f16.gguf"));
    assert!(bytes("out") == bytes("again"));
    assert!(bytes("out") != bytes("plain"));
}

#[test]
fn what_llama_cpp_does_not_compute_is_refused_by_name() {
    let refused = |place: &Place, problem: &str| {
        let arguments = ["export", "--model", "model", "--gguf", "out"];
        place.trainer(&arguments).ends_with(65).says("for llama.cpp").says(problem).says("hint: ");
        assert!(!place.path("out").exists());
    };
    for (name, family) in [
        ("moe-vl", "`qwen3_vl_moe`"),
        ("moe-text", "`qwen3_moe`"),
        ("moe-qwen35", "`qwen3_5_moe`"),
        ("small-qwen2vl", "`qwen2_vl`"),
        ("small-internvl", "`internvl`"),
        ("small-minicpm", "`minicpmv4_6`"),
    ] {
        refused(&model(name), family);
    }
    for (name, section, key, value, problem) in [
        ("small-tied", "vision_config", "hidden_act", json!("gelu"), "`gelu_pytorch_tanh`"),
        ("small-qwen25vl", "vision_config", "window_size", json!(56), "56 pixels"),
        ("small-qwen25vl", "vision_config", "fullatt_block_indexes", json!([1, 2]), "block 2"),
        ("small-qwen35", "text_config", "max_position_embeddings", json!(null), "`max_position"),
    ] {
        let place = model(name);
        let path = "model/config.json";
        let mut config: serde_json::Value = serde_json::from_slice(&place.read(path)).unwrap();
        config[section][key] = value;
        place.write(path, &config.to_string());
        refused(&place, problem);
    }
    let place = model("small-tied");
    let path = "model/tokenizer.json";
    let tokenizer = String::from_utf8(place.read(path)).unwrap();
    place.write(path, &tokenizer.replace(r"\\p{N}|", r"\\p{N}{1,3}|"));
    refused(&place, "splits text by");
}

#[test]
fn a_file_that_cannot_be_written_leaves_no_folder() {
    let place = model("small-tied");
    let arguments = ["export", "--model", "model", "--gguf", "out"];
    let mut command = Command::new("sh");
    // 512 KiB a file
    let script = "trap '' XFSZ; ulimit -f 1024; exec \"$0\" \"$@\"";
    command.args(["-c", script, &binary()]).args(arguments).current_dir(place.path("."));
    finish(&mut command).ends_with(73).says("cannot write").says("model-f16.gguf");
    assert_eq!(place.names("."), ["model"]);

    // one value that is too large for f16
    let mut stored = tensors(&place, "model/model.safetensors");
    let name = "model.language_model.layers.0.mlp.up_proj.weight";
    let mut values = flat(&stored[name]);
    values[300] = 70_000.0;
    let changed = Tensor::from_vec(values, stored[name].shape(), &Device::Cpu).unwrap();
    stored.insert(name.to_owned(), changed);
    candle_core::safetensors::save(&stored, place.path("model/model.safetensors")).unwrap();
    place
        .trainer(&arguments)
        .ends_with(65)
        .says("`blk.0.ffn_up.weight`: its element 300 is 70000, which f16 cannot represent")
        .says("`--quant bf16`");
    assert_eq!(place.names("."), ["model"]);
    export(&place, "out", &["--quant", "bf16"]);
    place.trainer(&arguments).ends_with(64).says("`--gguf`: `out` exists");
}
