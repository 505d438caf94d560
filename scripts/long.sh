#!/usr/bin/env bash
# Runs the long forms of the tests, of which .ci/run has the short ones. They take hours.
#   scripts/long.sh                             all parts
#   scripts/long.sh tests reliability ranks     some of them
#     tests         cargo test with whole curves and every case
#     reliability   scripts/reliability/all.sh long: thousands of kills, mutants and damaged files
#     ranks         scripts/dist: 50 kills and 20 stops, saves, 1,000 steps on 4 ranks
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install_dependencies.sh

features=video,mpi,cuda-emulation,testing
tests() {
  export TRAINER_LONG_TESTS=1 PROPTEST_CASES=1000
  cargo test --release --workspace --features "$features"
  TRAINER_EMULATE_CUDA=8.0 scripts/cuda/op_tests.sh "$features"
  TRAINER_PTX=$(scripts/cuda/ptx.sh) TRAINER_EMULATE_CUDA=ptx:9.0 scripts/unit_tests.sh kernels "$features" attention:: --skip cuda::
}
reliability() { scripts/reliability/all.sh long; }
ranks() {
  FEATURES=$features STEPS=24 scripts/dist/test.sh
  scripts/dist/kill_test.sh 50 20
  scripts/dist/save_kill_test.sh 20
  scripts/dist/many_steps.sh 1000
}

[ $# -gt 0 ] || set -- tests reliability ranks
for part in "$@"; do
  case $part in
    tests | reliability | ranks) ;;
    *) echo "unknown part \`$part\`, expected tests, reliability or ranks" >&2; exit 64 ;;
  esac
  echo "=== $part"
  "$part"
done
