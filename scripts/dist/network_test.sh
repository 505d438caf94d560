#!/usr/bin/env bash
# Trains on ranks of which the last one loses its connection to rank 0 during training: first without a
# sign, as if a cable was cut, then with closed connections. The command must end with exit code 74
# within `distributed.timeout_s` + 5 seconds, name the rank, and leave no process; the same command then
# continues the run.
#   scripts/dist/network_test.sh
# Needs a binary with the feature `mpi`: TRAINER=path, by default target/release/trainer. RANKS=n sets
# the number of ranks (3), and TIMEOUT_S=n `distributed.timeout_s` (3).
set -euo pipefail
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-$PWD/target/release/trainer} python=${PYTHON:-python3}
world=${RANKS:-3} timeout_s=${TIMEOUT_S:-3}
source scripts/dist/killing.sh
proxy=
cleanup_all() {
  if [ -n "$proxy" ]; then kill "$proxy" 2>/dev/null || true; fi
  cleanup
}
trap cleanup_all EXIT

# Forwards connections from the first port to the second one. On SIGUSR1 nothing arrives any more; on
# SIGUSR2 the connections are closed.
cat >"$folder/proxy.py" <<'PY'
import os, signal, socket, sys, threading
near, far = map(int, sys.argv[1:])
cut, ends = threading.Event(), []
def close(*_):
    cut.set()
    for end in ends:
        try: end.shutdown(socket.SHUT_RDWR)
        except OSError: pass
signal.signal(signal.SIGUSR1, lambda *_: cut.set())
signal.signal(signal.SIGUSR2, close)
def forward(source, target):
    try:
        while (data := source.recv(65536)) and not cut.is_set():
            target.sendall(data)
        if not cut.is_set():
            target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
def serve(listener):
    while True:
        one, _ = listener.accept()
        try: other = socket.create_connection(("127.0.0.1", far))
        except OSError:
            one.close()
            continue
        ends.extend((one, other))
        for pair in ((one, other), (other, one)):
            threading.Thread(target=forward, args=pair, daemon=True).start()
listener = socket.create_server(("127.0.0.1", near))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
while True:
    signal.pause()
PY
read -r port through < <("$python" -c '
import socket
ends = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(end.getsockname()[1] for end in ends))')

start() { # port of the last rank
  local command=("$trainer" sft --config configs/quickstart.yaml --set device=cpu --set "output_dir=$folder/run" --set "data.eval=[]"
    --set "train.gradient_accumulation_steps=$world" --set train.max_steps=100000 --set "checkpoint={every_steps: 1, keep: 2}"
    --set data.packing_length=52 --set "distributed.timeout_s=$timeout_s")
  setsid mpirun --allow-run-as-root --oversubscribe --bind-to none \
    -n $((world - 1)) -x "MASTER_PORT=$port" "${command[@]}" : -n 1 -x "MASTER_PORT=$1" "${command[@]}" >"$folder/log" 2>&1 &
  job=$!
}
wait_for() { # condition..
  local limit=$((SECONDS + 120))
  until "$@"; do
    is_running || fail "the run has ended"
    [ "$SECONDS" -lt "$limit" ] || fail "the run does not get there: $*"
    sleep 0.05
  done
}
has_saved() { compgen -G "$folder/run/checkpoints/step-*" >/dev/null; }
for signal in USR1 USR2; do
  rm -rf "$folder/run"
  "$python" "$folder/proxy.py" "$through" "$port" &
  proxy=$!
  start "$through"
  wait_for has_saved
  kill "-$signal" "$proxy"
  cut=$(date +%s%N)
  while is_running; do
    [ $((($(date +%s%N) - cut) / 1000000)) -le $(((timeout_s + 5) * 1000)) ] || fail "the ranks did not end in time"
    sleep 0.02
  done
  took=$((($(date +%s%N) - cut) / 1000000)) code=0
  wait "$job" || code=$?
  job=
  [ "$code" = 74 ] || fail "exit code $code"
  [ -z "$(processes "$folder/run")" ] || fail "a process is left"
  # Each end of the connection names the other one; rank 0 sends the reason to the others.
  grep -q "^error: rank $((world - 1)) was lost" "$folder/log" || fail "rank $((world - 1)) is not named"
  kill "$proxy" 2>/dev/null || true
  wait "$proxy" 2>/dev/null || true
  proxy=
  echo "network_test: SIG$signal to the network of one of $world ranks: ended after $took ms, $(grep "^error: rank $((world - 1)) was lost" "$folder/log" | head -n 1)"
done
# The same command continues the run.
saved=$(cd "$folder/run/checkpoints" && printf '%s\n' step-* | tail -n 1)
start "$port"
wait_for grep -q "from_step=$((10#${saved#step-}))\b" "$folder/log"
wait_for grep -q "all ranks are connected" "$folder/log"
kill -USR2 "$job"
limit=$((SECONDS + 120))
while is_running; do
  [ "$SECONDS" -lt "$limit" ] || fail "the ranks did not end after a request to stop"
  sleep 0.05
done
code=0
wait "$job" || code=$?
job=
[ "$code" = 75 ] || fail "the continued run ended with $code after a request to stop"
echo "network_test: the same command continued from $saved"
