//! The place that a launcher gives to a process.

use std::fmt;

/// The program that started the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// The variables `TRAINER_RANK` and so on, which `trainer` sets itself, and users may set.
    Explicit,
    /// torchrun, or another program that sets its variables: the PyTorch operator of Kubernetes,
    /// Ray.
    Torchrun,
    /// OpenMPI's mpirun.
    OpenMpi,
    /// The mpiexec of MPICH or of Intel MPI.
    Pmi,
    /// SLURM's srun.
    Slurm,
    /// Kubeflow's trainer, without torchrun.
    Kubeflow,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Explicit => "TRAINER_RANK",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "OpenMPI",
            Self::Pmi => "PMI",
            Self::Slurm => "SLURM",
            Self::Kubeflow => "Kubeflow",
        })
    }
}

/// A process that a launcher started as a rank, and what is known about the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// The program that started the ranks.
    pub launcher: Launcher,
    /// Number of this rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Number of this rank on its machine. If unknown, the ranks agree on it when they connect.
    pub local_rank: Option<usize>,
    /// Number of ranks on this machine. If unknown, the ranks agree on it when they connect.
    pub local_world: Option<usize>,
    /// Host name or IP address of rank 0.
    pub host: Option<String>,
    /// TCP port of rank 0.
    pub port: Option<u16>,
    /// Name of the job, the same for all of its ranks; empty if the launcher gives it none.
    pub job: String,
}

impl Launched {
    /// A rank of a job of tests, without the address of rank 0.
    #[cfg(test)]
    pub(crate) fn of_test(rank: usize, world: usize) -> Self {
        Self {
            launcher: Launcher::Explicit,
            rank,
            world,
            local_rank: None,
            local_world: None,
            host: None,
            port: None,
            job: "test".to_owned(),
        }
    }

    /// Whether the launcher has started all ranks on one machine.
    pub(crate) fn is_one_machine(&self) -> bool {
        self.local_world == Some(self.world)
    }
}
