#!/bin/sh
# Prints the path of the program with the unit tests of a crate, and compiles it if needed:
#   "$(scripts/test_program.sh kernels cuda-emulation)" attention
# All crates are compiled with the features, as by `cargo test --workspace`, so that a change of the
# crate does not compile the crates below it again.
set -eu
cd "$(dirname "$0")/.."
crate=$1 features=$2
cargo test --release --workspace --features "$features" --lib --no-run --message-format json |
  sed -n "s/.*\"target\":{\"kind\":\[\"lib\"\][^}]*\"name\":\"$crate\".*\"executable\":\"\([^\"]*\)\".*/\1/p"
