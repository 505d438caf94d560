//! Lookup and interpolation of table rows by id, and the gradient of the table.
//!
//! Shapes: `ids: [T]` (`u32`), `w: [V, D]`, result and `dy`: `[T, D]`, `dw: [V, D]` (`f32`). For
//! interpolation: `table: [N, D]`, `index: [P, 4]` (`u32`), `weight: [P, 4]` (`f32`), result and
//! `dy`: `[P, D]`.

use super::cpu::blocks::{filled, span};
use super::cpu::{self, Operand, Shared, compute_dtype, expect_f32, read};
use super::launch::{Launch, can_be_checked, empty, launch, on_gpu, vectors, version};
use super::rows::expect_u32;
use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;

/// Fails if an id is not a row of a table of `num_rows` rows. Does nothing on a GPU, where reading
/// the ids would wait for the device: those ids were checked before the upload, and the kernels
/// skip ids outside the table.
fn check_ids(op: &'static str, ids: &Tensor, num_rows: usize) -> Result<()> {
    if !can_be_checked(ids) {
        return Ok(());
    }
    let ids = read(op, "ids", ids)?;
    match ids.slice::<u32>()?.iter().enumerate().find(|(_, id)| **id as usize >= num_rows) {
        Some((at, id)) => {
            bail!("{op}: id `{id}` at position {at} is out of range for {num_rows} rows")
        }
        None => Ok(()),
    }
}

/// Returns `w[ids]`, `[T, D]`, in the dtype of `w`. On the CPU it fails if an id is not below `V`.
pub fn embedding(ids: &Tensor, w: &Tensor) -> Result<Tensor> {
    let op = "embedding";
    let (v, _) = w.dims2()?;
    ids.dims1()?;
    compute_dtype(op, &[("w", w)])?;
    check_ids(op, ids, v)?;
    super::gather_rows(w, ids)
}

/// Adds `dy[t]` to `dw[ids[t]]` for each `t`, in ascending order for each row of `dw`.
pub fn embedding_backward(ids: &Tensor, dy: &Tensor, dw: &Tensor) -> Result<()> {
    let op = "embedding_backward";
    let ((t, d), (v, _)) = (dy.dims2()?, dw.dims2()?);
    compute_dtype(op, &[("dy", dy)])?;
    expect_f32(op, "dw", dw, &[v, d])?;
    if ids.dims() != [t] {
        bail!("{op}: `ids` is {:?}, expected [{t}]", ids.dims());
    }
    cpu::distinct(op, "dw", dw, &[("ids", ids), ("dy", dy)])?;
    check_ids(op, ids, v)?;
    if on_gpu(dy) {
        return add_by_row_on_gpu(op, ids, None, dy, dw);
    }
    let (ids, dy) = (read(op, "ids", ids)?, read(op, "dy", dy)?);
    let (ids, dy) = (ids.slice::<u32>()?, dy.values()?);
    cpu::write(op, "dw", dw, |dw| {
        add_by_row(ids, d, dw, |at, row| cpu::add(&dy.view(at * d..(at + 1) * d), row));
    })
}

/// Calls `add(at, row ids[at] of table)` for each `at`: rows in parallel, the calls of a row in
/// ascending order of `at`. Every id must be a row of `table [_, width]`.
#[expect(unsafe_code, reason = "tasks write disjoint rows, which the type system cannot see")]
pub(super) fn add_by_row(
    ids: &[u32],
    width: usize,
    table: &mut [f32],
    add: impl Fn(usize, &mut [f32]) + Sync,
) {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.par_sort_by_key(|at| ids[*at as usize]); // stable, so positions stay ascending
    let groups: Vec<&[u32]> = order.chunk_by(|a, b| ids[*a as usize] == ids[*b as usize]).collect();
    let num_rows = table.len() / width.max(1);
    let table = Shared::of(table);
    groups.par_iter().with_min_len(16).for_each(|group| {
        let row = ids[group[0] as usize] as usize;
        assert!(row < num_rows, "ids were checked");
        // SAFETY: the row is inside the table, and each row is in one group.
        let row = unsafe { table.slice(row * width..(row + 1) * width) };
        for at in *group {
            add(*at as usize, row);
        }
    });
}

/// Number of positions that one block sorts, one per thread: `TILE` of the kernels.
const TILE: usize = 1024;
/// Number of sorted positions that one block sums: `STRETCH` of the kernels.
const STRETCH: usize = 64;

/// Adds `weight[i] * dy[i / taps]` to `table[ids[i]]` for each `i`, where `taps` is the number of
/// ids per row of `dy`.
fn add_by_row_on_gpu(
    op: &str,
    ids: &Tensor,
    weight: Option<&Tensor>,
    dy: &Tensor,
    table: &Tensor,
) -> Result<()> {
    let (n, (rows, d), num_rows) = (ids.elem_count(), dy.dims2()?, table.dim(0)?);
    expect_u32(op, "ids", ids)?;
    let (keys, from) = sorted_on_gpu(op, ids)?;
    let stretches = n.div_ceil(STRETCH);
    let carried = empty((stretches, d), DType::F32, dy)?;
    let all = [dy, table, &carried];
    let columns = 64 * if vectors(d, &all)? { 16 / dy.dtype().size_in_bytes() } else { 1 };
    let launch = Launch::new(&version("add_runs", d, &all)?, dy.dtype());
    let launch = launch.grid3([stretches, d.div_ceil(columns), 1]).threads(64);
    let taps = n / rows.max(1);
    launch!(op, launch; keys, from, weight, dy, table, carried, n, d, num_rows, taps)?;
    let launch = Launch::new("join_runs", DType::F32)
        .grid3([stretches.saturating_sub(1), d.div_ceil(256), 1])
        .threads(256);
    launch!(op, launch; keys, carried, table, n, d, num_rows)
}

/// Returns the ids in ascending order and their positions. Equal ids are in the order of their
/// positions.
fn sorted_on_gpu(op: &str, ids: &Tensor) -> Result<(Tensor, Tensor)> {
    let n = ids.elem_count();
    let pair = || -> Result<_> { Ok((empty(n, DType::U32, ids)?, empty(n, DType::U32, ids)?)) };
    let (tile_keys, tile_from) = pair()?;
    let tiles = n.div_ceil(TILE);
    let each = |name| Launch::new(name, DType::F32).grid(tiles).threads(TILE as u32);
    launch!(op, each("sort_tiles"); ids, tile_keys, tile_from, n)?;
    if tiles <= 1 {
        return Ok((tile_keys, tile_from));
    }
    let (keys, from) = pair()?;
    launch!(op, each("merge_tiles"); tile_keys, tile_from, keys, from, n)?;
    Ok((keys, from))
}

/// Validates `index` and `weight [P, 4]` and returns `P`.
fn check_taps(op: &'static str, index: &Tensor, weight: &Tensor, num_rows: usize) -> Result<usize> {
    let (p, taps) = index.dims2()?;
    if taps != 4 {
        bail!("{op}: `index` is {:?}, expected [P, 4]", index.dims());
    }
    expect_f32(op, "weight", weight, &[p, 4])?;
    check_ids(op, index, num_rows)?;
    Ok(p)
}

/// Returns `y [P, D]` with `y[p] = sum over j of weight[p, j] * table[index[p, j]]`.
pub fn interpolate_rows(table: &Tensor, index: &Tensor, weight: &Tensor) -> Result<Tensor> {
    interpolate("interpolate_rows", table, index, weight, None)
}

/// Returns `x + interpolate_rows(table, index, weight)`, with `x: [P, D]`.
pub fn interpolate_rows_add(
    table: &Tensor,
    index: &Tensor,
    weight: &Tensor,
    x: &Tensor,
) -> Result<Tensor> {
    interpolate("interpolate_rows_add", table, index, weight, Some(x))
}

fn interpolate(
    op: &'static str,
    table: &Tensor,
    index: &Tensor,
    weight: &Tensor,
    x: Option<&Tensor>,
) -> Result<Tensor> {
    let (n, d) = table.dims2()?;
    let dtype = compute_dtype(op, &[("table", table)])?;
    let p = check_taps(op, index, weight, n)?;
    if let Some(x) = x {
        compute_dtype(op, &[("table", table), ("x", x)])?;
        cpu::expect_shape(op, "x", x, &[p, d])?;
    }
    if on_gpu(table) {
        expect_u32(op, "index", index)?;
        let y = empty((p, d), dtype, table)?;
        let mut rows = vec![table, &y];
        rows.extend(x);
        let launch = Launch::for_rows("interpolate_rows", (p, d), &rows)?;
        launch!(op, launch; table, index, weight, x, y, n, p, d)?;
        return Ok(y);
    }
    let x = x.map(|x| read(op, "x", x)).transpose()?;
    let x = x.as_ref().map(Operand::values).transpose()?;
    let (table, index) = (read(op, "table", table)?, read(op, "index", index)?);
    let weight = read(op, "weight", weight)?;
    let (table, index, weight) = (table.values()?, index.slice::<u32>()?, weight.slice::<f32>()?);
    let [y] = filled(p, cpu::ROWS, [(d, dtype)], |patches, [y]| {
        if let Some(x) = x {
            y.copy_from_slice(&x.view(span(&patches, d)));
        }
        for (at, y) in patches.zip(y.chunks_mut(d)) {
            for tap in at * 4..at * 4 + 4 {
                let row = index[tap] as usize;
                cpu::add_scaled(weight[tap], &table.view(row * d..(row + 1) * d), y);
            }
        }
    });
    y.tensor((p, d))
}

/// Adds `weight[p, j] * dy[p]` to `dtable[index[p, j]]` for each `p` and `j`; `dtable: [N, D]`
/// (`f32`).
pub fn interpolate_rows_backward(
    index: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    dtable: &Tensor,
) -> Result<()> {
    let op = "interpolate_rows_backward";
    let ((n, d), dtype) = (dtable.dims2()?, dtable.dtype());
    if dtype != DType::F32 {
        bail!("{op}: `dtable` is {dtype:?}, expected F32");
    }
    let p = check_taps(op, index, weight, n)?;
    compute_dtype(op, &[("dy", dy)])?;
    cpu::expect_shape(op, "dy", dy, &[p, d])?;
    cpu::distinct(op, "dtable", dtable, &[("index", index), ("weight", weight), ("dy", dy)])?;
    if on_gpu(dy) {
        return add_by_row_on_gpu(op, index, Some(weight), dy, dtable);
    }
    let (index, weight) = (read(op, "index", index)?, read(op, "weight", weight)?);
    let dy = read(op, "dy", dy)?;
    let (index, weight, dy) = (index.slice::<u32>()?, weight.slice::<f32>()?, dy.values()?);
    cpu::write(op, "dtable", dtable, |dtable| {
        add_by_row(index, d, dtable, |tap, row| {
            let at = tap / 4;
            cpu::add_scaled(weight[tap], &dy.view(at * d..(at + 1) * d), row);
        });
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        added, check, gradient_buffer, ids, ids_are_checked, message, random,
    };
    use super::*;

    #[test]
    fn a_lookup_and_its_gradient_match_the_reference() {
        for (v, d, chosen) in [
            (1, 1, vec![0]),
            (5, 33, vec![4, 0, 4, 4, 2]),
            (9, 64, (0..200).map(|i| i * i % 9).collect()),
        ] {
            let chosen: Vec<u32> = chosen;
            let plain = |t: &[Tensor]| t[0].index_select(&ids(&chosen), 0);
            check(&format!("embedding {v} {d}"), &[random(1, &[v, d])], plain, |t, dy| {
                let dw = gradient_buffer(&[v, d]);
                embedding_backward(&ids(&chosen), dy, &dw)?;
                Ok((embedding(&ids(&chosen), &t[0])?, vec![added(&dw)]))
            });
        }
    }

    #[test]
    fn interpolation_and_its_gradient_match_the_reference() {
        let (n, d, p) = (6, 33, 50);
        let taps: Vec<u32> = (0..4 * p as u32).map(|i| i * 5 % 6).collect();
        let index = ids(&taps).reshape((p, 4)).unwrap();
        let weight = random(9, &[p, 4]);
        let plain = |t: &[Tensor]| {
            let picked = t[0].index_select(&index.flatten_all()?, 0)?.reshape((p, 4, d))?;
            let weight = weight.to_dtype(t[0].dtype())?.unsqueeze(2)?;
            picked.broadcast_mul(&weight)?.sum(1)? + &t[1]
        };
        let inputs = [random(1, &[n, d]), random(2, &[p, d])];
        check("interpolate_rows", &inputs, plain, |t, dy| {
            let dtable = gradient_buffer(&[n, d]);
            interpolate_rows_backward(&index, &weight, dy, &dtable)?;
            let y = interpolate_rows_add(&t[0], &index, &weight, &t[1])?;
            Ok((y, vec![added(&dtable), dy.clone()]))
        });
        let (table, zero) = (&inputs[0], inputs[1].zeros_like().unwrap());
        let alone = interpolate_rows(table, &index, &weight).unwrap();
        let onto_zero = interpolate_rows_add(table, &index, &weight, &zero).unwrap();
        assert_eq!(alone.to_vec2::<f32>().unwrap(), onto_zero.to_vec2::<f32>().unwrap());
    }

    #[test]
    fn an_id_outside_the_table_is_reported_with_its_position() {
        if !ids_are_checked() {
            return;
        }
        let error = message(embedding(&ids(&[0, 7]), &random(1, &[7, 2])));
        assert!(error.contains("id `7` at position 1"), "{error}");
        let dw = gradient_buffer(&[7, 2]);
        let error = message(embedding_backward(&ids(&[9]), &random(1, &[1, 2]), &dw));
        assert!(error.contains("id `9` at position 0"), "{error}");
    }
}
