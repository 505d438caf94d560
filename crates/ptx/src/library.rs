//! The kernels of a folder of PTX files, launched with arguments at addresses, as `cuLaunchKernel`
//! does.

use crate::fault::Failure;
use crate::global::{Global, Host};
use crate::instruction::Kernel;
use crate::launch::{Counts, Launch, run};
use crate::parse::{ParseError, parse};
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Registers of a multiprocessor.
const REGISTERS: u64 = 65536;

/// Kernels by name.
#[derive(Debug)]
pub struct Library {
    kernels: HashMap<String, Arc<Kernel>>,
    /// Launches so far: the seed of each.
    launches: AtomicU64,
    counts: Option<Mutex<Log>>,
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
    #[error("unknown compute capability `{0}`, expected 8.0 or 9.0")]
    Capability(String),
}

impl Library {
    /// Reads the kernels that a GPU of a compute capability runs, from the folders `80`, `90` and
    /// `90a` below `root`. `counts`: a file to which each launch adds a line.
    pub fn open(
        root: &Path,
        capability: &str,
        counts: Option<&Path>,
    ) -> Result<Self, LibraryError> {
        let folders: &[&str] = match capability {
            "8.0" => &["80"],
            "9.0" => &["90", "90a"],
            other => return Err(LibraryError::Capability(other.to_owned())),
        };
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| LibraryError::Io { path, source }
        };
        let mut kernels = HashMap::new();
        for folder in folders {
            let folder = root.join(folder);
            for entry in std::fs::read_dir(&folder).map_err(failed(&folder))? {
                let path = entry.map_err(failed(&folder))?.path();
                #[expect(clippy::disallowed_methods, reason = "files that a script has written")]
                let text = std::fs::read_to_string(&path).map_err(failed(&path))?;
                let module = parse(&text);
                let module = module.map_err(|source| LibraryError::Parse { path, source })?;
                kernels
                    .extend(module.kernels.into_iter().map(|kernel| (kernel.name.clone(), kernel)));
            }
        }
        let open = |path: &Path| {
            let file = File::options().create(true).append(true).open(path);
            let log = |file| Mutex::new(Log { file, executed: HashMap::new() });
            file.map(log).map_err(failed(path))
        };
        let counts = counts.map(open).transpose()?;
        Ok(Self { kernels, launches: AtomicU64::new(1), counts })
    }

    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.get(name).map(Arc::as_ref)
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
        let mut global = unsafe { Global::of_host(host) };
        let launch = Launch {
            kernel,
            grid,
            threads: threads as usize,
            shared_bytes: shared as usize,
            params: &params,
            // as many as fit, in steps of 8 (the assembler takes as many for these kernels)
            registers: REGISTERS / u64::from(threads) / 8 * 8,
            seed: self.launches.fetch_add(1, Ordering::Relaxed),
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
    /// The line of a launch, with tabs.
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
