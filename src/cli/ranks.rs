//! The ranks of a command: started by a launcher, or by this program itself.

use super::error_report;
use super::failure::{Exit, Failure};
use super::launch::{Forwarded, Signals, launch};
use crate::dist::{
    Collective, Connections, DistError, Distributed, Group, Launched, Launcher, Monitor, Nccl,
    NcclOptions, Processes, Rank, ShardGroup, connect, gather, interface_name,
};
use crate::ops::{CUDA_BUILD, count_gpus, exit_at_once};
use crate::train::DeviceChoice;
use candle_core::Device;
use std::env;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::{SystemTime, UNIX_EPOCH};

/// The variable that sets the number of threads of a process.
const THREADS: &str = "RAYON_NUM_THREADS";

/// The variable that sets the network interface of NCCL.
const NCCL_INTERFACE: &str = "NCCL_SOCKET_IFNAME";

/// Runs this command as several ranks on this machine, if `distributed` and the number of GPUs
/// require it and no launcher has started this process. Returns whether it did so; all ranks have
/// then succeeded. `check` returns an error if the command cannot use this number of ranks.
pub(super) fn started_ranks(
    distributed: &Distributed,
    device: DeviceChoice,
    check: impl FnOnce(usize) -> anyhow::Result<()>,
) -> anyhow::Result<bool> {
    if place()?.is_some() {
        return Ok(false);
    }
    let (world, engine) = processes(distributed.processes, device, count_gpus())?;
    if world == 1 {
        return Ok(false);
    }
    check(world)?;
    // Received from now on, so that no signal ends this process before it is forwarded.
    let signals = Signals::receive()?;
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let (commands, forwarded) = match engine {
        LaunchMethod::OnePerGpu => {
            tracing::info!(ranks = world, "starting one process per GPU");
            let interface = distributed.interface.as_deref();
            (rank_commands(world, interface, &arguments)?, Forwarded::Unchanged)
        }
        LaunchMethod::Mpirun => {
            tracing::info!(ranks = world, "starting `mpirun`");
            (vec![mpirun(world, distributed.interface.as_deref(), &arguments)?], Forwarded::AsUsr2)
        }
    };
    launch(commands, &signals, forwarded)?;
    Ok(true)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LaunchMethod {
    /// It starts one process for each GPU.
    OnePerGpu,
    /// `mpirun` starts ranks on the CPU.
    Mpirun,
}

/// `mpirun` of OpenMPI with `world` ranks of this program on this machine, which connect through
/// `interface`.
fn mpirun(
    world: usize,
    interface: Option<&str>,
    arguments: &[OsString],
) -> anyhow::Result<Command> {
    let mut command = Command::new("mpirun");
    // More ranks than cores are allowed.
    command.args(["--oversubscribe", "--bind-to", "none", "-n", &world.to_string()]);
    if rustix::process::geteuid().is_root() {
        command.arg("--allow-run-as-root");
    }
    // OpenMPI expects names. The ranks report an interface that does not exist.
    if let Some(name) = interface.and_then(interface_name) {
        for layer in ["btl_tcp_if_include", "oob_tcp_if_include"] {
            command.args(["--mca", layer, &name]);
        }
    }
    command.arg(env::current_exe()?).args(arguments);
    if env::var_os(THREADS).is_none() {
        command.env(THREADS, threads_of_rank(world).to_string());
    }
    Ok(command)
}

/// Number of threads of each of `world` ranks on this machine.
fn threads_of_rank(world: usize) -> usize {
    available_parallelism().map_or(1, |cores| (cores.get() / world).max(1))
}

/// The place that a launcher gives to this process; `None` without a launcher.
fn place() -> anyhow::Result<Option<Launched>> {
    Ok(Launched::find(|name| env::var(name).ok())?)
}

/// The log level of this process, unless `RUST_LOG` sets it: ranks other than 0 only warn.
pub(super) fn log_level() -> &'static str {
    match place() {
        Ok(Some(place)) if place.rank > 0 => "warn",
        _ => "info", // an error is reported when the ranks connect
    }
}

/// Number of processes to start, without a launcher.
fn processes(
    processes: Processes,
    device: DeviceChoice,
    gpus: usize,
) -> Result<(usize, LaunchMethod), Failure> {
    let usable = match device {
        DeviceChoice::Auto => gpus,
        DeviceChoice::Cuda(_) => gpus.min(1),
        DeviceChoice::Cpu => 0,
    };
    let Processes::Count(count) = processes else {
        return Ok((usable.max(1), LaunchMethod::OnePerGpu));
    };
    let count = count.get();
    if count == 1 || count <= usable {
        return Ok((count, LaunchMethod::OnePerGpu));
    }
    if usable == 0 && cfg!(feature = "mpi") {
        return Ok((count, LaunchMethod::Mpirun));
    }
    let message = format!(
        "`distributed.processes` is {count}, and this run uses {}",
        match usable {
            0 => "the CPU".to_owned(),
            1 => "one GPU".to_owned(),
            _ => format!("{usable} GPUs"),
        }
    );
    let hint = format!(
        "several ranks on the CPU or on one GPU use MPI: build with `--features mpi` and start \
         `mpirun -n {count} trainer ..`"
    );
    Err(Failure::new(Exit::Usage, message).hint(hint))
}

/// This program with `arguments`, once per rank, as ranks on this machine, which connect through
/// `interface`.
pub(super) fn rank_commands(
    world: usize,
    interface: Option<&str>,
    arguments: &[OsString],
) -> anyhow::Result<Vec<Command>> {
    let program = env::current_exe()?;
    // The port is free, as the system has just chosen it.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let job = format!("{}-{}", std::process::id(), time.as_nanos());
    let threads = threads_of_rank(world);
    let interface = interface.and_then(interface_name);
    let command = |rank| {
        let place = Launched {
            launcher: Launcher::Explicit,
            rank,
            world,
            local_rank: Some(rank),
            local_world: Some(world),
            host: Some(Ipv4Addr::LOCALHOST.to_string()),
            port: Some(port),
            job: job.clone(),
        };
        let mut command = Command::new(&program);
        command.args(arguments).envs(place.environment());
        if env::var_os(THREADS).is_none() {
            command.env(THREADS, threads.to_string());
        }
        if let Some(name) = interface.as_deref().filter(|_| env::var_os(NCCL_INTERFACE).is_none()) {
            command.env(NCCL_INTERFACE, format!("={name}")); // NCCL compares the whole name
        }
        command
    };
    Ok((0..world).map(command).collect())
}

/// Connects this process to the other ranks of its run; `None` if it is the only one.
///
/// If another rank fails or is lost, this process prints the reason and ends with
/// [`Exit::Ranks`].
pub(super) fn group(
    distributed: &Distributed,
    device: DeviceChoice,
) -> anyhow::Result<Option<Group>> {
    let Some(place) = place()?.filter(|place| place.world > 1) else { return Ok(None) };
    if !CUDA_BUILD && !cfg!(feature = "mpi") {
        let message = "this build cannot add up the gradients of several ranks";
        return Err(no_engine(message).into());
    }
    let mut connections = connect(&place, distributed, end)?;
    let (shard_group, (sums, device)) = shard_group(&mut connections, distributed.shard_group)
        .and_then(|size| Ok((size, engine(&mut connections, size, distributed, device)?)))
        .inspect_err(|error| connections.monitor.fail(&error.to_string()))?;
    let (ranks, mut machines) = (connections.rank.world, connections.hosts.clone());
    machines.sort();
    machines.dedup();
    let (launcher, machines) = (place.launcher, machines.len());
    tracing::info!(%launcher, ranks, machines, "all ranks are connected");
    Ok(Some(connections.group(shard_group, sums, device)))
}

/// Number of ranks of a shard group.
fn shard_group(connections: &mut Connections, of: ShardGroup) -> anyhow::Result<usize> {
    let Rank { rank, world, local_rank, local_world } = connections.rank;
    if of == ShardGroup::All {
        return Ok(world);
    }
    let own = (rank.checked_sub(local_rank), local_world);
    let all = gather(&mut *connections.step, &own)?;
    let in_order = |(rank, of): (usize, &(Option<usize>, usize))| {
        *of == (Some(rank / local_world * local_world), local_world)
    };
    if all.iter().enumerate().all(in_order) {
        return Ok(local_world);
    }
    let message = "`distributed.shard_group` is `node`, but the machines have different numbers of ranks, or \
                   ranks that do not follow each other";
    let hint = "start the same number of ranks on each machine, or use `shard_group: all`";
    Err(Failure::new(Exit::Usage, message).hint(hint).into())
}

/// The connections of this rank that end with the command.
pub(super) struct Ending {
    sums: Arc<dyn Collective>,
    monitor: Arc<dyn Monitor>,
}

impl Ending {
    pub(super) fn of(group: &Group) -> Self {
        Self { sums: Arc::clone(&group.sums), monitor: Arc::clone(&group.monitor) }
    }

    /// Ends the connections together with the other ranks if `result` is a success, or a stop after
    /// the run was saved. Otherwise ends all ranks with the error. Returns `result`.
    pub(super) fn after<T>(self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        match result.as_ref().err().filter(|error| error_report::exit(error) != Exit::Stopped) {
            Some(error) if error_report::exit(error) == Exit::Ranks => {} // all monitors know it
            Some(error) => self.monitor.fail(&format!("{error:#}")),
            None => {
                self.monitor.report("ending the connections");
                if let Err(error) = self.sums.finish() {
                    self.monitor.fail(&error.to_string());
                    return result.and(Err(error.into()));
                }
                self.monitor.finish();
            }
        }
        result
    }
}

/// Ends this process because another rank has ended the run.
pub(super) fn end(error: &DistError) {
    let _ = error_report::report(&error.clone().into());
    exit_at_once(Exit::Ranks as i32);
}

/// Adds up gradients, and the device on which it needs them.
type Engine = (Arc<dyn Collective>, Option<Device>);

/// Connects NCCL if every rank has a GPU of its own, and MPI otherwise.
fn engine(
    connections: &mut Connections,
    shard_group: usize,
    distributed: &Distributed,
    device: DeviceChoice,
) -> anyhow::Result<Engine> {
    let rank = connections.rank;
    if !has_own_gpu(device, rank) {
        return Ok((mpi(rank, shard_group)?, None));
    }
    connections.monitor.wait("connecting the GPUs");
    let device = device.open_for(rank)?;
    let options = NcclOptions {
        library: Nccl::LIBRARY.into(),
        shard_group,
        exact: distributed.exact.holds(device.is_cpu()),
        timeout: distributed.timeout(),
    };
    let nccl = Nccl::connect(rank, &mut *connections.step, &device, &options)?;
    if rank.is_first() {
        let interface = distributed.interface.as_deref();
        if let Some(warning) = other_interface(interface, env::var_os(NCCL_INTERFACE).is_some()) {
            tracing::warn!("{warning}");
        }
        let order = if options.exact { "that of the tree" } else { "chosen by NCCL" };
        tracing::info!(order, "NCCL adds up the gradients");
    }
    Ok((Arc::new(nccl), Some(device)))
}

/// Returns a warning if NCCL may use another network interface than `interface`, because a launcher
/// has started the ranks.
fn other_interface(interface: Option<&str>, is_set: bool) -> Option<String> {
    let interface = interface.filter(|_| !is_set)?;
    Some(format!(
        "`distributed.interface` is `{interface}`, but NCCL chooses the interface of its own \
         connections: set `{NCCL_INTERFACE}` to the name of the interface on every machine"
    ))
}

/// Whether each rank has a GPU that no other rank uses.
fn has_own_gpu(device: DeviceChoice, rank: Rank) -> bool {
    match device {
        DeviceChoice::Cpu => false,
        DeviceChoice::Auto => CUDA_BUILD,
        DeviceChoice::Cuda(_) => CUDA_BUILD && rank.local_world == 1,
    }
}

#[cfg(feature = "mpi")]
fn mpi(rank: Rank, shard_group: usize) -> anyhow::Result<Arc<dyn Collective>> {
    let connect = move || -> Result<Box<dyn crate::dist::Transport>, DistError> {
        Ok(Box::new(crate::dist::Mpi::connect(rank)?))
    };
    Ok(Arc::new(crate::dist::HostCollective::start(rank, shard_group, connect)?))
}

#[cfg(not(feature = "mpi"))]
fn mpi(_: Rank, _: usize) -> anyhow::Result<Arc<dyn Collective>> {
    let message = "this build cannot add up gradients on the CPU, or of ranks that share a GPU";
    Err(no_engine(message).into())
}

fn no_engine(message: &str) -> Failure {
    let hint = "build it with `--features cuda` for ranks with a GPU each, otherwise with `--features mpi`";
    Failure::new(Exit::Usage, message).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;

    fn count(count: usize) -> Processes {
        Processes::Count(NonZeroUsize::new(count).unwrap())
    }

    #[test]
    fn one_process_is_started_for_each_gpu() {
        use DeviceChoice::{Auto, Cpu, Cuda};
        for (wanted, device, gpus, expected) in [
            (Processes::Auto, Auto, 8, 8),
            (Processes::Auto, Auto, 0, 1),
            (Processes::Auto, Cpu, 8, 1),
            (Processes::Auto, Cuda(3), 8, 1),
            (count(2), Auto, 8, 2),
            (count(1), Cpu, 0, 1),
        ] {
            let found = processes(wanted, device, gpus).unwrap();
            assert_eq!(found, (expected, LaunchMethod::OnePerGpu), "{wanted:?} {device}");
        }
    }

    #[test]
    fn the_interface_reaches_mpi_and_nccl_by_its_name_and_by_its_address() {
        for interface in ["lo", "127.0.0.1"] {
            let command = mpirun(2, Some(interface), &[]).unwrap();
            let arguments: Vec<_> = command.get_args().filter_map(|text| text.to_str()).collect();
            for layer in ["btl_tcp_if_include", "oob_tcp_if_include"] {
                let at = arguments.iter().position(|argument| *argument == layer).unwrap();
                assert_eq!(arguments[at + 1], "lo", "{interface}");
            }
            for command in rank_commands(2, Some(interface), &[]).unwrap() {
                let is_name = |(name, _): &(&std::ffi::OsStr, _)| *name == NCCL_INTERFACE;
                let (_, value) = command.get_envs().find(is_name).unwrap();
                assert_eq!(value.unwrap(), "=lo", "{interface}");
            }
        }
        let commands = rank_commands(2, None, &[]).unwrap();
        assert!(commands[0].get_envs().all(|(name, _)| name != NCCL_INTERFACE));
        assert!(other_interface(Some("eth0"), false).unwrap().contains("`NCCL_SOCKET_IFNAME`"));
        assert_eq!(other_interface(Some("eth0"), true).or(other_interface(None, false)), None);
    }

    #[test]
    fn ranks_that_need_mpi_are_refused_with_the_command_that_starts_them() {
        use DeviceChoice::{Auto, Cpu, Cuda};
        for (device, gpus, uses) in [
            (Auto, 0, "the CPU"),
            (Cpu, 8, "the CPU"),
            (Cuda(3), 8, "one GPU"),
            (Auto, 3, "3 GPUs"),
        ] {
            if uses == "the CPU" && cfg!(feature = "mpi") {
                assert_eq!(processes(count(4), device, gpus).unwrap(), (4, LaunchMethod::Mpirun));
                continue;
            }
            let error = processes(count(4), device, gpus).unwrap_err();
            let expected = format!("`distributed.processes` is 4, and this run uses {uses}");
            assert_eq!(error.to_string(), expected);
            assert!(error.hint.unwrap().contains("`mpirun -n 4 trainer"));
        }
    }
}
