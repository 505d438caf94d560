//! Loops over pixels, compiled for AVX-512, for AVX2 and for the baseline, chosen at run time.
//!
//! Pixels are integers: every level gives the same bytes.

/// Defines functions whose body is compiled once for each level.
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
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }

                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }

                let avx2_is_there = is_x86_feature_detected!("avx2");
                if avx2_is_there
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                {
                    // SAFETY: the CPU has every feature that is enabled.
                    return unsafe { avx512($($arg),*) };
                }
                if avx2_is_there {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    )* };
}
pub(super) use for_each_level;
