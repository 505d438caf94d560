//! SIMD levels. Kernels are compiled for AVX-512, for AVX2 and for the baseline, and the version
//! that runs is chosen at run time.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read their own files"))]

use std::cell::Cell;
use std::fmt;
use std::sync::LazyLock;

mod transpose;

pub use transpose::{LANES, Lanes, transpose};

/// Environment variable that selects a lower level, to test what another CPU would run.
const VARIABLE: &str = "TRAINER_SIMD";

/// Vector extensions that kernels are compiled for, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// No extension beyond those of the compilation target.
    Baseline,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
}

impl SimdLevel {
    const ALL: [Self; 3] = [Self::Avx512, Self::Avx2, Self::Baseline];
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Baseline => "baseline",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SimdError {
    /// The value is not the name of a level.
    #[error("`{VARIABLE}` is `{found}`, expected `avx512`, `avx2` or `baseline`")]
    Unknown {
        /// Value of the variable.
        found: String,
    },
    #[error("`{VARIABLE}` is `{wanted}`, but the best level of this CPU is `{best}`")]
    Missing {
        /// Level that the variable names.
        wanted: SimdLevel,
        best: SimdLevel,
    },
}

/// Returns the SIMD level of the kernels: the best of this CPU, unless the environment variable
/// `TRAINER_SIMD` selects a lower one.
///
/// An invalid value of the variable is an error, which the command line reports. Kernels then run
/// at the best level.
pub fn simd_level() -> Result<SimdLevel, SimdError> {
    CHOICE.clone()
}

static CHOICE: LazyLock<Result<SimdLevel, SimdError>> = LazyLock::new(|| {
    let requested = std::env::var_os(VARIABLE).unwrap_or_default();
    choose(&requested.to_string_lossy(), best())
});

static LEVEL: LazyLock<SimdLevel> = LazyLock::new(|| simd_level().unwrap_or(best()));

fn choose(requested: &str, best: SimdLevel) -> Result<SimdLevel, SimdError> {
    if requested.is_empty() {
        return Ok(best);
    }
    match SimdLevel::ALL.into_iter().find(|level| level.to_string() == requested) {
        None => Err(SimdError::Unknown { found: requested.to_owned() }),
        Some(wanted) if wanted > best => Err(SimdError::Missing { wanted, best }),
        Some(level) => Ok(level),
    }
}

fn best() -> SimdLevel {
    #[cfg(target_arch = "x86_64")]
    {
        let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        if fma
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
        {
            return SimdLevel::Avx512;
        }
        if fma {
            return SimdLevel::Avx2;
        }
    }
    SimdLevel::Baseline
}

thread_local! {
    static HIGHEST: Cell<SimdLevel> = const { Cell::new(SimdLevel::Avx512) };
}

/// The level at which kernels run: on this thread at most the one that [`at_each_level`] sets.
#[inline]
pub fn level() -> SimdLevel {
    (*LEVEL).min(HIGHEST.get())
}

/// Results of `body` at each level up to that of the process, best level last. `body` must not use
/// other threads.
pub fn at_each_level<T>(body: impl Fn() -> T) -> Vec<(SimdLevel, T)> {
    let levels = [SimdLevel::Baseline, SimdLevel::Avx2, SimdLevel::Avx512];
    let run = |level| {
        HIGHEST.set(level);
        (level, body())
    };
    levels.into_iter().filter(|level| *level <= *LEVEL).map(run).collect()
}

/// Defines functions whose body is compiled once for each [`SimdLevel`].
///
/// Bodies use plain loops and the `#[inline(always)]` functions of `kernels::cpu::simd`. A closure or a
/// function that is not inlined would be compiled for the baseline only.
#[macro_export]
macro_rules! kernels {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident$(<$life:lifetime>)?($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => { $(
        $(#[$meta])*
        #[expect(unsafe_code, reason = "a function with target features is called after detection")]
        $vis fn $name$(<$life>)?($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body$(<$life>)?($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
            fn avx512$(<$life>)?($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2$(<$life>)?($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            match $crate::level() {
                // SAFETY: `level` guarantees that the CPU has every enabled feature.
                #[cfg(target_arch = "x86_64")]
                $crate::SimdLevel::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::SimdLevel::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    )* };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_lowers_the_level_and_never_raises_it() {
        use SimdLevel::{Avx2, Avx512, Baseline};
        assert_eq!(choose("", Avx2), Ok(Avx2));
        assert_eq!(choose("avx512", Avx512), Ok(Avx512));
        assert_eq!(choose("avx2", Avx512), Ok(Avx2));
        assert_eq!(choose("baseline", Avx2), Ok(Baseline));
        let error = choose("avx512", Avx2).unwrap_err().to_string();
        assert_eq!(error, "`TRAINER_SIMD` is `avx512`, but the best level of this CPU is `avx2`");
        let error = choose("AVX", Avx512).unwrap_err().to_string();
        assert!(error.contains("`AVX`, expected `avx512`, `avx2` or `baseline`"), "{error}");
    }
}
