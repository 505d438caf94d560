//! Memory of this process, as the system counts it.

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

#[cfg(test)]
mod tests {
    use super::*;

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
