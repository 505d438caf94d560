#!/usr/bin/env bash
# Benchmark of Parquet files with images in their rows. Prints rows per second and peak memory of the
# length cache: the first pass and a second pass. Then prints how long a run that resumes at nine
# tenths of its rows takes until its data is open, and how long its next step waits for rows.
#   scripts/bench/parquet.sh [ROWS] [OPTION OF parquet_rows.py]..
# TOKENIZER=FILE  a published tokenizer.json instead of the tests' tokenizer
# FOLDER=DIR      folder for rows and caches
# TRAINER=FILE    another binary
# PYTHON=FILE     a Python with numpy, pillow and pyarrow
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rows=${1:-1000000} trainer=${TRAINER:-./target/release/trainer}
shift || true
work=${FOLDER:-target/bench_parquet}/$rows-rows$(printf '%s' "$@")
mkdir -p "$work"
data=$work/rows.parquet
[ -e "$data" ] || "$python" tests/bench/parquet_rows.py "$data" "$rows" "$@"
rm -rf "$work/model" "$work/run" && cp -r tests/golden/models/small-tied "$work/model"
[ -z "${TOKENIZER:-}" ] || cp "$TOKENIZER" "$work/model/tokenizer.json"
cat >"$work/config.yaml" <<YAML
output_dir: $work/run
model: {path: $work/model, weights: random, freeze: [vision, merger]}
data:
  train: [{path: $data}]
  packing: false
train: {max_steps: 2}
checkpoint: {every_steps: 0}
YAML

pass() { # NAME: prints seconds, rows/s, peak memory and the cache's log fields
  "$python" - "$1" "$rows" "$trainer" cache --config "$work/config.yaml" <<'PY'
import resource, subprocess, sys, time
name, rows, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
begin = time.perf_counter()
done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
seconds = time.perf_counter() - begin
if done.returncode:
    sys.exit(done.stderr)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
work = next(line.split("INFO ", 1)[1] for line in done.stderr.splitlines() if "measured=" in line)
print(f"| {name} | {seconds:.2f} | {usage.ru_utime + usage.ru_stime:.1f} | {rows / seconds:,.0f} | {usage.ru_maxrss / 1024:.0f} | {work} |", flush=True)
PY
}

ls -l "$data" | awk '{print $5 / 1e6 " MB"}'
echo "| pass | s | CPU s | rows/s | peak MiB | |"
echo "|---|---|---|---|---|---|"
pass "first"
pass "again"

# Saves a checkpoint after two steps and moves its data position to nine tenths of the rows.
sft=("$trainer" sft --config "$work/config.yaml")
"${sft[@]}" --resume never --set checkpoint.every_steps=2 2>"$work/sft.log" || { cat "$work/sft.log" >&2; exit 1; }
"$python" tests/bench/move_data_state.py "$work/run/checkpoints/step-00000002" $((rows / 10 * 9))
"$python" tests/bench/resume_times.py "$work/run" "${sft[@]}" --set train.max_steps=3
