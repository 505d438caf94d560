//! Settings of LLaMA-Factory, with its defaults; environment variables in capitals.

use super::transformers::DEVICES;
use crate::convert::rule::Kind::{Count, Not, Number};
use crate::convert::rule::Rule::{Adapter, Copy, Drop, Is, Only, Refuse};
use crate::convert::rule::{Role, Row, row};

const KERNEL: &str = "the kernels follow from the device";
const CACHE: &str = "lengths are cached in `output_dir` by themselves";
const FREEZE: &str = "has no effect without `finetuning_type: freeze`";
const QUANTISED: &str =
    "quantised weights are NF4 with double quantisation, as bitsandbytes makes them";
const OBJECTIVE: &str = "only supervised fine-tuning of a language model is supported";
const OPTIMIZER: &str = "set `optim.kind` to `adamw`, `adamw_8bit`, `muon` or `adafactor`";
const GENERATION: &str = "generation has no part in training";
const TRACKER: &str = "there is no tracker of this name; every step is in `metrics.jsonl`";
const PROMPT: &str =
    "the text of users is not supervised; `data.loss_scale: all` supervises every text";
/// Why a system prompt is refused; also used for ms-swift.
pub(super) const SYSTEM: &str =
    "write it into the rows, for example `jq -c '.system = \"TEXT\"' rows.jsonl > new.jsonl`";

pub(super) const ROWS: &[Row] = &[
    // model
    row("model_name_or_path", "", Is(Role::Model)),
    row(
        "model_revision",
        "",
        Only(&["main"], "write the revision into `model_name_or_path`: `OWNER/NAME@REVISION`"),
    ),
    row("train_from_scratch", "", Is(Role::RandomWeights)),
    row("trust_remote_code", "", Drop("no code of a model folder is ever run")),
    row("cache_dir", "", Drop("set the environment variable `HF_HOME`")),
    row("hf_hub_token", "", Drop("set the environment variable `HF_TOKEN`")),
    row("ms_hub_token", "", Drop("model files come from the Hugging Face hub or a folder")),
    row("use_fast_tokenizer", "", Drop("`tokenizer.json` of the model folder is used")),
    row("resize_vocab", "", Refuse("add the tokens to the model folder first")),
    row("add_tokens", "", Refuse("add the tokens to the model folder first")),
    row("add_special_tokens", "", Refuse("add the tokens to the model folder first")),
    row("new_special_tokens", "", Refuse("add the tokens to the model folder first")),
    row("split_special_tokens", "", Refuse("the tokenizer of the model folder decides")),
    row("rope_scaling", "", Refuse("set it in `config.json` of the model folder")),
    row("shift_attn", "", Refuse("the model's own attention is used")),
    row("mixture_of_depths", "", Refuse("the model's own layers are used")),
    row("moe_aux_loss_coef", "", Copy(Number)),
    row("flash_attn", "", Is(Role::Attention)),
    row("use_unsloth", "", Drop(KERNEL)),
    row("use_unsloth_gc", "", Drop("`model.recompute` is exact and needs no offload")),
    row("enable_liger_kernel", "", Drop(KERNEL)),
    row("use_v1_kernels", "", Drop(KERNEL)),
    row("use_kv_cache", "", Drop(GENERATION)),
    row("low_cpu_mem_usage", "", Drop("weights are read from a memory map")),
    row("infer_backend", "", Drop(GENERATION)),
    row("infer_dtype", "", Drop(GENERATION)),
    row("device_map", "", Drop(DEVICES)),
    row("offload_folder", "", Drop(DEVICES)),
    row("print_param_status", "", Drop("the log has the numbers of parameters")),
    row("upcast_layernorm", "", Drop("norms are computed in f32")),
    row("upcast_lmhead_output", "", Drop("logits are computed in f32")),
    row("disable_gradient_checkpointing", "false", Is(Role::NoRecompute)),
    row(
        "gradient_checkpointing",
        "",
        Drop("LLaMA-Factory reads `disable_gradient_checkpointing` instead"),
    ),
    row("use_reentrant_gc", "", Drop("`model.recompute` has one implementation")),
    row("pure_bf16", "", Is(Role::PureBf16)),
    row("quantization_bit", "", Is(Role::QuantBits)),
    row("quantization_method", "", Only(&["bnb", "bitsandbytes"], QUANTISED)),
    row("quantization_type", "", Only(&["nf4"], QUANTISED)),
    row("double_quantization", "", Only(&["true"], QUANTISED)),
    row("quantization_device_map", "", Drop("has no effect without `quantization_bit`")),
    // what is trained
    row("stage", "", Only(&["sft"], OBJECTIVE)),
    row("do_train", "", Only(&["true"], "the config does not train")),
    row("finetuning_type", "lora", Is(Role::Tuner)),
    row("freeze_vision_tower", "true", Is(Role::FreezeVision)),
    row("freeze_multi_modal_projector", "true", Is(Role::Deepstack)),
    row("freeze_language_model", "false", Is(Role::FreezeLlm)),
    row("train_mm_proj_only", "", Refuse("use `freeze_vision_tower` and `freeze_language_model`")),
    row("freeze_trainable_layers", "", Drop(FREEZE)),
    row("freeze_trainable_modules", "", Drop(FREEZE)),
    row("freeze_extra_modules", "", Drop(FREEZE)),
    row("adapter_name_or_path", "", Is(Role::AdapterFrom)),
    row("adapter_folder", "", Drop("has no effect without `adapter_name_or_path`")),
    row(
        "create_new_adapter",
        "",
        Adapter("merge the adapter into the model first: `trainer export --adapter DIR --merge`"),
    ),
    row("lora_rank", "8", Is(Role::LoraRank)),
    row("lora_alpha", "", Is(Role::LoraAlpha)),
    row("lora_dropout", "0", Is(Role::LoraDropout)),
    row("lora_target", "all", Is(Role::LoraTarget)),
    row("additional_target", "", Is(Role::ModulesToSave)),
    row("loraplus_lr_ratio", "", Is(Role::LoraPlus)),
    row("loraplus_lr_embedding", "", Drop("embeddings have no adapter")),
    row("use_rslora", "false", Is(Role::Rslora)),
    row("use_dora", "", Is(Role::Dora)),
    row("pissa_init", "", Is(Role::LoraInit)),
    row("pissa_iter", "", Drop("the number of iterations is fixed")),
    row("pissa_convert", "", Drop("checkpoints always fit the original model")),
    row("use_llama_pro", "", Refuse("added blocks are not supported")),
    row("use_dft_loss", "", Refuse(OBJECTIVE)),
    row("use_asft_loss", "", Refuse(OBJECTIVE)),
    row("use_eaft_loss", "", Refuse(OBJECTIVE)),
    row("use_galore", "", Refuse(OPTIMIZER)),
    row("use_apollo", "", Refuse(OPTIMIZER)),
    row("use_badam", "", Refuse(OPTIMIZER)),
    row("use_adam_mini", "", Refuse(OPTIMIZER)),
    row("use_muon", "", Refuse(OPTIMIZER)),
    row("use_mca", "", Refuse("Megatron is another engine")),
    row("compute_accuracy", "", Drop("an evaluation always counts exact answers")),
    row("early_stopping_steps", "", Is(Role::EarlyStopping)),
    row("plot_loss", "", Drop("`metrics.jsonl` has the loss of every step")),
    row("include_effective_tokens_per_second", "", Drop("the log has tokens per second")),
    // data
    row("dataset", "", Is(Role::Dataset)),
    row("eval_dataset", "", Is(Role::EvalDataset)),
    row("dataset_dir", "data", Is(Role::DatasetDir)),
    row("media_dir", "", Is(Role::MediaDir)),
    row("template", "", Only(TEMPLATES, "the chat template of the model folder is used")),
    row("tool_format", "", Drop("the chat template of the model folder renders tools")),
    row("default_system", "", Refuse(SYSTEM)),
    row("enable_thinking", "", Is(Role::Thinking)),
    row("preserve_thinking", "", Refuse("the chat template of the model folder decides")),
    row("train_on_prompt", "", Refuse(PROMPT)),
    row("mask_history", "", Is(Role::LastTurn)),
    row("ignore_pad_token_for_loss", "", Only(&["true"], "padding is never supervised")),
    row("streaming", "", Drop("every file is read by row number, without loading it")),
    row("buffer_size", "", Drop("every row is shuffled")),
    row("mix_strategy", "concat", Is(Role::Mix)),
    row("interleave_probs", "", Is(Role::Probabilities)),
    row("disable_shuffling", "false", Copy(Not)),
    row("overwrite_cache", "", Drop(CACHE)),
    row("tokenized_path", "", Refuse("give the files that the tokenised data was made from")),
    row("data_shared_file_system", "", Drop(DEVICES)),
    row("preprocessing_batch_size", "", Drop("rows are encoded one by one")),
    row("preprocessing_num_workers", "", Drop("set `data.workers` for the threads that read rows")),
    row("max_samples", "", Is(Role::MaxSamples)),
    row(
        "val_size",
        "",
        Refuse(
            "split the file yourself, for example `head -n 100 all.jsonl > val.jsonl; tail -n +101 all.jsonl > train.jsonl`, and name both in `dataset_info.json`",
        ),
    ),
    row("eval_on_each_dataset", "", Drop("losses by data set are always in the metrics")),
    row("eval_num_beams", "", Drop(GENERATION)),
    row("cutoff_len", "2048", Is(Role::CutoffLen)),
    row("packing", "false", Is(Role::Packing)),
    row("neat_packing", "", Is(Role::NeatPacking)),
    // images and videos
    row("image_max_pixels", "589824", Copy(Count)),
    row("image_min_pixels", "1024", Copy(Count)),
    row("image_do_pan_and_scan", "", Refuse("a preprocessing of another model family")),
    row("crop_to_patches", "", Refuse("a preprocessing of another model family")),
    row("video_max_pixels", "65536", Is(Role::VideoPixels)),
    row(
        "video_min_pixels",
        "",
        Drop("a minimum per frame; `data.video.min_pixels` counts all frames"),
    ),
    row("video_fps", "2", Copy(Number)),
    row("video_maxlen", "128", Is(Role::MaxFrames)),
    row("use_audio_in_video", "", Refuse("audio is not supported")),
    row("audio_sampling_rate", "", Drop("audio is not supported")),
    // the run
    row("predict_with_generate", "", Drop("an evaluation always counts exact answers")),
    row("use_swanlab", "", Drop(TRACKER)),
    row("swanlab_project", "", Drop(TRACKER)),
    row("swanlab_run_name", "", Drop(TRACKER)),
    row("swanlab_workspace", "", Drop(TRACKER)),
    row("swanlab_mode", "", Drop(TRACKER)),
    row("ray_run_name", "", Drop(DEVICES)),
    row("ray_num_workers", "", Refuse("pass the number of processes as `--world-size`")),
    row("fp8", "", Refuse("`model.precision` is f32 or bf16")),
    row("max_new_tokens", "", Drop(GENERATION)),
    row("temperature", "", Drop(GENERATION)),
    row("top_p", "", Drop(GENERATION)),
    row("top_k", "", Drop(GENERATION)),
    // the launch
    row("FORCE_TORCHRUN", "", Drop(DEVICES)),
    row("NPROC_PER_NODE", "", Is(Role::Processes)),
    row("NNODES", "", Is(Role::Nodes)),
    row("CUDA_VISIBLE_DEVICES", "", Is(Role::VisibleDevices)),
    row("NODE_RANK", "", Drop(DEVICES)),
    row("MASTER_ADDR", "", Drop(DEVICES)),
    row("MASTER_PORT", "", Drop(DEVICES)),
    row("DISABLE_VERSION_CHECK", "", Drop("a check of Python packages")),
    row("USE_MODELSCOPE_HUB", "", Drop("model files come from the Hugging Face hub or a folder")),
];

/// Templates that render what the chat template of a Qwen3-VL, Qwen3 or Qwen2.5-VL folder renders.
const TEMPLATES: &[&str] = &["qwen3_vl", "qwen3_vl_nothink", "qwen3", "qwen3_nothink", "qwen2_vl"];
