//! A table of measured algorithms of cuBLASLt: its file, and which entry a product uses.
//!
//! `trainer bench --tune` measures the algorithms and writes the table; a run only reads it. A run
//! that measured would choose by timings, which differ each time, and so would its results.

use candle_core::DType;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;

/// Schemes in which an algorithm may add the parts of a sum that it has split, as cuBLASLt numbers
/// them: not split, and in the workspace in `f32`. The others round the parts, or add them in the
/// order in which they are done.
const REDUCTIONS: [u32; 2] = [0, 2];
/// An entry is used for a size that differs by at most this factor from the measured one.
const MAX_RATIO: f64 = 1.25;
/// Another algorithm must be faster by this share than the first choice of cuBLASLt, since repeated
/// measurements differ, too.
const MIN_GAIN: f64 = 0.02;

/// Which operand of a product is transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transpose {
    /// `a [m, k]`, `b [n, k]`: `a b^T`.
    Nt,
    /// `a [m, k]`, `b [k, n]`: `a b`.
    Nn,
    /// `a [k, m]`, `b [k, n]`: `a^T b`.
    Tn,
}

/// Dtype of the elements of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MatrixDType {
    /// Brain floating point.
    Bf16,
    /// 32 bits.
    F32,
    /// Codes of FP8, in tensors of `u8`.
    E4m3,
}

impl MatrixDType {
    /// The dtype of the elements of a tensor; `None` if no product has it.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::BF16 => Some(Self::Bf16),
            DType::F32 => Some(Self::F32),
            DType::U8 => Some(Self::E4m3),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::E4m3 => "e4m3",
        }
    }
}

/// Properties of a product that decide which algorithms can compute it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Product {
    /// Which operand is transposed.
    pub transpose: Transpose,
    /// Rows of the result, its columns, and the number of terms of each sum.
    pub shape: [usize; 3],
    /// Dtype of `a` and `b`.
    pub operands: MatrixDType,
    /// Dtype of the result.
    pub result: MatrixDType,
    /// Whether `a` and `b` are the second halves of the rows of a matrix.
    pub second_halves: [bool; 2],
    /// Alignments of `b`, `a`, the addend and the result, in bytes; at most 256.
    pub alignments: [u32; 4],
    /// Whether the addend is the result, or there is none.
    pub in_place: bool,
    /// Whether a bias is added.
    pub bias: bool,
}

impl Product {
    /// The factor between the sizes of this product and those of `other`, if an algorithm that was
    /// measured for this one is used for `other`. At most one size differs, such as the number of
    /// tokens, by at most [`MAX_RATIO`]. The alignments of `other` may be larger.
    fn ratio_to(&self, other: &Self) -> Option<f64> {
        let Self { shape, alignments, .. } = *other;
        let is_aligned = self.alignments.iter().zip(alignments).all(|(own, other)| *own <= other);
        if !is_aligned || (Self { shape, alignments, ..self.clone() }) != *other {
            return None;
        }
        let ratio = |(own, other): (&usize, usize)| {
            let (own, other) = (*own as f64, other as f64);
            own.max(other) / own.min(other)
        };
        let mut differing = self.shape.iter().zip(shape).map(ratio).filter(|ratio| *ratio != 1.0);
        let ratio = differing.next().unwrap_or(1.0);
        (differing.next().is_none() && ratio <= MAX_RATIO).then_some(ratio)
    }
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [m, n, k] = self.shape;
        let transpose = match self.transpose {
            Transpose::Nt => "nt",
            Transpose::Nn => "nn",
            Transpose::Tn => "tn",
        };
        write!(f, "{transpose} {m}x{n}x{k} {}", self.operands.name())?;
        if self.operands != self.result {
            write!(f, " to {}", self.result.name())?;
        }
        f.write_str(if self.bias { ", bias" } else { "" })?;
        f.write_str(if self.in_place { "" } else { ", residual" })
    }
}

/// Settings of an algorithm, as `cublasLtMatmulAlgoConfigGetAttribute` returns them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlgorithmSettings {
    /// Number of the algorithm.
    pub id: u32,
    /// Number of the tile size.
    pub tile: u32,
    /// Number of the buffering.
    pub stages: u32,
    /// Number of parts into which a sum is split.
    pub split_k: u32,
    /// How these parts are added: 0 or 2.
    #[serde(deserialize_with = "deterministic")]
    pub reduction: u32,
    /// Order of the tiles.
    pub swizzle: u32,
    /// Variant of the algorithm.
    pub custom: u32,
    /// Number of the shape of a tensor core instruction.
    pub inner_shape: u32,
    /// Number of the cluster size.
    pub cluster_shape: u32,
}

impl AlgorithmSettings {
    /// Whether repeated products have the same bits, and are rounded once.
    pub fn is_deterministic(&self) -> bool {
        REDUCTIONS.contains(&self.reduction)
    }
}

fn deterministic<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let reduction = u32::deserialize(deserializer)?;
    if REDUCTIONS.contains(&reduction) {
        return Ok(reduction);
    }
    let problem = format!("`reduction` is {reduction}, expected 0 or 2, which give the same bits");
    Err(serde::de::Error::custom(problem))
}

/// A product and the fastest algorithm for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlgorithmEntry {
    /// The product.
    pub product: Product,
    /// Microseconds of the first choice of cuBLASLt.
    pub first_us: f64,
    /// Microseconds of the fastest algorithm.
    pub best_us: f64,
    /// Place of the fastest algorithm among the choices of cuBLASLt. 0: the first choice, which a
    /// run takes from cuBLASLt.
    pub place: usize,
    /// Settings of the fastest algorithm, for readers. A run compares them with `data`.
    pub settings: AlgorithmSettings,
    /// The fastest algorithm as cuBLASLt represents it in this version.
    pub data: [u64; 8],
}

impl AlgorithmEntry {
    /// The entry to use for a product: the one with the nearest size.
    pub fn nearest<'a>(entries: &'a [Self], product: &Product) -> Option<&'a Self> {
        let ratio = |entry: &'a Self| Some((entry.product.ratio_to(product)?, entry));
        let fitting = entries.iter().filter_map(ratio);
        fitting.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, entry)| entry)
    }

    /// The place of the algorithm to use, by the microseconds of each. An algorithm without a time
    /// failed. `None` if all have failed.
    pub fn fastest(times: &[Option<f64>]) -> Option<usize> {
        let known = times.iter().enumerate().filter_map(|(place, time)| Some((place, (*time)?)));
        let (best, best_us) = known.min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        let keeps_first = times[0].is_some_and(|first| best_us > (1.0 - MIN_GAIN) * first);
        Some(if keeps_first { 0 } else { best })
    }
}

/// The GPU and the library that compute products.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulLibrary {
    /// Name of the GPU.
    pub gpu: String,
    /// Its compute capability, such as `9.0`.
    pub compute_capability: String,
    /// Version of cuBLASLt.
    pub cublaslt: usize,
    /// Version of CUDA that the driver supports. Tables of other drivers are used too.
    pub driver: i32,
}

impl fmt::Display for MatmulLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, compute_capability, cublaslt, .. } = self;
        write!(f, "`{gpu}` ({compute_capability}) with cuBLASLt {cublaslt}")
    }
}

/// The table of one GPU and one version of cuBLASLt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlgorithmTable {
    /// Where the algorithms were measured.
    pub measured_on: MatmulLibrary,
    /// The measured products.
    pub products: Vec<AlgorithmEntry>,
}

/// A file that is not a table of algorithms.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {problem}")]
pub struct AlgorithmTableError {
    line: usize,
    column: usize,
    problem: String,
}

impl AlgorithmTable {
    /// Reads the text of a file.
    pub fn parse(text: &str) -> Result<Self, AlgorithmTableError> {
        serde_json::from_str(text).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            let problem = error.to_string();
            let place = format!(" at line {line} column {column}");
            let problem = problem.strip_suffix(&place).unwrap_or(&problem).to_owned();
            AlgorithmTableError { line, column, problem }
        })
    }

    /// The text of the file, with one product in a line.
    pub fn to_text(&self) -> String {
        let products: Vec<String> = self.products.iter().map(json).collect();
        format!(
            "{{\n  \"measured_on\": {},\n  \"products\": [\n    {}\n  ]\n}}\n",
            json(&self.measured_on),
            products.join(",\n    ")
        )
    }

    /// Why the table cannot be used with `library`; `None` if it can.
    pub fn mismatch(&self, library: &MatmulLibrary) -> Option<String> {
        let other = MatmulLibrary { driver: self.measured_on.driver, ..library.clone() };
        (other != self.measured_on)
            .then(|| format!("it was measured on {}, and this is {library}", self.measured_on))
    }
}

fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("plain values")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn product(shape: [usize; 3]) -> Product {
        Product {
            transpose: Transpose::Nt,
            shape,
            operands: MatrixDType::Bf16,
            result: MatrixDType::Bf16,
            second_halves: [false; 2],
            alignments: [256; 4],
            in_place: true,
            bias: false,
        }
    }

    fn entry(product: Product, place: usize) -> AlgorithmEntry {
        let settings = AlgorithmSettings {
            id: 66,
            tile: 20,
            stages: 36,
            split_k: 2,
            reduction: 2,
            swizzle: 1,
            custom: 3,
            inner_shape: 4,
            cluster_shape: 5,
        };
        let data = [u64::MAX, 1, 2, 3, 4, 5, 6, place as u64];
        AlgorithmEntry { product, first_us: 12.5, best_us: 10.0, place, settings, data }
    }

    fn table(products: Vec<AlgorithmEntry>) -> AlgorithmTable {
        let measured_on = MatmulLibrary {
            gpu: "NVIDIA H100 80GB HBM3".to_owned(),
            compute_capability: "9.0".to_owned(),
            cublaslt: 130_002,
            driver: 13_000,
        };
        AlgorithmTable { measured_on, products }
    }

    #[test]
    fn a_written_table_is_read_with_all_settings() {
        let residual = Product { in_place: false, bias: true, ..product([7, 8, 9]) };
        let table = table(vec![entry(product([1, 2, 3]), 0), entry(residual, 5)]);
        let text = table.to_text();
        assert_eq!(AlgorithmTable::parse(&text).unwrap(), table);
        // a line for each product, so that an error in it has its line
        assert_eq!(text.lines().count(), 2 + 1 + 2 + 2);
        let empty = AlgorithmTable { products: Vec::new(), ..table };
        assert_eq!(AlgorithmTable::parse(&empty.to_text()).unwrap(), empty);
    }

    #[test]
    fn a_damaged_table_is_an_error_with_the_line_and_what_was_found() {
        let text =
            table(vec![entry(product([1, 2, 3]), 1), entry(product([4, 5, 6]), 1)]).to_text();
        let fails = |from: &str, to: &str| {
            let (start, end) = text.rsplit_once(from).unwrap();
            AlgorithmTable::parse(&format!("{start}{to}{end}")).unwrap_err().to_string()
        };
        for (from, to, problem) in [
            ("\"swizzle\":1,", "", "missing field `swizzle`"),
            ("\"swizzle\"", "\"swizle\"", "unknown field `swizle`, expected one of `id`"),
            ("\"nt\"", "\"tt\"", "unknown variant `tt`, expected one of `nt`, `nn`, `tn`"),
            ("\"tile\":20", "\"tile\":-1", "invalid value: integer `-1`, expected u32"),
            ("\"reduction\":2", "\"reduction\":1", "`reduction` is 1, expected 0 or 2"),
            ("[4,5,6]", "[4,5]", "invalid length 2, expected an array of length 3"),
        ] {
            let error = fails(from, to);
            assert!(error.starts_with("line 5, column "), "{error}");
            assert!(error.contains(problem), "{error}");
            assert!(!error.contains(" at line "), "{error}");
        }
        let cut = AlgorithmTable::parse(&text[..text.len() / 2]).unwrap_err().to_string();
        assert!(cut.contains("EOF while parsing"), "{cut}");
        let empty = AlgorithmTable::parse("").unwrap_err().to_string();
        assert_eq!(empty, "line 1, column 0: EOF while parsing a value");
    }

    #[test]
    fn a_table_of_another_gpu_or_version_is_refused_and_one_of_another_driver_is_not() {
        let table = table(Vec::new());
        let here = table.measured_on.clone();
        assert_eq!(table.mismatch(&here), None);
        assert_eq!(table.mismatch(&MatmulLibrary { driver: 12_040, ..here.clone() }), None);
        let others = [
            MatmulLibrary { gpu: "NVIDIA H100 PCIe".to_owned(), ..here.clone() },
            MatmulLibrary { compute_capability: "9.1".to_owned(), ..here.clone() },
            MatmulLibrary { cublaslt: 130_101, ..here },
        ];
        for other in others {
            let problem = table.mismatch(&other).unwrap();
            assert!(problem.ends_with(&format!("and this is {other}")), "{problem}");
        }
    }

    #[test]
    fn an_entry_is_used_for_equal_properties_and_one_near_size() {
        let entries = [entry(product([1000, 64, 32]), 1), entry(product([1200, 64, 32]), 2)];
        let place =
            |product: &Product| AlgorithmEntry::nearest(&entries, product).map(|entry| entry.place);
        for (rows, expected) in [
            (1000, Some(1)),
            (1080, Some(1)),
            (1110, Some(2)),
            (1500, Some(2)),
            (1501, None),
            (800, Some(1)),
            (799, None),
            (0, None),
        ] {
            assert_eq!(place(&product([rows, 64, 32])), expected, "{rows} rows");
        }
        assert_eq!(place(&product([1000, 64, 33])), Some(1));
        assert_eq!(place(&product([1000, 65, 33])), None);
        let same = product([1000, 64, 32]);
        for other in [
            Product { transpose: Transpose::Tn, ..same.clone() },
            Product { operands: MatrixDType::F32, ..same.clone() },
            Product { result: MatrixDType::F32, ..same.clone() },
            Product { second_halves: [true, false], ..same.clone() },
            Product { alignments: [256, 16, 256, 256], ..same.clone() },
            Product { in_place: false, ..same.clone() },
            Product { bias: true, ..same.clone() },
        ] {
            assert_eq!(place(&other), None, "{other:?}");
        }
        let less = [entry(Product { alignments: [16; 4], ..same.clone() }, 3)];
        assert_eq!(AlgorithmEntry::nearest(&less, &same).map(|entry| entry.place), Some(3));
        assert_eq!(AlgorithmEntry::nearest(&[], &same), None);
    }

    #[test]
    fn another_algorithm_than_the_first_is_chosen_if_it_is_faster_by_two_percent() {
        for (times, expected) in [
            (vec![Some(10.0), Some(9.0), Some(8.0)], Some(2)),
            (vec![Some(10.0), Some(9.9)], Some(0)),
            (vec![Some(10.0), Some(9.7), Some(9.7)], Some(1)),
            (vec![None, Some(9.0), None], Some(1)),
            (vec![Some(10.0), None], Some(0)),
            (vec![None, None], None),
            (vec![], None),
        ] {
            assert_eq!(AlgorithmEntry::fastest(&times), expected, "{times:?}");
        }
    }

    proptest! {
        #[test]
        fn the_chosen_algorithm_is_never_slower_than_the_first_nor_two_percent_slower_than_any(
            times in prop::collection::vec(1e-3..1e6f64, 1..9)
        ) {
            let some: Vec<_> = times.iter().copied().map(Some).collect();
            let chosen = times[AlgorithmEntry::fastest(&some).unwrap()];
            let best = times.iter().copied().fold(f64::INFINITY, f64::min);
            prop_assert!(chosen <= times[0] && best > (1.0 - MIN_GAIN) * chosen - 1e-9);
        }
    }
}
