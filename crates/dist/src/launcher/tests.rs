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
    let kubeflow =
        "PET_NODE_RANK=1 PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=a PET_MASTER_PORT=29400";
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
        ("PMIX_RANK=1", "`PMIX_RANK` is `1`, but no environment variable has the number of ranks"),
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
        let values: Vec<_> = environment.iter().map(|(name, value)| (*name, &value[..])).collect();
        find(&values).unwrap()
    };
    assert_eq!(found(&place), Some(place.clone()));
    place = Launched { local_rank: None, local_world: None, host: None, port: None, ..place };
    place.job.clear();
    assert_eq!(found(&place), Some(place.clone()));
}
