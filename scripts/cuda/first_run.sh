#!/usr/bin/env bash
# Tests and benchmarks for a new GPU machine. Needs only a checkout with target/cuda/bundle
# (scripts/cuda/build.sh) and python3.
#   scripts/cuda/first_run.sh                  all parts, within 26 minutes
#   scripts/cuda/first_run.sh tests ops        only these, if each command has a time limit
# Parts, in this order, with their limits in seconds:
#   tests  540  gpu_test.sh: every op against its reference, the model, 50 steps against the CPU, resume
#   steps  400  gpu_bench.sh step: the text mix of 4B, 2B and 8B, then the other mixes
#   ops    300  gpu_bench.sh ops: every op against the peaks of this GPU, and against PyTorch's
#   torch  200  gpu_bench.sh torch: the 4B text mix in PyTorch, if it is installed
#   start   90  gpu_bench.sh start: seconds to the first step of the 2B shape
#   tune   180  tune.sh: the algorithms of cuBLASLt for the 4B text mix, and its steps with them; only if
#               the parts before have left time
#   page        a Markdown page of all results, OUT/page.md
# If a test has failed, no benchmark runs: wrong values make their figures worthless. FORCE=1 runs
# them all the same. OUT (target/cuda/first_run) has a log of each part and all results; the parts of
# later calls are added to it.
# TINY=1 tests the script on a machine without a GPU, in a small form: with emulated kernels if the
# bundle has them (minutes), otherwise with those of the CPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
started=$SECONDS
export OUT=${OUT:-target/cuda/first_run} BUNDLE=${BUNDLE:-target/cuda/bundle}
export TRAINER=${TRAINER:-$BUNDLE/trainer} DEVICE=${DEVICE:-cuda:0} PYTHON=${PYTHON:-python3}
most=${LIMIT_S:-1560} failed=()
if [ -n "${TINY:-}" ]; then
  export DEVICE=cpu TRAINER_EMULATE_CUDA=1 STEPS=2 SHAPES=2b
  mixes=(text)
else
  # 18 bytes for a trained parameter: 4B needs 115 GiB, 2B 57.
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
  if [ "${memory:-0}" -gt 125000 ]; then export SHAPES=${SHAPES:-4b 2b 8b}; else export SHAPES=${SHAPES:-2b}; fi
  mixes=(text vl hires)
fi
mkdir -p "$OUT"

# Runs a command with at most `limit` of the seconds that are left; its output goes to a log too.
part() { # name, limit, command..
  local name=$1 limit=$2 left=$((most - SECONDS + started))
  shift 2
  if [ "$left" -lt 30 ]; then
    echo "skipped, no time left" | tee "$OUT/$name.status"
    return 1
  fi
  echo "=== $name"
  if LIMIT_S=$((left < limit ? left : limit)) "$@" 2>&1 | tee "$OUT/$name.log"; then
    echo "passed" >"$OUT/$name.status"
  else
    echo "failed" >"$OUT/$name.status"
    failed+=("$name")
    return 1
  fi
}
is_right() {
  [ "$(cat "$OUT/tests.status" 2>/dev/null)" = passed ] || [ -n "${FORCE:-}" ] || {
    echo "the tests have not passed: no benchmarks (FORCE=1 runs them)" >&2
    return 1
  }
}
tests() { part tests 540 env OUT="$OUT/test" scripts/cuda/gpu_test.sh; }
steps() { MIXES=${MIXES:-${mixes[*]}} RUN_S=${RUN_S:-380} part steps 400 scripts/cuda/gpu_bench.sh step; }
ops() { part ops 300 scripts/cuda/gpu_bench.sh ops; }
torch() {
  "$PYTHON" -c 'import torch' 2>/dev/null || { echo "PyTorch is not installed: skipped" | tee "$OUT/torch.status" && return; }
  MIXES=${MIXES:-text} part torch 200 scripts/cuda/gpu_bench.sh torch
}
start() { part start 90 scripts/cuda/gpu_bench.sh start; }
# The steps without the table are among those of `steps`.
tune() { part tune 180 env OUT="$OUT/tune" SHAPES="${SHAPES%% *}" MIXES=text COMPARE=with scripts/cuda/tune.sh; }
page() { "$PYTHON" tests/bench/gpu_page.py "$OUT" "$TRAINER" >"$OUT/page.md" && echo "wrote $OUT/page.md"; }

[ $# -gt 0 ] || set -- tests steps ops torch start tune page
for name in "$@"; do
  case $name in
    tests) tests || { [ -n "${FORCE:-}" ] || break; } ;;
    steps | ops | torch | start | tune) is_right && "$name" || true ;;
    page) ;;
    *) echo "unknown part \`$name\`, expected tests, steps, ops, torch, start, tune or page" >&2 && exit 64 ;;
  esac
done
page || failed+=(page)
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
is_right
