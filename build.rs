//! Compiles `src/ops/cuda/kernels/*/*.cu` if a feature needs them: with `cuda`, nvcc builds one fatbin per
//! file; with `cuda-emulation`, the C++ compiler of the host builds a static library. The default
//! build compiles nothing here.

#![expect(
    clippy::disallowed_methods,
    clippy::unnecessary_debug_formatting,
    reason = "an interrupted build script runs again; `{:?}` quotes a path for Rust source"
)]

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCES: &str = "src/ops/cuda";
/// Folders below `src/ops/cuda/kernels`: kernels for every GPU, kernels that need compute capability 8.0,
/// and kernels that only compute capability 9.0 has the instructions for. The names of the last end
/// with `_sm90`.
const KERNELS: [&str; 3] = ["common", "sm80", "sm90"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={SOURCES}");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    println!("cargo:rerun-if-env-changed=CXX");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets `OUT_DIR`"));
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        compile_for_gpus(&out);
        return;
    }
    println!("cargo:rustc-env=TRAINER_GPU_CODE=without GPU code");
    if std::env::var_os("CARGO_FEATURE_CUDA_EMULATION").is_some() {
        compile_for_the_host(&out);
    }
}

/// Returns the `.cu` files, sorted by folder and name.
fn kernels() -> Vec<PathBuf> {
    let mut files = Vec::new();
    for folder in KERNELS {
        let folder = Path::new(SOURCES).join("kernels").join(folder);
        let entries = std::fs::read_dir(folder).expect("the sources are in the repository");
        files.extend(entries.map(|entry| entry.expect("readable").path()));
    }
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cu"));
    files.sort();
    files
}

/// Compiler options for the folders of the shared headers.
fn includes() -> [String; 2] {
    ["kernels/common", "emulation"].map(|folder| format!("-I{SOURCES}/{folder}"))
}

fn stem(file: &Path) -> &str {
    file.file_stem().and_then(|stem| stem.to_str()).expect("source file names are ASCII")
}

fn run(command: &mut Command, hint: &str) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{command:?} failed: {status}"),
        Err(error) => panic!("cannot start {command:?}: {error}; hint: {hint}"),
    }
}

/// Compiles machine code for Ampere and Hopper, and PTX that the driver compiles for later GPUs. Kernels
/// for Hopper alone are machine code for it.
fn compile_for_gpus(out: &Path) {
    let nvcc = std::env::var_os("CUDA_HOME")
        .map_or_else(|| PathBuf::from("nvcc"), |home| PathBuf::from(home).join("bin/nvcc"));
    let mut images = String::from("&[\n");
    for file in kernels() {
        let image = out.join(format!("{}.fatbin", stem(&file)));
        let mut command = Command::new(&nvcc);
        command.args(["-fatbin", "-O3", "-std=c++17", "--threads", "2", "-lineinfo"]);
        let codes = if stem(&file).ends_with("_sm90") {
            &["arch=compute_90a,code=sm_90a"][..]
        } else {
            &[
                "arch=compute_80,code=sm_80",
                "arch=compute_90,code=sm_90",
                "arch=compute_80,code=compute_80",
            ]
        };
        // The update of a parameter has the same bits in one part or several, whose elements take
        // other paths of the kernel: the compiler would join products and sums in one of them only.
        if stem(&file).starts_with("adamw") {
            command.arg("-fmad=false");
        }
        for code in codes {
            command.args(["-gencode", code]);
        }
        command.args(includes()).arg("-o").arg(&image).arg(&file);
        run(
            &mut command,
            "install the CUDA toolkit, or run scripts/cuda/toolkit.sh and set CUDA_HOME",
        );
        let _ = writeln!(images, "({:?}, include_bytes!({image:?}).as_slice()),", stem(&file));
    }
    let toolkit = toolkit_version(&nvcc);
    println!("cargo:rustc-env=TRAINER_CUDA_TOOLKIT={toolkit}");
    println!(
        "cargo:rustc-env=TRAINER_GPU_CODE=CUDA {toolkit}: sm_80, sm_90, sm_90a, PTX of compute_80"
    );
    // Otherwise a driver that lacks a function stops the program before it can say so.
    println!("cargo:rustc-link-arg-bins=-Wl,-z,lazy");
    images.push(']');
    std::fs::write(out.join("kernels.rs"), images).expect("OUT_DIR is writable");
}

/// The version of the CUDA toolkit, such as `13.0`.
fn toolkit_version(nvcc: &Path) -> String {
    let output = Command::new(nvcc).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let text = text.unwrap_or_default();
    let version = text.split_once("release ").and_then(|(_, rest)| rest.split(',').next());
    version.expect("`nvcc --version` prints the release").to_owned()
}

/// Compiles the kernels into one archive. It is linked with `whole-archive`, because the kernels
/// register themselves in static initializers.
fn compile_for_the_host(out: &Path) {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut files = kernels();
    for file in ["emulation.cpp", "probes.cpp"] {
        files.push(Path::new(SOURCES).join("emulation").join(file));
    }
    let archive = out.join("libemulation.a");
    let _ = std::fs::remove_file(&archive);
    // Two files at a time: each takes seconds, and cargo waits for this build script.
    let compile = |files: &[PathBuf]| -> Vec<PathBuf> {
        files.iter().map(|file| compile_object(&compiler, file, out)).collect()
    };
    let (first, second) = files.split_at(files.len() / 2);
    let objects = std::thread::scope(|scope| {
        let first = scope.spawn(|| compile(first));
        let second = compile(second);
        [first.join().expect("a panic was printed"), second].concat()
    });
    run(Command::new("ar").arg("crs").arg(&archive).args(&objects), "install binutils");
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static:+whole-archive=emulation");
    println!("cargo:rustc-link-lib=dylib=stdc++");
}

/// Compiles one source file for the host, and returns the path of the object file.
fn compile_object(compiler: &OsStr, file: &Path, out: &Path) -> PathBuf {
    let object = out.join(format!("{}.o", stem(file)));
    let mut command = Command::new(compiler);
    command.args(["-x", "c++", "-std=c++20", "-O2", "-DEMULATION", "-Wall"]);
    // Kernels read vectors of elements as words.
    command.args(["-Wno-unknown-pragmas", "-fno-strict-aliasing"]);
    command.args(["-Wno-unused-function", "-Wno-unused-variable", "-c", "-fPIC", "-o"]);
    command.arg(&object).args(includes()).arg(file);
    run(&mut command, "install a C++ compiler (g++)");
    object
}
