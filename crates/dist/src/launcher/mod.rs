//! Finds out which rank this process is, from the environment variables that launchers set.

mod error;
mod place;
mod slurm;
#[cfg(test)]
mod tests;
mod variables;

pub use error::LaunchError;
pub use place::Launched;

pub(crate) use variables::JOB;
use variables::{EXPLICIT, OPEN_MPI, PMI, TORCHRUN, Variables};

impl Launched {
    /// Returns the place that a launcher gives to this process; `None` without a launcher.
    ///
    /// `lookup` returns the value of an environment variable. The first of these counts:
    /// `TRAINER_RANK`, torchrun, OpenMPI, PMI, a step of SLURM, Kubeflow.
    pub fn find(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, LaunchError> {
        let variables = Variables(&lookup);
        for names in [EXPLICIT, TORCHRUN, OPEN_MPI] {
            if let Some(launched) = variables.launched(&names)? {
                return Ok(Some(launched));
            }
        }
        let (pmi, slurm) = (variables.launched(&PMI)?, slurm::step(&variables)?);
        // With `srun --mpi=pmi2` both are set; SLURM also has the address of rank 0.
        let same = |a: &Self, b: &Self| (a.rank, a.world) == (b.rank, b.world);
        let found = match (pmi, slurm) {
            (Some(pmi), Some(slurm)) if same(&pmi, &slurm) => Some(slurm),
            (Some(pmi), _) => Some(pmi),
            (None, slurm) => slurm,
        };
        if found.is_some() {
            return Ok(found);
        }
        if let Some(value) = lookup("PMIX_RANK") {
            return Err(LaunchError::PmixAlone { value });
        }
        variables.kubeflow()
    }

    /// Environment variables from which [`Self::find`] returns the same place, for a process that
    /// this one starts as a rank.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let number = |name, value: Option<usize>| Some((name, value?.to_string()));
        let all = [
            number(EXPLICIT.rank, Some(self.rank)),
            number(EXPLICIT.world, Some(self.world)),
            number(EXPLICIT.local_rank, self.local_rank),
            number(EXPLICIT.local_world, self.local_world),
            self.host.clone().map(|host| (EXPLICIT.host, host)),
            number(EXPLICIT.port, self.port.map(usize::from)),
            Some((JOB, self.job.clone())).filter(|_| !self.job.is_empty()),
        ];
        all.into_iter().flatten().collect()
    }
}
