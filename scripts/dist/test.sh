#!/usr/bin/env bash
# Tests runs of several ranks on this machine with MPI: the self-test on 2 and 4 ranks, and the
# quickstart on 1, 2 and 4 ranks, whose weights, optimizer states and losses must have the same bits,
# also after a resume on another number of ranks. Installs OpenMPI if it is missing.
#   scripts/dist/test.sh
# FEATURES=video,mpi builds with other features than `mpi`, so that CI can reuse a build. STEPS=n sets
# the number of steps.
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts/dist/install.sh
cargo build --release --quiet --bin trainer --features "${FEATURES:-mpi}"
trainer=$PWD/target/release/trainer
steps=${STEPS:-8}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Ranks share the cores, so each has one thread; `--bind-to none` lets the system place them. On
# SIGTERM, ranks have 10 seconds to save before SIGKILL follows.
export RAYON_NUM_THREADS=1
ranks() { # number of ranks, arguments of trainer..
  local world=$1
  shift
  if [ "$world" = 1 ]; then
    "$trainer" "$@"
    return
  fi
  mpirun --allow-run-as-root --oversubscribe --bind-to none --mca odls_base_sigkill_timeout 10 \
    -n "$world" "$trainer" "$@"
}
train() { # number of ranks, output_dir, further arguments..
  local world=$1 out=$2
  shift 2
  if ! ranks "$world" sft --config configs/quickstart.yaml --set "output_dir=$folder/$out" \
    --set train.gradient_accumulation_steps=4 --set "train.max_steps=$steps" \
    --set "checkpoint={every_steps: $((steps / 2)), keep: 3}" --set log.every_steps=1 \
    --set "eval.every_steps=$((steps / 2))" "$@" >"$folder/log" 2>&1; then
    cat "$folder/log"
    echo "error: the run \`$out\` failed" >&2
    exit 1
  fi
}
# Checksums of weights, optimizer state and position in the data.
sums() { # output_dir
  local last
  last=checkpoints/step-$(printf '%08d' "$steps")
  (cd "$folder/$1" && sha256sum final/model.safetensors "$last"/{optimizer.safetensors,trainer_state.json})
}
# Losses, gradient norms and accuracies of all steps and evaluations.
losses() { # output_dir
  grep -hoE '"(loss|grad_norm|accuracy)":[^,}]*' "$folder/$1"/{metrics,eval}.jsonl
}
expect_same() { # function, output_dir on one rank, output_dir
  if ! diff <("$1" "$2") <("$1" "$3"); then
    echo "error: the $1 of \`$3\` differ from those of the run on one rank" >&2
    exit 1
  fi
}

for world in 2 4; do
  ranks "$world" selftest --distributed
done

for precision in f32 bf16; do
  for moments in f32 bf16; do
    settings=(--set "model.precision=$precision" --set "optim.moments=$moments")
    one=one-$precision-$moments
    train 1 "$one" "${settings[@]}"
    for world in 2 4; do
      run=world-$world-$precision-$moments
      train "$world" "$run" "${settings[@]}"
      expect_same sums "$one" "$run"
      expect_same losses "$one" "$run"
      echo "$world ranks, $precision, moments in $moments: equal to the run on one rank"
    done
  done
done
sums one-f32-f32

# The ranks divide the state.
for precision in f32 bf16; do
  settings=(--set "model.precision=$precision" --set "optim.moments=$precision")
  for shard in optimizer gradients full; do
    for world in 2 4; do
      run=$shard-$world-$precision
      train "$world" "$run" "${settings[@]}" --set "distributed.shard=$shard"
      expect_same sums "one-$precision-$precision" "$run"
      expect_same losses "one-$precision-$precision" "$run"
    done
    echo "shard $shard, $precision: 2 and 4 ranks are equal to the run on one rank"
  done
done

# The second half of a run, resumed from its middle on another number of ranks.
middle=checkpoints/step-$(printf '%08d' $((steps / 2)))
train 2 from-4-to-2 --resume "$folder/world-4-f32-f32/$middle"
train 4 from-1-to-4 --resume "$folder/one-f32-f32/$middle"
train 4 from-full-to-optimizer --resume "$folder/full-2-f32/$middle" --set distributed.shard=optimizer
train 1 from-gradients-to-1 --resume "$folder/gradients-4-f32/$middle"
for run in from-4-to-2 from-1-to-4 from-full-to-optimizer from-gradients-to-1; do
  expect_same sums one-f32-f32 "$run"
  echo "resumed $run: equal to the run on one rank"
done

# An epoch of 10 packs: two steps of 4 micro-batches and one of 2.
head -n 150 data/quickstart/digits_train.jsonl >"$folder/rows.jsonl"
epoch() { # number of ranks, output_dir, further arguments..
  steps=3 train "$@" --set train.max_steps=null --set train.epochs=1 --set "data.train=[{path: $folder/rows.jsonl}]" \
    --set checkpoint.every_steps=1
}
steps=3 epoch 1 epoch-1
[ "$(wc -l <"$folder/epoch-1/metrics.jsonl")" = 3 ] || { echo "error: the epoch does not have 3 steps" >&2 && exit 1; }
for world in 2 4; do
  epoch "$world" "epoch-$world"
  steps=3 expect_same sums epoch-1 "epoch-$world"
  expect_same losses epoch-1 "epoch-$world"
  echo "$world ranks, a last step of half the size: equal to the run on one rank"
done

# Two machines of two ranks each, as far as the ranks know; each machine has all of the state.
real=$trainer
cat >"$folder/two_machines" <<SH
#!/bin/sh
export TRAINER_RANK=\$OMPI_COMM_WORLD_RANK TRAINER_WORLD_SIZE=4 TRAINER_LOCAL_RANK=\$((OMPI_COMM_WORLD_RANK % 2)) TRAINER_LOCAL_WORLD_SIZE=2
export TRAINER_MASTER_ADDR=127.0.0.1 TRAINER_MASTER_PORT=$((20000 + RANDOM % 10000)) TRAINER_JOB_ID=$$
exec "$real" "\$@"
SH
chmod +x "$folder/two_machines"
trainer=$folder/two_machines
train 4 two-machines --set distributed.shard=full --set distributed.shard_group=node
trainer=$real
expect_same sums one-f32-f32 two-machines
echo "shard_group node, two groups of two ranks: equal to the run on one rank"

# Two ranks share each micro-batch. Losses differ by rounding.
train 2 sequence --set distributed.sequence=2
paste <(losses one-f32-f32) <(losses sequence) | tr ':' ' ' | awk '
  $1 == "\"loss\"" { off = ($2 > $4 ? $2 - $4 : $4 - $2) / $2; if (off > worst) worst = off; rows++ }
  END { printf "sequence 2: losses differ from those of one rank by at most %.1e\n", worst; exit !rows || worst > 1e-4 }'

# A signal to one rank ends an evaluation of 40,000 rows on all ranks.
for _ in $(seq 200); do cat data/quickstart/digits_test.jsonl; done >"$folder/many.jsonl"
"$trainer" sft --config configs/quickstart.yaml --set "output_dir=$folder/stopped" --set device=cpu --set distributed.processes=2 \
  --set train.gradient_accumulation_steps=4 --set train.max_steps=4 --set eval.every_steps=2 --set log.every_steps=1 --set "data.eval=[{path: $folder/many.jsonl}]" \
  >"$folder/log" 2>&1 &
job=$!
for _ in $(seq 600); do
  if grep -qs '"step":2' "$folder/stopped/metrics.jsonl"; then break; fi
  sleep 0.1
done
sleep 1
kill -TERM "$(pgrep -P "$(pgrep -P $job)" | tail -n 1)"
before=$SECONDS code=0
wait $job || code=$?
took=$((SECONDS - before))
if [ "$code" != 75 ] || [ "$took" -gt 15 ]; then
  tail -n 20 "$folder/log"
  echo "error: after SIGTERM to one rank during an evaluation, the run ended with code $code after $took s, expected 75 at once" >&2
  exit 1
fi
echo "SIGTERM to one of 2 ranks during an evaluation: exit code 75 after $took s"
