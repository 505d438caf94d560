#!/usr/bin/env bash
# Runs the tests of the ops on the GPU that TRAINER_EMULATE_CUDA names:
#   TRAINER_EMULATE_CUDA=8.0 scripts/cuda/op_tests.sh FEATURES
# Those in kernels::cuda launch kernels themselves, and would compare them with themselves here.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${TRAINER_EMULATE_CUDA:?}"
scripts/unit_tests.sh kernels "$1" --skip cuda::
scripts/unit_tests.sh engine "$1" optim::
scripts/unit_tests.sh trainer "$1" presets
