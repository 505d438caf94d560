#!/usr/bin/env bash
# Runs the binary on emulated CPUs, one with AVX2 but not AVX-512 and two without AVX: the same
# binary, with all dependencies, must run there and train the same.
#   scripts/simd_test.sh [CPU..]
# Needs qemu-x86_64 (package `qemu-user`) and takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v qemu-x86_64 >/dev/null || { echo "qemu-x86_64 not found: install the package qemu-user" >&2; exit 1; }
out=target/simd
rm -rf "$out"
mkdir -p "$out"
train() { # name, runner..
  local name=$1
  shift
  "$@" target/release/trainer sft --config configs/quickstart.yaml --resume never \
    --set "output_dir=$out/$name" --set train.max_steps=3 --set 'data.eval=[]' >"$out/$name.log" 2>&1
}
figures() { # name: loss and gradient norm of each step
  sed 's/.*"loss":\([^,]*\),"grad_norm":\([^,]*\),.*/\1 \2/' "$out/$1/metrics.jsonl"
}
level() { sed -n 's/.*simd=\([a-z0-9]*\).*/\1/p' "$out/$1.log"; }
row() { # name, seconds, largest difference
  printf '%-12s %-10s %6s s  %s\n' "$1" "$(level "$1")" "$2" "$3"
}

echo "CPU          level       wall    largest relative difference of loss and gradient norm in 3 steps"
begin=$SECONDS
train native env
row native $((SECONDS - begin)) -
[ $# -gt 0 ] || set -- Haswell Nehalem qemu64
failed=0
for cpu; do
  begin=$SECONDS
  if ! train "$cpu" qemu-x86_64 -cpu "$cpu"; then
    echo "$cpu: failed" >&2
    tail -n 5 "$out/$cpu.log" >&2
    failed=1
    continue
  fi
  difference=$(paste -d ' ' <(figures native) <(figures "$cpu") | awk '
    function far(a, b) { return a > b ? (a - b) / a : (b - a) / a }
    { loss = far($1, $3); norm = far($2, $4); worst = loss > worst ? loss : worst; worst = norm > worst ? norm : worst }
    END { printf "%.1e", NR == 3 ? worst : 1 }')
  row "$cpu" $((SECONDS - begin)) "$difference"
  awk -v d="$difference" 'BEGIN { exit !(d < 1e-4) }' || { echo "$cpu: loss or gradient norm differs by $difference, limit 1e-4" >&2; failed=1; }
done
exit $failed
