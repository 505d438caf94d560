//! Environment variables from which the rank of this process cannot be found.

/// The environment variables of a launcher contradict each other, or one cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, fault::Fault)]
#[fault(exit = Usage)]
pub enum LaunchError {
    #[error("environment variable `{set}` is `{value}`, but `{missing}` is not set")]
    #[fault(hint = "set `{missing}` too, or unset `{set}` to run without other ranks")]
    OneOfTwo { set: &'static str, value: String, missing: &'static str },
    #[error("environment variable `{variable}` is `{value}`, expected a whole number of 0 or more")]
    #[fault(hint = "correct or unset `{variable}`")]
    NotANumber { variable: &'static str, value: String },
    #[error(
        "environment variable `{variable}` is `{value}`, expected a port from 1 to 65535 (65534 \
         with torchrun's agent, which uses that port itself)"
    )]
    #[fault(hint = "correct or unset `{variable}`")]
    NotAPort { variable: &'static str, value: String },
    #[error(
        "environment variable `{variable}` is `{found}`, expected a number below `{limit}`, which \
         is `{below}`"
    )]
    #[fault(hint = "ranks count from 0; every rank needs the same number of ranks")]
    OutOfRange { variable: &'static str, found: usize, limit: &'static str, below: usize },
    #[error("environment variable `{variable}` is `{value}`, expected {expected}")]
    #[fault(hint = "start the ranks with `srun`, and do not change its variables")]
    List { variable: &'static str, value: String, expected: &'static str },
    #[error("`PMIX_RANK` is `{value}`, but no environment variable has the number of ranks")]
    #[fault(hint = "set `TRAINER_RANK` and `TRAINER_WORLD_SIZE` for each process")]
    PmixAlone { value: String },
    /// Kubeflow expects torchrun to start the ranks of a node.
    #[error("`PET_NPROC_PER_NODE` is `{value}`, but this process was not started by torchrun")]
    #[fault(hint = "start the program with `torchrun --no-python`, or run one process per node")]
    ProcessesPerNode { value: String },
}
