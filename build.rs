//! Passes on which GPU code `crates/kernels` has, and where the program finds the libraries of CUDA.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let of_kernels = |name: &str| std::env::var(format!("DEP_TRAINER_KERNELS_{name}")).ok();
    let code = of_kernels("GPU_CODE").expect("the build script of `kernels` ran");
    println!("cargo:rustc-env=TRAINER_GPU_CODE={code}");
    if let Some(folders) = of_kernels("CUDA_LIBRARIES") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folders}");
    }
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        println!("cargo:rustc-link-arg-bins=-Wl,-rpath,$ORIGIN/../lib");
    }
}
