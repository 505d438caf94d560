# Functions of the scripts that kill ranks; source it. Expects `trainer` and `world`, sets `folder`, and
# removes it at the end.
export RAYON_NUM_THREADS=1
folder=$(mktemp -d)
job=
cleanup() {
  if [ -n "$job" ]; then kill -9 -- "-$job" 2>/dev/null || true; fi
  mapfile -t left < <(processes "$folder/")
  if [ ${#left[@]} -gt 0 ]; then kill -9 "${left[@]}" 2>/dev/null || true; fi
  rm -rf "$folder"
}
trap cleanup EXIT

# Starts a run of the quickstart in a session of its own; `job` is its process id. It starts mpirun,
# which starts the ranks.
start_ranks() { # output_dir, further arguments of trainer..
  local out=$1
  shift
  setsid "$trainer" sft --set "distributed.processes=$world" --set device=cpu --config configs/quickstart.yaml \
    --set "output_dir=$folder/$out" --set "data.eval=[]" "$@" >"$folder/log" 2>&1 &
  job=$!
}
# The processes of runs whose output_dir begins with $1.
processes() { pgrep -f "output_dir=$1" || true; }
# The rows of metrics.jsonl without times, memory and values of single ranks.
metrics() { # output_dir
  "${PYTHON:-python3}" - "$folder/$1/metrics.jsonl" <<'PY'
import json, sys
measured = "step_time_s data_wait_s save_hold_s save_s tokens_per_s peak_memory_bytes predicted_memory_bytes time_s ranks".split()
for line in open(sys.argv[1]):
    print(json.dumps({key: value for key, value in json.loads(line).items() if key not in measured}))
PY
}
is_running() { [ -e "/proc/$job" ] && ! grep -q '^State:.Z' "/proc/$job/status" 2>/dev/null; }
# The number of the rank that process $1 is; nothing if it has ended.
rank_of() { { tr '\0' '\n' <"/proc/$1/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p'; } 2>/dev/null || true; }
ranks() { pgrep -P "$(pgrep -P "$job" || echo none)" 2>/dev/null || true; }
fail() {
  cat "$folder/log"
  echo "error: $*" >&2
  exit 1
}
