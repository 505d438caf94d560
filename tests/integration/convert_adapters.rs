//! `trainer convert`: adapters of other trainers become the config section `adapter`.

use super::convert::{refusal, resolved, swift};
use serde_json::Value;
use trainer::convert::{ConvertError, Trainer};

/// A config with an adapter, of a trainer whose default is an adapter.
fn adapter(trainer: Trainer, more: &str) -> Result<Value, ConvertError> {
    let base = match trainer {
        Trainer::MsSwift => "model: Qwen/Qwen3-VL-2B-Instruct\ndataset: a.jsonl\n",
        _ => "model_name_or_path: Qwen/Qwen3-VL-2B-Instruct\ndataset: a\n",
    };
    resolved(trainer, "a.yaml", &format!("{base}{more}"))
}

#[test]
fn adapters_have_the_defaults_of_the_other_trainer() {
    let swift = adapter(Trainer::MsSwift, "").unwrap();
    let factory = adapter(Trainer::LlamaFactory, "").unwrap();
    for (config, alpha, dropout, lr) in [(&swift, 32.0, 0.05, 1e-4), (&factory, 16.0, 0.0, 5e-5)] {
        let adapter = &config["adapter"];
        assert_eq!(adapter["kind"], "lora");
        assert_eq!(adapter["rank"], 8);
        assert_eq!(adapter["alpha"], alpha);
        assert_eq!(adapter["dropout"], dropout);
        assert_eq!(adapter["target"], "all-linear");
        assert_eq!(adapter["parts"].to_string(), r#"["llm"]"#);
        assert_eq!(config["optim"]["lr"], lr);
        assert_eq!(config["model"]["freeze"].to_string(), "[]");
    }
}

#[test]
fn settings_of_adapters_become_the_section_adapter() {
    let text = "lora_rank: 16\nlora_alpha: 8\nlora_dropout: 0.1\nuse_rslora: true\nuse_dora: true\n\
                target_modules: [q_proj, attn.qkv]\nmodules_to_save: [embed_tokens]\n\
                init_weights: gaussian\nlorap_lr_ratio: 16\n";
    let config = adapter(Trainer::MsSwift, text).unwrap();
    assert_eq!(
        config["adapter"].to_string(),
        r#"{"kind":"dora","rank":16,"alpha":8.0,"dropout":0.1,"target":["q_proj","attn.qkv"],"parts":["llm","vision","merger"],"rslora":true,"init":"gaussian","train_also":["*embed_tokens.*"],"quantize":"none","start_from":null}"#
    );
    assert_eq!(config["optim"]["lr_multipliers"].to_string(), r#"{"*lora_B*":16.0}"#);
    let text = "lora_rank: 4\nlora_target: q_proj,v_proj\nadditional_target: lm_head\nloraplus_lr_ratio: 4\nquantization_bit: 4\n";
    let config = adapter(Trainer::LlamaFactory, text).unwrap();
    assert_eq!(
        config["adapter"].to_string(),
        r#"{"kind":"lora","rank":4,"alpha":8.0,"dropout":0.0,"target":["q_proj","v_proj"],"parts":["llm"],"rslora":false,"init":"default","train_also":["*lm_head.*"],"quantize":"nf4","start_from":null}"#
    );
    assert_eq!(config["optim"]["lr_multipliers"].to_string(), r#"{"*lora_B*":4.0}"#);
}

#[test]
fn new_tokens_are_added_and_the_embedding_of_an_adapter_is_trained_as_in_llama_factory() {
    let text = "add_tokens: <a>, <b>\nnew_special_tokens: '<|c|>'\nresize_vocab: true\n";
    let config = adapter(Trainer::LlamaFactory, text).unwrap();
    assert_eq!(config["model"]["add_tokens"].to_string(), r#"["<a>","<b>"]"#);
    assert_eq!(config["model"]["add_special_tokens"].to_string(), r#"["<|c|>"]"#);
    assert_eq!(config["adapter"]["train_also"].to_string(), r#"["*embed_tokens.*"]"#);
    let own = format!("{text}additional_target: embed_tokens,lm_head\n");
    let config = adapter(Trainer::LlamaFactory, &own).unwrap();
    assert_eq!(config["adapter"]["train_also"].to_string(), r#"["*embed_tokens.*","*lm_head.*"]"#);
    let full = format!("{text}finetuning_type: full\n");
    assert_eq!(adapter(Trainer::LlamaFactory, &full).unwrap()["adapter"], Value::Null);
    let swift = "new_special_tokens: ['<|a|>', '<b,c>']\nmodules_to_save: [embed_tokens]\n";
    let config = adapter(Trainer::MsSwift, swift).unwrap();
    assert_eq!(config["model"]["add_special_tokens"].to_string(), r#"["<|a|>","<b,c>"]"#);
    let refused = refusal(adapter(Trainer::MsSwift, "new_special_tokens: [tokens.txt]\n"));
    assert!(refused.contains("write those of a file in its place"), "{refused}");
}

#[test]
fn an_adapter_covers_the_parts_that_are_not_frozen() {
    let of = |config: Result<Value, ConvertError>| {
        let adapter = &config.unwrap()["adapter"];
        format!("{} {}", adapter["target"], adapter["parts"])
    };
    let swift = |more: &str| of(adapter(Trainer::MsSwift, more));
    assert_eq!(swift("freeze_vit: false"), r#""all-linear" ["llm","vision"]"#);
    assert_eq!(swift("freeze_llm: true\nfreeze_aligner: false"), r#""all-linear" ["merger"]"#);
    let factory = |more: &str| of(adapter(Trainer::LlamaFactory, more));
    let unfrozen = "freeze_vision_tower: false\n";
    assert_eq!(
        factory(unfrozen),
        r#"["*.language_model.*","*.visual.blocks.*","*.deepstack_merger_list.*"] ["llm","vision","merger"]"#
    );
    assert_eq!(factory("freeze_multi_modal_projector: false"), r#""all-linear" ["llm"]"#);
    let all = format!("{unfrozen}freeze_multi_modal_projector: false");
    assert_eq!(factory(&all), r#""all-linear" ["llm","vision","merger"]"#);
}

#[test]
fn a_continued_adapter_decides_on_its_rank() {
    for (trainer, key) in
        [(Trainer::MsSwift, "adapters"), (Trainer::LlamaFactory, "adapter_name_or_path")]
    {
        let text = format!("{key}: out/final\nlora_rank: 64\nlora_dropout: 0.2\n");
        let config = adapter(trainer, &text).unwrap();
        assert_eq!(config["adapter"]["start_from"], "out/final");
        assert_eq!(config["adapter"]["rank"], 8);
        assert_eq!(config["adapter"]["dropout"], 0.2);
        let message = refusal(adapter(trainer, &format!("{key}: [a, b]\n")));
        assert!(message.contains("one adapter"), "{message}");
    }
}

#[test]
fn an_adapter_may_start_from_a_part_of_the_weights() {
    for (trainer, text, init) in [
        (Trainer::MsSwift, "init_weights: pissa", "pissa"),
        (Trainer::MsSwift, "init_weights: olora", "olora"),
        (Trainer::LlamaFactory, "pissa_init: true\npissa_iter: 4\npissa_convert: true", "pissa"),
        (Trainer::LlamaFactory, "pissa_init: false", "default"),
    ] {
        assert_eq!(adapter(trainer, text).unwrap()["adapter"]["init"], init, "{text}");
    }
}

#[test]
fn what_no_adapter_here_has_is_refused_by_name() {
    for (trainer, text) in [
        (Trainer::MsSwift, "tuner_type: longlora"),
        (Trainer::MsSwift, "lora_bias: all"),
        (Trainer::MsSwift, "init_weights: lora-ga"),
        (Trainer::MsSwift, "target_modules: all-embedding"),
        (Trainer::MsSwift, "target_regex: .*q_proj"),
        (Trainer::MsSwift, "quant_bits: 8"),
        (Trainer::LlamaFactory, "finetuning_type: oft"),
        (Trainer::LlamaFactory, "quantization_bit: 8"),
        (Trainer::LlamaFactory, "create_new_adapter: true"),
        (Trainer::LlamaFactory, "lora_rank: 0"),
    ] {
        let message = refusal(adapter(trainer, text));
        assert!(message.contains(&format!("`{text}`")), "{message}");
    }
    assert!(swift("lora_rank: 8\nlora_bias: all").is_ok(), "no effect with full tuning");
    let merged = refusal(swift("adapters: out/final"));
    assert!(merged.contains("`trainer export --adapter DIR --merge`"), "{merged}");
}
