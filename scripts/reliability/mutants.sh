#!/usr/bin/env bash
# Runs the trainer on N mutated rows, N / 4 mutated images, N / 20 mutants of each of a Parquet file, an
# Arrow file and an Arrow stream (COLUMNAR=n), N / 10 mutated headers of safetensors files (HEADERS=n),
# hostile chat templates, and paths that leave their folder. No process may panic or be
# ended by a signal, take more than 512 MiB, or need more than 2 s for one of them; every hostile
# template and path must be refused.
#
#   scripts/reliability/mutants.sh 200000
#   scripts/reliability/mutants.sh 1000 rows templates     # only these
#
# Prints one summary line. SEED=n sets the seed. KEEP=folder keeps what fails. MUTANTS_SLOW=n
# multiplies the time limit on a busy machine.
set -euo pipefail
source "$(dirname "$0")/common.sh"
count=${1:-1000}
shift || true

init_model
mkdir "$folder/work"
if summary=$(python3 $tools/mutants.py "$trainer" "$folder/model" "$folder/work" "$count" "${SEED:-1}" "$@"); then
  echo "mutants: $summary"
else
  echo "mutants: ${summary:-the script has failed}"
  exit 1
fi
