//! Finds out which rank this process is, from the environment variables that launchers and `srun`
//! set.

use ranks::Launcher;

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
        let (pmi, slurm) = (variables.launched(&PMI)?, slurm_step(&variables)?);
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

/// The variables of one launcher.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
    host: &'static str,
    port: &'static str,
    /// The first of these that is set names the job.
    job: &'static [&'static str],
}

const EXPLICIT: Names = Names {
    launcher: Launcher::Explicit,
    rank: "TRAINER_RANK",
    world: "TRAINER_WORLD_SIZE",
    local_rank: "TRAINER_LOCAL_RANK",
    local_world: "TRAINER_LOCAL_WORLD_SIZE",
    host: "TRAINER_MASTER_ADDR",
    port: "TRAINER_MASTER_PORT",
    job: &[JOB],
};

const TORCHRUN: Names = Names {
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

const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    world: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
    job: &[JOB, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    ..TORCHRUN
};

const PMI: Names = Names {
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
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        self.0(name)
    }

    /// A text; an empty variable counts as missing.
    fn text(&self, name: &str) -> Option<String> {
        self.get(name).filter(|text| !text.is_empty())
    }

    fn number(&self, name: &'static str) -> Result<Option<usize>, LaunchError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(LaunchError::NotANumber { variable: name, value }),
        }
    }

    fn port(&self, name: &'static str) -> Result<Option<u16>, LaunchError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(LaunchError::NotAPort { variable: name, value }),
        }
    }

    /// The value of two variables that are set together: a number and its exclusive upper bound.
    fn pair(
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

    fn launched(&self, names: &Names) -> Result<Option<Launched>, LaunchError> {
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

    fn kubeflow(&self) -> Result<Option<Launched>, LaunchError> {
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

/// Numbers from here on are of steps that are not started by `srun`: the script of `sbatch`, and
/// the shell of `salloc`.
const FIRST_SPECIAL_STEP: usize = 0xffff_fff0;

/// Returns the place of this process in a step. A script of `sbatch` is a single process, although
/// SLURM sets the number of tasks for it.
fn slurm_step(variables: &Variables<'_>) -> Result<Option<Launched>, LaunchError> {
    match variables.number("SLURM_STEP_ID")? {
        Some(step) if step < FIRST_SPECIAL_STEP => {}
        _ => return Ok(None),
    }
    let size = match variables.get("SLURM_STEP_NUM_TASKS") {
        Some(_) => "SLURM_STEP_NUM_TASKS",
        None => "SLURM_NTASKS",
    };
    let Some((rank, world)) = variables.pair("SLURM_PROCID", size)? else { return Ok(None) };
    let host = match variables.text(TORCHRUN.host) {
        Some(host) => Some(host),
        None => first_host(variables)?,
    };
    let job =
        ["SLURM_JOB_ID", "SLURM_STEP_ID"].map(|name| variables.text(name).unwrap_or_default());
    Ok(Some(Launched {
        launcher: Launcher::Slurm,
        rank,
        world,
        local_rank: variables.number("SLURM_LOCALID")?,
        local_world: tasks_on_node(variables)?,
        host,
        port: variables.port(TORCHRUN.port)?,
        job: variables.text(JOB).unwrap_or_else(|| job.join(".")),
    }))
}

/// The first host of `SLURM_STEP_NODELIST`, which runs rank 0.
fn first_host(variables: &Variables<'_>) -> Result<Option<String>, LaunchError> {
    let variable = "SLURM_STEP_NODELIST";
    let Some(value) = variables.text(variable) else { return Ok(None) };
    let expected = "names of hosts, such as `n[01-04],m7`";
    first_of(&value).map(Some).ok_or(LaunchError::List { variable, value, expected })
}

/// The first name of a list such as `n[01-04,9]-ib,m7`: `n01-ib`.
fn first_of(list: &str) -> Option<String> {
    let (mut name, mut rest) = (String::new(), list);
    loop {
        let Some(special) = rest.find(['[', ',']) else {
            name.push_str(rest);
            break;
        };
        name.push_str(&rest[..special]);
        if rest[special..].starts_with(',') {
            break;
        }
        let (numbers, after) = rest[special + 1..].split_once(']')?;
        let first = numbers.split(['-', ',']).next()?;
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        name.push_str(first);
        rest = after;
    }
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (!name.is_empty() && name.bytes().all(valid)).then_some(name)
}

/// Number of tasks on this node, from `SLURM_STEP_TASKS_PER_NODE`.
fn tasks_on_node(variables: &Variables<'_>) -> Result<Option<usize>, LaunchError> {
    let variable = "SLURM_STEP_TASKS_PER_NODE";
    let (Some(value), Some(node)) = (variables.text(variable), variables.number("SLURM_NODEID")?)
    else {
        return Ok(None);
    };
    let expected = "numbers of tasks, such as `2(x3),1`";
    let tasks = nth(&value, node);
    tasks.map(Some).ok_or(LaunchError::List { variable, value, expected })
}

/// Entry `index` of a list such as `2(x3),1`, which is `2,2,2,1`.
fn nth(list: &str, index: usize) -> Option<usize> {
    let mut before = 0;
    for entry in list.split(',') {
        let (tasks, times) = match entry.strip_suffix(')') {
            Some(entry) => {
                let (tasks, times) = entry.split_once("(x")?;
                (tasks, times.parse::<usize>().ok()?)
            }
            None => (entry, 1),
        };
        before += times;
        if index < before {
            return tasks.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use fault::Fault;
    use ranks::Launcher;
    use std::collections::BTreeMap;

    fn find(variables: &[(&str, &str)]) -> Result<Option<Launched>, LaunchError> {
        let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
        Launched::find(|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    /// Separates `A=1 B=2`.
    fn variables(text: &str) -> Vec<(&str, &str)> {
        text.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect()
    }

    /// What [`Launched`] is expected to be: `launcher rank/world local_rank/local_world host:port job`,
    /// with `-` for what is unknown.
    fn described(launched: &Launched) -> String {
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        let Launched { launcher, rank, world, local_rank, local_world, host, port, job } = launched;
        let local = or_dash(local_rank.map(|local| local.to_string()));
        let local_world = or_dash(local_world.map(|count| count.to_string()));
        let (host, port) = (or_dash(host.clone()), or_dash(port.map(|port| port.to_string())));
        let job = or_dash(Some(job.clone()).filter(|job| !job.is_empty()));
        format!("{launcher} {rank}/{world} {local}/{local_world} {host}:{port} {job}")
    }

    #[test]
    fn every_launcher_is_recognised() {
        let torchrun = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 \
                    MASTER_PORT=29500 TORCHELASTIC_RUN_ID=abc";
        let step = "SLURM_STEP_ID=0 SLURM_JOB_ID=17 SLURM_PROCID=2 SLURM_NTASKS=3 SLURM_LOCALID=0 \
                SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_STEP_NODELIST=n[01-02] \
                SLURM_LAUNCH_NODE_IPADDR=10.0.0.9";
        let open_mpi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                    OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=1 PMIX_NAMESPACE=77";
        let mpich = "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
        let kubeflow = "PET_NODE_RANK=1 PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=a PET_MASTER_PORT=29400";
        let both = |a: &str, b: &str| format!("{a} {b}");
        for (text, expected) in [
            (torchrun.to_owned(), "torchrun 3/4 1/2 n1:29500 abc"),
            // without `--rdzv-id`
            (torchrun.replace("=abc", "=none"), "torchrun 3/4 1/2 n1:29500 -"),
            (both(torchrun, "TORCHELASTIC_USE_AGENT_STORE=False"), "torchrun 3/4 1/2 n1:29500 abc"),
            // the agent of the static rendezvous listens on 29500
            (both(torchrun, "TORCHELASTIC_USE_AGENT_STORE=True"), "torchrun 3/4 1/2 n1:29501 abc"),
            // the PyTorch operator of Kubernetes
            (
                "RANK=1 WORLD_SIZE=2 MASTER_ADDR=m-0 MASTER_PORT=23456".to_owned(),
                "torchrun 1/2 -/- m-0:23456 -",
            ),
            (step.to_owned(), "SLURM 2/3 0/1 n01:- 17.0"),
            (both(step, "MASTER_ADDR=n9 MASTER_PORT=5"), "SLURM 2/3 0/1 n9:5 17.0"),
            (both(step, "SLURM_STEP_NUM_TASKS=4"), "SLURM 2/4 0/1 n01:- 17.0"),
            (both(step, "PMI_RANK=2 PMI_SIZE=3 PMIX_RANK=2"), "SLURM 2/3 0/1 n01:- 17.0"),
            (open_mpi.to_owned(), "OpenMPI 1/2 1/2 -:- 77"),
            (both(open_mpi, "MASTER_ADDR=n1 MASTER_PORT=9"), "OpenMPI 1/2 1/2 n1:9 77"),
            (both(open_mpi, step), "OpenMPI 1/2 1/2 -:- 77"),
            (mpich.to_owned(), "PMI 1/4 1/2 -:- -"),
            (both(mpich, "TRAINER_JOB_ID=x"), "PMI 1/4 1/2 -:- x"),
            (kubeflow.to_owned(), "Kubeflow 1/2 0/1 a:29400 -"),
            (both(kubeflow, torchrun), "torchrun 3/4 1/2 n1:29500 abc"),
            (both(torchrun, open_mpi), "torchrun 3/4 1/2 n1:29500 abc"),
            (both(torchrun, "TRAINER_RANK=0 TRAINER_WORLD_SIZE=1"), "TRAINER_RANK 0/1 -/- -:- -"),
        ] {
            let found = find(&variables(&text)).unwrap().unwrap();
            assert_eq!(described(&found), expected, "{text}");
        }
    }

    #[test]
    fn a_process_without_a_launcher_is_not_a_rank() {
        for text in [
            "",
            "MASTER_ADDR=n1 MASTER_PORT=29500",
            // a script of sbatch, and the shell of salloc
            "SLURM_JOB_ID=17 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=0 SLURM_LOCALID=0",
            "SLURM_STEP_ID=4294967291 SLURM_JOB_ID=17 SLURM_PROCID=0 SLURM_NTASKS=2",
            "SLURM_STEP_ID=4294967290 SLURM_JOB_ID=17 SLURM_PROCID=0 SLURM_NTASKS=2",
        ] {
            assert_eq!(find(&variables(text)), Ok(None), "{text}");
        }
    }

    #[test]
    fn a_mistake_names_the_variable_and_its_value() {
        for (text, expected) in [
            ("RANK=1", "environment variable `RANK` is `1`, but `WORLD_SIZE` is not set"),
            ("WORLD_SIZE=4", "environment variable `WORLD_SIZE` is `4`, but `RANK` is not set"),
            ("PMI_RANK=0", "environment variable `PMI_RANK` is `0`, but `PMI_SIZE` is not set"),
            ("OMPI_COMM_WORLD_SIZE=2", "`OMPI_COMM_WORLD_RANK` is not set"),
            ("TRAINER_RANK=0", "`TRAINER_WORLD_SIZE` is not set"),
            ("SLURM_STEP_ID=0 SLURM_NTASKS=2", "`SLURM_PROCID` is not set"),
            ("PET_NNODES=2", "`PET_NODE_RANK` is not set"),
            (
                "RANK=4 WORLD_SIZE=4",
                "`RANK` is `4`, expected a number below `WORLD_SIZE`, which is `4`",
            ),
            ("RANK=0 WORLD_SIZE=0", "`RANK` is `0`, expected a number below `WORLD_SIZE`"),
            ("RANK=x WORLD_SIZE=4", "environment variable `RANK` is `x`, expected a whole number"),
            ("RANK=-1 WORLD_SIZE=4", "`RANK` is `-1`, expected a whole number of 0 or more"),
            ("RANK= WORLD_SIZE=4", "`RANK` is ``, expected a whole number"),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=a", "`LOCAL_RANK` is `a`, expected a whole number"),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
                "`LOCAL_RANK` is `2`, expected a number below `LOCAL_WORLD_SIZE`, which is `2`",
            ),
            ("RANK=0 WORLD_SIZE=2 MASTER_PORT=http", "`MASTER_PORT` is `http`, expected a port"),
            ("RANK=0 WORLD_SIZE=2 MASTER_PORT=0", "`MASTER_PORT` is `0`, expected a port"),
            (
                "RANK=0 WORLD_SIZE=2 MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True",
                "`MASTER_PORT` is `65535`, expected a port from 1 to 65535 (65534 with",
            ),
            (
                "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n[01-02",
                "`SLURM_STEP_NODELIST` is `n[01-02`, expected names of hosts",
            ),
            (
                "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=1 \
             SLURM_STEP_TASKS_PER_NODE=2",
                "`SLURM_STEP_TASKS_PER_NODE` is `2`, expected numbers of tasks",
            ),
            (
                "PMIX_RANK=1",
                "`PMIX_RANK` is `1`, but no environment variable has the number of ranks",
            ),
            (
                "PET_NODE_RANK=0 PET_NNODES=2 PET_NPROC_PER_NODE=8",
                "`PET_NPROC_PER_NODE` is `8`, but this process was not started by torchrun",
            ),
        ] {
            let error = find(&variables(text)).unwrap_err();
            assert!(error.to_string().contains(expected), "{text}: {error}");
            assert!(error.hint().is_some_and(|hint| !hint.is_empty()), "{text}");
        }
    }

    #[test]
    fn a_started_process_finds_the_place_that_it_is_given() {
        let mut place = Launched {
            launcher: Launcher::Explicit,
            rank: 1,
            world: 2,
            local_rank: Some(1),
            local_world: Some(2),
            host: Some("127.0.0.1".to_owned()),
            port: Some(29500),
            job: "a job".to_owned(),
        };
        let found = |place: &Launched| {
            let environment = place.environment();
            let values: Vec<_> =
                environment.iter().map(|(name, value)| (*name, &value[..])).collect();
            find(&values).unwrap()
        };
        assert_eq!(found(&place), Some(place.clone()));
        place = Launched { local_rank: None, local_world: None, host: None, port: None, ..place };
        place.job.clear();
        assert_eq!(found(&place), Some(place.clone()));
    }

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, first) in [
            ("n1", Some("n1")),
            ("login.example,n1", Some("login.example")),
            ("n[01-04]", Some("n01")),
            ("n[7,9-12],m1", Some("n7")),
            ("gpu-[003-004,9]-ib,m[1-2]", Some("gpu-003-ib")),
            ("rack[2-3]n[08-16]", Some("rack2n08")),
            ("n[01-04", None),
            ("n[]", None),
            ("[a-b]", None),
            (",n1", None),
            ("n 1", None),
        ] {
            assert_eq!(first_of(list).as_deref(), first, "{list}");
        }
    }

    #[test]
    fn the_tasks_of_each_node_are_found() {
        let expanded = |list| (0..5).map(|index| nth(list, index)).collect::<Vec<_>>();
        assert_eq!(expanded("2(x3),1"), [Some(2), Some(2), Some(2), Some(1), None]);
        assert_eq!(expanded("8"), [Some(8), None, None, None, None]);
        assert_eq!(expanded("1,3(x2)"), [Some(1), Some(3), Some(3), None, None]);
        for broken in ["", "a", "2(x", "2(3)", "2x3"] {
            assert_eq!(nth(broken, 0), None, "{broken}");
        }
    }
}
