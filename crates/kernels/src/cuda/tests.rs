//! Compares the kernels, emulated or from their PTX, with the CPU ops, at the sizes and alignments of training: 16-byte
//! accesses, rows of several warps, blocks that iterate. (If `TRAINER_EMULATE_CUDA` is set, both
//! sides run the kernels.)

use super::select::{AttentionKernels, AttentionLaunch, Gpu, Own};
use crate::launch::{vectors, with_kernels};
use crate::testing::{Tolerance, assert_close, gradient_buffer, ids, message, random, rope_table};
use crate::{Gelu, NormScale, RecomputeInput};
use candle_core::{DType, Device, Result, Tensor};

const DTYPES: [(DType, Tolerance); 2] =
    [(DType::F32, Tolerance::F32), (DType::BF16, Tolerance::BF16)];

/// A random tensor, whose rows are 16-byte aligned if `dims` allow it.
fn operand(seed: u64, dims: &[usize], dtype: DType) -> Tensor {
    let x = random(seed, dims).to_dtype(dtype).unwrap();
    let aligned = vectors(0, &[&x]).unwrap();
    assert!(aligned || x.elem_count() == 0, "the allocator returns 16-byte aligned memory");
    x
}

#[track_caller]
fn assert_all_close(what: &str, got: &[Tensor], want: &[Tensor], tolerance: Tolerance) {
    assert_eq!(got.len(), want.len());
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        assert_close(&format!("{what}: result {index}"), got, want, tolerance);
    }
}

/// Results of ops, from the kernels and from the CPU.
macro_rules! both {
    ($results:expr) => {{
        let gpu = with_kernels(|| -> Result<Vec<Tensor>> { Ok($results) })?;
        let cpu: Vec<Tensor> = $results;
        (gpu, cpu)
    }};
}

mod counts;
mod e4m3;
mod experts;
mod joined;
mod linear_attention;

#[test]
fn norms_match_the_cpu_for_any_row_width() -> Result<()> {
    // The last size has more rows than a backward pass has blocks, so blocks iterate.
    for (n, d) in
        [(0, 64), (3, 8), (9, 520), (5, 2560), (3, 4096), (3, 8192), (2, 2561), (5000, 16)]
    {
        for (dtype, tolerance) in DTYPES {
            let (x, w) = (operand(1, &[n, d], dtype), operand(2, &[d], dtype));
            let (dy, residual) = (operand(3, &[n, d], dtype), operand(4, &[n, d], dtype));
            let b = operand(5, &[d], dtype);
            let (gpu, cpu) = both!({
                let (y, rstd) = crate::rms_norm(&x, &w, NormScale::Weight, 1e-6)?;
                let dw = gradient_buffer(&[d]);
                let dx = crate::rms_norm_backward(
                    &x,
                    &rstd,
                    &w,
                    NormScale::Weight,
                    &dy,
                    Some(&residual),
                    Some(&dw),
                )?;
                let alone =
                    crate::rms_norm_backward(&x, &rstd, &w, NormScale::Weight, &dy, None, None)?;
                let again = crate::rms_norm_apply(&x, &rstd, &w, NormScale::Weight)?;
                vec![y, rstd, dw, dx, alone, again]
            });
            assert_all_close(&format!("rms_norm {dtype:?} {n} {d}"), &gpu, &cpu, tolerance);
            let (gpu, cpu) = both!({
                let (y, stats) = crate::layer_norm(&x, &w, &b, 1e-6)?;
                let (dw, db) = (gradient_buffer(&[d]), gradient_buffer(&[d]));
                let dx = crate::layer_norm_backward(
                    &x,
                    &stats,
                    &w,
                    &dy,
                    Some(&residual),
                    Some(&dw),
                    Some(&db),
                )?;
                let alone = crate::layer_norm_backward(&x, &stats, &w, &dy, None, None, None)?;
                let again = crate::layer_norm_apply(&x, &stats, &w, &b)?;
                vec![y, stats, dw, db, dx, alone, again]
            });
            assert_all_close(&format!("layer_norm {dtype:?} {n} {d}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

#[test]
fn a_row_too_long_for_a_block_is_rejected() {
    let (x, w) = (operand(1, &[1, 8200], DType::F32), operand(2, &[8200], DType::F32));
    let error = message(with_kernels(|| crate::rms_norm(&x, &w, NormScale::Weight, 1e-6)));
    assert!(error.contains("rows have 8200 columns"), "{error}");
}

#[test]
fn norms_of_one_plus_the_weight_and_partial_rotations_match_the_cpu() -> Result<()> {
    let scale = NormScale::OnePlusWeight;
    for (t, h, dh, rotated) in [(5, 3, 64, 16), (7, 2, 256, 64), (3, 1, 40, 12), (9, 4, 64, 64)] {
        for (dtype, tolerance) in DTYPES {
            let table = rope_table(t, rotated / 2);
            let (x, w) = (operand(1, &[t, h * dh], dtype), operand(2, &[dh], dtype));
            let (dy, all) = (operand(3, &[t, h, dh], dtype), operand(4, &[h * dh], dtype));
            let (gpu, cpu) = both!({
                let (y, rstd) = crate::qk_norm_rope(&x, &w, scale, 1e-6, &table)?;
                let dw = gradient_buffer(&[dh]);
                let dx =
                    crate::qk_norm_rope_backward(&x, &rstd, &w, scale, &table, &dy, Some(&dw))?;
                let (normed, rstds) = crate::rms_norm(&x, &all, scale, 1e-6)?;
                let again = crate::rms_norm_apply(&x, &rstds, &all, scale)?;
                let d_all = gradient_buffer(&[h * dh]);
                let back =
                    crate::rms_norm_backward(&x, &rstds, &all, scale, &normed, None, Some(&d_all))?;
                vec![y, rstd, dw, dx, normed, again, d_all, back]
            });
            let what = format!("norms {dtype:?} {t} {h} {dh} {rotated}");
            assert_all_close(&what, &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

#[test]
fn rotary_embeddings_match_the_cpu() -> Result<()> {
    for (t, h, dh) in [(0, 2, 64), (5, 3, 64), (7, 2, 72), (3, 1, 96), (150, 16, 128)] {
        for (dtype, tolerance) in DTYPES {
            let what = format!("{dtype:?} {t} {h} {dh}");
            let table = rope_table(t, dh / 2);
            let (x, w) = (operand(1, &[t, h * dh], dtype), operand(2, &[dh], dtype));
            let dy = operand(3, &[t, h, dh], dtype);
            let (gpu, cpu) = both!({
                let (y, rstd) = crate::qk_norm_rope(&x, &w, NormScale::Weight, 1e-6, &table)?;
                let dw = gradient_buffer(&[dh]);
                let dx = crate::qk_norm_rope_backward(
                    &x,
                    &rstd,
                    &w,
                    NormScale::Weight,
                    &table,
                    &dy,
                    Some(&dw),
                )?;
                let alone = crate::qk_norm_rope_backward(
                    &x,
                    &rstd,
                    &w,
                    NormScale::Weight,
                    &table,
                    &dy,
                    None,
                )?;
                vec![y, rstd, dw, dx, alone]
            });
            assert_all_close(&format!("qk_norm_rope {what}"), &gpu, &cpu, tolerance);
            let (gpu, cpu) = both!({
                let y = crate::rope_heads(&x, dh, &table)?;
                vec![y, crate::rope_heads_backward(&dy, &table)?]
            });
            assert_all_close(&format!("rope_heads {what}"), &gpu, &cpu, tolerance);
            let qkv = operand(4, &[t, 3 * h * dh], dtype);
            let (gpu, cpu) = both!({
                let (q, k, v) = crate::vision_rope_split(&qkv, h, &table)?;
                let dqkv = crate::vision_rope_merge_backward(&q, &k, &v, &table)?;
                vec![q, k, v, dqkv]
            });
            assert_all_close(&format!("vision_rope {what}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

#[test]
fn elementwise_ops_match_the_cpu_for_any_length() -> Result<()> {
    for n in [0, 1, 8, 2047, 2048, 4101] {
        for (dtype, tolerance) in DTYPES {
            let (a, b) = (operand(1, &[n], dtype), operand(2, &[n], dtype));
            let dy = operand(3, &[n], dtype);
            let (gpu, cpu) = both!({
                let (dgate, dup, again) =
                    crate::swiglu_backward(a.copy()?, b.copy()?, dy.copy()?, RecomputeInput::Yes)?;
                let alone =
                    crate::swiglu_backward(a.copy()?, b.copy()?, dy.copy()?, RecomputeInput::No)?;
                let sum = a.copy()?;
                crate::add_in_place(&sum, &b)?;
                let zeros = a.copy()?;
                crate::fill_zero(&zeros)?;
                let mut results = vec![crate::swiglu(&a, &b)?, dgate, dup, sum, zeros];
                results.extend(again.into_iter().chain([alone.0, alone.1]));
                for kind in [Gelu::Tanh, Gelu::Erf, Gelu::Quick] {
                    results.push(crate::gelu(&a, kind)?);
                    let (dx, again) =
                        crate::gelu_backward(a.copy()?, dy.copy()?, kind, RecomputeInput::Yes)?;
                    let (alone, _) =
                        crate::gelu_backward(a.copy()?, dy.copy()?, kind, RecomputeInput::No)?;
                    results.extend(again.into_iter().chain([dx, alone]));
                }
                results
            });
            assert_all_close(&format!("{dtype:?} {n}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

/// A sum of tensors that begin at any element, as those of gradients that are added on a GPU's side stream.
#[test]
fn sums_of_tensors_that_are_not_aligned_match_the_cpu() -> Result<()> {
    for (dtype, tolerance) in DTYPES {
        for n in [1, 2051] {
            let a = operand(1, &[n + 1], dtype).narrow(0, 1, n)?;
            let b = operand(2, &[n], dtype);
            let (gpu, cpu) = both!({
                let sum = a.force_contiguous()?;
                let sum = Tensor::cat(&[&sum.narrow(0, 0, 1)?, &sum], 0)?.narrow(0, 1, n)?;
                crate::add_in_place(&sum, &b)?;
                vec![sum.force_contiguous()?]
            });
            assert_all_close(&format!("{dtype:?} {n}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

#[test]
fn row_ops_match_the_cpu_for_any_width() -> Result<()> {
    // Rows of the last two sizes have several accesses of each lane, of 16 bytes and of an element.
    for (t, d) in [(11, 8), (11, 9), (20, 1160), (11, 333)] {
        for (dtype, tolerance) in DTYPES {
            let (x, rows) = (operand(1, &[t, d], dtype), ids(&[10, 3, 0, 7]));
            let (gpu, cpu) = both!({
                let taken = crate::gather_rows(&x, &rows)?;
                let zeroed = x.copy()?;
                crate::zero_rows(&zeroed, &rows)?;
                let src = operand(2, &[4, d], dtype);
                let (set, added) = (x.copy()?, x.copy()?);
                crate::index_copy(&set, &rows, &src)?;
                crate::index_add(&added, &rows, &src)?;
                vec![taken, zeroed, set, added]
            });
            assert_all_close(&format!("{dtype:?} {t} {d}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

#[test]
fn rows_outside_the_tensor_give_nan_or_are_skipped() -> Result<()> {
    let (x, rows) = (operand(1, &[3, 8], DType::F32), ids(&[1, 3]));
    let taken = with_kernels(|| crate::gather_rows(&x, &rows))?.to_vec2::<f32>()?;
    assert!(taken[0].iter().all(|x| x.is_finite()) && taken[1].iter().all(|x| x.is_nan()));
    let kept = x.copy()?;
    let src = operand(2, &[2, 8], DType::F32);
    with_kernels(|| crate::index_copy(&kept, &ids(&[4, 9]), &src))?;
    with_kernels(|| crate::embedding_backward(&ids(&[7, 3]), &src, &kept))?;
    assert_eq!(kept.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
    Ok(())
}

/// Most ids are equal, like those of image tokens, so that runs start, end and continue across
/// stretches and tiles.
#[test]
fn table_gradients_match_the_cpu() -> Result<()> {
    let v = 700;
    let pick = |i: u32| if i % 5 < 3 { 77 } else { i.wrapping_mul(2654435761) >> 20 };
    for (n, d) in [(1, 8), (64, 8), (65, 3), (1024, 16), (2600, 9), (2600, 520), (64, 333)] {
        let chosen: Vec<u32> = (0..n as u32).map(|i| pick(i) % v).collect();
        for (dtype, tolerance) in DTYPES {
            let (chosen, dy) = (ids(&chosen), operand(1, &[n, d], dtype));
            let (gpu, cpu) = both!({
                let dw = gradient_buffer(&[v as usize, d]);
                crate::embedding_backward(&chosen, &dy, &dw)?;
                vec![dw]
            });
            assert_all_close(&format!("embedding {dtype:?} {n} {d}"), &gpu, &cpu, tolerance);
            if n % 4 > 0 {
                continue;
            }
            let (index, weight) = (chosen.reshape((n / 4, 4))?, random(2, &[n / 4, 4]));
            let dy = dy.narrow(0, 0, n / 4)?;
            let table = operand(3, &[v as usize, d], dtype);
            let (gpu, cpu) = both!({
                let dtable = gradient_buffer(&[v as usize, d]);
                crate::interpolate_rows_backward(&index, &weight, &dy, &dtable)?;
                vec![dtable, crate::interpolate_rows_add(&table, &index, &weight, &dy)?]
            });
            assert_all_close(&format!("taps {dtype:?} {n} {d}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

#[test]
fn dropout_has_the_mask_of_the_cpu() -> Result<()> {
    for (n, k) in [(0, 8), (3, 7), (5, 4096), (600, 40)] {
        for (dtype, tolerance) in DTYPES {
            let (x, y) = (operand(1, &[n, k], dtype), operand(2, &[n, k], dtype));
            let mask = crate::DropoutMask { seed: 0xdead_beef, first_row: 9, probability: 0.3 };
            let (gpu, cpu) = both!({
                let sum = y.copy()?;
                crate::dropout_add(&x, mask, &sum)?;
                vec![crate::dropout(&x, mask)?, sum]
            });
            assert_all_close(&format!("dropout {n} {k} {dtype:?}"), &gpu, &cpu, tolerance);
        }
    }
    Ok(())
}

/// On a GPU the optimizer step checks the gradients only, not the loss.
#[test]
fn a_loss_that_is_not_finite_gives_a_gradient_that_is_not_finite() -> Result<()> {
    for (dtype, _) in DTYPES {
        // A target beyond the vocabulary, a logit of minus infinity, and an ordinary row.
        let (v, targets) = (12, ids(&[12, 5, 3]));
        let h =
            Tensor::new(&[[1f32, 0.0], [1e30, 0.0], [1.0, 0.0]], &Device::Cpu)?.to_dtype(dtype)?;
        let column = |row| if row == 5 { -1e30 } else { 1.0 };
        let w: Vec<f32> = (0..v).flat_map(|row| [column(row), 0.0]).collect();
        let w = Tensor::from_vec(w, (v, 2), &Device::Cpu)?.to_dtype(dtype)?;
        let (nll, dh) = with_kernels(|| {
            crate::linear_cross_entropy_backward(&h, &w, &targets, 0.5.into(), None, true)
        })?;
        let dh = dh.expect("`need_dh` is true").to_dtype(DType::F32)?.to_vec2::<f32>()?;
        for (row, nll) in nll.to_vec1::<f32>()?.into_iter().enumerate() {
            let finite = dh[row].iter().filter(|x| x.is_finite()).count();
            assert_eq!(
                (nll.is_finite(), finite),
                (row == 2, if row == 2 { 2 } else { 0 }),
                "{dh:?}"
            );
        }
    }
    Ok(())
}

/// An RTX 4090 or an L40S.
const SMALL: Gpu =
    Gpu { capability: (8, 9), shared_bytes: 99 << 10, shared_bytes_of_all: 100 << 10, ..Gpu::A100 };

/// The kernels of the forward and of the backward pass.
fn passes(kernels: AttentionKernels) -> impl Iterator<Item = AttentionLaunch> {
    let backward = kernels.passes().iter().map(move |own| kernels.backward(*own));
    std::iter::once(kernels.forward()).chain(backward)
}

#[test]
fn attention_of_every_head_dim_fits_into_99_kib_of_shared_memory() {
    for dh in [8, 64, 72, 80, 128, 136, 256] {
        let kernels = AttentionKernels::choose("attention", DType::BF16, dh, SMALL).unwrap();
        let sizes: Vec<usize> = passes(kernels).map(|block| block.shared).collect();
        assert!(
            sizes.len() == 3 && sizes.iter().all(|bytes| *bytes <= SMALL.shared_bytes),
            "{dh}: {sizes:?}"
        );
    }
}

#[test]
fn attention_of_every_head_dim_fits_into_the_shared_memory_of_a_hopper_gpu() {
    for dh in [8, 64, 72, 80, 128, 136, 256] {
        let kernels = AttentionKernels::choose("attention", DType::BF16, dh, Gpu::H100).unwrap();
        for block in passes(kernels) {
            assert!(block.name.contains("_sm90_d") && block.boxes.is_some(), "{block:?}");
            assert!(block.shared <= Gpu::H100.shared_bytes, "{dh}: {block:?}");
        }
    }
    // Later GPUs lack the instructions, f32 and odd head dims have no tensor-core kernel.
    let later = Gpu { capability: (10, 0), ..Gpu::H100 };
    for (dtype, dh, gpu) in
        [(DType::BF16, 64, later), (DType::F32, 64, Gpu::H100), (DType::BF16, 20, Gpu::H100)]
    {
        let kernels = AttentionKernels::choose("attention", dtype, dh, gpu).unwrap();
        assert!(kernels.forward().boxes.is_none(), "{gpu:?} {dtype:?} {dh}");
    }
}

#[test]
fn plain_attention_of_wide_heads_is_refused_on_a_gpu_with_little_shared_memory() {
    let room = |dh| {
        let kernels = AttentionKernels::choose("attention", DType::F32, dh, SMALL)?;
        kernels.expect_room("attention", &kernels.backward(Own::Keys))
    };
    assert!(room(128).is_ok());
    let error = room(256).unwrap_err().to_string();
    assert!(error.contains("needs 139776 bytes of shared memory"), "{error}");
}

#[test]
fn a_multiprocessor_has_eight_warps_of_attention_on_every_gpu() {
    for gpu in [SMALL, Gpu::A100, Gpu::H100] {
        for dh in [8, 64, 72, 80, 128] {
            let kernels = AttentionKernels::choose("attention", DType::BF16, dh, gpu).unwrap();
            for AttentionLaunch { name, threads, shared, .. } in passes(kernels) {
                let blocks = gpu.shared_bytes_of_all / (shared + 1024);
                assert!(blocks as u32 * threads >= 256, "{gpu:?} {name}: {blocks} of {threads}");
            }
        }
    }
}

/// Boxes of 64 columns, and of the 16 columns after them, of rows of a head.
#[test]
fn tensor_maps_have_the_sizes_and_strides_of_a_tensor_of_heads() -> Result<()> {
    use super::tensor_map::head_maps;
    use crate::launch::{Address, address};
    use ptx::products::{Swizzle, TensorMap};
    let x = operand(1, &[21, 2, 72], DType::BF16);
    let words = head_maps("attention", "q", &x, 48)?;
    let found = words.chunks(TensorMap::BYTES / 8).map(|map| {
        let bytes: Vec<u8> = map.iter().flat_map(|word| word.to_le_bytes()).collect();
        TensorMap::from_bytes(&bytes.try_into().unwrap()).unwrap()
    });
    let Address(address) = address("attention", "q", &x)?;
    let expected = [(64, Swizzle::Bytes128), (16, Swizzle::Bytes32)].map(|(columns, swizzle)| {
        let (sizes, strides, box_sizes) = ([72, 2, 21], [144, 288], [columns, 1, 48]);
        TensorMap { address, sizes, strides, box_sizes, swizzle }
    });
    assert_eq!(found.collect::<Vec<_>>(), expected);
    // The driver needs rows of whole 16 bytes.
    let error = message(head_maps("attention", "q", &operand(1, &[21, 2, 20], DType::BF16), 48));
    assert!(error.contains("is not a multiple of 16 bytes"), "{error}");
    Ok(())
}

#[test]
fn the_gpus_whose_kernels_run_on_the_cpu_are_listed() {
    let found = ["1", "8.0", "ptx:8.0", "ptx:9.0"].map(|value| Gpu::named(value).unwrap());
    let hopper = Gpu { multiprocessors: 3, ..Gpu::H100 };
    assert_eq!(found, [Gpu::A100, Gpu::A100, Gpu::A100, hopper]);
    for value in ["9.0", "ptx:1", ""] {
        let expected =
            format!("found TRAINER_EMULATE_CUDA={value}, expected 1, 8.0, ptx:8.0 or ptx:9.0");
        let error = message(Gpu::named(value));
        assert!(error.contains(&expected), "{error}"); // a backtrace may follow
    }
}

/// Whether Hopper's kernels can run, which only their PTX can without a GPU. If not, prints that the
/// test is skipped, also where the output of tests is captured.
fn hopper_runs() -> bool {
    use std::io::Write as _;
    let runs = super::interpreted::has_hopper();
    if !runs {
        let name = std::thread::current().name().unwrap_or("-").to_owned();
        let _ = writeln!(std::io::stderr(), "{name}: skipped: needs TRAINER_PTX");
    }
    runs
}

fn window(tokens: usize) -> crate::Masking {
    crate::Masking::Window(std::num::NonZeroUsize::new(tokens).unwrap())
}

/// Results of attention with the kernels for a GPU, or of the op on the CPU.
fn attention_on(
    gpu: Option<Gpu>,
    lengths: &[u32],
    (h, hkv, dh): (usize, usize, usize),
    masking: crate::Masking,
) -> Result<Vec<Tensor>> {
    use crate::attention::gpu::{attend, attend_backward};
    use crate::{AttentionBackend as _, Flash, Qkv, QkvGrad, Scores, Segments};
    use batch::CuSeqlens;
    use candle_core::Error;
    let ends = &CuSeqlens::from_lengths(lengths).map_err(Error::wrap)?;
    let (t, dtype) = (lengths.iter().sum::<u32>() as usize, DType::BF16);
    let (q, d_o) = (operand(1, &[t, h, dh], dtype), operand(4, &[t, h, dh], dtype));
    let (k, v) = (operand(2, &[t, hkv, dh], dtype), operand(3, &[t, hkv, dh], dtype));
    let (qkv, scores) = (Qkv { q: &q, k: &k, v: &v }, Scores::new(masking, dh));
    let (o, lse, QkvGrad { dq, dk, dv }) = if let Some(gpu) = gpu {
        let (o, lse) = attend("forward", gpu, qkv, ends.clone(), 0, scores)?;
        let grads = attend_backward("backward", gpu, qkv, &o, &lse, &d_o, ends, scores)?;
        (o, lse, grads)
    } else {
        let segments = &Segments::new(ends.clone(), ends.clone())?;
        let (o, lse) = Flash.forward(qkv, segments, scores)?;
        let grads = Flash.backward(qkv, &o, &lse, &d_o, segments, scores)?;
        (o, lse, grads)
    };
    Ok(vec![o, lse, dq, dk, dv])
}

#[test]
fn attention_matches_with_the_kernels_of_every_gpu() -> Result<()> {
    for (dh, masking) in [
        (128, crate::Masking::Causal),
        (128, crate::Masking::Full),
        (64, crate::Masking::Causal),
        (72, crate::Masking::Full),
        (256, crate::Masking::Causal),
        (128, window(130)),
        (80, window(2)),
        (256, window(33)),
    ] {
        let on = |gpu| attention_on(Some(gpu), &[1, 17, 128, 257], (4, 2, dh), masking);
        let (small, a100) = (on(SMALL)?, on(Gpu::A100)?);
        assert_all_close(&format!("{dh} {masking:?}"), &small, &a100, Tolerance::BF16);
    }
    Ok(())
}

/// The last segment has so many tiles of keys and of queries that each buffer is used twice.
#[test]
fn attention_of_hopper_matches_the_cpu() -> Result<()> {
    if !hopper_runs() {
        return Ok(());
    }
    for (dh, longest, masking) in [
        (64, 386, crate::Masking::Causal),
        (72, 386, crate::Masking::Full),
        (128, 386, crate::Masking::Causal),
        (256, 258, crate::Masking::Causal),
        // from a few keys to more than a tile of any kernel, at and next to the ends of tiles
        (64, 386, window(128)),
        (72, 386, window(3)),
        (80, 386, window(97)),
        (128, 386, window(129)),
        (256, 258, window(79)),
    ] {
        let on = |gpu| attention_on(gpu, &[1, 17, longest], (4, 2, dh), masking);
        let (hopper, cpu) = (on(Some(Gpu::H100))?, on(None)?);
        let what = format!("Hopper {dh} {masking:?}");
        assert_all_close(&what, &hopper, &cpu, Tolerance::BF16_TILES);
    }
    Ok(())
}

/// Blocks add to the gradient of the queries one after the other. Each launch has another order of blocks
/// and warps.
#[test]
fn attention_of_hopper_has_the_same_bits_in_twenty_orders() -> Result<()> {
    use crate::testing::bits;
    if !hopper_runs() {
        return Ok(());
    }
    for (dh, masking) in [
        (128, crate::Masking::Causal),
        (64, crate::Masking::Full),
        (80, window(100)),
        (128, window(129)),
    ] {
        let on = || attention_on(Some(Gpu::H100), &[7, 300], (2, 1, dh), masking);
        let first: Vec<_> = on()?.iter().map(bits).collect();
        for order in 1..20 {
            let found: Vec<_> = on()?.iter().map(bits).collect();
            assert!(found == first, "{dh} {masking:?}: order {order}");
        }
    }
    Ok(())
}

/// `o` and `lse` of Hopper's kernels on a GPU with this many multiprocessors.
fn forward_of_hopper(
    multiprocessors: usize,
    lengths: &[u32],
    (h, hkv, dh): (usize, usize, usize),
    masking: crate::Masking,
) -> Result<[Tensor; 2]> {
    let t = lengths.iter().sum::<u32>() as usize;
    let of = |seed, heads| operand(seed, &[t, heads, dh], DType::BF16);
    let (q, k, v) = (of(1, h), of(2, hkv), of(3, hkv));
    let (qkv, scores) = (crate::Qkv { q: &q, k: &k, v: &v }, crate::Scores::new(masking, dh));
    let ends = batch::CuSeqlens::from_lengths(lengths).map_err(candle_core::Error::wrap)?;
    let gpu = Gpu { multiprocessors, ..Gpu::H100 };
    let (o, lse) = crate::attention::gpu::attend("forward", gpu, qkv, ends, 0, scores)?;
    Ok([o, lse])
}

/// With few multiprocessors, a block computes several tasks, with different numbers of tiles: an odd
/// one leaves the ring of tiles at its second stage. Which block has which task depends on the order of
/// blocks and warps, which every launch has another one of.
#[test]
fn attention_of_hopper_has_the_same_bits_with_every_number_of_blocks() -> Result<()> {
    use crate::testing::bits;
    if !hopper_runs() {
        return Ok(());
    }
    let lengths = [1, 260, 130, 17];
    for (dh, masking) in [
        (64, crate::Masking::Causal),
        (72, crate::Masking::Full),
        (80, window(100)),
        (128, crate::Masking::Causal),
        (128, crate::Masking::Full),
        (128, window(40)),
        (256, crate::Masking::Causal),
        (256, window(81)),
    ] {
        let on = |blocks| forward_of_hopper(blocks, &lengths, (2, 1, dh), masking);
        let [o, lse] = on(132)?; // one task each
        let cpu = attention_on(None, &lengths, (2, 1, dh), masking)?;
        let (what, found) = (format!("{dh} {masking:?}"), [o.clone(), lse.clone()]);
        assert_all_close(&what, &found, &cpu[..2], Tolerance::BF16_TILES);
        for blocks in [1, 2, 4] {
            let [other_o, other_lse] = on(blocks)?;
            assert!(bits(&other_o) == bits(&o), "{dh} {masking:?}, {blocks} blocks: o");
            assert!(bits(&other_lse) == bits(&lse), "{dh} {masking:?}, {blocks} blocks: lse");
        }
    }
    Ok(())
}

/// With the shared memory of an H100 and without its kernels, a multiprocessor has room for two blocks of
/// more kernels than on an A100.
#[test]
fn attention_matches_with_two_blocks_on_a_multiprocessor() -> Result<()> {
    use crate::Masking;
    let later = Gpu { capability: (10, 0), ..Gpu::H100 };
    for (dh, masking) in [(128, Masking::Causal), (80, Masking::Full), (128, window(40))] {
        let on = |gpu| attention_on(Some(gpu), &[17, 70], (2, 1, dh), masking);
        let (a100, later) = (on(Gpu::A100)?, on(later)?);
        assert_all_close(&format!("{dh} {masking:?}"), &later, &a100, Tolerance::BF16);
    }
    Ok(())
}

#[test]
fn nf4_has_the_bits_of_the_cpu_at_any_alignment() -> Result<()> {
    for n in [1, 7, 64, 135, 2048, 2051, 40_000] {
        let x = operand(1, &[n], DType::F32);
        let matrix = crate::Nf4::quantize(&[n], |range| x.narrow(0, range.start, range.len()))?;
        for (dtype, _) in DTYPES {
            for offset in [0, 1] {
                let zeros = || Tensor::zeros(n + offset, dtype, &Device::Cpu)?.narrow(0, offset, n);
                let (gpu, cpu) = (zeros()?, zeros()?);
                with_kernels(|| matrix.dequantize_into(&gpu))?;
                matrix.dequantize_into(&cpu)?;
                let bits = |t: &Tensor| crate::testing::bits(t);
                assert_eq!(bits(&gpu), bits(&cpu), "{n} elements in {dtype:?} from {offset}");
            }
        }
    }
    Ok(())
}
