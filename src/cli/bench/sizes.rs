//! Sizes at which `bench --ops` times the ops.

use crate::ops::Masking;
use clap::ValueEnum;

/// The sizes that `bench --ops` uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum SizeChoice {
    /// For CPUs: takes two minutes on two cores
    Cpu,
    /// For GPUs: the published shapes with 16,384 tokens per pack
    Gpu,
    /// For tests: the ops of `gpu` at tiny sizes
    Tiny,
}

impl SizeChoice {
    pub(super) fn sizes(self) -> &'static Sizes {
        match self {
            Self::Cpu => &CPU,
            Self::Gpu => &GPU,
            Self::Tiny => &TINY,
        }
    }
}

/// Number of segments, their length, `H`, `Hkv`, `Dh`.
type AttentionSizes = (usize, usize, usize, usize, usize, Masking);

/// Sizes of each op; `N` is a number of rows.
pub(super) struct Sizes {
    /// Side of the square matrices whose product measures the peak FLOP rate.
    pub(super) matmul: usize,
    /// Number of floats whose copy measures the peak memory rate.
    pub(super) copy: usize,
    /// Rows `N`, inputs, outputs.
    pub(super) linears: &'static [[usize; 3]],
    /// Tokens, experts `E`, experts of a token, hidden size, intermediate size of an expert.
    pub(super) experts: &'static [[usize; 5]],
    /// Rows `N`, width.
    pub(super) rms_norms: &'static [[usize; 2]],
    pub(super) layer_norms: &'static [[usize; 2]],
    /// Rows `N`, heads `H`, head size `Dh`.
    pub(super) rotations: &'static [[usize; 3]],
    pub(super) vision_rotations: &'static [[usize; 3]],
    pub(super) swiglus: &'static [[usize; 2]],
    pub(super) gelus: &'static [[usize; 2]],
    /// Rows `N`, hidden size `D`, vocabulary `V`.
    pub(super) embeddings: &'static [[usize; 3]],
    pub(super) attention: &'static [AttentionSizes],
    /// Number of segments, their length, `Hk`, `Hv`, head size.
    pub(super) delta_rules: &'static [[usize; 5]],
    /// Supervised rows `S`, hidden size `D`, vocabulary `V`.
    pub(super) head: [usize; 3],
    /// Number of elements of a matrix in NF4.
    pub(super) dequantized: usize,
    /// Number of parameters.
    pub(super) optimizer: usize,
}

const CPU: Sizes = Sizes {
    matmul: 2048,
    copy: 64 << 20,
    linears: &[[2048, 1024, 3072], [1881, 512, 1536], [416, 128, 256]],
    // 256 and 8 rows per expert.
    experts: &[[4096, 128, 8, 2048, 768], [128, 128, 8, 2048, 768]],
    rms_norms: &[[2048, 1024]],
    layer_norms: &[[2048, 1024]],
    rotations: &[[2048, 16, 64], [2048, 16, 128]],
    vision_rotations: &[],
    swiglus: &[[2048, 3072]],
    gelus: &[[2048, 3072]],
    embeddings: &[],
    attention: &[
        (1, 2048, 16, 8, 128, Masking::Causal),
        (16, 128, 16, 8, 128, Masking::Causal),
        (4, 512, 16, 16, 64, Masking::Full),
    ],
    // 1,024 and 32,768 tokens: the time of a token does not depend on the length.
    delta_rules: &[
        [1, 2048, 16, 32, 128],
        [16, 128, 16, 32, 128],
        [1, 1024, 4, 8, 128],
        [1, 32_768, 4, 8, 128],
    ],
    head: [1024, 512, 151_936],
    dequantized: 64 << 20,
    optimizer: 16 << 20,
};

/// Every operand of a memory-bound op is larger than the caches of the GPUs in use (60 MB), so that
/// it is read from memory.
const GPU: Sizes = Sizes {
    matmul: 8192,
    copy: 512 << 20,
    // 4B: query, key or value, all three, gate or up, both, down projection; 8B: query, gate or up
    // projection.
    linears: &[
        [16384, 2560, 4096],
        [16384, 2560, 1024],
        [16384, 2560, 6144],
        [16384, 2560, 9728],
        [16384, 2560, 19456],
        [16384, 9728, 2560],
        [16384, 4096, 4096],
        [16384, 4096, 12288],
    ],
    experts: &[[16384, 128, 8, 2048, 768], [128, 128, 8, 2048, 768]],
    rms_norms: &[[16384, 2560], [16384, 4096]],
    layer_norms: &[[65536, 1024], [65536, 1152]],
    rotations: &[[16384, 32, 128]],
    vision_rotations: &[[65536, 16, 64], [65536, 16, 72]],
    swiglus: &[[16384, 9728], [16384, 12288]],
    gelus: &[[65536, 4096]],
    embeddings: &[[16384, 2560, 151_936]],
    attention: &[
        (8, 4096, 16, 16, 128, Masking::Causal),
        (8, 4096, 16, 16, 64, Masking::Causal),
        (8, 4096, 32, 8, 128, Masking::Causal),
        (1, 16384, 32, 8, 128, Masking::Causal),
        (8, 4096, 16, 4, 256, Masking::Causal),
        (128, 128, 32, 8, 128, Masking::Causal),
        (1024, 16, 32, 8, 128, Masking::Causal),
        (16, 4096, 16, 16, 64, Masking::Full),
        (16, 4096, 16, 16, 72, Masking::Full),
        (128, 256, 16, 16, 72, Masking::Full),
    ],
    delta_rules: &[[1, 16384, 16, 32, 128], [8, 2048, 16, 32, 128], [128, 128, 16, 32, 128]],
    head: [16384, 2560, 151_936],
    dequantized: 512 << 20,
    optimizer: 512 << 20,
};

const TINY: Sizes = Sizes {
    matmul: 64,
    copy: 1 << 16,
    linears: &[[33, 24, 40]],
    experts: &[[9, 5, 2, 24, 20]],
    rms_norms: &[[9, 40], [5, 64]],
    layer_norms: &[[9, 72]],
    rotations: &[[17, 4, 128]],
    vision_rotations: &[[17, 2, 64], [9, 2, 72]],
    swiglus: &[[9, 152]],
    gelus: &[[9, 64]],
    embeddings: &[[40, 16, 300]],
    attention: &[
        (2, 150, 2, 2, 128, Masking::Causal),
        (1, 70, 4, 1, 64, Masking::Causal),
        (5, 3, 2, 1, 128, Masking::Causal),
        (2, 33, 2, 2, 72, Masking::Full),
    ],
    delta_rules: &[[2, 70, 1, 2, 16]],
    head: [40, 24, 600],
    dequantized: 5000,
    optimizer: 5000,
};
