//! The environment variables of launchers.

use super::error::LaunchError;
use super::place::Launched;
use ranks::Launcher;

/// The variables of one launcher.
pub(super) struct Names {
    pub(super) launcher: Launcher,
    pub(super) rank: &'static str,
    pub(super) world: &'static str,
    pub(super) local_rank: &'static str,
    pub(super) local_world: &'static str,
    pub(super) host: &'static str,
    pub(super) port: &'static str,
    /// The first of these that is set names the job.
    pub(super) job: &'static [&'static str],
}

pub(super) const EXPLICIT: Names = Names {
    launcher: Launcher::Explicit,
    rank: "TRAINER_RANK",
    world: "TRAINER_WORLD_SIZE",
    local_rank: "TRAINER_LOCAL_RANK",
    local_world: "TRAINER_LOCAL_WORLD_SIZE",
    host: "TRAINER_MASTER_ADDR",
    port: "TRAINER_MASTER_PORT",
    job: &[JOB],
};

pub(super) const TORCHRUN: Names = Names {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    world: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
    local_world: "LOCAL_WORLD_SIZE",
    host: "MASTER_ADDR",
    port: "MASTER_PORT",
    // Not with TORCHELASTIC_RESTART_COUNT, which differs between nodes.
    job: &[JOB, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"],
};

pub(super) const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    world: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
    job: &[JOB, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    ..TORCHRUN
};

pub(super) const PMI: Names = Names {
    launcher: Launcher::Pmi,
    rank: "PMI_RANK",
    world: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_world: "MPI_LOCALNRANKS",
    job: &[JOB, "PMI_JOBID", "SLURM_JOB_ID"],
    ..TORCHRUN
};

/// Names the job with every launcher.
pub(crate) const JOB: &str = "TRAINER_JOB_ID";

/// `True` with torchrun's static rendezvous, whose agent listens on `MASTER_PORT`.
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";

/// The environment variables of the process.
pub(super) struct Variables<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    pub(super) fn get(&self, name: &str) -> Option<String> {
        self.0(name)
    }

    /// A text; an empty variable counts as missing.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        self.get(name).filter(|text| !text.is_empty())
    }

    pub(super) fn number(&self, name: &'static str) -> Result<Option<usize>, LaunchError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(LaunchError::NotANumber { variable: name, value }),
        }
    }

    pub(super) fn port(&self, name: &'static str) -> Result<Option<u16>, LaunchError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(LaunchError::NotAPort { variable: name, value }),
        }
    }

    /// The value of two variables that are set together: a number and its exclusive upper bound.
    pub(super) fn pair(
        &self,
        number: &'static str,
        limit: &'static str,
    ) -> Result<Option<(usize, usize)>, LaunchError> {
        let one = |set: &'static str, missing| LaunchError::OneOfTwo {
            set,
            value: self.get(set).unwrap_or_default(),
            missing,
        };
        match (self.number(number)?, self.number(limit)?) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(one(number, limit)),
            (None, Some(_)) => Err(one(limit, number)),
            (Some(found), Some(below)) if found < below => Ok(Some((found, below))),
            (Some(found), Some(below)) => {
                Err(LaunchError::OutOfRange { variable: number, found, limit, below })
            }
        }
    }

    pub(super) fn launched(&self, names: &Names) -> Result<Option<Launched>, LaunchError> {
        let Some((rank, world)) = self.pair(names.rank, names.world)? else { return Ok(None) };
        let local = match self.number(names.local_world)? {
            Some(_) => self.pair(names.local_rank, names.local_world)?,
            None => None,
        };
        let local_rank = self.number(names.local_rank)?;
        let launcher = names.launcher;
        let mut port = self.port(names.port)?;
        let has_agent = self.get(AGENT_STORE).is_some_and(|value| value == "True");
        if let (Launcher::Torchrun, true, Some(used)) = (launcher, has_agent, port) {
            let next = used.checked_add(1);
            let value = used.to_string();
            port = Some(next.ok_or(LaunchError::NotAPort { variable: names.port, value })?);
        }
        // torchrun sets `none` without `--rdzv-id`.
        let is_name = |id: &String| launcher != Launcher::Torchrun || id != "none";
        let id = |name: &&str| self.text(name).filter(is_name);
        let job = names.job.iter().find_map(id).unwrap_or_default();
        let (local_world, host) = (local.map(|(_, count)| count), self.text(names.host));
        Ok(Some(Launched { launcher, rank, world, local_rank, local_world, host, port, job }))
    }

    pub(super) fn kubeflow(&self) -> Result<Option<Launched>, LaunchError> {
        let Some((rank, world)) = self.pair("PET_NODE_RANK", "PET_NNODES")? else {
            return Ok(None);
        };
        if let Some(value) = self.text("PET_NPROC_PER_NODE").filter(|value| value != "1") {
            return Err(LaunchError::ProcessesPerNode { value });
        }
        Ok(Some(Launched {
            launcher: Launcher::Kubeflow,
            rank,
            world,
            local_rank: Some(0),
            local_world: Some(1),
            host: self.text("PET_MASTER_ADDR"),
            port: self.port("PET_MASTER_PORT")?,
            job: self.text(JOB).or_else(|| self.text("PET_RDZV_ID")).unwrap_or_default(),
        }))
    }
}
