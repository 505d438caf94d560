#!/usr/bin/env bash
# Runs the tests of videos with `--features video`. Needs FFmpeg's development files (Debian:
# libavcodec-dev libavformat-dev libavutil-dev libswscale-dev libclang-dev pkg-config).
#   scripts/video_test.sh
# MORE_FEATURES=cuda-emulation builds with more features, so that CI compiles the crate once for
# these tests and for those of the emulated kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
features=video${MORE_FEATURES:+,$MORE_FEATURES}
# One command, so that the library and its tests compile at the same time.
cargo test --release --features "$features" --lib --test integration -- video
