//! Settings of lmms-engine, with its defaults.

use crate::convert::rule::Kind::{Count, Flag, Number};
use crate::convert::rule::Rule::{Copy, Drop, Is, Only, Refuse};
use crate::convert::rule::{Role, Row, row};

const KERNEL: &str = "the kernels follow from the device";
const EMA: &str = "an average of weights is not supported";
const EMA_OFF: &str = "has no effect without `ema_enabled`";
const RL: &str = "only supervised fine-tuning is supported; this section has no effect on it";
const EXTRA: &str = "there is no equivalent here";

pub(super) const ROWS: &[Row] = &[
    row(
        "trainer_type",
        "",
        Only(
            &["hf_trainer", "fsdp2_trainer"],
            "only supervised fine-tuning of a language model is supported",
        ),
    ),
    // model
    row("model_config.load_from_pretrained_path", "", Is(Role::Model)),
    row("model_config.load_from_config", "", Is(Role::RandomConfig)),
    row("model_config.model_type", "", Drop("`config.json` of the model folder decides")),
    row("model_config.attn_implementation", "", Is(Role::Attention)),
    row("model_config.torch_dtype", "", Is(Role::TorchDtype)),
    row("model_config.overwrite_config", "", Refuse("change `config.json` of the model folder")),
    row("model_config.monkey_patch_kwargs", "", Drop(KERNEL)),
    row("model_config.extra_kwargs", "", Refuse(EXTRA)),
    row("trainer_args.freeze_modules", "", Is(Role::FreezeModules)),
    row(
        "trainer_args.use_rmpad",
        "",
        Drop("padding is always removed before the model (`model.use_rmpad`)"),
    ),
    // data
    row(
        "dataset_config.dataset_type",
        "",
        Drop("every file is read by row number, without loading it"),
    ),
    row("dataset_config.dataset_format", "yaml", Is(Role::DatasetFormat)),
    row("dataset_config.datasets", "", Is(Role::Dataset)),
    row("dataset_config.dataset_path", "", Is(Role::DatasetDir)),
    row("dataset_config.eval_dataset_path", "", Is(Role::EvalDataset)),
    row("dataset_config.data_folder", "", Is(Role::MediaDir)),
    row("dataset_config.shuffle", "true", Copy(Flag)),
    row("dataset_config.data_seed", "", Is(Role::DataSeed)),
    row("dataset_config.object_storage", "", Refuse("copy the media to a folder first")),
    row("dataset_config.bucket_name", "", Refuse("copy the media to a folder first")),
    row("dataset_config.packing", "false", Is(Role::Packing)),
    row("dataset_config.packing_strategy", "first_fit", Is(Role::PackingStrategy)),
    row("dataset_config.packing_length", "32000", Is(Role::PackingLength)),
    row("dataset_config.filter_overlong", "true", Copy(Flag)),
    row(
        "dataset_config.filter_overlong_workers",
        "",
        Drop("set `data.workers` for the threads that read rows"),
    ),
    row("dataset_config.max_length", "", Is(Role::MaxLength)),
    row(
        "dataset_config.extra_kwargs.packing_kwargs",
        "",
        Drop("packs are planned from the lengths of all rows, not in a number of open packs"),
    ),
    row("dataset_config.extra_kwargs", "", Refuse(EXTRA)),
    // chats, images and videos
    row(
        "dataset_config.processor_config.processor_name",
        "",
        Drop("the processor files of the model folder are used"),
    ),
    row(
        "dataset_config.processor_config.processor_type",
        "",
        Only(&["qwen3_vl", "qwen3", "qwen2_5_vl"], "the chat template of the model folder is used"),
    ),
    row("dataset_config.processor_config.processor_kwargs", "", Refuse(EXTRA)),
    row("dataset_config.processor_config.extra_kwargs.image_max_pixels", "", Copy(Count)),
    row("dataset_config.processor_config.extra_kwargs.image_min_pixels", "", Copy(Count)),
    row("dataset_config.processor_config.extra_kwargs", "", Drop("it is empty")),
    row("dataset_config.video_sampling_strategy", "fps", Is(Role::FrameSampling)),
    row("dataset_config.video_max_pixels", "602112", Is(Role::VideoPixels)),
    row(
        "dataset_config.video_min_pixels",
        "",
        Drop("a minimum per frame; `data.video.min_pixels` counts all frames"),
    ),
    row("dataset_config.video_max_frames", "768", Is(Role::MaxFrames)),
    row("dataset_config.frame_num", "64", Is(Role::FrameNum)),
    row("dataset_config.fps", "1", Copy(Number)),
    row("dataset_config.video_backend", "", Drop("FFmpeg reads videos")),
    // the run
    row("trainer_args.max_train_steps", "", Refuse("use `max_steps`")),
    row("trainer_args.use_muon", "", Refuse("set `optim.kind: muon`")),
    row("trainer_args.fsdp2", "", Is(Role::Shard)),
    row("trainer_args.reduce_dtype", "", Drop("gradients are summed in f32")),
    row(
        "trainer_args.output_dtype",
        "",
        Drop("`model.precision` decides the dtype of activations"),
    ),
    row("trainer_args.sp_ulysses_degree", "", Is(Role::SequenceParallel)),
    row("trainer_args.tp_degree", "", Is(Role::TensorParallel)),
    row("trainer_args.ep_degree", "", Only(&["1"], "each rank computes all experts")),
    row(
        "trainer_args.print_batch_input_steps",
        "",
        Drop("`trainer inspect` shows what the model sees"),
    ),
    row("trainer_args.enable_profiler", "", Drop("`trainer bench` measures a step")),
    row("trainer_args.profiler_config", "", Drop("`trainer bench` measures a step")),
    row("trainer_args.enable_cuda_event_profiler", "", Drop("`trainer bench` measures a step")),
    row("trainer_args.cuda_event_profiler_config", "", Drop("`trainer bench` measures a step")),
    row(
        "trainer_args.enable_memory_snapshot",
        "",
        Drop("`metrics.jsonl` has the peak of the memory"),
    ),
    row("trainer_args.carbon_intensity", "", Drop("the energy of a run is not measured")),
    row("trainer_args.ema_enabled", "", Refuse(EMA)),
    row("trainer_args.ema_decay", "", Drop(EMA_OFF)),
    row("trainer_args.ema_update_every", "", Drop(EMA_OFF)),
    row("trainer_args.ema_start_step", "", Drop(EMA_OFF)),
    row("trainer_args.ema_requires_grad_only", "", Drop(EMA_OFF)),
    row("trainer_args.ema_param_filter", "", Drop(EMA_OFF)),
    row("trainer_args.ema_resume_from_ema", "", Drop(EMA_OFF)),
    row("trainer_args.eval_config", "", Refuse("benchmarks during training are not supported")),
    row("trainer_args.rl_config", "", Drop(RL)),
    row("ray_train", "", Drop(RL)),
    row("rl_runtime", "", Drop(RL)),
    row("extra_kwargs", "", Refuse(EXTRA)),
    row("config_yaml", "", Drop("the file has been read")),
    // the launch
    row("NPROC_PER_NODE", "", Is(Role::Processes)),
    row("NNODES", "", Is(Role::Nodes)),
    row("CUDA_VISIBLE_DEVICES", "", Is(Role::VisibleDevices)),
];
