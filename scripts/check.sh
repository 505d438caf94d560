#!/usr/bin/env bash
# Checks prose, formatting, lints and documentation, in the release profile. A warning is an error.
#   scripts/check.sh
# FEATURES=video,mpi also lints these features, which need the development files of FFmpeg and MPI.
set -euo pipefail
cd "$(dirname "$0")/.."

step() {
  local before=$SECONDS
  echo "== $*"
  "$@"
  echo "== $((SECONDS - before)) s"
}

step sh scripts/check_prose.sh
step cargo fmt --check
step cargo clippy --release --workspace --all-targets --features "${FEATURES:-}" -- -D warnings
# The tests with the default features, which users build, and the program without any.
[ -z "${FEATURES:-}" ] || step cargo clippy --release --workspace --all-targets -- -D warnings
step cargo clippy --release --workspace --lib --bins --no-default-features -- -D warnings
RUSTDOCFLAGS="-D warnings" step cargo doc --release --workspace --no-deps
