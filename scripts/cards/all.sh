#!/bin/sh
# Writes the cards to target/cards. Run in the root of the repository, after `cargo build --release`.
#
#   sh scripts/cards/all.sh [PYTHON]     PYTHON: an interpreter with scripts/golden/requirements.txt
#
# TRAINER is the binary, target/release/trainer by default. With DRY_RUN=1, only checks the configs of
# the cards (`trainer check`).
set -eu
trainer=${TRAINER:-target/release/trainer}
reference=${1:+--reference=$1}

card() {
    name=$1
    shift
    if [ -n "${DRY_RUN:-}" ]; then
        check "$@"
        return
    fi
    # $reference is empty or one word without spaces
    # shellcheck disable=SC2086
    mkdir -p target/cards
    python3 scripts/cards/card.py "target/cards/$name.md" --trainer "$trainer" $reference \
        --config configs/quickstart.yaml "$@"
}

check() {
    sets=$(mktemp)
    while [ $# -gt 0 ]; do
        if [ "$1" = --set ]; then printf '%s\n' --set "$2" >>"$sets"; fi
        shift 2
    done
    folder=$(mktemp -d)
    code=0
    xargs -d '\n' "$trainer" check --config configs/quickstart.yaml --set "output_dir=$folder" <"$sets" >"$folder/report" 2>&1 || code=$?
    if [ "$code" = 0 ]; then echo "$name: the config can be used"; else cat "$folder/report"; fi
    rm -rf "$sets" "$folder"
    return "$code"
}

golden="--set model.weights=pretrained --set train.max_steps=60 --set eval.every_steps=60"
lora='adapter={rank: 8, dropout: 0.1, parts: [llm, vision, merger]}'
card quickstart
card quickstart-bf16 --set model.precision=bf16 --set train.max_steps=60
# shellcheck disable=SC2086
card qwen3-vl-lora --set model.path=tests/golden/models/small-tied --set "$lora" $golden
# shellcheck disable=SC2086
card qwen3-vl-untied --set model.path=tests/golden/models/untied $golden
# shellcheck disable=SC2086
card qwen3-vl-sharded-bf16 --set model.path=tests/golden/models/sharded-bf16 \
    --set model.precision=bf16 $golden
# shellcheck disable=SC2086
card qwen3-vl-nf4 --set model.path=tests/golden/models/small-tied --set 'adapter={rank: 8, quantize: nf4}' $golden
# Sides of the images of these rows are multiples of 28, the size of four patches of this model.
# shellcheck disable=SC2086
card qwen2.5-vl --set model.path=tests/golden/models/small-qwen25vl $golden \
    --reference-rows tests/golden/data/image_28.jsonl
# shellcheck disable=SC2086
card qwen2-vl --set model.path=tests/golden/models/small-qwen2vl $golden \
    --reference-rows tests/golden/data/image_28.jsonl
# shellcheck disable=SC2086
card internvl3.5 --set model.path=tests/golden/models/small-internvl $golden
# shellcheck disable=SC2086
card minicpm-v-4.6 --set model.path=tests/golden/models/small-minicpm $golden
# shellcheck disable=SC2086
card qwen3.5 --set model.path=tests/golden/models/small-qwen35 $golden
rows=tests/golden/data/text.jsonl
# shellcheck disable=SC2086
card qwen3-text --set model.path=tests/golden/models/qwen3-text $golden \
    --set "data={train: [{path: $rows}], eval: [{path: $rows}], packing_length: 1024, max_rejected: 1.0}" \
    --reference-rows $rows
