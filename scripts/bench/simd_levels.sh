#!/usr/bin/env bash
# Times the ops of `trainer bench --ops` at each SIMD level. Each round runs all levels; the best of
# all rounds is printed. Without FILTER, only elementwise ops and norms run.
#   scripts/bench/simd_levels.sh [ROUNDS] [FILTER..]
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-3}
shift $(($# < 1 ? $# : 1))
[ $# -gt 0 ] || set -- norm swiglu gelu adamw
out=target/simd_levels.txt
: >"$out"
for _ in $(seq "$rounds"); do
  for filter; do
    for level in avx512 avx2 baseline; do
      TRAINER_SIMD=$level target/release/trainer bench --ops --filter "$filter" --json 2>/dev/null | sed "s/^/$level /" >>"$out" ||
        echo "this CPU does not support \`$level\`" >&2
    done
  done
done
awk '
  match($0, /"ms":[0-9.]+/) {
    ms = substr($0, RSTART + 5, RLENGTH - 5) + 0
    level = $1
    name = $0; sub(/.*"name":"/, "", name); sub(/".*/, "", name)
    if (!(name in seen)) { seen[name] = 1; order[++count] = name }
    if (!((name, level) in best) || ms < best[name, level]) best[name, level] = ms
  }
  END {
    printf "%-36s %9s %9s %9s\n", "ms", "avx512", "avx2", "baseline"
    for (i = 1; i <= count; i++) { n = order[i]; printf "%-36s %9.2f %9.2f %9.2f\n", n, best[n, "avx512"], best[n, "avx2"], best[n, "baseline"] }
  }' "$out"
