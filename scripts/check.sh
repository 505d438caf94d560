#!/usr/bin/env bash
# Formatting, lints and documentation, all in the release profile; a warning is an error. Runs from anywhere:
#   scripts/check.sh
set -euo pipefail
cd "$(dirname "$0")/.."

step() {
  local before=$SECONDS
  echo "== $*"
  "$@"
  echo "== $((SECONDS - before)) s"
}

step cargo fmt --check
step cargo clippy --release --all-targets -- -D warnings
step cargo clippy --release --all-targets --features hub -- -D warnings
RUSTDOCFLAGS="-D warnings" step cargo doc --release --no-deps
