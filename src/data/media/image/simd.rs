//! Loops over pixels, compiled for AVX-512, for AVX2 and for the baseline, chosen at run time.
//!
//! Sums of pixels are integers, and floats are not summed: every level gives the same bits.

/// What a body is compiled for, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// No vector extension beyond the target's own.
    Baseline,
    /// AVX2.
    Avx2,
    /// AVX-512 F, BW, VL.
    Avx512,
}

/// The best level of this CPU.
fn best() -> Level {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
        {
            return Level::Avx512;
        }
        return Level::Avx2;
    }
    Level::Baseline
}

/// The level that functions run at: the best.
#[cfg(not(test))]
pub(super) fn level() -> Level {
    best()
}

#[cfg(test)]
pub(super) use at_levels::{at_each_level, level};

/// Defines functions whose body is compiled once for each [`Level`].
///
/// What a body calls must be inlined into it, or it is compiled for the baseline.
macro_rules! for_each_level {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => { $(
        $(#[$meta])*
        #[expect(unsafe_code, reason = "a function with target features is called after detection")]
        fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            match $crate::data::media::image::simd::level() {
                // SAFETY: the CPU has every feature that is enabled.
                #[cfg(target_arch = "x86_64")]
                $crate::data::media::image::simd::Level::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::data::media::image::simd::Level::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    )* };
}
pub(super) use for_each_level;

#[cfg(test)]
mod at_levels {
    use super::{Level, best};
    use std::cell::Cell;

    thread_local! {
        static HIGHEST: Cell<Level> = const { Cell::new(Level::Avx512) };
    }

    /// The best level that the running test allows.
    pub(in super::super) fn level() -> Level {
        best().min(HIGHEST.get())
    }

    /// What `body` gives at each level that the CPU has, the best one last.
    pub(in super::super) fn at_each_level<T>(body: impl Fn() -> T) -> Vec<(Level, T)> {
        let levels = [Level::Baseline, Level::Avx2, Level::Avx512];
        let run = |level| {
            HIGHEST.set(level);
            (level, body())
        };
        levels.into_iter().filter(|level| *level <= best()).map(run).collect()
    }
}
