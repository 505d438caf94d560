#!/bin/sh
# Writes the cards in docs/cards. Run in the root of the repository, after `cargo build --release`.
#
#   sh scripts/cards/all.sh [PYTHON]     PYTHON: an interpreter with scripts/golden/requirements.txt
#
# TRAINER is the binary, target/release/trainer by default.
set -eu
trainer=${TRAINER:-target/release/trainer}
reference=${1:+--reference=$1}

card() {
    name=$1
    shift
    # $reference is empty or one word without spaces
    # shellcheck disable=SC2086
    python3 scripts/cards/card.py "docs/cards/$name.md" --trainer "$trainer" $reference \
        --config configs/quickstart.yaml "$@"
}

golden="--set model.weights=pretrained --set train.max_steps=60 --set eval.every_steps=60"
lora='adapter={rank: 8, dropout: 0.1, parts: [llm, vision, merger]}'
card quickstart
card quickstart-bf16 --set model.precision=bf16 --set train.max_steps=60
card quickstart-lora --set "$lora" --set train.max_steps=60
# shellcheck disable=SC2086
card qwen3-vl-untied --set model.path=tests/golden/models/untied $golden
# shellcheck disable=SC2086
card qwen3-vl-sharded-bf16 --set model.path=tests/golden/models/sharded-bf16 \
    --set model.precision=bf16 $golden
