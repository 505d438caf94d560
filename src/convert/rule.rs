//! Rules for the settings of other trainers; `tables` has one for each setting.

/// A setting of another trainer.
#[derive(Debug)]
pub(super) struct Row {
    /// Key, with dots between sections.
    pub(super) key: &'static str,
    /// Default of the other trainer; empty if there is none, or if it has no effect here.
    pub(super) default: &'static str,
    pub(super) rule: Rule,
}

/// How a setting is converted.
#[derive(Debug)]
pub(super) enum Rule {
    /// The value of our key, whose name `config::our_key` gives.
    Copy(Kind),
    /// A part of a decision that needs several settings.
    Is(Role),
    /// Has no effect here, for this reason.
    Drop(&'static str),
    /// Refused for this reason, unless its value switches it off.
    Refuse(&'static str),
    /// Dropped if it has one of these values, refused otherwise; the reason says what happens here.
    Only(&'static [&'static str], &'static str),
    /// Dropped if all parameters are trained or if it is off; refused otherwise, for this reason.
    Adapter(&'static str),
}

/// The values that a copied setting may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Number,
    /// A whole number of 0 or more.
    Count,
    Flag,
    /// A flag whose meaning here is the opposite.
    Not,
}

/// A part of a decision in `compose`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    AdapterFrom,
    AlignerLr,
    Accumulation,
    Attention,
    Beta1,
    Beta2,
    Bf16,
    CutoffLen,
    DataSeed,
    Dataset,
    DatasetDir,
    DatasetFormat,
    Deepstack,
    Dora,
    EarlyStopping,
    Epochs,
    EvalDataset,
    EvalSteps,
    EvalStrategy,
    Fp16,
    FrameNum,
    FrameSampling,
    FreezeLlm,
    FreezeMerger,
    FreezeModules,
    FreezePrefixes,
    FreezeVision,
    ImageMaxTokens,
    ImageMinTokens,
    Keep,
    LastTurn,
    LogSteps,
    LoraAlpha,
    LoraDropout,
    LoraInit,
    LoraPlus,
    LoraRank,
    LoraTarget,
    LossScale,
    Lr,
    MaxFrames,
    MaxLength,
    MaxSamples,
    MaxSteps,
    MediaDir,
    MinFrames,
    Mix,
    Model,
    ModulesToSave,
    NeatPacking,
    NoRecompute,
    Nodes,
    Optimizer,
    OutputDir,
    Packing,
    PackingLength,
    PackingStrategy,
    Probabilities,
    Processes,
    PureBf16,
    QuantBits,
    RandomConfig,
    RandomWeights,
    Recompute,
    RecomputeVision,
    Rslora,
    SaveSteps,
    SaveStrategy,
    Schedule,
    ScheduleArgs,
    SequenceParallel,
    Shard,
    Stopping,
    Strict,
    TensorParallel,
    Template,
    Thinking,
    TorchDtype,
    Trackers,
    Truncation,
    Tuner,
    VideoPixels,
    VideoTokens,
    VisibleDevices,
    VisionLr,
    WarmupRatio,
    WarmupSteps,
    Workers,
}

pub(super) const fn row(key: &'static str, default: &'static str, rule: Rule) -> Row {
    Row { key, default, rule }
}
