#!/usr/bin/env bash
# Installs a pinned CUDA 13.0 compiler and a disassembler from PyPI wheels (109 MB) and prints the shell line that
# activates it:
#   eval "$(scripts/cuda/toolkit.sh [FOLDER])"          default folder: target/cuda
# Needs python3 with venv, and gcc, but neither a GPU nor root.
# The driver, cuBLAS, cuRAND and NVRTC are replaced by stub libraries, which is enough for linking;
# the machine that runs the binary provides the real ones.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${1:-target/cuda}")
home=$folder/home
if ! [ -x "$home/bin/nvcc" ] || ! [ -x "$home/bin/nvdisasm" ] || ! [ -e "$home/lib/stubs/named/libcuda.so.1" ]; then
  mkdir -p "$folder"
  {
    python3 -m venv "$folder/venv"
    # nvcc newer than 13.0 writes PTX that 580 drivers reject. There is no nvdisasm older than 13.2.
    "$folder/venv/bin/python" -m pip install -q --no-deps 'nvidia-cuda-nvcc==13.0.88' 'nvidia-cuda-crt==13.0.88' 'nvidia-nvvm==13.0.88' \
      'nvidia-cuda-runtime==13.0.96' 'nvidia-cuda-cccl==13.0.85' 'nvidia-cuda-nvdisasm==13.2.51'
    ln -sfn "$(echo "$folder"/venv/lib/python3*/site-packages/nvidia/cu13)" "$home"
    ln -sfn lib "$home/lib64"
    ln -sf libcudart.so.13 "$home/lib/libcudart.so"
    # The linker needs only the names of the functions; they are taken from the bindings of the
    # build. Each stub returns 100 ("no device"), so that build.sh can start the binary.
    cargo fetch -q
    bindings=$(cargo metadata -q --format-version 1 --features cuda | grep -o '"manifest_path":"[^"]*cudarc-[^"]*Cargo.toml"' | head -n 1 | cut -d'"' -f4)
    sources=$(dirname "$bindings")/src
    mkdir -p "$home/lib/stubs/named"
    ln -sf ../../libcudart.so.13 "$home/lib/stubs/named/libcudart.so.13"
    stub() { # library, soname, folder of its bindings, prefix of its functions
      grep -rhoE "fn $4[A-Za-z0-9_]*" "$sources/$3/sys" | awk '{print "int " $2 "(void){return 100;}"}' | sort -u |
        gcc -x c -shared -fPIC -w -Wl,-soname,"$2" -o "$home/lib/stubs/lib$1.so" -
      cp "$home/lib/stubs/lib$1.so" "$home/lib/lib$1.so"
      ln -sf "../lib$1.so" "$home/lib/stubs/named/$2"
    }
    stub cublas libcublas.so.13 cublas cublas
    stub cublasLt libcublasLt.so.13 cublaslt cublasLt
    stub curand libcurand.so.10 curand curand
    stub nvrtc libnvrtc.so.13 nvrtc nvrtc
    stub cuda libcuda.so.1 driver cu
    rm "$home/lib/libcuda.so" # the driver's stub stays in lib/stubs only
  } >&2
fi
echo "export CUDA_HOME='$home' PATH='$home/bin':\"\$PATH\""
