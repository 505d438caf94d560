//! Memory and time of this process, as the system counts them.

use std::fs;

/// Highest resident memory of this process so far; 0 where the system does not say.
pub fn peak_memory_bytes() -> u64 {
    fs::read_to_string("/proc/self/status").ok().and_then(|status| high_water(&status)).unwrap_or(0)
}

fn high_water(status: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Seconds that all threads of this process have run so far, the kernel's part included; 0 where the
/// system does not say.
pub fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    ticks(&stat).unwrap_or(0) as f64 / TICKS_A_SECOND
}

/// Linux tells user space this unit on every architecture (`USER_HZ`).
const TICKS_A_SECOND: f64 = 100.0;

/// `utime + stime`: the 14th and 15th field; the second is a name in brackets that may hold anything.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_all_threads_is_read_behind_the_name() {
        let stat = "7 (a) b) R 1 2 3 4 5 6 7 8 9 10 250 30 0 0 20 0 1";
        assert_eq!(ticks(stat), Some(280));
        assert_eq!(ticks("7 (a"), None);
    }

    #[test]
    fn the_high_water_mark_is_read_in_bytes() {
        let status = "Name:\ttrainer\nVmPeak:\t  9 kB\nVmHWM:\t   2048 kB\nVmRSS:\t 1 kB\n";
        assert_eq!(high_water(status), Some(2048 * 1024));
        assert_eq!(high_water("Name:\ttrainer\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_contains_what_was_touched() {
        let touched = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(peak_memory_bytes() > touched.len() as u64);
    }
}
