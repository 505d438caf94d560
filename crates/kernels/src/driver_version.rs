//! The GPU code in this binary, and the driver that it needs.

/// The version of the CUDA toolkit that compiled the GPU code, such as `13.0`; empty if there is
/// none.
const CUDA_TOOLKIT: &str = match option_env!("TRAINER_CUDA_TOOLKIT") {
    Some(toolkit) => toolkit,
    None => "",
};

/// Oldest versions of the driver for Linux that support a version of CUDA.
const DRIVERS: [((u32, u32), u32); 8] = [
    ((12, 4), 550),
    ((12, 5), 555),
    ((12, 6), 560),
    ((12, 8), 570),
    ((12, 9), 575),
    ((13, 0), 580),
    ((13, 1), 590),
    ((13, 2), 595),
];

/// `13.0` as `(13, 0)`.
fn parsed(toolkit: &str) -> Option<(u32, u32)> {
    let (major, minor) = toolkit.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The driver that the GPU code of this binary needs, for hints.
pub fn needed_driver() -> String {
    needed_by(CUDA_TOOLKIT)
}

fn needed_by(toolkit: &str) -> String {
    let parsed = parsed(toolkit);
    let known = DRIVERS.iter().find(|(cuda, _)| Some(*cuda) == parsed);
    match (known, parsed) {
        (Some((_, driver)), _) => format!("a driver of version {driver} or later"),
        (None, Some(_)) => format!("a driver for CUDA {toolkit} or later"),
        (None, None) => "an NVIDIA driver".to_owned(),
    }
}

/// Why a driver cannot run the GPU code of this binary; `None` if it can.
#[cfg(feature = "cuda")]
pub(super) fn problem_of_driver(driver: u32) -> Option<String> {
    problem_with(driver, CUDA_TOOLKIT)
}

/// Returns why the driver cannot run code of `toolkit`; `None` if it can. `driver` is the version
/// of CUDA that the driver supports, as it reports it: 12040 is 12.4.
///
/// A driver compiles PTX of its own version of CUDA or an earlier one only, and candle's kernels
/// are PTX.
#[cfg(any(feature = "cuda", test))]
fn problem_with(driver: u32, toolkit: &str) -> Option<String> {
    let supported = (driver / 1000, driver % 1000 / 10);
    if driver == 0 {
        return Some("no NVIDIA driver is loaded".to_owned());
    }
    (supported < parsed(toolkit)?).then(|| {
        format!(
            "the driver supports CUDA {}.{} at most, but this binary was built with CUDA {toolkit}: \
             install {}, or build with a toolkit of CUDA {0}.{1} or earlier",
            supported.0,
            supported.1,
            needed_by(toolkit)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_older_than_the_binary_is_a_problem_with_a_fix() {
        let problem = problem_with(12040, "13.0").unwrap();
        for part in ["CUDA 12.4 at most", "built with CUDA 13.0", "version 580", "CUDA 12.4 or"] {
            assert!(problem.contains(part), "{problem}");
        }
        for (driver, toolkit) in
            [(13000, "13.0"), (13010, "12.4"), (12040, "12.4"), (13000, "12.9")]
        {
            assert_eq!(problem_with(driver, toolkit), None, "{driver} {toolkit}");
        }
        assert!(problem_with(12080, "12.9").unwrap().contains("version 575"));
        assert!(problem_with(13020, "13.9").unwrap().contains("a driver for CUDA 13.9"));
        assert_eq!(problem_with(0, "13.0").unwrap(), "no NVIDIA driver is loaded");
    }
}
