//! The exit code and the hint of an error of the GPU's driver or of cuBLAS.
//!
//! candle wraps these errors without a kind, so the text decides. It has the name of the code, as
//! in `DriverError(CUDA_ERROR_ECC_UNCORRECTABLE, "..")`.

use super::failure::Exit;
use crate::ops::memory_advice;
use std::borrow::Cow;

/// A lack of memory.
const MEMORY: [&str; 2] = ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"];

/// A kernel did something wrong, because of an error of this program or of the GPU.
const KERNEL: [&str; 9] = [
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ASSERT",
    "CUBLAS_STATUS_EXECUTION_FAILED",
];

/// A call that the driver or cuBLAS refuses. It would refuse the same call again, so the run must
/// not be started again without a change.
const REFUSED: [&str; 14] = [
    "CUDA_ERROR_INVALID_VALUE",
    "CUDA_ERROR_INVALID_HANDLE",
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_INVALID_PTX",
    "CUDA_ERROR_INVALID_SOURCE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_NOT_FOUND",
    "CUDA_ERROR_NOT_SUPPORTED",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "CUBLAS_STATUS_INVALID_VALUE",
    "CUBLAS_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ARCH_MISMATCH",
];

/// The exit code and the hint of an error whose text is `error`; `None` if it is no error of the
/// GPU, or one that another attempt would repeat.
pub(super) fn outcome(error: &str) -> Option<(Exit, Cow<'static, str>)> {
    let has = |names: &[&str]| names.iter().any(|name| has_name(error, name));
    if has(&MEMORY) {
        let hint = format!("{}; `trainer plan` predicts the memory of a config", memory_advice());
        return Some((Exit::Resources, hint.into()));
    }
    if has(&REFUSED) || !["CUDA_ERROR_", "CUBLAS_STATUS_"].iter().any(|name| error.contains(name)) {
        return None;
    }
    let hint = if has(&KERNEL) {
        "run the same command again to resume from the last checkpoint. If it happens again on \
         another GPU too, this is a bug in trainer: please report it with the log"
    } else {
        "the GPU was lost, or does not work: run the same command again to resume from the last \
         checkpoint. `nvidia-smi` and `dmesg | grep Xid` show its state; `CUDA_VISIBLE_DEVICES` \
         can exclude it"
    };
    Some((Exit::Ranks, hint.into()))
}

/// Whether `text` contains `name` as a whole name.
fn has_name(text: &str, name: &str) -> bool {
    let ends = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    text.match_indices(name).any(|(at, _)| ends(&text[at + name.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit_of(name: &str) -> Option<Exit> {
        outcome(&format!("DriverError({name}, \"text of the driver\")")).map(|(exit, _)| exit)
    }

    #[test]
    fn a_gpu_that_is_lost_has_the_exit_code_of_a_lost_rank() {
        for name in [
            "ECC_UNCORRECTABLE",
            "NVLINK_UNCORRECTABLE",
            "NO_DEVICE",
            "DEVICE_UNAVAILABLE",
            "LAUNCH_FAILED",
            "LAUNCH_TIMEOUT",
            "EXTERNAL_DEVICE",
            "CONTAINED",
            "UNKNOWN",
            "SYSTEM_NOT_READY",
            "ILLEGAL_ADDRESS",
            "INVALID_ADDRESS_SPACE",
            "DEINITIALIZED",
            "CONTEXT_IS_DESTROYED",
        ] {
            assert_eq!(exit_of(&format!("CUDA_ERROR_{name}")), Some(Exit::Ranks), "{name}");
        }
        for name in ["EXECUTION_FAILED", "INTERNAL_ERROR", "NOT_INITIALIZED"] {
            assert_eq!(exit_of(&format!("CUBLAS_STATUS_{name}")), Some(Exit::Ranks), "{name}");
        }
    }

    #[test]
    fn memory_and_calls_that_are_refused_are_no_lost_gpu() {
        assert_eq!(exit_of("CUDA_ERROR_OUT_OF_MEMORY"), Some(Exit::Resources));
        assert_eq!(exit_of("CUBLAS_STATUS_ALLOC_FAILED"), Some(Exit::Resources));
        for name in REFUSED {
            assert_eq!(exit_of(name), None);
        }
        assert_eq!(outcome("shape mismatch"), None);
    }

    #[test]
    fn the_hint_says_what_to_do_with_the_gpu() {
        let hint = |name| outcome(name).unwrap().1;
        assert!(hint("CUDA_ERROR_ECC_UNCORRECTABLE").contains("dmesg | grep Xid"));
        assert!(hint("CUDA_ERROR_ILLEGAL_ADDRESS").contains("please report it"));
    }
}
