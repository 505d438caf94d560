#!/usr/bin/env bash
# Benchmark of the length cache. Prints seconds, CPU seconds, rows per second and peak memory for
# image rows and text rows: the first pass, a second pass, and a pass with another max_pixels. Then
# prints how long a run that resumes near the end of its data takes until its next step, with the
# cache and with `data.length_cache: off`.
#   scripts/bench/cache.sh [ROWS]
# TOKENIZER=FILE  a published tokenizer.json instead of the tests' tokenizer
# FOLDER=DIR      folder for rows and caches; each number of rows gets its own subfolder
# TRAINER=FILE    another binary
# FILES=N         number of images, each in its own file; the files have sparse pixel data
# COLD=COMMAND    also measures a first pass after this command, which must empty the page cache,
#                 for example (as root) `sync; echo 3 >/proc/sys/vm/drop_caches`
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rows=${1:-1000000} trainer=${TRAINER:-./target/release/trainer}
work=${FOLDER:-target/bench_cache}/$rows-rows-${FILES:-default}-files
PYTHONDONTWRITEBYTECODE=1 "$python" tests/bench/cache_rows.py "$work" --rows "$rows" ${FILES:+--files "$FILES" --headers} ${TOKENIZER:+--tokenizer "$TOKENIZER"} >&2

pass() { # NAME ROWS KEY=VALUE..: prints seconds, rows/s, peak memory and the cache's log fields
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
used = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
work = next(line.split("INFO ", 1)[1] for line in done.stderr.splitlines() if "measured=" in line)
print(f"| {name} | {seconds:.2f} | {cpu:.2f} | {rows / seconds:,.0f} | {memory:.0f} | {work} |", flush=True)
PY
}

echo "| pass | s | CPU s | rows/s | peak MiB | |"
echo "|---|---|---|---|---|---|"
for file in images text; do
  for state in ${COLD:+cold} warm; do
    rm -rf "$work/run-$file"
    [ $state = warm ] || bash -c "$COLD"
    pass "$file, first, $state" $file
    pass "$file, again" $file
    pass "$file, other max_pixels" $file data.image.max_pixels=401408
  done
done

# Saves a checkpoint after two steps and moves its data position to nine tenths of the rows. The log
# of the resumed run has the times at which the data is open and the model is loaded, and the time
# that the next step waits for its rows.
run=$work/run-text
sft=("$trainer" sft --config "$work/text.yaml" --set model.weights=random --set data.packing_length=1024 --set train.epochs=null)
"${sft[@]}" --resume never --set train.max_steps=2
"$python" tests/bench/move_data_state.py "$run/checkpoints/step-00000002" $((rows / 10 * 9))
rm -rf "$work/saved" && cp -r "$run/checkpoints" "$work/saved"
for cache in complete off; do
  rm -rf "$run/checkpoints" "$run/final" && cp -r "$work/saved" "$run/checkpoints"
  echo "data.length_cache: $cache"
  "$python" tests/bench/resume_times.py "$run" "${sft[@]}" --set train.max_steps=3 --set data.length_cache=$cache
done
