#!/usr/bin/env bash
# The first time on a GPU, in four calls that each end within LIMIT_S (570) seconds, for a machine that is
# available for a short time only. Needs only the archive of scripts/cuda/build.sh and python3.
#   scripts/cuda/first_run.sh 1    correctness: gpu_test.sh without the sanitizers, the ops first
#   scripts/cuda/first_run.sh 2    compute-sanitizer on the ops
#   scripts/cuda/first_run.sh 3    ops against the peaks of this GPU and PyTorch's
#   scripts/cuda/first_run.sh 4    steps; seconds to the first step; the steps in PyTorch
# Without arguments, all four run. Calls add to target/cuda/first_run: logs, results, the state of each
# part, and a page of everything so far, page.md. If OUT is set, this folder receives three files:
# page.md, results.tar.xz, and the output of the call.
# A part has passed, has failed, was skipped, or is not finished because its time was too short; the same
# call may be repeated with more time. Exit code: 1 if a part of the call has failed, otherwise 75 if one
# is not finished, otherwise 0. If call 1 has failed, 3 and 4 run nothing and end with 1: wrong values make
# their figures worthless (FORCE=1 runs them).
# SHAPES is chosen by the memory of the GPU: 4B, 2B and 8B above 125 GB; 2B, and adapters of 4B and 8B,
# above 75 GB; otherwise only an adapter of 2B.
# TINY=1 scripts/cuda/first_run.sh [ARCHIVE] tests all this on a machine without a GPU, in minutes, with the
# limits of such a machine: 64 MiB go there, 8 files come back, a command is killed after its time. ARCHIVE
# is a pack.sh of a bundle with emulated kernels:
#   scripts/cuda/bundle.sh FOLDER cuda-emulation TARGET && scripts/cuda/pack.sh FOLDER ARCHIVE
set -uo pipefail
back=${OUT:+$(realpath -m "$OUT")}
cd "$(dirname "$0")/../.." || exit
limit=${LIMIT_S:-570} failed=() left_over=()
export OUT=$PWD/target/cuda/first_run BUNDLE=${BUNDLE:-target/cuda/bundle} DEVICE=${DEVICE:-cuda:0}
export TRAINER=${TRAINER:-$BUNDLE/trainer}

# Unpacks the archive, and makes the calls there under the limits of such a machine.
rehearse() { # archive
  local place built code call expected seconds
  archive=$(realpath "$1") place=$(mktemp -d)
  [ "$(stat -c %s "$archive")" -le $((64 << 20)) ] || { echo "error: $archive has more than 64 MiB" && exit 1; }
  mkdir "$place/tree" "$place/bin"
  tar -C "$place/tree" -xJmf "$archive"
  built=$(head -n 1 "$place/tree/target/cuda/bundle/built_in")
  # A compute-sanitizer that runs the tests and checks nothing.
  printf '#!/bin/sh\nwhile [ "$1" != "${1#-}" ]; do case $1 in --tool | --report-api-errors | --error-exitcode) shift ;; esac; shift; done\nexec "$@"\n' >"$place/bin/compute-sanitizer"
  chmod +x "$place/bin/compute-sanitizer"
  # The last two calls have too little time for call 1, and tests that fail.
  while read -r call expected seconds; do
    [ "$call" != 3! ] || echo failed >"$place/tree/target/cuda/first_run/tests.status"
    rm -rf "$place/out"
    mkdir "$place/out"
    code=0
    # The tests read files from the path at which they were built: in this mount, only the packed files.
    TINY=1 OUT=$place/out LIMIT_S=$seconds PATH=$place/bin:$PATH timeout -s KILL $((seconds + 30)) unshare --map-root-user --mount bash -c \
      'mkdir -p "$1" && mount --bind "$0" "$1" && cd "$1" && exec scripts/cuda/first_run.sh "$2"' "$place/tree" "$built" "${call%!}" </dev/null || code=$?
    echo "call $call ended with $code; $(cd "$place/out" && find . -mindepth 1 -printf '%P %k KiB, ')"
    [ "$code" = "$expected" ] || { echo "FAILED: expected $expected; see $place" && exit 1; }
    [ -z "$(find "$place/out" -mindepth 1 ! -type f -o -size +16M)" ] && [ "$(find "$place/out" -type f | wc -l)" -le 8 ] && [ -s "$place/out/results.tar.xz" ] ||
      { echo "FAILED: not these files; see $place/out" && exit 1; }
    [ "$expected" = 0 ] || grep -E "^\| .*\| (not finished|failed|skipped)" "$place/out/page.md" || { echo "FAILED: the page has no state of this call; see $place/out" && exit 1; }
    cp "$place/out/page.md" "target/cuda/tiny_page_$call.md"
  done <<CALLS
1 0 $limit
2 0 $limit
3 0 $limit
4 0 $limit
1! 75 20
3! 1 20
CALLS
  rm -rf "$place"
  echo "ok: the calls of a first run"
}
if [ -n "${TINY:-}" ] && [[ ${1:-archive} != [1-4] ]]; then
  mkdir -p target/cuda
  rehearse "${1:-target/cuda/bundle.tar.xz}"
  exit
fi
[ $# -gt 0 ] || set -- 1 2 3 4
for call in "$@"; do [[ $call == [1-4] ]] || { echo "unknown call \`$call\`, expected 1, 2, 3 or 4" >&2 && exit 64; }; done

mkdir -p "$OUT"
if [ -n "$back" ]; then mkdir -p "$back" && exec > >(tee "$back/call_$(tr -d ' ' <<<"$*").log") 2>&1; fi
. scripts/cuda/machine.sh
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null >"$OUT/gpu.txt"
# In GiB, by `trainer plan` for packs of text: 4B 115, 2B 57; adapters of 8B 67, of 4B 49.
memory=$(grep -om 1 '[0-9]* MiB' "$OUT/gpu.txt" | cut -d' ' -f1)
if [ "${memory:-0}" -gt 125000 ]; then shapes="4b 2b 8b"; elif [ "${memory:-0}" -gt 75000 ]; then shapes="2b 4b+adapter 8b+adapter"; else shapes=2b+adapter; fi
export SHAPES=${SHAPES:-$shapes} MIXES=${MIXES:-text vl hires}
correctness=(ops mma laws curves adapters resume poison ranks memory)
if [ -n "${TINY:-}" ]; then
  correctness=(ops laws curves adapters resume)
  export DEVICE=cpu TRAINER_EMULATE_CUDA=1 STEPS=2 SHAPES="2b 2b+adapter" MIXES=text
fi
first=${SHAPES%% *}

publish() {
  "$python" tests/bench/gpu_page.py "$OUT" "$TRAINER" >"$OUT/page.new" && mv "$OUT/page.new" "$OUT/page.md"
  [ -n "$back" ] || return 0
  cp "$OUT/page.md" "$back"
  (cd "$OUT" && find . -type f -size -4M -regex '.*\.\(log\|jsonl\|json\|txt\|md\|yaml\|status\)' -print0 | tar -c --null -T - | xz -6) >"$back/results.tar.xz"
}
state() { # part, state
  echo "$2" >"$OUT/$1.status"
  publish
}
# Runs a command with at most `most` of the seconds that are left. If the call is killed meanwhile, the
# part is not finished.
part() { # name, most, command..
  local name=$1 most=$2 code=75 left=$((ends - EPOCHSECONDS))
  shift 2
  [ "$left" -le "$most" ] || left=$most
  echo "=== $name, at most $left s"
  state "$name" "not finished"
  if [ "$left" -ge 10 ]; then
    LIMIT_S=$left timeout --kill-after 5 $((left + 5)) "$@" 2>&1 | tee "$OUT/$name.log"
    code=${PIPESTATUS[0]}
  fi
  case $code in
    0) state "$name" "passed" ;;
    75 | 124 | 137) left_over+=("$name") ;;
    *) failed+=("$name") && state "$name" "failed" ;;
  esac
}
is_right() {
  [ "$(cat "$OUT/tests.status" 2>/dev/null)" != failed ] || [ -n "${FORCE:-}" ] || {
    echo "the tests of call 1 have failed: no benchmarks (FORCE=1 runs them)"
    failed+=("benchmarks, which did not run")
    return 1
  }
}

sanitizers() {
  command -v compute-sanitizer >/dev/null || { state sanitizers "skipped: no compute-sanitizer"; return; }
  part sanitizers "$limit" env OUT="$OUT/sanitizers" scripts/cuda/gpu_test.sh sanitizers
}
ops() {
  part ops $((limit * 2 / 3)) scripts/cuda/gpu_bench.sh ops
}
steps() {
  RUN_S=${RUN_S:-380} part steps $((limit * 2 / 3)) scripts/cuda/gpu_bench.sh step
  if [[ $first == *+* ]]; then state start "skipped: no GPU with 75 GB"; else part start 60 scripts/cuda/gpu_bench.sh start; fi
  if [[ $first == *+* ]] || ! "$python" -c 'import torch' 2>/dev/null; then state torch "skipped: no PyTorch, or no GPU with 75 GB"; return; fi
  TORCH_SHAPES=$first MIXES=text part torch "$limit" scripts/cuda/gpu_bench.sh torch
}

for call in "$@"; do
  ends=$((EPOCHSECONDS + limit - 10)) # the page and the archive need some time
  case $call in
    1) part tests "$limit" env OUT="$OUT/test" scripts/cuda/gpu_test.sh "${correctness[@]}" ;;
    2) sanitizers ;;
    3) is_right && ops ;;
    4) is_right && steps ;;
  esac
done
publish || failed+=(page)
code=0
if [ ${#left_over[@]} -gt 0 ]; then echo "NOT FINISHED: ${left_over[*]}" && code=$unfinished; fi
if [ ${#failed[@]} -gt 0 ]; then echo "FAILED: ${failed[*]}" && code=1; fi
echo "wrote $OUT/page.md"
exec >&- 2>&-
wait # for the copy of the output
exit $code
