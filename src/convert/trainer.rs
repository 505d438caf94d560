//! The trainers whose configs can be converted.

/// A trainer whose configs can be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trainer {
    /// ms-swift.
    MsSwift,
    /// LLaMA-Factory.
    LlamaFactory,
    /// lmms-engine.
    LmmsEngine,
}

impl Trainer {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::MsSwift, Self::LlamaFactory, Self::LmmsEngine];

    /// Its name in `trainer convert --from`.
    pub fn name(self) -> &'static str {
        match self {
            Self::MsSwift => "ms-swift",
            Self::LlamaFactory => "llama-factory",
            Self::LmmsEngine => "lmms-engine",
        }
    }

    /// Its name in prose.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::MsSwift => "ms-swift",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::LmmsEngine => "lmms-engine",
        }
    }

    /// The command that starts a training.
    pub(super) fn command(self) -> &'static str {
        match self {
            Self::MsSwift => "swift sft",
            Self::LlamaFactory => "llamafactory-cli train",
            Self::LmmsEngine => "-m lmms_engine.launch.cli",
        }
    }
}
