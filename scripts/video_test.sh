#!/usr/bin/env bash
# Runs the tests of videos with `--features video`; .ci/run runs them among all others.
#   scripts/video_test.sh
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install_dependencies.sh video
# One command, so that the library and its tests compile at the same time.
cargo test --release --workspace --features video --lib --test integration -- video
