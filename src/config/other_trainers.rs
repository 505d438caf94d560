//! Names of settings in other trainers, for error messages and for `trainer convert`.

/// Names in ms-swift, LLaMA-Factory, lmms-engine or transformers without their section, and the
/// key here.
const NAMES: &[(&str, &str)] = &[
    ("model", "model.path"),
    ("model_name_or_path", "model.path"),
    ("load_from_pretrained_path", "model.path"),
    ("train_from_scratch", "model.weights"),
    ("load_from_config", "model.weights"),
    ("torch_dtype", "model.precision"),
    ("dtype", "model.precision"),
    ("bf16", "model.precision"),
    ("pure_bf16", "model.precision"),
    ("attn_impl", "model.attention"),
    ("attn_implementation", "model.attention"),
    ("flash_attn", "model.attention"),
    ("router_aux_loss_coef", "model.aux_loss"),
    ("moe_aux_loss_coef", "model.aux_loss"),
    ("padding_free", "model.use_rmpad"),
    ("use_rmpad", "model.use_rmpad"),
    ("gradient_checkpointing", "model.recompute"),
    ("vit_gradient_checkpointing", "model.recompute"),
    ("disable_gradient_checkpointing", "model.recompute"),
    ("freeze_vit", "model.freeze"),
    ("freeze_aligner", "model.freeze"),
    ("freeze_llm", "model.freeze"),
    ("freeze_parameters", "model.freeze"),
    ("freeze_vision_tower", "model.freeze"),
    ("freeze_multi_modal_projector", "model.freeze"),
    ("freeze_language_model", "model.freeze"),
    ("freeze_modules", "model.freeze"),
    ("tuner_type", "adapter.kind"),
    ("train_type", "adapter.kind"),
    ("finetuning_type", "adapter.kind"),
    ("use_dora", "adapter.kind"),
    ("lora_rank", "adapter.rank"),
    ("lora_alpha", "adapter.alpha"),
    ("lora_dropout", "adapter.dropout"),
    ("target_modules", "adapter.target"),
    ("lora_target", "adapter.target"),
    ("use_rslora", "adapter.rslora"),
    ("init_weights", "adapter.init"),
    ("modules_to_save", "adapter.train_also"),
    ("additional_target", "adapter.train_also"),
    ("quant_bits", "adapter.quantize"),
    ("quantization_bit", "adapter.quantize"),
    ("adapters", "adapter.start_from"),
    ("adapter_name_or_path", "adapter.start_from"),
    ("dataset", "data.train"),
    ("datasets", "data.train"),
    ("dataset_path", "data.train"),
    ("val_dataset", "data.eval"),
    ("eval_dataset", "data.eval"),
    ("eval_dataset_path", "data.eval"),
    ("media_dir", "data.train[].image_root"),
    ("data_folder", "data.train[].image_root"),
    ("image_folder", "data.train[].image_root"),
    ("interleave_prob", "data.train[].weight"),
    ("interleave_probs", "data.train[].weight"),
    ("mix_strategy", "data.mixture"),
    ("stopping_strategy", "data.stopping_strategy"),
    ("packing", "data.packing"),
    ("neat_packing", "data.packing"),
    ("packing_length", "data.packing_length"),
    ("packing_strategy", "data.packing_strategy"),
    ("filter_overlong", "data.filter_overlong"),
    ("max_length", "data.max_length"),
    ("max_seq_length", "data.max_length"),
    ("max_seq_len", "data.max_length"),
    ("model_max_length", "data.max_length"),
    ("cutoff_len", "data.max_length"),
    ("truncation_strategy", "data.truncation"),
    ("shuffle", "data.shuffle"),
    ("dataset_shuffle", "data.shuffle"),
    ("disable_shuffling", "data.shuffle"),
    ("dataloader_num_workers", "data.workers"),
    ("num_workers", "data.workers"),
    ("strict", "data.on_error"),
    ("loss_scale", "data.loss_scale"),
    ("mask_history", "data.loss_scale"),
    ("max_pixels", "data.image.max_pixels"),
    ("MAX_PIXELS", "data.image.max_pixels"),
    ("image_max_pixels", "data.image.max_pixels"),
    ("IMAGE_MAX_TOKEN_NUM", "data.image.max_tokens"),
    ("min_pixels", "data.image.min_pixels"),
    ("MIN_PIXELS", "data.image.min_pixels"),
    ("image_min_pixels", "data.image.min_pixels"),
    ("IMAGE_MIN_TOKEN_NUM", "data.image.min_pixels"),
    ("fps", "data.video.fps"),
    ("FPS", "data.video.fps"),
    ("video_fps", "data.video.fps"),
    ("FPS_MAX_FRAMES", "data.video.max_frames"),
    ("video_maxlen", "data.video.max_frames"),
    ("video_max_frames", "data.video.max_frames"),
    ("FPS_MIN_FRAMES", "data.video.min_frames"),
    ("video_max_pixels", "data.video.max_pixels"),
    ("VIDEO_MAX_TOKEN_NUM", "data.video.max_pixels"),
    ("output_dir", "output_dir"),
    ("seed", "seed"),
    ("per_device_train_batch_size", "train.batch_size"),
    ("micro_batch_size", "train.batch_size"),
    ("batch_size", "train.batch_size"),
    ("gradient_accumulation_steps", "train.gradient_accumulation_steps"),
    ("num_train_epochs", "train.epochs"),
    ("num_epochs", "train.epochs"),
    ("epochs", "train.epochs"),
    ("max_steps", "train.max_steps"),
    ("max_grad_norm", "train.max_grad_norm"),
    ("gradient_clipping", "train.max_grad_norm"),
    ("learning_rate", "optim.lr"),
    ("lr", "optim.lr"),
    ("adam_beta1", "optim.betas"),
    ("adam_beta2", "optim.betas"),
    ("adam_epsilon", "optim.eps"),
    ("weight_decay", "optim.weight_decay"),
    ("lr_scheduler_type", "optim.schedule"),
    ("lr_scheduler", "optim.schedule"),
    ("warmup_steps", "optim.warmup_steps"),
    ("warmup_ratio", "optim.warmup_ratio"),
    ("vit_lr", "optim.lr_multipliers"),
    ("lorap_lr_ratio", "optim.lr_multipliers"),
    ("loraplus_lr_ratio", "optim.lr_multipliers"),
    ("aligner_lr", "optim.lr_multipliers"),
    ("save_steps", "checkpoint.every_steps"),
    ("save_total_limit", "checkpoint.keep"),
    ("eval_steps", "eval.every_steps"),
    ("early_stopping_steps", "eval.early_stopping"),
    ("logging_steps", "log.every_steps"),
    ("report_to", "log.trackers"),
];

/// Returns the key for a setting that other trainers call `name`.
pub(crate) fn our_key(name: &str) -> Option<&'static str> {
    NAMES.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| *ours)
}

/// Names that have no key of the same meaning here, and what to do instead.
const ADVICE: &[(&str, &str)] = &[
    ("stage", "remove it: `trainer sft` always fine-tunes"),
    ("do_train", "remove it: `trainer sft` always trains"),
    ("template", "remove it: the chat template is that of the model folder"),
    ("agent_template", "remove it: the chat template of the model folder renders tools"),
    (
        "enable_thinking",
        "remove it: the chat template of the model folder decides; `data.train_empty_think` trains empty thoughts",
    ),
    (
        "val_size",
        "write the rows for the evaluation into a file of their own, and name it in `data.eval`",
    ),
    (
        "val_set_size",
        "write the rows for the evaluation into a file of their own, and name it in `data.eval`",
    ),
    (
        "split_dataset_ratio",
        "write the rows for the evaluation into a file of their own, and name it in `data.eval`",
    ),
    ("system", "write a `system` message into the rows"),
    ("default_system", "write a `system` message into the rows"),
    ("deepspeed", "set `distributed.shard`: ZeRO 1 is `optimizer`, 2 is `gradients`, 3 is `full`"),
    ("fsdp", "set `distributed.shard: full`"),
    ("resize_vocab", "remove it: tokens cannot be added"),
    ("plot_loss", "remove it: every run writes `report.html`"),
    ("use_liger_kernel", "remove it: fused kernels are always used"),
    ("enable_liger_kernel", "remove it: fused kernels are always used"),
    (
        "assistant_only_loss",
        "remove it: only answers are trained on, unless `data.loss_scale` is `all`",
    ),
    (
        "completion_only_loss",
        "remove it: only answers are trained on, unless `data.loss_scale` is `all`",
    ),
    ("train_on_inputs", "set `data.loss_scale: all` for `true`, and remove it otherwise"),
    ("neftune_noise_alpha", "remove it: noise on embeddings is not supported"),
    ("base_model", "write `model: {path: FOLDER}`"),
    ("sequence_len", "write `data: {max_length: N, packing_length: N}`"),
    ("sample_packing", "write `data: {packing: true}`"),
    ("load_in_4bit", "write `adapter: {quantize: nf4}`"),
    ("load_in_8bit", "write `adapter: {quantize: nf4}`: 8-bit weights are not supported"),
    ("lora_r", "write `adapter: {rank: N}`"),
    ("r", "write `adapter: {rank: N}`"),
    ("strategy", "remove it: `every_steps` sets the interval, and 0 switches off"),
    ("eval_strategy", "write `eval: {every_steps: N}`"),
    ("save_strategy", "write `checkpoint: {every_steps: N}`"),
];

/// What to do about a setting of other trainers that has no key here.
pub(super) fn advice(name: &str) -> Option<&'static str> {
    ADVICE.iter().find(|(theirs, _)| *theirs == name).map(|(_, advice)| *advice)
}

/// Values of other trainers, and the value here; a value applies where it is a choice.
const VALUES: &[(&str, &str)] = &[
    ("bfloat16", "bf16"),
    ("float32", "f32"),
    ("fp32", "f32"),
    ("float16", "bf16"),
    ("fp16", "bf16"),
    ("adamw_torch", "adamw"),
    ("adamw_torch_fused", "adamw"),
    ("adamw_hf", "adamw"),
    ("paged_adamw_32bit", "adamw"),
    ("adamw_bnb_8bit", "adamw_8bit"),
    ("paged_adamw_8bit", "adamw_8bit"),
    ("ignore_think_prefix", "default"),
    ("zero1", "optimizer"),
    ("zero2", "gradients"),
    ("zero3", "full"),
    ("fsdp", "full"),
    ("4bit", "nf4"),
    ("4", "nf4"),
    ("cosine_with_min_lr", "cosine"),
    ("flash_attention_2", "flash"),
    ("sdpa", "flash"),
];

/// The value here that other trainers call `value`, if it is one of `valid`.
pub(super) fn our_value(value: &str, valid: &[String]) -> Option<&'static str> {
    let ours =
        |theirs: &&(&str, &str)| theirs.0 == value && valid.iter().any(|valid| valid == theirs.1);
    VALUES.iter().find(ours).map(|(_, ours)| *ours)
}

/// Other trainers: the name, names that only its configs have at the top level, and the value of
/// `trainer convert --from`.
const TRAINERS: &[(&str, &[&str], Option<&str>)] = &[
    (
        "LLaMA-Factory",
        &[
            "model_name_or_path",
            "finetuning_type",
            "stage",
            "cutoff_len",
            "template",
            "dataset_dir",
            "lora_target",
            "image_max_pixels",
        ],
        Some("llama-factory"),
    ),
    (
        "ms-swift",
        &[
            "tuner_type",
            "train_type",
            "torch_dtype",
            "split_dataset_ratio",
            "target_modules",
            "freeze_vit",
            "attn_impl",
            "val_dataset",
            "padding_free",
        ],
        Some("ms-swift"),
    ),
    (
        "lmms-engine",
        &["trainer_type", "dataset_config", "model_config", "trainer_args", "trainer_args_type"],
        Some("lmms-engine"),
    ),
    (
        "Axolotl",
        &[
            "base_model",
            "sequence_len",
            "sample_packing",
            "val_set_size",
            "lora_r",
            "pad_to_sequence_len",
        ],
        None,
    ),
];
/// Number of such names with which a config is taken for that of another trainer.
const MIN_NAMES: usize = 2;

/// The trainer whose config has these keys at the top level: its name, and the value of `trainer
/// convert --from`.
pub(super) fn trainer_of(keys: &[&str]) -> Option<(&'static str, Option<&'static str>)> {
    let num_names = |names: &[&str]| names.iter().filter(|name| keys.contains(name)).count();
    let found = TRAINERS.iter().max_by_key(|(_, names, _)| num_names(names))?;
    (num_names(found.1) >= MIN_NAMES).then_some((found.0, found.2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{RunConfig, load_text};
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn each_name_occurs_once_and_leads_to_a_key_of_the_config() {
        let text = "output_dir: a\nadapter: {}\nmodel: {path: b}\ndata: {train: [{path: c}]}";
        let config: RunConfig = load_text(Path::new("a.yaml"), text).unwrap();
        let config = serde_json::to_value(&config).unwrap();
        let mut names = BTreeSet::new();
        for (theirs, ours) in NAMES {
            assert!(names.insert(theirs), "`{theirs}` twice");
            let path = format!("/{}", ours.replace("[]", ".0").replace('.', "/"));
            assert!(config.pointer(&path).is_some(), "`{ours}` is no key");
        }
        for (theirs, _) in ADVICE {
            assert!(names.insert(theirs), "`{theirs}` twice");
        }
    }

    #[test]
    fn a_config_of_another_trainer_is_recognised_by_two_names() {
        let of = |keys: &[&str]| trainer_of(keys).map(|(name, _)| name);
        assert_eq!(of(&["stage", "do_train", "model_name_or_path"]), Some("LLaMA-Factory"));
        assert_eq!(of(&["model", "train_type", "torch_dtype"]), Some("ms-swift"));
        assert_eq!(of(&["base_model", "sequence_len"]), Some("Axolotl"));
        assert_eq!(of(&["model", "data", "template"]), None);
    }
}
