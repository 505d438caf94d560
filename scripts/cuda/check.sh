#!/usr/bin/env bash
# What can be checked of CUDA without a GPU: Rust under the feature `cuda`, by clippy behind a stand-in for nvcc; every
# kernel on the host, in place of its CPU twin, under all tests of the ops and the laws of the model; and, where
# scripts/cuda/toolkit.sh has put a real nvcc ($CUDA_HOME), every kernel for sm_80 and sm_90, failing on register spills.
set -euo pipefail
cd "$(dirname "$0")/../.."

echo "=== Rust with --features cuda"
env -u CUDA_HOME PATH="$PWD/scripts/cuda/stub:$PATH" CUDA_COMPUTE_CAP=80 CUDARC_CUDA_VERSION=13000 NVCC="$PWD/scripts/cuda/stub/nvcc" \
  cargo clippy --release --target-dir target/cuda-check --features cuda --lib --bins -- -D warnings

echo "=== kernels, emulated"
export TRAINER_EMULATE_CUDA=1
cargo test --release --features cuda-emulation --lib -- ops::
cargo test --release --features cuda-emulation --test integration -- laws parity --skip follow_the_reference

[ -n "${CUDA_HOME:-}" ] || { echo "no CUDA_HOME: kernels were not compiled for GPUs"; exit 0; }
echo "=== kernels, by nvcc"
spilled=0
for arch in 80 90; do
  for file in src/ops/cuda/*.cu; do
    log=$("$CUDA_HOME/bin/nvcc" -cubin "-arch=sm_$arch" -O3 -std=c++17 -Werror all-warnings -Xptxas -v -o /dev/null "$file" 2>&1) || { echo "$log"; exit 1; }
    awk -v where="sm_$arch $(basename "$file")" '
      /Compiling entry function/ { split($0, part, "\047"); name = part[2] }
      /bytes spill stores/ { if ($5 > 0 || $9 > 0) { spills = $5 + $9 } else spills = 0 }
      /Used [0-9]+ registers/ { match($0, /Used [0-9]+/); printf "%-32s %-44s %3d registers, %d bytes spilled\n", where, name, substr($0, RSTART + 5), spills }
    ' <<<"$log" | tee -a target/cuda-registers.txt.new
  done
done
mv target/cuda-registers.txt.new target/cuda-registers.txt
if grep -v ' 0 bytes spilled' target/cuda-registers.txt; then echo "the kernels above spill registers"; exit 1; fi
