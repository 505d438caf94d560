#!/usr/bin/env bash
# Packs a bundle and all other files that first_run.sh needs into one small archive; build.sh calls it:
#   scripts/cuda/pack.sh [BUNDLE] [ARCHIVE]      default: target/cuda/bundle and target/cuda/bundle.tar.xz
# The archive is a tree of its own: unpack it in an empty folder of the GPU machine and run
# scripts/cuda/first_run.sh there. Of tests/golden, it has what the tests of gpu_test.sh and the rows of
# the benchmarks read. An archive of more than 60 MiB is an error.
set -euo pipefail
cd "$(dirname "$0")/../.."
bundle=${1:-target/cuda/bundle} archive=${2:-target/cuda/bundle.tar.xz}
files=(scripts/cuda/{first_run,gpu_test,gpu_bench,machine}.sh scripts/cuda/torch_{bench,packs}.py tests/bench/gpu_{page,rows,table}.py configs/quickstart.yaml data/quickstart)
# Everything but the files of tests that do not run on a GPU.
golden=(--exclude 'tests/golden/images.*' --exclude 'tests/golden/jpeg.*' --exclude 'tests/golden/video.*' --exclude 'tests/golden/models/moe-*' tests/golden)
# The dictionary is larger than a binary, so that code that is in all three binaries is stored once.
tar -cP --owner 0 --group 0 --transform "s|^$bundle|target/cuda/bundle|" "${golden[@]}" "${files[@]}" "$bundle" | xz -T1 --lzma2=preset=9e,dict=128MiB >"$archive.new"
mv "$archive.new" "$archive"
if [ "$bundle" = target/cuda/bundle ]; then touch "$bundle/built_in"; fi # newer than the archive: machine.sh does not unpack it
size=$(stat -c %s "$archive")
checkout=$({ git ls-files -z 2>/dev/null | xargs -0 stat -c %s 2>/dev/null || true; } | awk '{ sum += $1 } END { print sum + 0 }')
echo "$archive: $((size >> 10)) KiB; with all files of this checkout: $(((size + checkout) >> 10)) KiB"
[ "$size" -le $((60 << 20)) ] || { echo "error: the archive has more than 60 MiB" >&2 && exit 1; }
