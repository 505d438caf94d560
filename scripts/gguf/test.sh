#!/bin/sh
# `trainer export --gguf` with llama.cpp itself: models of each family are trained for some seconds,
# exported, and loaded by llama.cpp, whose greedy answers to 50 prompts, 25 of them with images, must
# be those of `trainer generate`. Also reads the files with the package `gguf` of llama.cpp.
# Needs Python with `venv` and a network, or a package index, from which the clients are installed:
# llama-cpp-py-sync 0.11739 contains the libraries of llama.cpp b11739.
#
#   scripts/gguf/test.sh [FAMILY ..]      (qwen3_vl, qwen2_5_vl, qwen3, qwen3_5)
#
# TRAINER (the binary), TMPDIR and STEPS (600) change the test.
set -eu
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-target/release/trainer} steps=${STEPS:-600}
folder=${TMPDIR:-/tmp}/gguf-test
families=${*:-qwen3_vl qwen2_5_vl qwen3 qwen3_5}
mkdir -p "$folder"

python=$folder/venv/bin/python
if [ ! -x "$python" ]; then
    python3 -m venv "$folder/venv"
    "$python" -m pip install --quiet llama-cpp-py-sync==0.11739 gguf==0.19.0 numpy==2.4.6 \
        jinja2==3.1.6 pillow==13.0.0
    # the libraries were linked with glibc 2.38
    if ! "$python" -c 'import os; v = os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")
raise SystemExit([int(n) for n in v] < [2, 38])'; then
        "$python" scripts/gguf/old_glibc.py "$folder/shim.so"
    fi
fi
shim=
[ ! -f "$folder/shim.so" ] || shim=$folder/shim.so

for family in $families; do
    # Sides are multiples of the side of a token, and an image has at least 8 tokens: llama.cpp
    # resizes others, in another way than transformers.
    case $family in
        qwen3_vl) model=data/quickstart/model size='128 96' ;;
        qwen2_5_vl) model=tests/golden/models/small-qwen25vl size='168 140' ;;
        qwen3) model=tests/golden/models/qwen3-text size='0 0' ;;
        qwen3_5) model=tests/golden/models/small-qwen35 size='96 128' ;;
        *) echo "unknown family $family" >&2; exit 2 ;;
    esac
    at=$folder/$family
    rm -rf "$at"
    # shellcheck disable=SC2086
    "$python" scripts/gguf/rows.py "$at" $size
    # larger random weights, which learn faster
    cp -r "$model" "$at/model"
    sed -i 's/"initializer_range": 0.02/"initializer_range": 0.09/' "$at/model/config.json"
    echo "$family: trains $steps steps"
    set -- --config configs/quickstart.yaml --set "model.path=$at/model" --set "output_dir=$at/run" \
        --set "data.train=[{path: $at/train.jsonl}]" --set "data.eval=[{path: $at/eval.jsonl}]" \
        --set data.packing_length=1024 --set "train.max_steps=$steps" --set checkpoint.every_steps=0 \
        --set "eval={every_steps: 0}"
    "$trainer" sft "$@" >"$at/log" 2>&1
    "$trainer" eval "$@" --checkpoint "$at/run/final" --per-sample "$at/likelihoods.jsonl"
    for quant in f16 bf16 q8_0 q4_0; do
        # answers that must be equal, and how far likelihoods of tokens may be apart
        case $quant in
            f16) fewest=48 tolerance=0.003 ;;
            bf16) fewest=48 tolerance=0.03 ;;
            q8_0) fewest=48 tolerance=0.05 ;;
            q4_0) fewest=40 tolerance=1 ;;
        esac
        "$trainer" export --model "$at/run/final" --gguf "$at/$quant" --quant "$quant" >"$at/export.json"
        "$python" scripts/gguf/read.py "$at/$quant" "$at/run/final"
        LD_PRELOAD=$shim "$python" scripts/gguf/check.py "$trainer" "$at/run/final" "$at/$quant" "$at/eval.jsonl" \
            "$at/likelihoods.jsonl" "$fewest" "$tolerance"
    done
done
