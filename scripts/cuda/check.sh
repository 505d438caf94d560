#!/usr/bin/env bash
# Checks the CUDA code without a GPU. Runs the named parts, or all of them:
#   scripts/cuda/check.sh [types] [emulated] [nvcc]
#   types     clippy for the features `cuda` and `flash-attn`, with a stub in place of nvcc
#   emulated  the tests of the ops and of the model (`laws`), with every CUDA kernel emulated
#             on the CPU
#   nvcc      compiles every kernel for sm_80 and sm_90 with the pinned compiler of toolkit.sh;
#             register spills are errors
set -euo pipefail
cd "$(dirname "$0")/../.."

types() {
  # With this cache, candle-flash-attn does not download CUTLASS. The stub compiles nothing of it.
  local cutlass=target/cuda-check/cache/git/checkouts/cutlass-7d49e6c7e2f8896c
  mkdir -p "$cutlass/include"
  [ -d "$cutlass/.git" ] || git init -q "$cutlass"
  echo 7d49e6c7e2f8896c47f586706e67e1fb215529dc >"$cutlass/.git/HEAD"
  CUDAFORGE_HOME=$PWD/target/cuda-check/cache env -u CUDA_HOME PATH="$PWD/scripts/cuda/stub:$PATH" CUDA_COMPUTE_CAP=80 CUDARC_CUDA_VERSION=13000 NVCC="$PWD/scripts/cuda/stub/nvcc" \
    cargo clippy --release --features flash-attn --lib --bins -- -D warnings
}

emulated() {
  export TRAINER_EMULATE_CUDA=1
  cargo test --release --features cuda-emulation --lib -- ops:: optim::
  cargo test --release --features cuda-emulation --test integration -- laws parity --skip follow_the_reference
}

# Prints one line per kernel: architecture and file, name, registers, spilled bytes.
registers() { # architecture, file
  local log
  log=$("$CUDA_HOME/bin/nvcc" -cubin "-arch=sm_$1" -O3 -std=c++17 -Werror all-warnings -Xptxas -v -Isrc/ops/cuda/kernels/common -o /dev/null "$2" 2>&1) || { echo "$log" >&2; return 1; }
  awk -v where="sm_$1 $(basename "$2")" '
    /Compiling entry function/ { split($0, part, "\047"); name = part[2] }
    /bytes spill stores/ { if ($5 > 0 || $9 > 0) { spills = $5 + $9 } else spills = 0 }
    /Used [0-9]+ registers/ { match($0, /Used [0-9]+/); printf "%-32s %-44s %3d registers, %d bytes spilled\n", where, name, substr($0, RSTART + 5), spills }
  ' <<<"$log"
}

nvcc() {
  eval "$(scripts/cuda/toolkit.sh)"
  mkdir -p target/cuda
  local list=target/cuda/registers.txt
  export -f registers
  for arch in 80 90; do printf "$arch %s\n" src/ops/cuda/kernels/*/*.cu; done |
    xargs -P "$(nproc)" -L 1 bash -c 'registers "$@"' _ >"$list.new"
  sort "$list.new" >"$list"
  rm "$list.new"
  if grep -v ' 0 bytes spilled' "$list"; then echo "error: the kernels above spill registers"; exit 1; fi
  awk '{ if ($4 > most) most = $4 } END { print NR " kernels, at most " most " registers, no spills: '"$list"'" }' "$list"
}

[ $# -gt 0 ] || set -- types emulated nvcc
for part in "$@"; do
  case $part in
    types | emulated | nvcc) ;;
    *) echo "unknown part \`$part\`, expected types, emulated or nvcc" >&2; exit 64 ;;
  esac
  echo "=== CUDA: $part"
  "$part"
done
