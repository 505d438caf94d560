#!/usr/bin/env bash
# Installs a pinned CUDA 13.0 compiler from PyPI wheels into a folder, no GPU and no root needed, and prints the line that
# puts it to use:   eval "$(scripts/cuda/toolkit.sh)"          (104 MB; folder: target/cuda, or the first argument)
# The libraries that a build links by name only (the driver, cuBLAS, cuRAND, NVRTC) are stubs made here: the real ones are
# those of the machine that runs the binary. Needs python3 with venv, and gcc.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${1:-target/cuda}")
home=$folder/home
if ! [ -x "$home/bin/nvcc" ] || ! [ -e "$home/lib/stubs/named/libcuda.so.1" ]; then
  mkdir -p "$folder"
  {
    python3 -m venv "$folder/venv"
    # nvcc above 13.0 writes PTX that drivers of the 580 line refuse.
    "$folder/venv/bin/pip" install -q --no-deps 'nvidia-cuda-nvcc==13.0.88' 'nvidia-cuda-crt==13.0.88' 'nvidia-nvvm==13.0.88' \
      'nvidia-cuda-runtime==13.0.96' 'nvidia-cuda-cccl==13.0.85'
    ln -sfn "$(echo "$folder"/venv/lib/python3*/site-packages/nvidia/cu13)" "$home"
    ln -sfn lib "$home/lib64"
    ln -sf libcudart.so.13 "$home/lib/libcudart.so"
    # Names out of the bindings that the build uses; a name is all that the linker needs. Called, each says "no device" (100),
    # so that build.sh can see the binary start.
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
    rm "$home/lib/libcuda.so" # only where the linker is told to look for the driver
  } >&2
fi
echo "export CUDA_HOME='$home' PATH='$home/bin':\"\$PATH\""
