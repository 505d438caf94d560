//! Compiles `src/ops/cuda/kernels/*/*.cu`, under the features that need them: `cuda` with nvcc to one fatbin a file,
//! `cuda-emulation` with the host's C++ compiler. The default build does nothing here.

#![expect(
    clippy::disallowed_methods,
    clippy::unnecessary_debug_formatting,
    reason = "cargo runs nothing before the build script ends; a path goes into Rust source, quoted"
)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCES: &str = "src/ops/cuda";
/// Folders of kernels below `src/ops/cuda/kernels`: for all GPUs, and from one compute capability on.
const KERNELS: [&str; 2] = ["common", "sm80"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={SOURCES}");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    println!("cargo:rerun-if-env-changed=CXX");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        compile_for_gpus(&out);
    } else if std::env::var_os("CARGO_FEATURE_CUDA_EMULATION").is_some() {
        compile_for_the_host(&out);
    }
}

/// The `.cu` files, by folder and name.
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

/// Options that let a kernel include the shared headers.
fn includes() -> [String; 2] {
    ["kernels/common", "emulation"].map(|folder| format!("-I{SOURCES}/{folder}"))
}

fn stem(file: &Path) -> &str {
    file.file_stem().and_then(|stem| stem.to_str()).expect("names of sources are ASCII")
}

fn run(command: &mut Command, hint: &str) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{command:?} ended with {status}"),
        Err(error) => panic!("{command:?} did not start: {error}; {hint}"),
    }
}

/// Machine code for Ampere and Hopper, and PTX that later GPUs compile when they load it.
fn compile_for_gpus(out: &Path) {
    let nvcc = std::env::var_os("CUDA_HOME")
        .map_or_else(|| PathBuf::from("nvcc"), |home| PathBuf::from(home).join("bin/nvcc"));
    let mut images = String::from("&[\n");
    for file in kernels() {
        let image = out.join(format!("{}.fatbin", stem(&file)));
        let mut command = Command::new(&nvcc);
        command.args(["-fatbin", "-O3", "-std=c++17", "--threads", "2", "-lineinfo"]);
        for code in [
            "arch=compute_80,code=sm_80",
            "arch=compute_90,code=sm_90",
            "arch=compute_80,code=compute_80",
        ] {
            command.args(["-gencode", code]);
        }
        command.args(includes()).arg("-o").arg(&image).arg(&file);
        run(
            &mut command,
            "install the CUDA toolkit, or run scripts/cuda/toolkit.sh and set CUDA_HOME",
        );
        let _ = writeln!(images, "({:?}, include_bytes!({image:?}).as_slice()),", stem(&file));
    }
    images.push(']');
    std::fs::write(out.join("kernels.rs"), images).expect("OUT_DIR is writable");
}

/// One archive, linked whole: the kernels register themselves.
fn compile_for_the_host(out: &Path) {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut files = kernels();
    files.push(Path::new(SOURCES).join("emulation/emulation.cpp"));
    let archive = out.join("libemulation.a");
    let _ = std::fs::remove_file(&archive);
    let mut objects = Vec::new();
    for file in files {
        let object = out.join(format!("{}.o", stem(&file)));
        let mut command = Command::new(&compiler);
        command.args([
            "-x",
            "c++",
            "-std=c++20",
            "-O2",
            "-DEMULATION",
            "-Wall",
            "-Wno-unknown-pragmas",
            "-fno-strict-aliasing", // vectors of elements are read as words
        ]);
        command
            .args(["-Wno-unused-function", "-Wno-unused-variable", "-c", "-fPIC", "-o"])
            .arg(&object)
            .args(includes())
            .arg(&file);
        run(&mut command, "install a C++ compiler (g++)");
        objects.push(object);
    }
    run(Command::new("ar").arg("crs").arg(&archive).args(&objects), "install binutils");
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static:+whole-archive=emulation");
    println!("cargo:rustc-link-lib=dylib=stdc++");
}
