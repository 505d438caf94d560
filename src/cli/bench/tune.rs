//! `bench --tune`: measures the algorithms of cuBLASLt for the products of a config's steps.

use super::Table;
use super::step::{Ready, StepBench};
use crate::checkpoint::write_atomically;
use crate::cli::failure::{Exit, Failure};
use crate::config::RunConfig;
use crate::ops::{
    AlgorithmEntry, AlgorithmTable, MatmulLibrary, OtherProducts, algorithm_entries,
    matmul_library, set_algorithms,
};
use crate::run::read_table;
use candle_core::Device;
use std::path::Path;

/// Measures the products of the first `steps` steps that the table in `file` lacks, adds them to
/// it, and prints them.
///
/// The products are those that the steps start: a list of them would differ from the model at some
/// time.
pub(super) fn run(
    config: &RunConfig,
    steps: u64,
    file: &Path,
    table: &mut Table,
) -> anyhow::Result<()> {
    let device = config.device.open()?;
    let Some(library) = matmul_library(&device)? else {
        let message =
            "`--tune` measures algorithms of a GPU, and the device of the config is the CPU";
        return Err(Failure::new(Exit::Usage, message)
            .hint(
                "use a build with `--features cuda` on a machine with a GPU, and \
                 `--set device=cuda:0`",
            )
            .into());
    };
    let earlier = earlier(file, &library)?;
    let known = earlier.len();
    let with = |products| AlgorithmTable { measured_on: library.clone(), products };
    // Measuring takes minutes, so that the file can be written is found out first.
    write_atomically(file, with(earlier.clone()).to_text().as_bytes())?;
    set_algorithms(earlier, OtherProducts::Measure);
    let measured = measure(config, steps, &device);
    let products = algorithm_entries();
    set_algorithms(Vec::new(), OtherProducts::FirstChoice);
    // An error in a later step, such as exhausted memory, does not lose what was measured.
    let algorithms = with(products);
    write_atomically(file, algorithms.to_text().as_bytes())?;
    measured?;
    if algorithms.products.is_empty() {
        let message = "cuBLASLt has no algorithm that can be measured for any product of the steps";
        return Err(Failure::new(Exit::Data, message).into());
    }
    let new = &algorithms.products[known..];
    for AlgorithmEntry { product, first_us, best_us, place, .. } in new {
        let figures = [
            ("first_us", *first_us),
            ("best_us", *best_us),
            ("gain", 1.0 - best_us / first_us),
            ("place", *place as f64),
        ];
        table.row(&product.to_string(), &figures)?;
    }
    let faster = new.iter().filter(|entry| entry.place > 0).count();
    table.row(
        "measured products",
        &[("number", new.len() as f64), ("faster", faster as f64), ("known", known as f64)],
    )
}

/// The entries of the table in `file`; none if there is no such file.
fn earlier(file: &Path, library: &MatmulLibrary) -> anyhow::Result<Vec<AlgorithmEntry>> {
    let exists = file
        .try_exists()
        .map_err(|error| Failure::new(Exit::Usage, format!("`{}`: {error}", file.display())))?;
    if !exists {
        return Ok(Vec::new());
    }
    let (table, _) = read_table(file).map_err(|error| {
        Failure::of(Exit::Usage, error).hint("remove the file, or give `--tune` another one")
    })?;
    match table.mismatch(library) {
        None => Ok(table.products),
        Some(problem) => {
            let message = format!("the table `{}` cannot be extended: {problem}", file.display());
            let hint = "give `--tune` another file for this GPU and this version of cuBLASLt";
            Err(Failure::new(Exit::Usage, message).hint(hint).into())
        }
    }
}

fn measure(config: &RunConfig, steps: u64, device: &Device) -> anyhow::Result<()> {
    let mut bench = StepBench::new(config, device)?;
    for step in 1..=steps {
        let Some(Ready { prepared, .. }) = bench.next()? else { break };
        let launched = bench.runner.launch(prepared, config.optim.lr, step)?;
        bench.runner.finish(&launched)?;
    }
    Ok(())
}
