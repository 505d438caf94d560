#!/usr/bin/env bash
# Writes the folder of a text model for benchmarks: a config, and the tokenizer and template of the
# tests. There are no weights; use `model.weights: random`.
#   scripts/bench/text_model.sh DIR [LAYERS HIDDEN INTERMEDIATE HEADS KV_HEADS]
# VOCAB=2048   rows of the embedding: 2,048, as the tokenizer has, give 26 M parameters, 151,936 give 103 M
# EXPERTS=8    experts in each layer, 2 of them for each token, half as wide as the MLP that they replace
# Head dim 64. The default sizes are those of vs_torch.sh (8 layers, hidden 512).
set -euo pipefail
folder=${1:?folder to write} small=$(dirname "$0")/../../tests/golden/models/small-tied
mkdir -p "$folder"
cp "$small"/{tokenizer.json,tokenizer_config.json,chat_template.jinja,preprocessor_config.json} "$folder/"
"${PYTHON:-python3}" - "$small/config.json" "$folder/config.json" "${VOCAB:-2048}" "${EXPERTS:-0}" "${@:2}" <<'PY'
import json, sys
source, target, vocabulary, experts, *sizes = sys.argv[1:]
layers, hidden, intermediate, heads, kv_heads = map(int, sizes or (8, 512, 1536, 8, 4))
config = json.load(open(source))
config["text_config"].update(
    num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
    num_key_value_heads=kv_heads, head_dim=64, vocab_size=int(vocabulary))
config["text_config"]["rope_scaling"]["mrope_section"] = [12, 10, 10]
if int(experts):
    config["model_type"] = "qwen3_vl_moe"
    config["text_config"].update(
        model_type="qwen3_vl_moe_text", num_experts=int(experts), num_experts_per_tok=2, moe_intermediate_size=intermediate // 2,
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)
config["vision_config"].update(depth=1, deepstack_visual_indexes=[], out_hidden_size=hidden)
json.dump(config, open(target, "w"), indent=2)
PY
