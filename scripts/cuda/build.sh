#!/usr/bin/env bash
# Builds the binary and the tests with CUDA on a machine without a GPU, and packs them so that they can be copied to one that
# has neither cargo nor network: target/cuda/bundle/{trainer,unit_tests,integration_tests}. About 9 minutes of CPU time the
# first time, most of it candle's own kernels.   scripts/cuda/build.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
eval "$(scripts/cuda/toolkit.sh)"
# 80: code that Ampere runs and later GPUs compile when they load it. 90 would become `90a`, which runs on Hopper alone.
export CUDA_COMPUTE_CAP=80 CUDAFORGE_THREADS=$(nproc) CUDARC_CUDA_VERSION=13000
export LIBRARY_PATH=$CUDA_HOME/lib:$CUDA_HOME/lib/stubs RUSTFLAGS="${RUSTFLAGS:-} -C link-arg=-Wl,--allow-shlib-undefined"
target=target/cuda-build
cargo build --release --features cuda --target-dir "$target"
bundle=target/cuda/bundle
mkdir -p "$bundle"
install -s -m 755 "$target/release/trainer" "$bundle/trainer"
cargo test --release --features cuda --target-dir "$target" --no-run --message-format json |
  grep -o '"executable":"[^"]*"' | cut -d'"' -f4 | while read -r test; do
  case $(basename "$test") in
    integration-*) install -s -m 755 "$test" "$bundle/integration_tests" ;;
    trainer-*) install -s -m 755 "$test" "$bundle/unit_tests" ;;
  esac
done
pwd >"$bundle/built_in" # tests look for their files there
ls -l "$bundle"
