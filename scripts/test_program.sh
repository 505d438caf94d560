#!/usr/bin/env bash
# Prints the path of the program with the unit tests of a crate, and compiles it if needed:
#   "$(scripts/test_program.sh kernels cuda-emulation)" attention
# It is the program of `cargo test --workspace` with these features: `-p` alone would give dependencies
# other features, and compile them once more.
set -euo pipefail
cd "$(dirname "$0")/.."
crate=$1 features=$2
cargo test --release --workspace --features "$features" --lib --no-run --message-format json |
  sed -n "s/.*\"target\":{\"kind\":\[\"lib\"\][^}]*\"name\":\"$crate\".*\"executable\":\"\([^\"]*\)\".*/\1/p" | grep .
