//! Peak rates of GPUs on matrix products, from the vendor's data sheets.

/// Names of GPUs as the driver reports them, in part, and their rates with bf16 operands and f32
/// sums, without sparsity, in TFLOP/s. The first entry that fits counts.
const PEAKS: [(&str, f64); 27] = [
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("GB200", 2500.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("A40", 149.7),
    ("RTX A6000", 154.8),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.2),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 4080", 97.5),
    ("RTX 3090 Ti", 80.0),
    ("RTX 3090", 71.0),
];

/// The peak rate of the GPU `name` in operations per second; `None` if it is not known.
pub fn vendor_peak_flops(name: &str) -> Option<f64> {
    let words = |text: &str| -> Vec<String> {
        text.split([' ', '-']).map(str::to_ascii_uppercase).collect()
    };
    let name = words(name);
    let fits = |(part, _): &&(&str, f64)| {
        let part = words(part);
        name.windows(part.len()).any(|window| window == part)
    };
    PEAKS.iter().find(fits).map(|(_, tflops)| tflops * 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_driver_have_the_rate_of_the_data_sheet() {
        for (name, tflops) in [
            ("NVIDIA H100 80GB HBM3", 989.4),
            ("NVIDIA H100 PCIe", 756.0),
            ("NVIDIA H200", 989.4),
            ("NVIDIA H200 NVL", 835.5),
            ("NVIDIA GH200 480GB", 989.4),
            ("NVIDIA A100-SXM4-80GB", 312.0),
            ("NVIDIA A10", 125.0),
            ("NVIDIA A10G", 70.0),
            ("NVIDIA L4", 121.0),
            ("NVIDIA L40S", 362.0),
            ("NVIDIA GeForce RTX 4090", 165.2),
            ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ] {
            assert_eq!(vendor_peak_flops(name), Some(tflops * 1e12), "{name}");
        }
        for name in ["Tesla V100-SXM2-32GB", "NVIDIA A1000 Laptop GPU", ""] {
            assert_eq!(vendor_peak_flops(name), None, "{name}");
        }
    }
}
