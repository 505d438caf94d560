#!/usr/bin/env bash
# Runs the trainer with N different sizes of each limit: a full disk, a folder without write
# permission, a limit on the size of files, few file descriptors, and little address space, each when
# a run starts, while it trains and saves, and when it resumes. A run must end with a documented exit
# code and an error, or train to its end without losing a row; it must never abort, and a checkpoint
# that was complete must stay. Without the limit, the same command must then finish with the weights
# of an undisturbed run.
#
#   scripts/reliability/limits.sh 40
#
# Prints one summary line. A full disk needs the right to mount a tmpfs (root, or user namespaces), and a
# folder without write permission another user. The script fails without them; SKIP_DISKS=1 skips both.
set -euo pipefail
# A namespace of its own, so that mounts need no privileges and disappear with the script.
if [ -z "${IN_NAMESPACE:-}" ] && unshare --mount true 2>/dev/null; then
  IN_NAMESPACE=yes exec unshare --mount "$0" "$@"
elif [ -z "${IN_NAMESPACE:-}" ] && unshare --user --map-root-user --mount true 2>/dev/null; then
  IN_NAMESPACE=yes exec unshare --user --map-root-user --mount "$0" "$@"
fi
source "$(dirname "$0")/common.sh"
count=${1:-40}
steps=12 cases=0 ended=0 completed=0

init_model
# Images in files, so that rows need descriptors.
python3 $tools/faults.py write "$folder/data" 300 1 >/dev/null
# Not all of them: an evaluation takes longer than the steps.
head -n 40 "$folder/data/good.jsonl" >"$folder/data/eval.jsonl"
run() { # output_dir, further arguments..
  local out=$1
  shift
  quickstart "$out" --set "data.train=[{path: $folder/data/good.jsonl}]" --set "data.eval=[{path: $folder/data/eval.jsonl}]" --set "train.max_steps=$steps" --set data.workers=16 \
    --set optim.schedule=constant --set log.every_steps=1 --set "checkpoint={every_steps: 3, keep: 2}" --set eval.every_steps=$((steps / 2)) "$@"
}
(run "$folder/whole") >"$folder/log" 2>&1
expected=$(sum "$folder/whole" $steps)
(run "$folder/half" --set "train.max_steps=$((steps / 2))") >"$folder/log" 2>&1
[ ! -s "$folder/whole/rejects.jsonl" ] || { cat "$folder/whole/rejects.jsonl" >&2 && exit 1; }

# A limit is a command that starts the trainer (`runner`). The log goes through a pipe, because limits
# on disks and files must not apply to it.
attempt() { # what, output_dir
  local code before after
  before=$(python3 $tools/verify_checkpoints.py "$2" 2>/dev/null || echo 0)
  { (run "$2" </dev/null) 2>&1 >/dev/null | head -c 1000000 >"$folder/log"; } || true
  code=$(cat "$folder/code")
  cases=$((cases + 1))
  [ -z "${VERBOSE:-}" ] || echo "$1: exit code $code: $(grep '^error: ' "$folder/log" | cut -c 1-150)"
  case $code in
  0) completed=$((completed + 1)) ;;
  64 | 65 | 71 | 73 | 74) # 64: the output folder cannot be used
    ended=$((ended + 1))
    grep -q '^error: ' "$folder/log" || failed "$1: exit code $code without an error"
    ;;
  75) ended=$((ended + 1)) ;;
  127) # the system cannot even load the program
    grep -q 'error while loading shared libraries' "$folder/log" || failed "$1: exit code $code"
    ended=$((ended + 1))
    ;;
  *) failed "$1: exit code $code" ;;
  esac
  if ! after=$(python3 $tools/verify_checkpoints.py "$2" 2>"$folder/verify"); then
    failed "$1: $(cat "$folder/verify")"
  elif [ "$after" -lt "$before" ]; then
    failed "$1: the checkpoint of step $before is lost"
  fi
  # An evaluation has all rows, or there is none.
  if grep -qv '"num_samples":40,' "$2/eval.jsonl" 2>/dev/null; then failed "$1: an evaluation without some of its rows"; fi
  # No memory, no descriptor, or a failed device is not bad data.
  if [ "$code" = 65 ] && grep -qE 'os error (5|12|23|24)\)' "$folder/log"; then failed "$1: exit code 65 for the trouble of the process"; fi
  # The trouble of the process must not be blamed on rows.
  if [ -s "$2/rejects.jsonl" ]; then failed "$1: $(wc -l <"$2/rejects.jsonl") good rows are rejected"; fi
}
# The same command without the limit finishes like the undisturbed run.
recover() { # what, output_dir
  local code=0
  runner=(env)
  (run "$2") >"$folder/log" 2>&1 || code=$?
  if [ "$code" != 0 ]; then
    failed "$1, then without it: exit code $code"
  elif [ "$(sum "$2" $steps)" != "$expected" ]; then
    failed "$1, then without it: differs from the undisturbed run"
  fi
}
# Starts the trainer after a shell command, keeps its exit code, and ends it after 60 s.
limited() { # shell command
  runner=(bash -c 'code=0; (trap - PIPE; '"$1"'; exec timeout -s KILL 60 "$@") || code=$?; echo $code >"$0"' "$folder/code")
}
# A new run, and one that resumes.
both() { # what, shell command
  local phase
  for phase in new resumed; do
    rm -rf "$folder/run"
    if [ $phase = resumed ]; then cp -a "$folder/half" "$folder/run"; fi
    limited "$2"
    attempt "$1, $phase run" "$folder/run"
    recover "$1, $phase run" "$folder/run"
  done
}
# A part that cannot be tested here: a failure, unless SKIP_DISKS is 1.
skipped() { # what
  : >"$folder/log"
  if [ "${SKIP_DISKS:-}" = 1 ]; then echo "$name: skipped $1" >&2; else failed "skipped $1 (SKIP_DISKS=1 allows it)"; fi
}
# i of n values between two bounds, in equal ratios.
between() { awk -v i="$1" -v n="$count" -v a="$2" -v b="$3" 'BEGIN { printf "%d", a * (b / a) ^ (n > 1 ? (i - 1) / (n - 1) : 0) }'; }

# bash counts the size of files in KiB.
for i in $(seq "$count"); do
  size=$(between "$i" 1 12000)
  both "files of at most $size KiB" "ulimit -f $size"
done
for i in $(seq "$count"); do
  number=$(between "$i" 6 32)
  both "$number descriptors" "ulimit -n $number"
done
both "32 descriptors" "ulimit -n 32"
[ "$(cat "$folder/code")" = 0 ] || failed "32 descriptors: exit code $(cat "$folder/code"), expected 0"
for i in $(seq "$count"); do
  size=$(between "$i" 80000 2097152)
  both "$size KiB of address space" "ulimit -v $size"
done
both "2 GiB of address space" "ulimit -v 2097152"
[ "$(cat "$folder/code")" = 0 ] || failed "2 GiB of address space: exit code $(cat "$folder/code"), expected 0"

# Disks.
disk=$folder/disk
mkdir "$disk"
if mount -t tmpfs -o size=100m tmpfs "$disk" 2>/dev/null; then
  mounted=$disk
  for i in $(seq "$count"); do
    for phase in new resumed; do
      mount -o remount,size=100m "$disk"
      rm -rf "$disk"/*
      limited true
      if [ $phase = resumed ]; then
        cp -a "$folder/half" "$disk/run"
      fi
      used=$(df --output=used -k "$disk" | tail -n 1)
      size=$((used + $(between "$i" 4 40000)))
      mount -o remount,size="${size}k" "$disk"
      attempt "a disk of $size KiB with $used KiB used, $phase run" "$disk/run"
      mount -o remount,size=100m "$disk"
      recover "a disk of $size KiB with $used KiB used, $phase run" "$disk/run"
    done
  done
  # A disk that is full only for a while: the run continues and saves later.
  rm -rf "$disk"/*
  limited true
  (
    for _ in $(seq 400); do
      [ -e "$disk/run/checkpoints/step-00000003" ] && break
      sleep 0.01
    done
    # Until the disk is full.
    dd if=/dev/zero of="$disk/fill" bs=4k 2>/dev/null || true
    sleep 0.3
    rm "$disk/fill"
  ) &
  steps_before=$steps
  steps=300
  attempt "a disk that is full for 0.3 s" "$disk/run"
  steps=$steps_before
  wait
  code=$(cat "$folder/code")
  [ "$code" = 0 ] || failed "a disk that is full for 0.3 s: exit code $code, expected that the run continues"
  grep -q 'No space left' "$folder/log" || failed "a disk that is full for 0.3 s: the log has no warning"
  # Read-only, from the start.
  for phase in new resumed; do
    rm -rf "$disk"/*
    if [ $phase = resumed ]; then cp -a "$folder/half" "$disk/run"; fi
    mount -o remount,ro "$disk"
    limited true
    attempt "a read-only disk, $phase run" "$disk/run"
    mount -o remount,rw "$disk"
    recover "a read-only disk, $phase run" "$disk/run"
  done
  umount "$disk"
  mounted=
else
  skipped "full and read-only disks: a tmpfs cannot be mounted here"
fi

# Folders without write permission: root ignores it, so another user runs the trainer.
as=()
if [ "$(id -u)" = 0 ]; then as=(setpriv --reuid=65534 --regid=65534 --clear-groups); fi
if "${as[@]}" true 2>/dev/null && chmod 755 "$folder"; then
  for part in . checkpoints cache checkpoints/step-00000006; do
    rm -rf "$folder/run"
    cp -a "$folder/half" "$folder/run"
    if [ "$(id -u)" = 0 ]; then chown -R 65534:65534 "$folder/run"; fi
    chmod a-w "$folder/run/$part"
    limited true
    runner=("${runner[@]:0:4}" "${as[@]}")
    : >"$folder/code"
    chmod 666 "$folder/code"
    attempt "no write permission on $part" "$folder/run"
    chmod u+w "$folder/run/$part" 2>/dev/null || true # an old checkpoint may be gone
    recover "no write permission on $part" "$folder/run"
  done
else
  skipped "folders without write permission: no other user can run the trainer"
fi

finish "$cases runs under a limit, $completed completed, $ended ended with an error"
