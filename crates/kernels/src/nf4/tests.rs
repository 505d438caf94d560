use super::*;
use crate::testing::{bits, device, message, operand, random, with_threads};
use std::collections::HashMap;

const NAMES: [&str; 6] = ["random", "constant", "tiny", "huge", "odd", "middles"];

/// Made by `scripts/golden/nf4.py` with bitsandbytes.
fn golden() -> HashMap<String, Tensor> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/nf4.safetensors");
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

fn quantized(x: &Tensor) -> Nf4 {
    let flat = x.flatten_all().unwrap().to_device(&Device::Cpu).unwrap();
    let flat = flat.to_dtype(DType::F32).unwrap();
    Nf4::quantize(x.dims(), |range| flat.narrow(0, range.start, range.len())).unwrap()
}

fn dequantized(matrix: &Nf4, dtype: DType) -> Tensor {
    let matrix = matrix.to_device(&device()).unwrap();
    let y = Tensor::zeros(matrix.shape(), dtype, &device()).unwrap();
    matrix.dequantize_into(&y).unwrap();
    y
}

fn f32s(tensor: &Tensor) -> Vec<f32> {
    if tensor.elem_count() == 0 {
        return vec![]; // candle cannot launch a kernel on an empty GPU tensor
    }
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn codes_and_scales_equal_those_of_bitsandbytes() {
    let golden = golden();
    for name in NAMES {
        let of = |key: &str| &golden[&format!("{name}.{key}")];
        let parts = quantized(of("original")).parts().unwrap();
        let bytes = |key: &str| of(key).flatten_all().unwrap().to_vec1::<u8>().unwrap();
        assert_eq!(parts.codes, bytes("weight"), "{name}: codes");
        assert_eq!(parts.scales, bytes("absmax_nearest"), "{name}: 8-bit codes of scales");
        let (_, scales) = quantize_part(&f32s(of("original")));
        assert_eq!(scales, f32s(of("absmax_f32")), "{name}: scales");
        // torch adds the scales up in another order
        let theirs = f32s(of("weight.nested_absmax"));
        for (ours, theirs) in parts.ranges.iter().zip(theirs) {
            assert!((ours - theirs).abs() <= 1e-6 * theirs, "{name}: {ours} {theirs}");
        }
    }
}

#[test]
fn stored_parts_have_the_values_of_bitsandbytes() {
    let golden = golden();
    for name in NAMES {
        let of = |key: &str| &golden[&format!("{name}.{key}")];
        let state = of("weight.quant_state.bitsandbytes__nf4").to_vec1::<u8>().unwrap();
        let state = String::from_utf8(state).unwrap();
        let offset = state.split("nested_offset\": ").nth(1).unwrap();
        let parts = Nf4Parts {
            shape: of("original").dims().to_vec(),
            codes: of("weight").flatten_all().unwrap().to_vec1().unwrap(),
            scales: of("weight.absmax").to_vec1().unwrap(),
            ranges: f32s(of("weight.nested_absmax")),
            offset: offset.trim_end_matches('}').parse().unwrap(),
        };
        let maps = [of("weight.quant_map"), of("weight.nested_quant_map")].map(f32s);
        assert!(is_nf4_map(&maps[0], &maps[1]), "{name}: maps");
        let expected = of("dequantized");
        let got = dequantized(&Nf4::new(parts).unwrap(), expected.dtype());
        assert_eq!(f32s(&got), f32s(expected), "{name}");
    }
}

#[test]
fn elements_of_every_block_are_next_to_the_quantised_ones() {
    for n in [0, 1, 63, 64, 65, 16_384, TASK + 70, PART + 131] {
        let x = random(1, &[n]);
        let matrix = quantized(&x);
        let exact = dequantized(&matrix, DType::F32);
        let rounded = exact.to_device(&Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        assert_eq!(bits(&dequantized(&matrix, DType::BF16)), bits(&rounded));
        // Neighbouring codes are at most 0.31 of a scale apart, and a scale is at most 5.5.
        let error = f32s(&exact).into_iter().zip(f32s(&x)).map(|(y, x)| (y - x).abs());
        assert!(error.fold(0.0, f32::max) < 0.31 / 2.0 * 5.5, "{n} elements");
        let whole = f32s(&exact);
        for range in [0..n, 0..n.min(1), n / 3..n / 2, n.saturating_sub(1)..n] {
            assert_eq!(f32s(&matrix.part(range.clone()).unwrap()), whole[range]);
        }
    }
}

#[test]
fn the_bits_depend_neither_on_threads_nor_on_the_simd_level() {
    let x = random(2, &[3, PART / 2 + 17]);
    let run = |threads| {
        with_threads(threads, || {
            let matrix = quantized(&x);
            (matrix.parts().unwrap(), bits(&dequantized(&matrix, DType::F32)))
        })
    };
    assert!(run(1) == run(3));
    let x = f32s(&random(3, &[64 * 5 + 3]));
    let levels = ::simd::at_each_level(|| {
        let (codes, scales) = quantize_part(&x);
        let mut y = [[[bf16::ZERO; 2]; 32]; 5];
        dequantize_bf16(&codes.as_chunks().0[..5], &scales, &mut y);
        (codes, scales, y)
    });
    assert!(levels.windows(2).all(|pair| pair[0].1 == pair[1].1));
}

#[test]
fn eight_bit_scales_cost_a_64th_of_a_byte_an_element() {
    assert_eq!(nf4_bytes(1 << 20), (1 << 19) + (1 << 14) + 4 * 64);
    assert_eq!(nf4_bytes(65), 33 + 2 + 4);
}

#[test]
fn a_target_of_another_size_and_parts_of_another_length_are_refused() {
    let matrix = quantized(&random(1, &[4, 64]));
    let matrix = matrix.to_device(&device()).unwrap();
    let y = operand(&random(2, &[3, 64]), DType::F32).unwrap();
    let error = message(matrix.dequantize_into(&y));
    assert!(error.contains("`y` is [3, 64], expected the elements of [4, 64]"), "{error}");
    let parts = Nf4Parts { scales: vec![0; 3], ..matrix.parts().unwrap() };
    let error = message(Nf4::new(parts));
    assert!(error.contains("have [128, 3, 1] elements, expected [128, 4, 1]"), "{error}");
}

#[test]
fn nan_and_infinity_do_not_become_numbers() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
        for (n, at) in [(200, 0), (200, 130), (200, 192), (200, 199), (64, 63), (3, 1)] {
            let mut values = vec![0.5f32; n];
            values[at] = bad;
            let x = Tensor::from_vec(values, n, &Device::Cpu).unwrap();
            let y = f32s(&dequantized(&quantized(&x), DType::F32));
            assert!(!y[at].is_finite(), "{bad} at {at} of {n} became {}", y[at]);
        }
    }
}
