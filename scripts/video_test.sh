#!/usr/bin/env bash
# Lints the code with `--features video` and runs the tests of videos. Needs FFmpeg's development
# files (Debian: libavcodec-dev libavformat-dev libavutil-dev libswscale-dev libclang-dev
# pkg-config).
set -euo pipefail
cd "$(dirname "$0")/.."
cargo clippy --release --features video --all-targets -- -D warnings
cargo test --release --features video --lib -- video
cargo test --release --features video --test integration -- video
