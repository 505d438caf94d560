#!/usr/bin/env bash
# Trains N tiny steps and stops and restarts the run ten times. Memory and file descriptors must stay
# flat within each part and over the parts, and metrics.jsonl must have each step exactly once.
#
#   scripts/reliability/many_steps.sh 10000
#
# Prints one summary line. GROWTH_MIB=n is the growth of resident memory that is allowed.
set -euo pipefail
source "$(dirname "$0")/common.sh"
steps=${1:-10000} restarts=10 growth=${GROWTH_MIB:-16}

init_model
: >"$folder/samples"
for part in $(seq 0 $restarts); do
  target=$(((part + 1) * steps / (restarts + 1)))
  (quickstart "$folder/run" --set data.packing_length=32 --set optim.schedule=constant --set "train.max_steps=$steps" \
    --set "checkpoint={every_steps: $((steps / 20 + 1)), keep: 2}") >"$folder/out" 2>"$folder/log" &
  child=$!
  stopping=no
  while kill -0 "$child" 2>/dev/null; do
    step=$(tail -n 1 "$folder/run/metrics.jsonl" 2>/dev/null | sed -nE 's/^\{"step":([0-9]+),.*/\1/p' || true)
    memory=$(awk '/^VmRSS/ { print $2 }' "/proc/$child/status" 2>/dev/null || true)
    descriptors=$(find "/proc/$child/fd" -mindepth 1 2>/dev/null | wc -l || true)
    if [ -n "$step" ] && [ -n "$memory" ]; then echo "$part $step $memory $descriptors" >>"$folder/samples"; fi
    if [ "$part" -lt "$restarts" ] && [ $stopping = no ] && [ "${step:-0}" -ge "$target" ]; then
      kill -TERM "$child" 2>/dev/null || true
      stopping=yes
    fi
    sleep 0.02
  done
  code=0
  wait "$child" || code=$?
  child=
  expected=75
  [ "$part" -lt "$restarts" ] || expected=0
  [ "$code" = "$expected" ] || { failed "part $part ended with exit code $code, expected $expected" && break; }
done
python3 - "$folder" "$steps" "$growth" >"$folder/report" 2>"$folder/log" <<'PYTHON' || failed "not flat, or not each step once"
import collections, json, statistics, sys

folder, steps, growth = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
numbers = [json.loads(line)["step"] for line in open(f"{folder}/run/metrics.jsonl")]
problems = []
if numbers != list(range(1, steps + 1)):
    count = collections.Counter(numbers)
    double = [step for step in count if count[step] > 1]
    missing = [step for step in range(1, steps + 1) if step not in count]
    problems.append(f"metrics.jsonl: {len(numbers)} rows, double {double[:5]}, missing {missing[:5]}")
parts = collections.defaultdict(list)
for line in open(f"{folder}/samples"):
    part, step, memory, descriptors = map(int, line.split())
    parts[part].append((step, memory / 1024, descriptors))
ends = []
for part, samples in parts.items():
    # Before its first step a part reads the model; the first steps allocate buffers.
    samples = [sample for sample in samples if sample[0] > samples[0][0]]
    samples = samples[len(samples) // 4 :]
    if len(samples) < 4:  # a busy machine; most parts must have more
        continue
    quarter = max(1, len(samples) // 4)
    first = statistics.median(memory for _, memory, _ in samples[:quarter])
    last = statistics.median(memory for _, memory, _ in samples[-quarter:])
    ends.append(last)
    if last - first > growth:
        problems.append(f"part {part}: memory grew from {first:.0f} to {last:.0f} MiB")
    most = [max(d for _, _, d in half) for half in (samples[:quarter], samples[-quarter:])]
    if most[1] > most[0] + 4:
        problems.append(f"part {part}: descriptors grew from {most[0]} to {most[1]}")
if ends and max(ends[1:] or ends) - ends[0] > 2 * growth:
    problems.append(f"memory at the end of the parts grew: {[round(end) for end in ends]} MiB")
print(f"{len(numbers)} rows of metrics, memory at the end of each part {min(ends):.0f} to {max(ends):.0f} MiB" if ends else "no samples")
if len(ends) < 6:
    problems.append(f"only {len(ends)} of {len(parts)} parts have enough samples to see growth")
print("\n".join(problems), file=sys.stderr)
sys.exit(1 if problems else 0)
PYTHON
finish "$steps steps in $((restarts + 1)) parts, $(cat "$folder/report")"
