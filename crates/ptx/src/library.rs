//! The kernels of a folder of PTX files, launched with arguments at addresses, as `cuLaunchKernel`
//! does.

use crate::fault::Failure;
use crate::global::{Global, Host};
use crate::instruction::Kernel;
use crate::launch::{Counts, Launch, run};
use crate::parse::{ParseError, parse};
use std::collections::HashMap;
use std::ffi::c_void;
use std::fs::File;
use std::io::{self, Write};
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
    /// A line for each launch: thread (the name of a test), kernel, grid, threads, microseconds, and
    /// the numbers of [`Counts`].
    counts: Option<Mutex<File>>,
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
            file.map(Mutex::new).map_err(failed(path))
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
    ) -> Result<(), Box<Failure>> {
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
        if let Some(file) = &self.counts {
            // a line that is missing is seen by the script that reads the file
            let _ = file
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .write_all(line(&launch, &counts, before.elapsed()).as_bytes());
        }
        Ok(())
    }
}

/// The line of a launch, with tabs.
fn line(launch: &Launch<'_>, counts: &Counts, time: Duration) -> String {
    let thread = std::thread::current();
    let Counts {
        instructions,
        branches,
        barriers,
        global_read,
        global_written,
        shared_read,
        shared_written,
        products,
    } = counts;
    let numbers = [
        *instructions,
        *branches,
        *barriers,
        *global_read,
        *global_written,
        *shared_read,
        *shared_written,
        *products,
    ];
    let numbers = numbers.map(|number| number.to_string()).join("\t");
    let [x, y, z] = launch.grid;
    let (name, kernel) = (thread.name().unwrap_or("-"), &launch.kernel.name);
    let (threads, time) = (launch.threads, time.as_micros());
    format!("{name}\t{kernel}\t{x}\t{y}\t{z}\t{threads}\t{time}\t{numbers}\n")
}
