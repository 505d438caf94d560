#!/usr/bin/env bash
# Writes tests/fixtures/videos from the frames of tests/golden/data/video. Needs the `ffmpeg` program
# (5.1 was used).
#   pan.mkv   8 frames, 4 per second, lossless RGB; the header has a duration but no frame count
#   pan.mp4   the same in H.264, with frames that depend on later ones
#   tall.mp4  5 frames, 4 per second, lossless RGB
set -euo pipefail
cd "$(dirname "$0")/../.."
frames=tests/golden/data/video
out=tests/fixtures/videos
mkdir -p "$out"
exact=(-fflags +bitexact -flags:v +bitexact)
ffmpeg -v error -y -framerate 4 -i "$frames/pan_%d.png" -c:v ffv1 -pix_fmt bgr0 "${exact[@]}" "$out/pan.mkv"
ffmpeg -v error -y -framerate 4 -i "$frames/pan_%d.png" -c:v libx264 -pix_fmt yuv420p -crf 18 "${exact[@]}" "$out/pan.mp4"
ffmpeg -v error -y -framerate 4 -i "$frames/tall_%d.png" -c:v libx264rgb -qp 0 "${exact[@]}" "$out/tall.mp4"
