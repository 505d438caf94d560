//! Which CUDA toolkit a build uses, and what it reports if there is no single one.

#[path = "../../crates/kernels/build/toolkit.rs"]
mod rule;

use rule::{Toolkit, find, is_at_least, release, too_new};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders `12.4`, `13.0` and `broken` with `bin/nvcc`, whose version is the name of the folder.
struct Toolkits {
    root: PathBuf,
}

impl Toolkits {
    fn new(test: &str) -> Self {
        let root = std::env::temp_dir().join(format!("toolkit-{test}-{}", std::process::id()));
        for version in ["12.4", "13.0", "other/13.0", "broken"] {
            let folder = root.join(version).join("bin");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("nvcc"), "").unwrap();
        }
        Self { root }
    }

    /// Applies the rule to variables; `{}` in a value is the folder of the toolkits.
    fn find(&self, variables: &[(&str, &str)]) -> Result<Toolkit, String> {
        let root = self.root.display().to_string();
        let variable = |name: &str| {
            let (_, value) = variables.iter().find(|(variable, _)| *variable == name)?;
            Some(OsString::from(value.replace("{}", &root)))
        };
        let version = |nvcc: &Path| {
            let home = nvcc.parent()?.parent()?.file_name()?.to_str()?;
            (home != "broken").then(|| home.to_owned())
        };
        find(variable, version).map_err(|message| message.replace(&root, "{}"))
    }

    fn finds(&self, variables: &[(&str, &str)], home: &str) {
        let root = self.root.join(home);
        let version = root.file_name().unwrap().to_str().unwrap().to_owned();
        let toolkit = Toolkit { nvcc: root.join("bin/nvcc"), home: root, version };
        assert_eq!(self.find(variables), Ok(toolkit), "{variables:?}");
    }
}

impl Drop for Toolkits {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

const NVCC: (&str, &str) = ("NVCC", "{}/13.0/bin/nvcc");
const PATH: (&str, &str) = ("PATH", "{}/empty:{}/13.0/bin:{}/12.4/bin");
const HOME: (&str, &str) = ("CUDA_HOME", "{}/13.0");
const BINDINGS: (&str, &str) = ("CUDARC_CUDA_VERSION", "13000");

#[test]
fn the_toolkit_of_all_build_scripts_is_used() {
    let toolkits = Toolkits::new("used");
    for variables in [
        &[PATH][..],
        &[NVCC, PATH],
        &[PATH, HOME],
        &[NVCC, PATH, HOME],
        &[NVCC, BINDINGS],
        &[HOME, BINDINGS],
        // An nvcc that does not exist is ignored, as cudaforge does.
        &[("NVCC", "{}/absent/nvcc"), PATH, ("CUDA_HOME", "{}/absent")],
    ] {
        toolkits.finds(variables, "13.0");
    }
    // Two folders with the same version.
    toolkits.finds(&[("NVCC", "{}/other/13.0/bin/nvcc"), PATH], "other/13.0");
    toolkits.finds(&[PATH, ("CUDA_HOME", "{}/other/13.0")], "13.0");
}

#[test]
fn cudarc_needs_nvcc_in_path() {
    let toolkits = Toolkits::new("path");
    for variables in [&[NVCC][..], &[HOME], &[NVCC, HOME], &[("PATH", "{}/empty"), HOME]] {
        let message = toolkits.find(variables).unwrap_err();
        let first = "the build found a CUDA toolkit, but no nvcc in PATH, where cudarc needs it:";
        assert!(message.starts_with(first), "{message}");
        let last = "\nto use CUDA 13.0: export NVCC={}/13.0/bin/nvcc CUDA_HOME={}/13.0 \
                    PATH={}/13.0/bin:$PATH";
        assert!(message.ends_with(last), "{message}");
    }
}

#[test]
fn different_toolkits_are_refused() {
    let toolkits = Toolkits::new("different");
    let old = [("NVCC", "{}/12.4/bin/nvcc"), ("PATH", "{}/12.4/bin"), ("CUDA_HOME", "{}/12.4")];
    for variables in [
        &[old[0], PATH][..],
        &[old[1], HOME],
        &[NVCC, old[1]],
        &[NVCC, PATH, old[2]],
        &[NVCC, old[2], BINDINGS],
    ] {
        let message = toolkits.find(variables).unwrap_err();
        assert!(message.starts_with("the build found different CUDA toolkits:\n"), "{message}");
    }
    let message = toolkits.find(&[old[0], PATH]).unwrap_err();
    assert_eq!(
        message.lines().filter(|line| !line.contains("/usr/local/cuda")).collect::<Vec<_>>(),
        [
            "the build found different CUDA toolkits:",
            "  NVCC: {}/12.4/bin/nvcc, CUDA 12.4",
            "  PATH: {}/13.0/bin/nvcc, CUDA 13.0",
            "  CUDA_HOME: no nvcc",
            "to use CUDA 12.4: export NVCC={}/12.4/bin/nvcc CUDA_HOME={}/12.4 PATH={}/12.4/bin:$PATH",
        ]
    );
}

#[test]
fn the_command_of_a_message_helps() {
    let toolkits = Toolkits::new("helps");
    let command = [
        ("NVCC", "{}/13.0/bin/nvcc"),
        ("CUDA_HOME", "{}/13.0"),
        ("PATH", "{}/13.0/bin:{}/12.4/bin"),
    ];
    toolkits.finds(&command, "13.0");
}

#[test]
fn without_an_nvcc_that_runs_the_places_are_listed() {
    let toolkits = Toolkits::new("none");
    let message = toolkits.find(&[("NVCC", "{}/broken/bin/nvcc"), PATH]).unwrap_err();
    assert!(message.contains("\n  NVCC: {}/broken/bin/nvcc, does not run\n"), "{message}");
    assert!(message.ends_with("\nto see why: {}/broken/bin/nvcc --version"), "{message}");
    // A machine with a toolkit in one of the usual folders finds it there.
    let message = toolkits.find(&[("PATH", "{}/empty"), ("CUDA_HOME", "{}/absent")]).unwrap_err();
    for place in ["\n  NVCC: no nvcc\n", "\n  PATH: no nvcc\n", "\n  CUDA_HOME: no nvcc\n"] {
        assert!(message.contains(place), "{message}");
    }
}

#[test]
fn versions_are_read_and_compared() {
    let output = "nvcc: NVIDIA (R) Cuda compiler driver\n\
                  Cuda compilation tools, release 12.4, V12.4.131\n";
    assert_eq!(release(output).as_deref(), Some("12.4"));
    assert_eq!(release("no such file"), None);
    assert!(is_at_least("12.8", (12, 8)) && is_at_least("13.0", (12, 8)));
    assert!(
        !is_at_least("12.6", (12, 8)) && !is_at_least("11.9", (12, 8)) && !is_at_least("?", (0, 0))
    );
}

#[test]
fn a_host_compiler_that_is_too_new_is_named() {
    let limits = "#if defined(__GNUC__)\n\n#if __GNUC__ > 13\n\n#error -- unsupported";
    let hint = too_new(limits, "gcc", "14.2.0\n").unwrap();
    assert_eq!(
        hint,
        "the host compiler `gcc` has version 14.2.0, and this CUDA toolkit supports GCC up to 13: \
         install g++-13 and run: export NVCC_CCBIN=g++-13"
    );
    assert_eq!(too_new(limits, "gcc", "13.3.0\n"), None);
    // clang prints no such version, and a header may have another form.
    assert_eq!(too_new(limits, "clang++", ""), None);
    assert_eq!(too_new("", "gcc", "14.2.0\n"), None);
}
