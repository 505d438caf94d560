//! Compiles `src/cuda/kernels/*/*.cu` if a feature needs them: with `cuda`, nvcc builds one fatbin per
//! file; with `cuda-emulation`, the C++ compiler of the host builds a static library of all but the kernels
//! for Hopper alone. The default build compiles nothing here.

#![expect(
    clippy::disallowed_methods,
    clippy::unnecessary_debug_formatting,
    reason = "an interrupted build script runs again; `{:?}` quotes a path for Rust source"
)]

#[path = "build/toolkit.rs"]
mod toolkit;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use toolkit::Toolkit;

const SOURCES: &str = "src/cuda";
/// Folders below `src/cuda/kernels`: kernels for every GPU, kernels that need compute capability 8.0,
/// and kernels that only compute capability 9.0 has the instructions for. The names of the last end
/// with `_sm90`. The host emulates the others.
const KERNELS: [&str; 3] = ["common", "sm80", "sm90"];
const EMULATED: &[&str] = &["common", "sm80"];

fn main() {
    for path in ["build.rs", "build", SOURCES] {
        println!("cargo:rerun-if-changed={path}");
    }
    for variable in ["NVCC", "CUDA_HOME", "CUDARC_CUDA_VERSION", "NVCC_CCBIN", "CXX"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets `OUT_DIR`"));
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        compile_for_gpus(&out);
        return;
    }
    println!("cargo:gpu_code=without GPU code");
    if std::env::var_os("CARGO_FEATURE_CUDA_EMULATION").is_some() {
        compile_for_the_host(&out);
    }
}

/// Returns the `.cu` files of some folders, sorted by folder and name.
fn kernels(folders: &[&str]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for folder in folders {
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

/// Runs a compiler. `hint` is called if it fails.
fn run(command: &mut Command, hint: impl Fn() -> Option<String>) {
    let problem = match command.status() {
        Ok(status) if status.success() => return,
        Ok(status) => format!("{command:?} failed: {status}"),
        Err(error) => format!("cannot start {command:?}: {error}"),
    };
    let hint = hint().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
    panic!("{problem}{hint}");
}

/// Compiles machine code for Ampere, Hopper and Blackwell, and PTX that the driver compiles for other
/// GPUs. Kernels for Hopper alone are machine code for it.
fn compile_for_gpus(out: &Path) {
    let toolkit = toolkit::find(|name| std::env::var_os(name), toolkit_version);
    let toolkit = toolkit.unwrap_or_else(|message| panic!("{message}"));
    let version = &toolkit.version;
    let mut codes = vec!["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90"];
    // From the same PTX as the driver would compile.
    if toolkit::is_at_least(version, (12, 8)) {
        codes.extend(["arch=compute_80,code=sm_100", "arch=compute_80,code=sm_120"]);
    }
    let names: Vec<&str> = codes.iter().filter_map(|code| code.rsplit('=').next()).collect();
    println!("cargo:rustc-env=TRAINER_CUDA_TOOLKIT={version}");
    println!("cargo:gpu_code=CUDA {version}: {}, sm_90a, PTX of compute_80", names.join(", "));
    codes.push("arch=compute_80,code=compute_80");
    let mut images = String::from("&[\n");
    for file in kernels(&KERNELS) {
        let name = stem(&file);
        let codes =
            if name.ends_with("_sm90") { &["arch=compute_90a,code=sm_90a"] } else { &codes[..] };
        let image = out.join(format!("{name}.fatbin"));
        let kernels = compile_image(&toolkit, &file, codes, &image);
        let _ = writeln!(images, "({name:?}, include_bytes!({image:?}).as_slice(), &{kernels:?}),");
    }
    images.push(']');
    fs::write(out.join("kernels.rs"), images).expect("OUT_DIR is writable");
    link(&toolkit.home);
}

/// Compiles one file with nvcc, and returns the names of its kernels. The stub of nvcc writes an
/// empty image and no names.
fn compile_image(toolkit: &Toolkit, file: &Path, codes: &[&str], image: &Path) -> Vec<String> {
    let kept = image.with_extension("kept");
    let _ = fs::remove_dir_all(&kept);
    fs::create_dir(&kept).expect("OUT_DIR is writable");
    let mut command = Command::new(&toolkit.nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "--threads", "2", "-lineinfo"]);
    // A file has its own options in lines `// nvcc: OPTION`, which scripts/cuda/ptx.sh reads too.
    let source = fs::read_to_string(file).expect("the sources are text");
    command.args(source.lines().filter_map(|line| line.strip_prefix("// nvcc: ")));
    for code in codes {
        command.args(["-gencode", code]);
    }
    // As cudaforge does: older versions of nvcc do not read the variable.
    if let Some(compiler) = std::env::var_os("NVCC_CCBIN") {
        command.arg("-ccbin").arg(compiler);
    }
    command.arg("--keep").arg("--keep-dir").arg(&kept);
    command.args(includes()).arg("-o").arg(image).arg(file);
    run(&mut command, || newer_host_compiler(&toolkit.home));
    // The folder has the PTX of each kernel, with a line `.visible .entry name(`.
    let mut kernels = BTreeSet::new();
    for entry in fs::read_dir(&kept).expect("the folder was created") {
        let path = entry.expect("readable").path();
        if path.extension().is_some_and(|extension| extension == "ptx") {
            let text = fs::read_to_string(&path).expect("PTX is text");
            let entries = text.lines().filter_map(|line| line.split_once(".entry "));
            kernels
                .extend(entries.filter_map(|(_, rest)| Some(rest.split_once('(')?.0.to_owned())));
        }
    }
    let _ = fs::remove_dir_all(&kept);
    let is_stub = fs::metadata(image).is_ok_and(|image| image.len() == 0);
    assert!(is_stub || !kernels.is_empty(), "nvcc kept no PTX of {file:?}");
    kernels.into_iter().collect()
}

/// Says why nvcc failed if the host compiler is too new for it.
fn newer_host_compiler(home: &Path) -> Option<String> {
    let compiler = std::env::var_os("NVCC_CCBIN").unwrap_or_else(|| "gcc".into());
    let limits = fs::read_to_string(home.join("include/crt/host_config.h")).ok()?;
    let output = Command::new(&compiler).arg("-dumpfullversion").output().ok()?;
    let version = String::from_utf8_lossy(&output.stdout);
    toolkit::too_new(&limits, &compiler.to_string_lossy(), &version)
}

/// Links with the libraries of this toolkit rather than with those that cudarc finds. The program
/// finds them there too, unless the folder has only stubs for the linker, and in `../lib`.
fn link(home: &Path) {
    let mut found = Vec::new();
    for folder in ["lib64", "lib", "targets/x86_64-linux/lib"].map(|folder| home.join(folder)) {
        for folder in [folder.clone(), folder.join("stubs")].iter().filter(|path| path.is_dir()) {
            println!("cargo:rustc-link-search=native={}", folder.display());
        }
        let mut names = fs::read_dir(&folder).into_iter().flatten().flatten();
        if names.any(|name| name.file_name().to_string_lossy().starts_with("libcublas.so.")) {
            found.push(folder.display().to_string());
        }
    }
    if !found.is_empty() {
        // For the programs of this package's tests, and for the root package, which links the others.
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", found.join(":"));
        println!("cargo:cuda_libraries={}", found.join(":"));
    }
}

/// The version of an nvcc, such as `13.0`; nothing if it does not run.
fn toolkit_version(nvcc: &Path) -> Option<String> {
    let output = Command::new(nvcc).arg("--version").output().ok()?;
    toolkit::release(&String::from_utf8_lossy(&output.stdout))
}

/// Compiles the kernels into one archive. It is linked with `whole-archive`, because the kernels
/// register themselves in static initializers.
fn compile_for_the_host(out: &Path) {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut files = kernels(EMULATED);
    files.push(Path::new(SOURCES).join("emulation/emulation.cpp"));
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
    run(Command::new("ar").arg("crs").arg(&archive).args(&objects), || {
        Some("install binutils".to_owned())
    });
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
    run(&mut command, || Some("install a C++ compiler (g++)".to_owned()));
    object
}
