#!/usr/bin/env bash
# Runs every reliability script in its short or long form, one after the other, and prints the
# summary lines. Exits with 0 only if all pass.
#
#   scripts/reliability/all.sh short     # a few minutes
#   scripts/reliability/all.sh long      # hours
#
# TRAINER=path selects the binary; otherwise a release build is made.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -z "${TRAINER:-}" ]; then
  cargo build --release --quiet
  export TRAINER=$PWD/target/release/trainer
fi
form=${1:-short}
case $form in
short) counts=(10 34 2000 1000 2 1000) kills=100 ;;
long)
  counts=(50 200 10000 200000 20 10000) kills=1000
  export HEADERS=200000 COLUMNAR=10000
  ;;
*) echo "usage: scripts/reliability/all.sh short|long" >&2 && exit 64 ;;
esac
passed=yes i=0
for script in signals damage faults mutants limits many_steps; do
  "scripts/reliability/$script.sh" "${counts[i]}" || passed=no
  i=$((i + 1))
done
scripts/kill_test.sh "$kills" || passed=no
# The memory that `plan` predicts, against that of three (short) or nine configs.
if [ "$form" = short ]; then configs=(short); else configs=(); fi
scripts/bench/plan_memory.sh "${configs[@]}" || passed=no
[ "$passed" = yes ]
