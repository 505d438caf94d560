//! The kernels of a folder of PTX files, launched with arguments at addresses, as `cuLaunchKernel`
//! does.

use crate::fault::Failure;
use crate::global::{Global, Host};
use crate::instruction::{Kernel, Module};
use crate::launch::{Counts, Launch, run};
use crate::parse::{ParseError, parse};
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Registers of a multiprocessor.
const REGISTERS: u64 = 65536;

/// Maximum number of instructions of a block, of which a CPU executes some millions a second.
const MAX_INSTRUCTIONS: u64 = 1 << 32;

/// The kernels of a folder, by name. A file is parsed when a kernel of it is launched for the first
/// time.
#[derive(Debug)]
pub struct Library {
    files: Vec<PtxFile>,
    /// The file of each kernel.
    index: HashMap<String, usize>,
    max_shared_bytes: usize,
    /// A part of the seed of each launch.
    seed: String,
    counts: Option<Mutex<Log>>,
}

#[derive(Debug)]
struct PtxFile {
    path: PathBuf,
    text: String,
    module: OnceLock<Result<Module, ParseError>>,
}

thread_local! {
    /// Number of launches of this thread.
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
}

/// A file with a line for each launch: thread (the name of a test), kernel, grid, threads,
/// microseconds, the numbers of [`Counts`], and the lines of the PTX that this thread has not executed
/// before.
#[derive(Debug)]
struct Log {
    file: File,
    /// By thread and kernel, which instructions were executed.
    executed: HashMap<(String, String), Vec<bool>>,
}

#[derive(Debug, Error)]
pub enum LibraryError {
    #[error("`{}`: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("`{}`: {source}", path.display())]
    Parse { path: PathBuf, source: ParseError },
    #[error("no kernel has the name `{0}`")]
    NoKernel(String),
    #[error("unknown compute capability `{0}`, expected 8.0 or 9.0")]
    Capability(String),
}

impl Library {
    /// Finds the kernels that a GPU of a compute capability runs, in the folders `80`, `90` and `90a`
    /// below `root`.
    ///
    /// `counts`: a file to which each launch adds a line; `None` takes the one that the environment
    /// variable `TRAINER_PTX_COUNTS` names, if it is set.
    ///
    /// The order of the warps of a launch depends on the name of the thread, the name of the kernel, the
    /// number of launches of the thread before, and the environment variable `TRAINER_PTX_SEED`. So a
    /// failure of a test occurs again if only this test runs, and other values of the variable try
    /// other orders.
    pub fn open(
        root: &Path,
        capability: &str,
        counts: Option<&Path>,
    ) -> Result<Self, LibraryError> {
        // CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
        let (folders, max_shared_bytes): (&[&str], usize) = match capability {
            "8.0" => (&["80"], 163 << 10),
            "9.0" => (&["90", "90a"], 227 << 10),
            other => return Err(LibraryError::Capability(other.to_owned())),
        };
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| LibraryError::Io { path, source }
        };
        let (mut files, mut index) = (Vec::new(), HashMap::new());
        for folder in folders {
            let folder = root.join(folder);
            for entry in std::fs::read_dir(&folder).map_err(failed(&folder))? {
                let path = entry.map_err(failed(&folder))?.path();
                #[expect(clippy::disallowed_methods, reason = "files that a script has written")]
                let text = std::fs::read_to_string(&path).map_err(failed(&path))?;
                index.extend(find_kernels(&text).map(|name| (name.to_owned(), files.len())));
                files.push(PtxFile { path, text, module: OnceLock::new() });
            }
        }
        let variable = std::env::var_os("TRAINER_PTX_COUNTS").map(PathBuf::from);
        let open = |path: &Path| {
            let file = File::options().create(true).append(true).open(path);
            let log = |file| Mutex::new(Log { file, executed: HashMap::new() });
            file.map(log).map_err(failed(path))
        };
        let counts = counts.or(variable.as_deref()).map(open).transpose()?;
        let seed = std::env::var("TRAINER_PTX_SEED").unwrap_or_default();
        Ok(Self { files, index, max_shared_bytes, seed, counts })
    }

    /// The kernel of this name. The first call for a kernel of a file parses the file.
    pub fn kernel(&self, name: &str) -> Result<&Kernel, LibraryError> {
        let file = self.index.get(name).map(|index| &self.files[*index]);
        let file = file.ok_or_else(|| LibraryError::NoKernel(name.to_owned()))?;
        let module = file.module.get_or_init(|| parse(&file.text)).as_ref();
        let module = module.map_err(|source| {
            let (path, source) = (file.path.clone(), source.clone());
            LibraryError::Parse { path, source }
        })?;
        let kernel = module.kernels.iter().find(|kernel| kernel.name == name);
        kernel.map(Arc::as_ref).ok_or_else(|| LibraryError::NoKernel(name.to_owned()))
    }

    /// The seed of the next launch of this thread.
    fn next_seed(&self, kernel: &str) -> u64 {
        let number = LAUNCHES.replace(LAUNCHES.get() + 1).to_string();
        let thread = std::thread::current();
        let parts = [thread.name().unwrap_or("-"), kernel, &number, &self.seed];
        // FNV-1a, with a byte between the parts that none of them has
        parts.join("\0").bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// Executes a kernel of this library.
    ///
    /// # Safety
    /// `arguments` has an address of a value for each parameter of the kernel. What `host` finds is
    /// allocated, and nothing else accesses it during the launch.
    #[expect(unsafe_code, reason = "kernels take addresses")]
    pub unsafe fn launch(
        &self,
        kernel: &Kernel,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: *const *mut c_void,
        host: &'static dyn Host,
    ) -> Result<Counts, Box<Failure>> {
        let mut params = vec![0; kernel.param_bytes];
        for (index, param) in kernel.params.iter().enumerate() {
            let to = params[param.offset..].as_mut_ptr();
            // SAFETY: as the caller promises.
            unsafe {
                let argument = *arguments.add(index);
                std::ptr::copy_nonoverlapping(argument.cast::<u8>(), to, param.bytes);
            }
        }
        // SAFETY: as the caller promises.
        let mut global = unsafe { Global::from_host(host) };
        // as many registers as fit, in steps of 8 (the assembler takes as many for these kernels)
        let most = if kernel.max_threads == 0 { threads as usize } else { kernel.max_threads };
        let registers = REGISTERS / most.max(1) as u64 / 8 * 8;
        let launch = Launch {
            kernel,
            grid,
            threads: threads as usize,
            shared_bytes: shared as usize,
            max_shared_bytes: self.max_shared_bytes,
            max_instructions: MAX_INSTRUCTIONS,
            params: &params,
            registers,
            seed: self.next_seed(&kernel.name),
        };
        let before = Instant::now();
        let counts = run(&launch, &mut global)?;
        if let Some(log) = &self.counts {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            let line = log.line(&launch, &counts, before.elapsed());
            // a line that is missing is seen by the script that reads the file
            let _ = log.file.write_all(line.as_bytes());
        }
        Ok(counts)
    }
}

impl Log {
    fn line(&mut self, launch: &Launch<'_>, counts: &Counts, time: Duration) -> String {
        let Launch { kernel, grid: [x, y, z], threads, .. } = launch;
        let thread = std::thread::current().name().unwrap_or("-").to_owned();
        let seen = self.executed.entry((thread.clone(), kernel.name.clone()));
        let seen = seen.or_insert_with(|| vec![false; kernel.code.len()]);
        let mut new = String::new();
        let executed = counts.executed.iter().zip(&kernel.code);
        for ((executed, instruction), seen) in executed.zip(seen) {
            if *executed && !*seen {
                *seen = true;
                let _ = write!(new, "{},", instruction.line);
            }
        }
        let numbers = [
            counts.instructions,
            counts.branches,
            counts.barriers,
            counts.global_read,
            counts.global_written,
            counts.shared_read,
            counts.shared_written,
            counts.products,
        ];
        let numbers = numbers.map(|number| number.to_string()).join("\t");
        let (name, time) = (&kernel.name, time.as_micros());
        format!("{thread}\t{name}\t{x}\t{y}\t{z}\t{threads}\t{time}\t{numbers}\t{new}\n")
    }
}

/// The names of the kernels of a PTX text.
fn find_kernels(text: &str) -> impl Iterator<Item = &str> {
    let entries = text.split(".entry ").skip(1);
    entries.filter_map(|rest| rest.split_once('(').map(|(name, _)| name.trim()))
}

#[cfg(test)]
mod tests;
