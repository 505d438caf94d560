#!/usr/bin/env bash
# The length cache: rows a second by kind of row, memory, the same again, with another max_pixels, and how long a run that resumes
# near the end of its data takes to its next step, with the cache and without.
#   scripts/bench/cache.sh [ROWS]
# TOKENIZER=FILE: a published tokenizer.json instead of the tests' one. FOLDER=DIR: where rows and caches go. TRAINER=FILE: another
# binary. COLD=COMMAND: run before each first pass, to empty the page cache. Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rows=${1:-1000000} work=${FOLDER:-target/bench_cache} trainer=${TRAINER:-./target/release/trainer}
PYTHONDONTWRITEBYTECODE=1 "$python" tests/bench/cache_rows.py "$work" --rows "$rows" ${TOKENIZER:+--tokenizer "$TOKENIZER"} >&2

pass() { # NAME ROWS KEY=VALUE..: seconds, memory, what was done
  local name=$1 file=$2 set=()
  shift 2
  for key in "$@"; do set+=(--set "$key"); done
  cat >"$work/$file.yaml" <<YAML
output_dir: $work/run-$file
model: {path: $work/model, weights: random, freeze: [vision, merger]}
data:
  train: [{path: $work/$file.jsonl, image_root: $work/images}]
  packing_length: 4096
train: {epochs: 1}
YAML
  "$python" - "$name" "$rows" "$trainer" cache --config "$work/$file.yaml" "${set[@]}" <<'PY'
import resource, subprocess, sys, time
name, rows, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
begin = time.perf_counter()
done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
seconds = time.perf_counter() - begin
if done.returncode:
    sys.exit(done.stderr)
memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
work = next(line.split("cache ", 1)[1] for line in done.stderr.splitlines() if "measured=" in line)
print(f"| {name} | {seconds:.2f} | {rows / seconds:,.0f} | {memory:.0f} | {work} |", flush=True)
PY
}

echo "| pass | s | rows/s | peak MiB | |"
echo "|---|---|---|---|---|"
for file in images text; do
  rm -rf "$work/run-$file"
  ${COLD:-true}
  pass "$file, first" $file
  pass "$file, again" $file
  pass "$file, other max_pixels" $file data.image.max_pixels=401408
done
