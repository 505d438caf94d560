//! The rule for the CUDA toolkit of a build.
//!
//! Three build scripts need one. cudaforge, which compiles candle's kernels, uses the first nvcc in
//! `NVCC`, `PATH`, `CUDA_HOME` and the usual folders. cudarc reads the version of its bindings from
//! the nvcc in `PATH`, unless `CUDARC_CUDA_VERSION` is set. Ours uses the nvcc of cudaforge, and
//! stops the build if these places have different versions.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Folders that cudaforge searches last.
const USUAL: &str = "/usr/local/cuda, /opt/cuda, /usr/lib/cuda, /usr";

/// The toolkit that all build scripts use.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Toolkit {
    pub(super) nvcc: PathBuf,
    /// The folder that contains `bin/nvcc`.
    pub(super) home: PathBuf,
    /// Such as `13.0`.
    pub(super) version: String,
}

/// The nvcc of a place that a build script searches.
struct Place {
    name: &'static str,
    nvcc: Option<PathBuf>,
    version: Option<String>,
}

impl Place {
    fn describe(&self) -> String {
        match (&self.nvcc, &self.version) {
            (None, _) => format!("  {}: no nvcc", self.name),
            (Some(nvcc), None) => format!("  {}: {}, does not run", self.name, nvcc.display()),
            (Some(nvcc), Some(version)) => {
                format!("  {}: {}, CUDA {version}", self.name, nvcc.display())
            }
        }
    }
}

/// Returns the toolkit, or a message with all places, what is there, and a command that helps.
/// `variable` reads the environment; `version` returns the version of an nvcc that runs.
pub(super) fn find(
    variable: impl Fn(&str) -> Option<OsString>,
    version: impl Fn(&Path) -> Option<String>,
) -> Result<Toolkit, String> {
    let path = variable("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join("nvcc"));
    let in_home = |home: &Path| home.join("bin/nvcc");
    let place = |name, candidates: Vec<PathBuf>| {
        let nvcc = candidates.into_iter().find(|nvcc| nvcc.is_file());
        let version = nvcc.as_deref().and_then(&version);
        Place { name, nvcc, version }
    };
    let home = variable("CUDA_HOME").map(|home| in_home(home.as_ref()));
    let places = [
        place("NVCC", variable("NVCC").map(PathBuf::from).into_iter().collect()),
        place("PATH", in_path.collect()),
        place("CUDA_HOME", home.into_iter().collect()),
        place(USUAL, USUAL.split(", ").map(|home| in_home(home.as_ref())).collect()),
    ];
    choose(&places, variable("CUDARC_CUDA_VERSION").is_some())
}

/// Applies the rule to the places of `find`. `has_version`: cudarc needs no nvcc.
fn choose(places: &[Place; 4], has_version: bool) -> Result<Toolkit, String> {
    let [_, path, _, usual] = places;
    let used = places.iter().find(|place| place.nvcc.is_some()).unwrap_or(usual);
    let (problem, remedy) = match (&used.nvcc, &used.version) {
        (Some(nvcc), Some(version)) => {
            let home = nvcc.parent().and_then(Path::parent).unwrap_or(nvcc);
            // The usual folders are searched only if no other place has an nvcc.
            let agrees = |other: &Place| other.nvcc.is_none() || other.version == used.version;
            let problem = if !places[..3].iter().all(agrees) {
                "different CUDA toolkits"
            } else if path.nvcc.is_none() && !has_version {
                "a CUDA toolkit, but no nvcc in PATH, where cudarc needs it"
            } else {
                let (nvcc, home) = (nvcc.clone(), home.to_owned());
                return Ok(Toolkit { nvcc, home, version: version.clone() });
            };
            let (nvcc, home) = (nvcc.display(), home.display());
            let command = format!("NVCC={nvcc} CUDA_HOME={home} PATH={home}/bin:$PATH");
            (problem, format!("to use CUDA {version}: export {command}"))
        }
        (Some(nvcc), None) => {
            ("an nvcc that does not run", format!("to see why: {} --version", nvcc.display()))
        }
        (None, _) => {
            let command = "export PATH=/usr/local/cuda/bin:$PATH";
            (
                "no CUDA toolkit",
                format!("install one, and add the folder of nvcc to PATH: {command}"),
            )
        }
    };
    let places: Vec<String> = places.iter().map(Place::describe).collect();
    Err(format!("the build found {problem}:\n{}\n{remedy}", places.join("\n")))
}

/// Returns the version in the output of `nvcc --version`, such as `13.0`.
pub(super) fn release(output: &str) -> Option<String> {
    let (_, rest) = output.split_once("release ")?;
    rest.split_once(',').map(|(version, _)| version.to_owned())
}

/// Whether a version such as `12.8` is `least` or later.
pub(super) fn is_at_least(version: &str, least: (u32, u32)) -> bool {
    let mut numbers = version.split('.').map(str::parse);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= least)
}

/// Returns why nvcc refuses the host compiler, if its version is newer than the toolkit supports.
/// `limits` is the text of `crt/host_config.h`, and `version` the output of `-dumpfullversion`, an option
/// of GCC alone.
pub(super) fn too_new(limits: &str, compiler: &str, version: &str) -> Option<String> {
    let (_, rest) = limits.split_once("#if __GNUC__ > ")?;
    let most: u32 = rest.split_whitespace().next()?.parse().ok()?;
    let version = version.trim();
    let major: u32 = version.split('.').next()?.parse().ok()?;
    (major > most).then(|| {
        format!(
            "the host compiler `{compiler}` has version {version}, and this CUDA toolkit supports \
             GCC up to {most}: install g++-{most} and run: export NVCC_CCBIN=g++-{most}"
        )
    })
}
