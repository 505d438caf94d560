//! Memory use and CPU time of this process, as reported by Linux.

use crate::files;
use std::path::Path;

/// Peak resident memory of this process in bytes, or 0 if the system does not report it.
pub fn peak_memory_bytes() -> u64 {
    files::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| high_water(&status))
        .unwrap_or(0)
}

/// Resident memory of this process in bytes, or 0 if the system does not report it.
pub fn resident_memory_bytes() -> u64 {
    let status = files::read_to_string("/proc/self/status").ok();
    status.and_then(|status| kibibytes(&status, "VmRSS:")).unwrap_or(0)
}

fn high_water(status: &str) -> Option<u64> {
    kibibytes(status, "VmHWM:")
}

/// A number of bytes as a text: `1.23 GiB`, or `12 MiB` below one GiB.
pub fn memory_text(bytes: f64) -> String {
    let mebibytes = bytes / 1_048_576.0;
    if mebibytes < 1024.0 {
        format!("{mebibytes:.0} MiB")
    } else {
        format!("{:.2} GiB", mebibytes / 1024.0)
    }
}

/// Memory that new allocations can use without swapping, in bytes, within the limits of this
/// process and of its control group; `None` if the system does not report it.
pub fn available_memory_bytes() -> Option<u64> {
    let system = available(&files::read_to_string("/proc/meminfo").ok()?)?;
    let limits = [below_group_limit(), below_address_limit()];
    Some(limits.into_iter().flatten().fold(system, u64::min))
}

/// What is left below the memory limit of the control group (version 2).
fn below_group_limit() -> Option<u64> {
    let groups = files::read_to_string("/proc/self/cgroup").ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let read = |name: &str| {
        // in a container, its group is the root
        let path = |group: &str| Path::new("/sys/fs/cgroup").join(group).join(name);
        files::read_to_string(path(group)).or_else(|_| files::read_to_string(path(""))).ok()
    };
    below_limit(&read("memory.max")?, &read("memory.current")?, &read("memory.stat")?)
}

/// File pages that are not in use count as free.
fn below_limit(limit: &str, current: &str, stat: &str) -> Option<u64> {
    let limit: u64 = limit.trim().parse().ok()?; // `max`: no limit
    let inactive = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let inactive: u64 = inactive.and_then(|value| value.trim().parse().ok()).unwrap_or(0);
    Some((limit + inactive).saturating_sub(current.trim().parse().ok()?))
}

/// What is left below the limit of the address space (`ulimit -v`).
fn below_address_limit() -> Option<u64> {
    let limits = files::read_to_string("/proc/self/limits").ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = limit.split_whitespace().next()?.parse().ok()?; // `unlimited`
    Some(
        limit.saturating_sub(kibibytes(
            &files::read_to_string("/proc/self/status").ok()?,
            "VmSize:",
        )?),
    )
}

/// The value of a line such as `VmHWM:  2048 kB`, in bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

fn available(meminfo: &str) -> Option<u64> {
    kibibytes(meminfo, "MemAvailable:")
}

/// CPU seconds of all threads of this process so far, user and system time, or 0 if the system does
/// not report them.
pub fn cpu_seconds() -> f64 {
    let stat = files::read_to_string("/proc/self/stat").unwrap_or_default();
    ticks(&stat).unwrap_or(0) as f64 / TICKS_A_SECOND
}

/// Unit of the times in `/proc/self/stat`; the same on every architecture (`USER_HZ`).
const TICKS_A_SECOND: f64 = 100.0;

/// Returns `utime + stime`, fields 14 and 15. Field 2 is the process name in parentheses, which may
/// itself contain spaces and parentheses.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_after_the_process_name() {
        let stat = "7 (a) b) R 1 2 3 4 5 6 7 8 9 10 250 30 0 0 20 0 1";
        assert_eq!(ticks(stat), Some(280));
        assert_eq!(ticks("7 (a"), None);
    }

    #[test]
    fn available_memory_is_returned_in_bytes() {
        let meminfo = "MemTotal:  24 kB\nMemFree:  1 kB\nMemAvailable:   2048 kB\n";
        assert_eq!(available(meminfo), Some(2048 * 1024));
        assert_eq!(available("MemTotal:  24 kB\n"), None);
    }

    #[test]
    fn a_limit_of_the_control_group_leaves_what_is_not_used() {
        let stat = "anon 900\nfile 100\ninactive_file 60\nactive_file 40\n";
        assert_eq!(below_limit("4096\n", "1000\n", stat), Some(3156));
        assert_eq!(below_limit("100\n", "1000\n", stat), Some(0));
        assert_eq!(below_limit("max\n", "1000\n", stat), None);
    }

    #[test]
    fn peak_memory_is_returned_in_bytes() {
        let status = "Name:\ttrainer\nVmPeak:\t  9 kB\nVmHWM:\t   2048 kB\nVmRSS:\t 1 kB\n";
        assert_eq!(high_water(status), Some(2048 * 1024));
        assert_eq!(kibibytes(status, "VmRSS:"), Some(1024));
        assert_eq!(high_water("Name:\ttrainer\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn peak_memory_includes_a_large_allocation() {
        let touched = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(peak_memory_bytes() > touched.len() as u64);
    }
}
