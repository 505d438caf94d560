//! The variables of a step of SLURM, which `srun` starts.

use super::error::LaunchError;
use super::place::Launched;
use super::variables::{JOB, TORCHRUN, Variables};
use ranks::Launcher;

/// Numbers from here on are of steps that are not started by `srun`: the script of `sbatch`, and
/// the shell of `salloc`.
const FIRST_SPECIAL_STEP: usize = 0xffff_fff0;

/// Returns the place of this process in a step. A script of `sbatch` is a single process, although
/// SLURM sets the number of tasks for it.
pub(super) fn step(variables: &Variables<'_>) -> Result<Option<Launched>, LaunchError> {
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
