//! Programs that start the ranks of a job.

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
