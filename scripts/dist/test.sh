#!/usr/bin/env bash
# Tests runs of several ranks on this machine with MPI: the self-test on 2 and 4 ranks, and the
# quickstart and a mix of text and images on 1, 2 and 4 ranks, whose weights, optimizer states and losses
# must have the same bits, also after a resume on another number of ranks; the variables of other
# launchers; and signals. Installs OpenMPI if it is missing.
#   scripts/dist/test.sh
# FEATURES=video,mpi builds with other features than `mpi`, so that CI can reuse a build. STEPS=n sets
# the number of steps.
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts/install_dependencies.sh mpi
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

expect_log() { # pattern, number of lines that match
  local found
  found=$(grep -cE "$1" "$folder/log" || true)
  [ "$found" = "$2" ] && return
  cat "$folder/log"
  echo "error: $found lines of the log match \`$1\`, expected $2" >&2
  exit 1
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
      # once, although all ranks have a log
      expect_log "the ranks share the micro-batches of a step: more ranks do not make the batch larger ranks=$world micro_batches=4 micro_batches_of_each=$((4 / world)) " 1
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

# The last of $2 steps must have at most 3/4 of the tokens of the step before.
expect_small_last_step() { # output_dir, number of steps
  grep -oE '"num_tokens":[0-9]+' "$folder/$1/metrics.jsonl" | cut -d: -f2 | awk -v steps="$2" '
    { before = last; last = $1 } END { exit NR != steps || last > 0.75 * before }' && return
  grep -oE '"num_tokens":[0-9]+' "$folder/$1/metrics.jsonl"
  echo "error: expected $2 steps in \`$1\`, the last one smaller" >&2
  exit 1
}

# An epoch of 10 packs: two steps of 4 micro-batches and one of 2.
head -n 150 data/quickstart/digits_train.jsonl >"$folder/rows.jsonl"
epoch() { # number of ranks, output_dir, further arguments..
  steps=3 train "$@" --set train.max_steps=null --set train.epochs=1 --set "data.train=[{path: $folder/rows.jsonl}]" \
    --set checkpoint.every_steps=1
}
epoch 1 epoch-1
expect_small_last_step epoch-1 3
for world in 2 4; do
  epoch "$world" "epoch-$world"
  steps=3 expect_same sums epoch-1 "epoch-$world"
  expect_same losses epoch-1 "epoch-$world"
  echo "$world ranks, a last step of half the size: equal to the run on one rank"
done

# An epoch of text rows and rows with images, in bf16, which ends with a small step.
"$trainer" init --preset debug --out "$folder/model" 2>/dev/null
golden=tests/golden/data
for file in text image_exact; do awk 'length($0) < 1500 && ++rows <= 30' "$golden/$file.jsonl"; done >"$folder/mixed.jsonl"
mixed() { # number of ranks, output_dir, further arguments..
  steps=5 train "$@" --set "model={path: $folder/model, weights: pretrained, precision: bf16}" --set data.packing_length=512 \
    --set "data.train=[{path: $folder/mixed.jsonl, image_root: $golden}]" --set "data.eval=[{path: $folder/mixed.jsonl, image_root: $golden}]" \
    --set train.max_steps=null --set train.epochs=1 --set data.max_rejected=1.0 --set optim.moments=bf16 --set checkpoint.every_steps=1 --set eval.show=0
}
mixed 1 mixed-1
expect_small_last_step mixed-1 5
for run in "2 none" "4 none" "2 full" "4 gradients"; do
  read -r world shard <<<"$run"
  mixed "$world" "mixed-$world-$shard" --set "distributed.shard=$shard"
  steps=5 expect_same sums mixed-1 "mixed-$world-$shard"
  expect_same losses mixed-1 "mixed-$world-$shard"
  echo "$world ranks, text and images in bf16, shard $shard: equal to the run on one rank"
done

# `mpirun` starts `launcher`, which sets the variables of another launcher: MPI adds up the gradients, and
# the variables say which rank a process is.
real=$trainer
launcher() { # lines of a shell script..
  { echo '#!/bin/sh' && printf '%s\n' "$@" "exec \"$real\" \"\$@\""; } >"$folder/launcher"
  chmod +x "$folder/launcher"
  trainer=$folder/launcher
}
rank='$OMPI_COMM_WORLD_RANK' port=$((20000 + RANDOM % 10000))

# Two machines of two ranks each, as far as the ranks know; each machine has all of the state.
launcher "export TRAINER_RANK=$rank TRAINER_WORLD_SIZE=4 TRAINER_LOCAL_RANK=\$(($rank % 2)) TRAINER_LOCAL_WORLD_SIZE=2" \
  "export TRAINER_MASTER_ADDR=127.0.0.1 TRAINER_MASTER_PORT=$port TRAINER_JOB_ID=$$"
train 4 two-machines --set distributed.shard=full --set distributed.shard_group=node
expect_log 'all ranks are connected launcher=TRAINER_RANK ranks=4' 1
expect_same sums one-f32-f32 two-machines
echo "shard_group node, two groups of two ranks: equal to the run on one rank"

# As torchrun sets them with `--rdzv-backend c10d --rdzv-id`.
launcher "export RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 GROUP_RANK=0 ROLE_RANK=$rank ROLE_WORLD_SIZE=2" \
  "export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((port + 1)) TORCHELASTIC_RUN_ID=job-$$ TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_USE_AGENT_STORE=False" \
  'unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE'
train 2 torchrun
expect_log 'all ranks are connected launcher=torchrun ranks=2 machines=1' 1
expect_same sums one-f32-f32 torchrun

# As `srun` sets them for a step of two tasks on one node.
launcher "export SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=$rank SLURM_NODEID=0" \
  "export SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost MASTER_PORT=$((port + 2))" \
  'unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE'
train 2 slurm
expect_log 'all ranks are connected launcher=SLURM ranks=2 machines=1' 1
expect_same sums one-f32-f32 slurm
echo "variables of torchrun and of SLURM: 2 ranks are equal to the run on one rank"
trainer=$real

# Two ranks share each micro-batch. Losses differ by rounding.
train 2 sequence --set distributed.sequence=2
paste <(losses one-f32-f32) <(losses sequence) | tr ':' ' ' | awk '
  $1 == "\"loss\"" { off = ($2 > $4 ? $2 - $4 : $4 - $2) / $2; if (off > worst) worst = off; rows++ }
  END { printf "sequence 2: losses differ from those of one rank by at most %.1e\n", worst; exit !rows || worst > 1e-5 }'

# Signals to one rank, or to the process that has started `mpirun`, stop all ranks after they have saved.
stop() { # signal, `rank` or `first`, further arguments of trainer..
  local signal=$1 to=$2 job victim before code=0 took
  shift 2
  rm -rf "$folder/stopped"
  "$trainer" sft --config configs/quickstart.yaml --set "output_dir=$folder/stopped" --set device=cpu --set distributed.processes=2 \
    --set train.gradient_accumulation_steps=4 --set log.every_steps=1 "$@" >"$folder/log" 2>&1 &
  job=$!
  for _ in $(seq 600); do
    if grep -qs '"step":2' "$folder/stopped/metrics.jsonl"; then break; fi
    sleep 0.1
  done
  sleep 1
  victim=$job
  [ "$to" = first ] || victim=$(pgrep -P "$(pgrep -P $job)" | tail -n 1)
  kill "-$signal" "$victim"
  before=$SECONDS
  wait $job || code=$?
  took=$((SECONDS - before))
  if [ "$code" != 75 ] || [ "$took" -gt 15 ] || ! compgen -G "$folder/stopped/checkpoints/step-*" >/dev/null; then
    tail -n 20 "$folder/log"
    echo "error: after SIG$signal to the $to process, the run ended with code $code after $took s, expected 75 at once, with a checkpoint" >&2
    exit 1
  fi
  echo "SIG$signal to the $to process of 2 ranks: exit code 75 after $took s"
}
# during an evaluation of 40,000 rows
for _ in $(seq 200); do cat data/quickstart/digits_test.jsonl; done >"$folder/many.jsonl"
stop TERM rank --set train.max_steps=4 --set eval.every_steps=2 --set "data.eval=[{path: $folder/many.jsonl}]"
for signal in TERM HUP; do
  stop $signal first --set train.max_steps=100000 --set 'data.eval=[]' --set checkpoint.every_steps=0
done
