#!/usr/bin/env bash
# Compiles every kernel to PTX, with the pinned compiler of toolkit.sh, and prints the folder:
#   export TRAINER_PTX=$(scripts/cuda/ptx.sh)
# PTX_NVCC=FILE takes another compiler, and another folder.
# A GPU of compute capability 8.0 runs the kernels in its folder `80`, one of 9.0 those in `90` and `90a`.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$PWD/target/cuda/kernels
if [ -n "${PTX_NVCC:-}" ]; then
  export nvcc=$PTX_NVCC folder=$folder-of-another-compiler
  mkdir -p target/cuda
else
  eval "$(scripts/cuda/toolkit.sh)"
  export nvcc=$CUDA_HOME/bin/nvcc
fi
# The files of an earlier run stay if nothing changed.
{ "$nvcc" --version && sha256sum scripts/cuda/ptx.sh $(find crates/kernels/src/cuda/kernels -type f | sort); } | sha256sum >"$folder.sha256.new"
if ! [ -d "$folder" ] || ! cmp -s "$folder.sha256.new" "$folder.sha256"; then
  rm -rf "$folder" "$folder.sha256" "$folder.new"
  mkdir -p "$folder.new"/{80,90,90a}
  {
    for arch in 80 90; do printf "$arch %s\n" crates/kernels/src/cuda/kernels/{common,sm80}/*.cu; done
    printf '90a %s\n' crates/kernels/src/cuda/kernels/sm90/*.cu
  } | FOLDER=$folder.new xargs -P "$(nproc)" -L 1 bash -c '
    file=$(basename "$2" .cu)
    mapfile -t options < <(sed -n "s|^// nvcc: ||p" "$2") # as in crates/kernels/build.rs
    "$nvcc" -ptx "-arch=sm_$1" -O3 -std=c++17 -Werror all-warnings -lineinfo "${options[@]}" -Icrates/kernels/src/cuda/kernels/common -o "$FOLDER/$1/$file.ptx" "$2"' _
  mv "$folder.new" "$folder"
  mv "$folder.sha256.new" "$folder.sha256"
fi
echo "$folder"
