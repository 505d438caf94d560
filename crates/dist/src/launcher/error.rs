//! Environment variables from which the rank of this process cannot be found.

/// The environment variables of a launcher contradict each other, or one cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// Of two variables that belong together only one is set.
    #[error("environment variable `{set}` is `{value}`, but `{missing}` is not set")]
    OneOfTwo {
        /// The variable that is set.
        set: &'static str,
        /// Its value.
        value: String,
        /// The variable that is not set.
        missing: &'static str,
    },
    /// A variable is not a whole number.
    #[error("environment variable `{variable}` is `{value}`, expected a whole number of 0 or more")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// A variable is not a usable TCP port.
    #[error(
        "environment variable `{variable}` is `{value}`, expected a port from 1 to 65535 (65534 \
         with torchrun's agent, which uses that port itself)"
    )]
    NotAPort {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// A rank is not below the number of ranks.
    #[error(
        "environment variable `{variable}` is `{found}`, expected a number below `{limit}`, which \
         is `{below}`"
    )]
    OutOfRange {
        /// The variable of the rank.
        variable: &'static str,
        /// Its value.
        found: usize,
        /// The variable of the number of ranks.
        limit: &'static str,
        /// Its value.
        below: usize,
    },
    /// A list of SLURM cannot be read.
    #[error("environment variable `{variable}` is `{value}`, expected {expected}")]
    List {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What a valid list looks like.
        expected: &'static str,
    },
    /// PMIx gives the rank, and no variable the number of ranks.
    #[error("`PMIX_RANK` is `{value}`, but no environment variable has the number of ranks")]
    PmixAlone {
        /// Value of the variable.
        value: String,
    },
    /// Kubeflow expects torchrun to start the ranks of a node.
    #[error("`PET_NPROC_PER_NODE` is `{value}`, but this process was not started by torchrun")]
    ProcessesPerNode {
        /// Value of the variable.
        value: String,
    },
}

impl LaunchError {
    /// Returns the fix that the error message suggests.
    pub fn hint(&self) -> String {
        match self {
            Self::OneOfTwo { set, missing, .. } => {
                format!("set `{missing}` too, or unset `{set}` to run without other ranks")
            }
            Self::NotANumber { variable, .. } | Self::NotAPort { variable, .. } => {
                format!("correct or unset `{variable}`")
            }
            Self::OutOfRange { .. } => {
                "ranks count from 0; every rank needs the same number of ranks".to_owned()
            }
            Self::List { .. } => {
                "start the ranks with `srun`, and do not change its variables".to_owned()
            }
            Self::PmixAlone { .. } => {
                "set `TRAINER_RANK` and `TRAINER_WORLD_SIZE` for each process".to_owned()
            }
            Self::ProcessesPerNode { .. } => {
                "start the program with `torchrun --no-python`, or run one process per node"
                    .to_owned()
            }
        }
    }
}
