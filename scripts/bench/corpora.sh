#!/usr/bin/env bash
# Benchmark of corpora and mixtures: tokenising a text file and rows of text, computing the order of
# an epoch with `repeat` and with `share`, and a training step with two data sets against one.
#   scripts/bench/corpora.sh [MEGABYTES] [ROUNDS]
# Needs a build: cargo build --release. Takes a minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
megabytes=${1:-60}
rounds=${2:-3}
trainer=$PWD/target/release/trainer
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# The text: copies of the documentation, with the number of the copy at the end of each line.
cat docs/*.md docs/dev/*.md README.md > "$folder/page"
bytes=0
for ((copy = 0; bytes < megabytes * 1000000; copy++)); do
  sed "s/\$/ $copy/" "$folder/page" >> "$folder/text.txt"
  bytes=$(stat -c %s "$folder/text.txt")
done
# The same lines as rows.
awk '{gsub(/["\\\t]/, " "); printf "{\"text\": \"%s\"}\n", $0}' "$folder/text.txt" > "$folder/rows.jsonl"

# NAME COMMAND..: prints the command's wall time and peak memory.
timed() {
  local what=$1
  shift
  /usr/bin/env python3 - "$what" "$@" <<'PYTHON'
import resource, subprocess, sys, time
begin = time.time()
subprocess.run(sys.argv[2:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(f"{sys.argv[1]}: {time.time() - begin:.2f} s, {memory:.0f} MB peak memory", flush=True)
PYTHON
}

inspect=("$trainer" inspect --config configs/counting.yaml --num 1)
mkdir "$folder/run"
for file in text.txt rows.jsonl; do
  echo "$file: $(stat -c %s "$folder/$file") bytes, $(wc -l < "$folder/$file") lines"
  set=(--set "output_dir=$folder/run" --set "data.train.0.path=$folder/$file")
  timed "  tokenised" "${inspect[@]}" "${set[@]}"
  timed "  again, with cached tokens" "${inspect[@]}" "${set[@]}"
done
windows='{sampling: sliding_window, length: 63, stride: 16}'
mixed="[{path: $folder/text.txt, weight: 3, corpus: $windows}, {path: $folder/rows.jsonl, corpus: $windows}]"
set=(--set "output_dir=$folder/run" --set "data.train=$mixed")
timed "order of an epoch, repeat" "${inspect[@]}" "${set[@]}"
timed "order of an epoch, share" "${inspect[@]}" "${set[@]}" --set data.mixture=share

# The same rows as one data set and as two.
awk -v folder="$folder" '{print > (folder "/half-" NR % 2 ".jsonl")}' data/quickstart/digits_train.jsonl
halves="[{path: $folder/half-0.jsonl}, {path: $folder/half-1.jsonl}]"
sft=("$trainer" sft --config configs/quickstart.yaml --resume never --set 'data.eval=[]' --set eval.show=0)
for ((round = 0; round < rounds; round++)); do
  "${sft[@]}" --set "output_dir=$folder/one" 2> "$folder/log"
  "${sft[@]}" --set "output_dir=$folder/two" --set "data.train=$halves" 2> "$folder/log"
  for run in one two; do
    printf '%s: ' "$run"
    sed 's/.*"step_time_s":\([0-9.e-]*\).*/\1/' "$folder/$run/metrics.jsonl" | sort -g |
      awk '{time[NR] = $1} END {printf "median step %.4f ms\n", 1000 * time[int((NR + 1) / 2)]}'
  done
done
