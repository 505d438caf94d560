# Functions of the reliability scripts; source it from scripts/reliability. Sets `trainer` (TRAINER=path
# overrides it) and `folder`, a temporary folder that is removed at the end.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RANDOM=${SEED:-1}
tools=scripts/reliability
name=$(basename "$0" .sh)
if [ -z "${TRAINER:-}" ]; then
  cargo build --release --quiet
  TRAINER=target/release/trainer
fi
trainer=$(realpath "$TRAINER")
folder=$(mktemp -d)
child= mounted=
cleanup() {
  if [ -n "$child" ]; then kill -9 "$child" 2>/dev/null || true; fi
  if [ -n "$mounted" ]; then umount -l "$mounted" 2>/dev/null || true; fi
  chmod -R u+w "$folder" 2>/dev/null || true
  rm -rf "$folder"
}
trap cleanup EXIT
ulimit -c 0

failures=0
# Reports one failure. The last lines of the log follow it.
failed() { # message
  failures=$((failures + 1))
  # The long forms would print thousands of equal lines.
  if [ "$failures" -le "${SHOW:-20}" ]; then
    echo "$name: $*" >&2
    if [ -s "$folder/log" ]; then tail -n "${LINES_OF_LOG:-3}" "$folder/log" | cut -c 1-300 | sed 's/^/    /' >&2; fi
  fi
}
now() { echo $(($(date +%s%N) / 1000000)); } # milliseconds
nap() { sleep "$(($1 / 1000)).$(printf '%03d' $(($1 % 1000)))"; }

init_model() { "$trainer" init --preset debug --out "$folder/model" 2>"$folder/log"; }
# Replaces the shell by a small run of the quickstart; `$folder/model` must exist. Call it in `( )`, so
# that a signal to the process id of a background command reaches the trainer.
quickstart() { # output_dir, further arguments..
  local out=$1
  shift
  set -- sft --config configs/quickstart.yaml --set "model.path=$folder/model" --set "data.eval=[]" \
    --set "output_dir=$out" --set device=cpu --set log.every_steps=1000 "$@"
  exec "${runner[@]}" "$trainer" "$@"
}
# A command that starts the trainer, for example with other limits. `env` resets the signals that
# bash ignores in background commands.
runner=(env --default-signal=INT,QUIT)

# Checksum of the final weights, the last checkpoint's state, and metrics without times and memory.
sum() { # output_dir, last step
  (
    cd "$1"
    sha256sum final/model.safetensors "checkpoints/step-$(printf '%08d' "$2")"/{optimizer.safetensors,trainer_state.json}
    sed -E 's/,"(step_time_s|data_wait_s|save_hold_s|save_s|tokens_per_s|peak_memory_bytes|predicted_memory_bytes|time_s)":[^,}]*//g' metrics.jsonl eval.jsonl | sha256sum
  ) 2>&1 | sha256sum
}
# Exits with 0 if nothing has failed.
finish() { # summary
  echo "$name: $*, $failures failures"
  [ "$failures" -eq 0 ]
}
