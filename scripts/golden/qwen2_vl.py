"""Small Qwen2.5-VL and Qwen2-VL models, images for them, their training curves and their losses by transformers and
PyTorch.

  python scripts/golden/qwen2_vl.py            # models/small-qwen25vl, models/small-qwen2vl, data/image_28.jsonl,
                                               # data/images28, and the models' entries of the files below
  python scripts/golden/qwen2_vl.py --check    # draws the weights again and compares them with the stored ones

Entries of `curves.json` and `losses_at_init.json` with the data `text` and `image_28`: rows of `image_exact` whose
images are cut to sides that 28 divides, so that no processor resizes them; `ref_trainer.py
--check-curves` and `check_golden.py` recompute them. Tokenizer and special tokens are those of small-tied.
config.json has the flat layout and preprocessor_config.json the keys of the published files.
"""

import argparse
import json
import shutil

import torch
from PIL import Image

from adapters import curve
from make_variants import SMALL, check_drawn, check_loads, drawn_tensors, save, write_json
from reference_lib import GOLDEN, Encoder, forward, load_model, normalise, read_jsonl

SEEDS = {"small-qwen25vl": 41, "small-qwen2vl": 43}
ROWS = 32
IMAGE_ROWS, SIDE = 24, 28
DATA = ("text", "image_28")
DECODER = {
    "attention_dropout": 0.0, "bos_token_id": 2017, "eos_token_id": 2019, "hidden_act": "silu", "hidden_size": 64, "image_token_id": 2029, "initializer_range": 0.02,
    "intermediate_size": 128, "max_position_embeddings": 128000, "max_window_layers": 3,
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [2, 3, 3], "type": "mrope"}, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "float32", "transformers_version": "4.49.0", "use_cache": True,
    "use_sliding_window": False, "video_token_id": 2030, "vision_end_token_id": 2027, "vision_start_token_id": 2026,
    "vocab_size": 2048,
}
VISION = {"depth": 4, "in_chans": 3, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}
CONFIGS = {
    # Neither the width of the MLP of a vision block nor the published 3420 is divisible by 8. A window has 4 x 4 tokens.
    "small-qwen25vl": DECODER | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "vision_config": VISION | {
            "fullatt_block_indexes": [1, 3], "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 84,
            "model_type": "qwen2_5_vl", "out_hidden_size": 64, "tokens_per_second": 2, "window_size": 112,
        },
    },
    # Unlike in the published files, the decoder is not as wide as the vision encoder's MLP.
    "small-qwen2vl": DECODER | {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
        "vision_config": VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 3},
    },
}
PROCESSOR = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "max_pixels": 153664, "merge_size": 2, "min_pixels": 3136,
    "patch_size": 14, "temporal_patch_size": 2,
}
PROCESSORS = {"small-qwen25vl": "Qwen2_5_VLProcessor", "small-qwen2vl": "Qwen2VLProcessor"}
# Renders what the published template renders without `add_vision_id`: a system prompt if the chat has none, then the
# turns.
TEMPLATE = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- for part in ([{'text': message.content}] if message.content is string else message.content) %}
        {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- elif part.type == 'video' or 'video' in part %}
            {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
        {%- else %}
            {{- part.text }}
        {%- endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def make_rows():
    """Cuts the images of the first rows of `image_exact`."""
    data, rows = GOLDEN / "data", read_jsonl(GOLDEN / "data" / "image_exact.jsonl")[:IMAGE_ROWS]
    shutil.rmtree(data / "images28", ignore_errors=True)
    (data / "images28").mkdir()
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for source in sorted({source for row in rows for source in normalise(row)[1]}):
        image = Image.open(data / source).convert("RGB")
        cut = image.crop((0, 0, *(side // SIDE * SIDE for side in image.size)))
        target = f"images28/{source.split('_')[1]}_{cut.width}x{cut.height}.png"
        cut.save(data / target, optimize=True)
        text = text.replace(source, target)
    (data / "image_28.jsonl").write_text(text, encoding="utf-8")


def folder_of(name):
    return GOLDEN / "models" / name


def in_order(config):
    return json.loads(json.dumps(config, sort_keys=True))


def make_folder(name):
    folder = folder_of(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(SMALL / file, folder / file)
    write_json(folder / "config.json", in_order(CONFIGS[name]))
    write_json(folder / "preprocessor_config.json", in_order(PROCESSOR | {"processor_class": PROCESSORS[name]}))
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATE})
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = TEMPLATE
    write_json(folder / "tokenizer_config.json", settings)
    save(drawn_tensors(folder, SEEDS[name]), folder)
    check_loads(folder)


def losses(name, data):
    """An entry of losses_at_init.json."""
    encoder, model = Encoder(folder_of(name), GOLDEN / "data"), load_model(folder_of(name))
    rows, sums = [], [0.0, 0]
    with torch.no_grad():
        for row in read_jsonl(GOLDEN / "data" / f"{data}.jsonl")[:ROWS]:
            ((nll, targets),) = forward(model, encoder.config, [encoder(row)])
            rows.append([row["id"], round(float(nll) / targets, 6), targets])
            sums = [sums[0] + float(nll), sums[1] + targets]
    return {
        "rows": len(rows), "token_mean": round(sums[0] / sums[1], 6), "target_tokens": sums[1],
        "sample_mean_of_means": round(sum(row[1] for row in rows) / len(rows), 6), "per_sample": rows,
    }


def update(name, indent, entries):
    path = GOLDEN / name
    golden = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(golden, indent=indent) + "\n" * (indent is not None), encoding="utf-8")


def write_results(name, data):
    """Writes the model's entries of losses_at_init.json and curves.json."""
    update("losses_at_init.json", None, {f"{name}|{of}": losses(name, of) for of in data})
    curves = {f"{of}_{name}": curve(of, [], name) for of in data}
    for key, golden in curves.items():
        print(key, golden["loss"][0], golden["loss"][-1], flush=True)
    update("curves.json", 1, curves)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the weights with the stored ones")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.check:
        for name, seed in SEEDS.items():
            check_drawn(folder_of(name), seed)
        return
    make_rows()
    for name in SEEDS:
        make_folder(name)
        write_results(name, DATA)


if __name__ == "__main__":
    main()
