#!/usr/bin/env bash
# Builds the archives of a release for Linux on x86-64, for glibc 2.31 or later (Debian 11, Ubuntu 20.04,
# RHEL 9), with their checksums, bills of materials, and the script that installs them.
#   scripts/release.sh [OUT]      writes to OUT, by default target/release-files
# Needs python3, for `ziglang` and `cargo-zigbuild` from PyPI in target/zig. zig links against the
# symbols of an old glibc, so the machine that builds may be newer. With nvcc in PATH, it also builds
# the binary with CUDA, with the linker and the glibc of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-target/release-files}
export CARGO=${CARGO:-cargo}
glibc=2.31
target=x86_64-unknown-linux-gnu
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
tools=${ZIG_TOOLS:-target/zig}
mkdir -p "$out"
out=$(cd "$out" && pwd)

if [ ! -x "$tools/bin/cargo-zigbuild" ]; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet ziglang==0.17.1 cargo-zigbuild==0.24.0
fi
tools=$(cd "$tools" && pwd)
target_dir=${CARGO_TARGET_DIR:-target}

# The release profile keeps incremental builds for developers; a release is built once, in full.
export CARGO_INCREMENTAL=0

PATH="$tools/bin:$PATH" cargo-zigbuild zigbuild --release --locked --bin trainer --target "$target.$glibc"
binary=$target_dir/$target/release/trainer
scripts/release/pack.sh "$out" "$binary"
needed=$(tar -xzOf "$out/trainer-$version-linux-x86_64.tar.gz" "trainer-$version-linux-x86_64/share/trainer/glibc")
if [ "$(printf '%s\n' "$glibc" "$needed" | sort -V | tail -n 1)" != "$glibc" ]; then
  echo "error: the binary needs glibc $needed, expected at most $glibc" >&2
  exit 1
fi

if command -v nvcc >/dev/null; then
  "$CARGO" build --release --locked --bin trainer --features cuda --target-dir "$target_dir/cuda-release"
  scripts/release/pack.sh "$out" "$target_dir/cuda-release/release/trainer" cuda "$binary"
else
  echo "no nvcc: the binary with CUDA is not built"
fi
echo "wrote $out"
