#!/usr/bin/env bash
# Checks formatting, lints and documentation, in the release profile. A warning is an error.
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
