#!/usr/bin/env bash
# Builds the binary and the tests with CUDA on a machine without a GPU:
#   scripts/cuda/build.sh
# Writes target/cuda/bundle/{trainer,unit_tests,integration_tests}, and target/cuda/bundle.tar.xz
# (pack.sh) for a machine that has a GPU but neither cargo nor a network.
# FEATURES=cuda,mpi adds MPI; the GPU machine then needs OpenMPI's library too.
# The first build takes about 8 minutes of CPU time, mostly for candle's own kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."
eval "$(scripts/cuda/toolkit.sh)"
# 80: Ampere runs this code directly, and the driver compiles it for later GPUs when it loads it.
# The build turns 90 into `90a`, which runs only on Hopper.
export CUDA_COMPUTE_CAP=80 CUDAFORGE_THREADS=$(nproc) CUDARC_CUDA_VERSION=13000
export LIBRARY_PATH=$CUDA_HOME/lib:$CUDA_HOME/lib/stubs RUSTFLAGS="${RUSTFLAGS:-} -C link-arg=-Wl,--allow-shlib-undefined"
target=target/cuda-build
features=${FEATURES:-cuda}
bundle=target/cuda/bundle
scripts/cuda/bundle.sh "$bundle" "$features" "$target"
ls -l "$bundle"
scripts/cuda/pack.sh

# With stubs of the driver and the libraries, the binary must start, find no GPU, and train on the
# CPU.
out=target/cuda/smoke
rm -rf "$out"
LD_LIBRARY_PATH=$CUDA_HOME/lib/stubs/named RUST_BACKTRACE=0 "$bundle/trainer" sft --config configs/quickstart.yaml --set device=auto \
  --set "output_dir=$out" --set train.max_steps=5 --set 'data.eval=[]' >"$out.log" 2>&1 || {
  cat "$out.log"
  exit 1
}
grep 'found no usable GPU' "$out.log"
[ -s "$out/final/model.safetensors" ]
echo "ok: the binary starts without a GPU and trains on the CPU"

