#!/usr/bin/env bash
# Builds the binaries of a release for Linux on x86-64: stripped, for glibc 2.31 or later (Debian 11,
# Ubuntu 20.04, RHEL 9), with checksums.
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

# The highest version of glibc whose symbols a binary needs.
needed() {
  objdump -T "$1" | grep -o 'GLIBC_[0-9.]*' | cut -d_ -f2 | sort -Vu | tail -n 1
}

# Copies a binary without symbols, and prints its size and what it needs.
deliver() { # BINARY NAME
  local file="$out/trainer-$version-$2"
  strip -o "$file" "$1"
  echo "$(basename "$file"): $(stat -c %s "$file") bytes, glibc $(needed "$file") or later"
}

# The release profile keeps incremental builds for developers; a release is built once, in full.
export CARGO_INCREMENTAL=0

PATH="$tools/bin:$PATH" cargo-zigbuild zigbuild --release --locked --bin trainer --target "$target.$glibc"
deliver "$target_dir/$target/release/trainer" linux-x86_64
last=$(printf '%s\n' "$glibc" "$(needed "$out/trainer-$version-linux-x86_64")" | sort -V | tail -n 1)
if [ "$last" != "$glibc" ]; then
  echo "error: the binary needs glibc $last, expected at most $glibc" >&2
  exit 1
fi

if command -v nvcc > /dev/null; then
  "$CARGO" build --release --locked --bin trainer --features cuda --target-dir "$target_dir/cuda-release"
  deliver "$target_dir/cuda-release/release/trainer" linux-x86_64-cuda
else
  echo "no nvcc: the binary with CUDA is not built"
fi

# Completions and man pages are the same for all binaries.
first="$out/trainer-$version-linux-x86_64"
mkdir -p "$out/completions"
for shell in bash zsh fish; do
  "$first" completions "$shell" > "$out/completions/trainer.$shell"
done
"$first" man --out "$out/man" 2> /dev/null

# Messages of the program name these files.
tar -c README.md docs configs scripts/trackers/read_*.py | tar -C "$out" -x

cd "$out"
find . -type f ! -name SHA256SUMS | sort | xargs sha256sum > SHA256SUMS
echo "wrote $out"
